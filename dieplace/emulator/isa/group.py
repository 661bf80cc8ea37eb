"""A wave group: waves of one launch at the same program counter, with the banks through which instructions see
registers.

Banks are dictionaries from operand key to array, filled on first use: a VGPR row [n, 64], a scalar register [n, 1] or a
constant. Groups of regularly spaced waves see views of the state; others gather rows and write them back in `flush`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from dieplace.emulator.isa.operands import CONST, EXEC, SCC_BIT, SGPR
from dieplace.emulator.isa.state import ALL_BITS, ALL_LANES, F32, I32, LANES, U8, U32, U64, LaunchState

Selection = slice | np.ndarray


class TaintAppeared(Exception):
    """A load brought never-written bits into a register: the rest of the block has to track them."""


class Words(dict[int, Any]):
    """Operands as uint32."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __missing__(self, key: int) -> Any:
        value = self[key] = self.group.find(key)
        return value


class Typed(dict[int, Any]):
    """The same operands under another 32-bit type."""

    __slots__ = ("dtype", "words")

    def __init__(self, words: Words, dtype: type) -> None:
        super().__init__()
        self.words, self.dtype = words, dtype

    def __missing__(self, key: int) -> Any:
        value = self[key] = self.words[key].view(self.dtype)
        return value


class Halves(dict[int, Any]):
    """Halves of registers as uint16; the key is twice the operand's key, plus one for the upper half."""

    __slots__ = ("words",)

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.words = words

    def __missing__(self, key: int) -> Any:
        word = self.words[key >> 1]
        if word.ndim and not word.flags.c_contiguous:
            return (word >> U32(16 * (key & 1))).astype(np.uint16)
        value: Any = np.uint16(int(word) >> (key & 1) * 16 & 0xFFFF) if word.ndim == 0 else (
            word.view(np.uint16).reshape(*word.shape, 2)[..., key & 1])  # fmt: skip
        self[key] = value
        return value


class Tensors(dict[int, torch.Tensor]):
    """The same operands as float32 torch tensors."""

    __slots__ = ("floats",)

    def __init__(self, floats: Typed) -> None:
        super().__init__()
        self.floats = floats

    def __missing__(self, key: int) -> torch.Tensor:
        value = self.floats[key]
        tensor = self[key] = torch.tensor(float(value)) if value.ndim == 0 else torch.from_numpy(value)
        return tensor


class Pairs(dict[int, Any]):
    """Aligned pairs of scalar registers as uint64 [n], keyed by half the register number."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __missing__(self, pair: int) -> Any:
        group = self.group
        value = self[pair] = group.st.sgpr64[pair][group.selection]
        return value


class Group:
    """Waves executed together; `full` says that every lane of every wave is active, else `mask` is bool [n, 64]."""

    def __init__(self, st: LaunchState, waves: np.ndarray, selection: Selection) -> None:
        self.st = st
        self.selection = selection
        self.waves = waves
        self.n = len(waves)
        self.is_view = isinstance(selection, slice)
        self.is_all = self.n == st.waves
        self.u = Words(self)
        self.f = Typed(self.u, F32)
        self.i = Typed(self.u, I32)
        self.h = Halves(self.u)
        self.t = Tensors(self.f)
        self.s64 = Pairs(self)
        self.scc = st.scc[selection]
        self.full = False
        self.mask: np.ndarray = np.empty((0, LANES), bool)
        self._active: tuple[np.ndarray, np.ndarray] | None = None
        self._lds_base: np.ndarray | None = None
        self.refresh()

    def find(self, key: int) -> Any:
        """Resolve an operand key: a row, a scalar column, or a constant."""
        if key < SGPR:
            return self.st.vgpr[key][self.selection]
        if key < CONST:
            number = key - SGPR
            if self.is_view:
                return self.st.sgpr[number >> 1][self.selection][:, (number & 1) : (number & 1) + 1]
            return self.s64[number >> 1].view(U32).reshape(-1, 2)[:, (number & 1) : (number & 1) + 1]
        return U32(key & 0xFFFFFFFF)

    def refresh(self) -> None:
        """Recompute what depends on EXEC; called after every write to it."""
        lanes = self.s64[EXEC >> 1]
        self.full = bool((lanes == ALL_LANES).all())
        self._active = None
        if not self.full:
            self.mask = unpack(lanes)

    def tick(self) -> int:
        """Read the clock; two reads never give the same value."""
        self.st.clock.now += 4
        return self.st.clock.now

    @property
    def lanes(self) -> np.ndarray | None:
        """The active lanes as a write mask; None when all are active."""
        return None if self.full else self.mask

    @property
    def active(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices (wave in group, lane) of the active lanes, in (wave, lane) order."""
        if self._active is None:
            waves, lanes = np.nonzero(self.mask)
            self._active = (waves, lanes)
        return self._active

    @property
    def lds_base(self) -> np.ndarray:
        """Byte offset of each wave's workgroup in the launch's LDS array, int64 [n, 1]."""
        if self._lds_base is None:
            self._lds_base = (self.st.slot[self.waves] * self.st.lds.shape[1])[:, None]
        return self._lds_base

    def flush(self, rows: Iterable[int], pairs: Iterable[int]) -> None:
        """Write gathered rows and pairs back; a view group has nothing to do."""
        if self.is_view:
            return
        st, waves = self.st, self.waves
        for row in rows:
            if row in self.u:
                st.vgpr[row][waves] = self.u[row]
        for pair in pairs:
            if pair in self.s64:
                st.sgpr64[pair][waves] = self.s64[pair]
        st.scc[waves] = self.scc

    def taint(self, key: int) -> Any:
        """Never-written bits of a register in this group: uint32 [n, 64] or [n, 1], or None when there are none."""
        if key >= CONST or not self.st.tainted >> key & 1:
            return None
        row = self.st.taints[key]
        if row is None:
            return np.full((self.n, LANES if key < SGPR else 1), ALL_BITS)
        part = row[self.selection]
        if not part.any():
            return None
        return part if key < SGPR else part[:, None]

    def set_taint(self, key: int, bits: Any, mask: np.ndarray | None, origin: str | None = None) -> None:
        """Set the never-written bits of a register where `mask` is true (None: everywhere)."""
        st = self.st
        mask = mask if key < SGPR else None
        nothing = bits is None or not np.any(bits)
        if not st.tainted >> key & 1 and nothing:
            return
        if nothing and mask is None and self.is_all:
            st.drop_taint(key)
            return
        row = st.taint_row(key)
        bits = U32(0) if bits is None else bits
        if mask is None:
            row[self.selection] = bits
        else:
            row[self.selection] = np.where(mask, bits, row[self.selection])
        if origin is not None and not nothing:
            st.origins[key] = origin
        if nothing and not row.any():
            st.drop_taint(key)

    def set_scalar_taint(self, key: int, bits: Any, origin: str | None = None) -> None:
        """Set the never-written bits of a scalar register: uint32 [n] or None."""
        self.set_taint(key, bits, None, origin)

    def require_written(self, keys: Iterable[int], what: str, lanes: bool = True) -> None:
        """Raise NeverWritten when any of `keys` has a never-written bit in an active lane."""
        for key in keys:
            bits = self.taint(key)
            if bits is None:
                continue
            if lanes and key < SGPR and not self.full:
                bits = bits[self.mask]
            if np.any(bits):
                raise self.st.never_written(what, key)


def select(waves: np.ndarray, total: int) -> Selection:
    """A slice when the sorted wave slots are evenly spaced, else the index array itself."""
    n = len(waves)
    if n == total:
        return slice(0, total, 1)
    first, last = int(waves[0]), int(waves[-1])
    step = 1 if n == 1 else int(waves[1]) - first
    if last - first == step * (n - 1) and (n < 3 or bool((np.diff(waves) == step).all())):
        return slice(first, last + 1, step)
    return waves


def unpack(lanes: np.ndarray) -> np.ndarray:
    """uint64 [n] to bool [n, 64], lane 0 from bit 0."""
    octets = np.ascontiguousarray(lanes).view(U8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


def pack(bits: np.ndarray, n: int) -> np.ndarray:
    """bool, broadcast to [n, 64], to uint64 [n]."""
    return np.packbits(np.broadcast_to(bits, (n, LANES)), axis=1, bitorder="little").view(U64)[:, 0]


def wide(low: Any, high: Any) -> Any:
    """Two uint32 arrays to one uint64 array."""
    shape = np.broadcast_shapes(np.shape(low), np.shape(high))
    both = np.empty((*shape, 2), U32)
    both[..., 0], both[..., 1] = low, high
    return both.view(U64)[..., 0]


def narrow(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """One 64-bit array to its lower and upper uint32 halves."""
    both = np.ascontiguousarray(value).view(U32).reshape(*np.shape(value), 2)
    return both[..., 0], both[..., 1]


SCC_KEY = SGPR + SCC_BIT
