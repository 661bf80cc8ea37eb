"""Relocating fresh torch storages: how `local()` and `peer()` place tensors on the emulated backend.

A dispatch mode sees every operator on this thread. An output whose storage is neither an input's nor already placed
is fresh, and is copied into memory that the pool gives. `torch.from_numpy` and `torch.frombuffer` alias host memory on
any backend and are left alone. As with `torch.cuda.MemPool`, threads started inside (autograd
has its own) are not covered; the audit names what they allocate as not placed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# Contexts nest: the innermost runs the operator through the outer ones, which must leave its result alone.
_inner = threading.local()


class Relocating(TorchDispatchMode):
    """`storage(nbytes)` gives placed memory as a uint8 tensor; `is_placed(address)` says what needs no move."""

    def __init__(self, storage: Callable[[int], torch.Tensor], is_placed: Callable[[int], bool]) -> None:
        super().__init__()
        self._storage = storage
        self._is_placed = is_placed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(_inner, "busy", False):
            return func(*args, **(kwargs or {}))
        _inner.busy = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            _inner.busy = False
        given: set[int] = set()
        # torch.tensor, torch.asarray and safetensors hand their new storage to lift_fresh: an input, and fresh.
        if func is not torch.ops.aten.lift_fresh.default:
            given = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if _is_plain(t)}
        return tree_map(lambda t: self._relocate(t) if self._is_fresh(t, given) else t, out)

    def _is_fresh(self, value: Any, given: set[int]) -> bool:
        if not _is_plain(value):
            return False
        storage = value.untyped_storage()
        return storage.nbytes() > 0 and storage.data_ptr() not in given and not self._is_placed(storage.data_ptr())

    def _relocate(self, value: torch.Tensor) -> torch.Tensor:
        old = value.untyped_storage()
        new = self._storage(old.nbytes()).untyped_storage()
        placed = torch.empty(0, dtype=value.dtype)
        placed.set_(new, value.storage_offset(), value.size(), value.stride())
        placed.copy_(value)
        return placed


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.device.type == "cpu" and value.layout == torch.strided
