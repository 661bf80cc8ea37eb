"""Byte arrays read and written by many lanes at once: host memory and LDS."""

from __future__ import annotations

import ctypes

import numpy as np

U8, U32 = np.uint8, np.uint32


class FlatBytes:
    """Gather and scatter on a byte array in the widest aligned words that fit; `origin` is the address of its first
    byte.

    Nothing is checked here: callers have checked bounds and dword alignment.
    """

    __slots__ = ("bytes", "halves", "origin", "pairs", "quads", "words")

    def __init__(self, octets: np.ndarray, origin: int = 0) -> None:
        self.origin = origin
        self.bytes = octets
        self.halves, self.words, self.pairs = octets.view(np.uint16), octets.view(U32), octets.view(np.uint64)
        self.quads = octets.view(np.complex128)

    def read(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint32 [N, words] at byte addresses int64 [N]; sizes 1 and 2 are zero-extended."""
        if size == 1:
            return self.bytes.take(address - self.origin, mode="clip").astype(U32)[:, None]
        if size == 2:
            return self.halves.take((address - self.origin) >> 1, mode="clip").astype(U32)[:, None]
        if size == 4:
            return self.words.take((address - self.origin) >> 2, mode="clip")[:, None]
        low = int(np.bitwise_or.reduce(address)) if len(address) else 0
        if size % 16 == 0 and not low & 15:
            first = (address - self.origin) >> 4
            index = first if size == 16 else first[:, None] + np.arange(size // 16)
            return self.quads.take(index, mode="clip").view(U32).reshape(len(address), size // 4)
        if size % 8 == 0 and not low & 7:
            index = ((address - self.origin) >> 3)[:, None] + np.arange(size // 8)
            return self.pairs.take(index, mode="clip").view(U32).reshape(len(address), size // 4)
        return self.words.take(((address - self.origin) >> 2)[:, None] + np.arange(size // 4), mode="clip")

    def write(self, address: np.ndarray, size: int, data: np.ndarray) -> None:
        """Store uint32 [N, words]; of equal addresses the last element wins."""
        if size == 1:
            self.bytes[address - self.origin] = data[:, 0].astype(U8)
        elif size == 2:
            self.halves[(address - self.origin) >> 1] = data[:, 0].astype(np.uint16)
        elif size == 4:
            self.words[(address - self.origin) >> 2] = data[:, 0]
        elif size % 16 == 0 and not int(np.bitwise_or.reduce(address)) & 15:
            values = np.ascontiguousarray(data).view(np.complex128)
            first = (address - self.origin) >> 4
            self.quads[first if size == 16 else first[:, None] + np.arange(size // 16)] = (
                values[:, 0] if size == 16 else values
            )
        else:
            self.words[((address - self.origin) >> 2)[:, None] + np.arange(size // 4)] = data


def host_bytes() -> FlatBytes:
    """The user address space as one array; callers check every address against registered buffers first."""
    pointer = ctypes.cast(ctypes.c_void_p(_FIRST), ctypes.POINTER(ctypes.c_uint8))
    return FlatBytes(np.ctypeslib.as_array(pointer, shape=((1 << 47) - _FIRST,)), _FIRST)


_FIRST = 4096  # an array cannot start at address 0; the first page is never mapped
