"""Which bytes a launch may touch: the extents of the tensors it was given, with home, role and class of their block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dieplace.emulator.isa.hierarchy_map import MappedBuffer
from dieplace.errors import UsageError

if TYPE_CHECKING:
    from dieplace.emulator.hbm import EmulatedHBM


def mapped_buffers(
    arguments: Mapping[str, Any], memory: EmulatedHBM | None, roles: Mapping[str, str]
) -> list[MappedBuffer]:
    """One buffer for each tensor and for each raw pointer into emulated HBM, named after its parameter."""
    unknown = sorted(set(roles) - set(arguments))
    if unknown:
        raise UsageError(f"roles name {', '.join(unknown)}", hint=f"the launcher takes {', '.join(arguments)}")
    found = []
    for name, value in arguments.items():
        extent = _extent(value, memory)
        if extent is None:
            continue
        block = memory.block_at(extent[0]) if memory is not None else None
        role = roles.get(name) or (block.role if block else "activation")
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


def merged(buffers: Sequence[MappedBuffer]) -> list[MappedBuffer]:
    """Distinct, non-overlapping buffers in address order; views of one storage become one buffer with both names."""
    out: list[MappedBuffer] = []
    for buffer in sorted(buffers, key=lambda b: (b.address, -b.nbytes)):
        last = out[-1] if out else None
        if last is None or buffer.address >= last.address + last.nbytes:
            out.append(buffer)
            continue
        names = last.name if buffer.name in last.name.split("+") else f"{last.name}+{buffer.name}"
        end = max(last.address + last.nbytes, buffer.address + buffer.nbytes)
        role = last.role if last.role != "activation" else buffer.role
        out[-1] = replace(last, name=names, nbytes=end - last.address, role=role)
    return out
