"""Which bytes a launch may touch: the extents of the tensors it was given, with home, role and class of their block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dieplace.emulator.devices import DIES
from dieplace.emulator.isa.hierarchy_map import HOST, MappedBuffer
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.emulator.hbm import Block, EmulatedHBM


def mapped_buffers(
    arguments: Mapping[str, Any],
    memory: EmulatedHBM | None,
    roles: Mapping[str, str],
    role_of: Callable[[str], str | None] | None = None,
) -> list[MappedBuffer]:
    """One buffer for each tensor and for each raw pointer into emulated HBM, named after its parameter.

    Its role is what `roles` says, else the role of its block, else what `role_of` says of the parameter.
    """
    unknown = sorted(set(roles) - set(arguments))
    if unknown:
        raise UsageError(f"roles name {', '.join(unknown)}", hint=f"the launcher takes {', '.join(arguments)}")
    found = []
    for name, value in arguments.items():
        extent = _extent(value, memory)
        if extent is None:
            continue
        block = memory.block_at(extent[0]) if memory is not None else None
        by_name = role_of(name) if role_of else None
        role = roles.get(name) or (block.role if block else by_name) or "activation"
        found.append(MappedBuffer(name, *extent, role, block.memory_class if block else "host"))
    return found


def _extent(value: Any, memory: EmulatedHBM | None) -> tuple[int, int] | None:
    """Address and bytes of a tensor (its last element included), or of the block under a raw pointer."""
    tensor = getattr(value, "torch_tensor", value)
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise UsageError(f"the emulator takes CPU tensors, got one on {tensor.device}", hint="see emulated HBM")
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return (tensor.data_ptr(), (last + 1) * tensor.element_size()) if tensor.numel() else None
    pointer = getattr(getattr(value, "pointer", None), "value", None)
    if pointer is None:
        return None
    block = memory.block_at(pointer) if memory is not None else None
    if block is None:
        raise UsageError(f"raw pointer {pointer:#x} lies in no block of emulated HBM", hint="pass a tensor")
    return pointer, block.address + block.nbytes - pointer


def block_of(value: Any) -> tuple[EmulatedHBM, Block] | None:
    """The emulated HBM of this process and the block that a tensor's first byte lies in; None for host memory."""
    from dieplace.emulator.hbm import LIVE

    tensor = getattr(value, "torch_tensor", value)
    if not hasattr(tensor, "data_ptr") or tensor.device.type != "cpu":
        return None
    for memory in list(LIVE):
        block = memory.block_at(tensor.data_ptr())
        if block is not None:
            return memory, block
    return None


def home_of(memory: EmulatedHBM | None) -> Callable[[np.ndarray], np.ndarray] | None:
    """Home die of addresses over all cards of a node: two dies a card, -1 for host memory."""
    if memory is None:
        return None
    cards = np.array([int((d.card or "gpu0").removeprefix("gpu")) for d in memory.domains] or [0], np.int16)

    def die(addresses: np.ndarray) -> np.ndarray:
        on_card, domain = memory.die_of(addresses).astype(np.int16), memory.domain_of(addresses)
        return np.where(on_card < 0, np.int16(HOST), cards[np.maximum(domain, 0)] * DIES + on_card)

    return die


def merged(buffers: Sequence[MappedBuffer]) -> list[MappedBuffer]:
    """Distinct, non-overlapping buffers in address order.

    A view inside another buffer is that buffer; views that overlap in part become one with both names.
    """
    out: list[MappedBuffer] = []
    for buffer in sorted(buffers, key=lambda b: (b.address, -b.nbytes)):
        last = out[-1] if out else None
        if last is None or buffer.address >= last.address + last.nbytes:
            out.append(buffer)
            continue
        end = buffer.address + buffer.nbytes
        if end > last.address + last.nbytes:
            out[-1] = replace(last, name=f"{last.name}+{buffer.name}", nbytes=end - last.address)
    return out
