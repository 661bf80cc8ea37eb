"""Read safetensors files straight into tensors that exist already, wherever they were placed.

Files are mapped and copied slice by slice, so no tensor is ever twice in host memory; everything is checked before the
first byte is copied.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dieplace.errors import UsageError
from dieplace.tensorfile import Entry, TensorFile, read_header

CHUNK_BYTES = 32 << 20
_CONVERTIBLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: `source` picks a slice of it (a shard's rows), `tensor` takes that slice's shape.

    `e8m0` marks scale bytes, of which 255 (NaN) is refused. With `write(start, rows)` the slice, of shape `shape`, is
    handed over in pieces along its first axis instead of being copied: for weights that are quantised while loading.
    """

    tensor: Tensor
    source: tuple[slice, ...] = ()
    e8m0: bool = False
    shape: tuple[int, ...] | None = None
    write: Callable[[int, Tensor], None] | None = None

    @property
    def takes(self) -> tuple[int, ...]:
        """The shape that the slice of the source must have."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape


@dataclass(frozen=True)
class LoadReport:
    """What was copied: tensors and bytes, names in files that nothing asked for, and notes."""

    tensors: int
    nbytes: int
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


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
        entries, _ = read_header(path)
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
    return dict.fromkeys(read_header(path)[0], path), []


def _join(paths: Iterable[Path], folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        for name in read_header(path)[0]:
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
        headers[file] = read_header(index.parent / file)[0]
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
    if tuple(shape) != target.takes:
        raise UsageError(f"{path}: {name} gives {tuple(shape)}, the model takes {target.takes}")
    if target.write is not None:
        if entry.dtype not in _CONVERTIBLE:
            raise UsageError(f"{path}: {name} is {entry.word}, which cannot be quantised again")
        return
    wanted = target.tensor.dtype
    as_bytes = {torch.uint8, torch.float8_e8m0fnu}
    fits = entry.dtype == wanted or {entry.dtype, wanted} == as_bytes or {entry.dtype, wanted} <= _CONVERTIBLE
    if not fits:
        raise UsageError(f"{path}: {name} is {entry.word}, the model takes {str(wanted).removeprefix('torch.')}")


def _copy(name: str, view: Tensor, target: Target) -> int:
    """Chunk by chunk along the first axis; scale bytes are checked on the way."""
    source, destination = view[target.source], target.tensor
    if target.write is not None:
        step = max(1, CHUNK_BYTES // 8 // max(1, source[:1].numel() * source.element_size()))
        for start in range(0, source.shape[0], step):
            target.write(start, source[start : start + step])
        return destination.numel() * destination.element_size()
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
        if target.write is not None:
            return [f"{name} was quantised while loading"]
        if {view.dtype, target.tensor.dtype} <= _CONVERTIBLE and view.dtype.itemsize > target.tensor.dtype.itemsize:
            text = f"{name} was rounded from {view.dtype} to {target.tensor.dtype}".replace("torch.", "")
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            return [text]
    return []
