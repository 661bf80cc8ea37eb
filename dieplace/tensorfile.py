"""One safetensors file: its header, checked, and views of its mapped bytes.

The header is read here and not by a library: the dtype tables of installed versions differ (safetensors issue 839), and
a damaged or lying file must be an error before the first byte is used. Format: the safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dieplace.errors import UsageError

_MAX_HEADER_BYTES = 100 << 20  # the reference implementation's own limit
# Header word -> torch dtype. F4 packs two elements a byte, low nibble first, and its shape counts elements.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `shape` is torch's (F4: bytes in the last axis), offsets count from the data section."""

    name: str
    word: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """One safetensors file, mapped; `entries` by name. Use as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries, self._data_start = read_header(self.path)
        self._map: mmap.mmap | None = None

    def __enter__(self) -> TensorFile:
        with self.path.open("rb") as stream:
            # A private map: torch wants writable memory, and a write must never reach the file.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(self, *exception: object) -> None:
        self._map = None  # freed with the last view: closing it under a live view would be a fault

    def view(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file; only one that starts unaligned is copied."""
        if self._map is None:
            raise RuntimeError("open the file with `with TensorFile(path) as f:` first")
        entry = self.entries[name]
        if entry.stop == entry.start:
            return torch.empty(entry.shape, dtype=entry.dtype)
        offset, nbytes = self._data_start + entry.start, entry.stop - entry.start
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
        if offset % entry.dtype.itemsize:
            data = data.clone()  # the format allows any start, torch views need an aligned one
        return data.view(entry.dtype).view(entry.shape)


def read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """Entries by name and the offset of the data; UsageError where the header is damaged or lies about the file.

    As the format says, entries lie end to end without holes and fill the file: a cut or overlapping one is refused.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                told = f"its header says {length:,} bytes, the file has {size:,}"
                raise UsageError(f"{path} is no safetensors file: {told}")
            header = json.loads(stream.read(length))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{path} is no safetensors file: {problem}") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    data_bytes = size - 8 - length
    entries = {name: _entry(path, name, raw, data_bytes) for name, raw in header.items()}
    _check_tiling(path, entries, data_bytes)
    return entries, 8 + length


def _check_tiling(path: Path, entries: Mapping[str, Entry], data_bytes: int) -> None:
    end = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            what = "overlaps another tensor" if entry.start < end else "leaves a hole before it"
            raise UsageError(f"{path}: {entry.name} at bytes {entry.start} to {entry.stop} {what}")
        end = entry.stop
    if end != data_bytes:
        raise UsageError(f"{path}: its tensors end at byte {end:,} of {data_bytes:,}", hint="the file is damaged")


def _entry(path: Path, name: str, raw: Any, data_bytes: int) -> Entry:
    try:
        word, shape, (start, stop) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path}: the header entry of {name} is damaged") from None
    if not isinstance(word, str) or not all(_is_count(number) for number in (*shape, start, stop)):
        raise UsageError(f"{path}: the header entry of {name} is damaged: it takes a word and whole numbers")
    elements = math.prod(shape)
    if word not in DTYPES:
        raise UsageError(f"{path}: {name} has dtype {word}, which is not known", hint=f"known: {', '.join(DTYPES)}")
    if word == "F4":
        if not shape or shape[-1] % 2:
            raise UsageError(f"{path}: {name} is F4 with shape {shape}: pairs need an even last axis")
        shape, elements = (*shape[:-1], shape[-1] // 2), elements // 2
    if not 0 <= start <= stop <= data_bytes or stop - start != elements * DTYPES[word].itemsize:
        raise UsageError(f"{path}: {name} {shape} {word} does not fit bytes {start:,} to {stop:,} of {data_bytes:,}")
    return Entry(name, word, DTYPES[word], shape, start, stop)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
