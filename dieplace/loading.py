"""Read safetensors files straight into tensors that exist already, wherever they were placed.

The reader maps the file and copies slice by slice, so no tensor is ever twice in host memory. It reads the header
itself: the dtype tables of installed libraries differ (safetensors issue 839), and a damaged or lying file must be an
error before the first byte is copied. Format: the safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dieplace.errors import UsageError

CHUNK_BYTES = 32 << 20
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
_CONVERTIBLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `shape` is torch's (F4: bytes in the last axis), offsets count from the data section."""

    name: str
    word: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: `source` picks a slice of it (a shard's rows), `tensor` takes that slice's shape.

    `e8m0` marks scale bytes, of which 255 (NaN) is refused.
    """

    tensor: Tensor
    source: tuple[slice, ...] = ()
    e8m0: bool = False


@dataclass(frozen=True)
class LoadReport:
    """What was copied: tensors and bytes, names in files that nothing asked for, and notes."""

    tensors: int
    nbytes: int
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


class TensorFile:
    """One safetensors file, mapped; `entries` by name. Use as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries, self._data_start = _read_header(self.path)
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


def load_safetensors(model: Any, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> LoadReport:
    """Copy the tensors of `files` into the storages that `model` already has; nothing is allocated or moved.

    `model` is a torch module, a mapping of names to tensors, or has `checkpoint_targets()`. `files` are `.safetensors`
    files, an index (`*.index.json`) or a folder. Raises UsageError before copying anything when a name, shape or dtype
    does not fit, a file is missing or damaged, or the index and its files disagree.
    """
    targets = targets_of(model)
    found, notes = locate(files)
    _check_names(targets, found)
    wanted = {name: found[name] for name in targets if name in found}
    paths = sorted(set(wanted.values()))
    for path in paths:
        entries, _ = _read_header(path)
        for name in (n for n in wanted if wanted[n] == path):
            for target in targets[name]:
                _check_fit(name, entries[name], target, path)
    nbytes = 0
    for path in paths:
        with TensorFile(path) as file:
            for name in (n for n in wanted if wanted[n] == path):
                view = file.view(name)
                notes += _conversion_note(name, view, targets[name])
                nbytes += sum(_copy(name, view, target) for target in targets[name])
    return LoadReport(len(wanted), nbytes, tuple(sorted(set(found) - set(targets))), tuple(notes))


def targets_of(model: Any) -> dict[str, tuple[Target, ...]]:
    """Targets by checkpoint name; the names of one tied parameter share a storage and need only one of them."""
    if hasattr(model, "checkpoint_targets"):
        return {name: tuple(targets) for name, targets in model.checkpoint_targets().items()}
    tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else dict(model)
    return {name: (Target(tensor.detach()),) for name, tensor in tensors.items()}


def locate(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[dict[str, Path], list[str]]:
    """File of every tensor, and notes. Index and files are checked against each other in both directions."""
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: dict[str, Path] = {}
    notes: list[str] = []
    for path in map(Path, given):
        names, more = _locate_one(path)
        notes += more
        twice = sorted(set(names) & set(found))
        if twice:
            raise UsageError(f"{twice[0]} is in {found[twice[0]]} and in {names[twice[0]]}", hint="name one of them")
        found |= names
    if not given:
        raise UsageError("no file was named", hint="pass .safetensors files, an index or a folder")
    return found, notes


def _locate_one(path: Path) -> tuple[dict[str, Path], list[str]]:
    if path.is_dir():
        index = sorted(path.glob("*.safetensors.index.json"))
        if index:
            return _from_index(index[0])
        return _join(sorted(path.glob("*.safetensors")), path), []
    if path.name.endswith(".json"):
        return _from_index(path)
    return dict.fromkeys(_read_header(path)[0], path), []


def _join(paths: Iterable[Path], folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        for name in _read_header(path)[0]:
            if name in found:
                raise UsageError(f"{name} is in {found[name].name} and in {path.name} of {folder}")
            found[name] = path
    if not found:
        raise UsageError(f"{folder} holds no .safetensors file")
    return found


def _from_index(index: Path) -> tuple[dict[str, Path], list[str]]:
    weight_map = _weight_map(index)
    headers: dict[str, dict[str, Entry]] = {}
    for file in sorted(set(weight_map.values())):
        if not (index.parent / file).is_file():
            raise UsageError(f"{index} names {file}, which is not there", hint="download the missing shard")
        headers[file] = _read_header(index.parent / file)[0]
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise UsageError(f"{index} says {name} is in {file}, but that file lacks it")
    for file, entries in headers.items():
        for name in entries:
            if name in weight_map and weight_map[name] != file:
                raise UsageError(f"{name} is in {file} and in {weight_map[name]}", hint=f"{index} names the latter")
    extra = sorted(p.name for p in index.parent.glob("*.safetensors") if p.name not in headers)
    notes = [f"{name} is not in {index.name} and was ignored" for name in extra]
    return {name: index.parent / file for name, file in weight_map.items()}, notes


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UsageError(f"{index} is no safetensors index: {problem!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UsageError(f"{index}: weight_map must map tensor names to file names")
    return weight_map


def _read_header(path: Path) -> tuple[dict[str, Entry], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise UsageError(f"{path} is no safetensors file: its header says {length} bytes, the file has {size}")
            header = json.loads(stream.read(length))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise UsageError(f"{path} is no safetensors file: {problem}") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, raw, size - 8 - length) for name, raw in header.items()}, 8 + length


def _entry(path: Path, name: str, raw: Any, data_bytes: int) -> Entry:
    try:
        word, shape, (start, stop) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        elements = math.prod(shape)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path}: the header entry of {name} is damaged") from None
    if word not in DTYPES:
        raise UsageError(f"{path}: {name} has dtype {word}, which is not known", hint=f"known: {', '.join(DTYPES)}")
    if word == "F4":
        if not shape or shape[-1] % 2:
            raise UsageError(f"{path}: {name} is F4 with shape {shape}: pairs need an even last axis")
        shape, elements = (*shape[:-1], shape[-1] // 2), elements // 2
    if not 0 <= start <= stop <= data_bytes or stop - start != elements * DTYPES[word].itemsize:
        raise UsageError(f"{path}: {name} {shape} {word} does not fit bytes {start} to {stop} of {data_bytes}")
    return Entry(name, word, DTYPES[word], shape, start, stop)


def _check_names(targets: Mapping[str, Sequence[Target]], found: Mapping[str, Path]) -> None:
    loaded = {t.tensor.data_ptr() for name in targets if name in found for t in targets[name]}
    missing = [
        name
        for name, ts in targets.items()
        if name not in found and any(t.tensor.data_ptr() not in loaded for t in ts if t.tensor.numel())
    ]
    if missing:
        raise UsageError(
            f"{len(missing)} tensor(s) of the model are in none of the files, first {missing[0]}",
            hint="a shard is missing, or the files are of another model",
            missing=missing[:20],
        )


def _check_fit(name: str, entry: Entry, target: Target, path: Path) -> None:
    shape = torch.empty(entry.shape, device="meta")[target.source].shape
    if shape != target.tensor.shape:
        raise UsageError(f"{path}: {name} gives {tuple(shape)}, the model takes {tuple(target.tensor.shape)}")
    wanted = target.tensor.dtype
    as_bytes = {torch.uint8, torch.float8_e8m0fnu}
    fits = entry.dtype == wanted or {entry.dtype, wanted} == as_bytes or {entry.dtype, wanted} <= _CONVERTIBLE
    if not fits:
        raise UsageError(f"{path}: {name} is {entry.word}, the model takes {str(wanted).removeprefix('torch.')}")


def _copy(name: str, view: Tensor, target: Target) -> int:
    """Chunk by chunk along the first axis; scale bytes are checked on the way."""
    source, destination = view[target.source], target.tensor
    if source.dtype != destination.dtype and destination.dtype not in _CONVERTIBLE:
        source = source.view(destination.dtype)
    if source.ndim == 0:
        source, destination = source[None], destination[None]
    row = max(1, source[:1].numel() * source.element_size())
    step = max(1, CHUNK_BYTES // row)
    for start in range(0, source.shape[0], step):
        piece = source[start : start + step]
        if target.e8m0:
            _refuse_nan(name, piece)
        with torch.no_grad():
            destination[start : start + step].copy_(piece)
    return target.tensor.numel() * target.tensor.element_size()


def _refuse_nan(name: str, scales: Tensor) -> None:
    count = int((scales.view(torch.uint8) == 255).sum())
    if count:
        raise UsageError(
            f"{name}: {count} scale byte(s) are 255, which the MX format defines as NaN",
            hint="the file is damaged or its scales are not e8m0",
            tensor=name,
            count=count,
        )


def _conversion_note(name: str, view: Tensor, targets: Sequence[Target]) -> list[str]:
    for target in targets:
        if {view.dtype, target.tensor.dtype} <= _CONVERTIBLE and view.dtype.itemsize > target.tensor.dtype.itemsize:
            text = f"{name} was rounded from {view.dtype} to {target.tensor.dtype}".replace("torch.", "")
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            return [text]
    return []
