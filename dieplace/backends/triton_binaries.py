"""Which compiled Triton kernels ran, and one hash over their machine code: the same-binary check of an experiment."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launched:
    """Function handles of the kernels launched so far, by kernel name."""

    handles: dict[int, str] = field(default_factory=dict)

    def binaries(self, kernels: list[Any] | None = None) -> dict[str, str]:
        """sha256 of each kernel's machine code, by `name#handle order`; LookupError for a kernel nobody holds."""
        held = {kernel.function: kernel for kernel in (kernels if kernels is not None else _compiled())}
        missing = [name for handle, name in self.handles.items() if handle not in held]
        if missing:
            raise LookupError(f"the machine code of {', '.join(missing)} cannot be found")
        return {
            f"{name}#{number}": hashlib.sha256(machine_code(held[handle])).hexdigest()
            for number, (handle, name) in enumerate(self.handles.items())
        }


def code_hash(binaries: Mapping[str, str]) -> str:
    """One hash over all machine code, whatever the order of launching."""
    parts = sorted(f"{name.partition('#')[0]} {digest}" for name, digest in binaries.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def machine_code(kernel: Any) -> bytes:
    """The cubin or, on AMD, the code object of a compiled Triton kernel."""
    kind = next((name for name in ("cubin", "hsaco") if name in kernel.asm), None)
    if kind is None:
        raise LookupError("a compiled Triton kernel has neither a cubin nor a code object")
    return bytes(kernel.asm[kind])


@contextmanager
def watch(hooks: Any = None) -> Iterator[Launched]:
    """Inside, every Triton launch of this process is noted; nothing is changed about it.

    `hooks` is Triton's chain of launch hooks (triton 3.5 and later), or a stand-in in tests.
    """
    if hooks is None:
        from triton import knobs

        hooks = knobs.runtime.launch_enter_hook
    found = Launched()

    def note(metadata: Any) -> None:
        told = metadata.get()
        found.handles.setdefault(int(told["function"]), str(told["name"]))

    hooks.add(note)
    try:
        yield found
    finally:
        hooks.remove(note)


def _compiled() -> list[Any]:
    from triton.compiler import CompiledKernel

    # Triton keeps kernels in caches of each function and device whose shape differs between releases.
    # By type, as isinstance asks each object for its __class__, which some of torch's answer with a warning.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), CompiledKernel)]
    return [kernel for kernel in found if getattr(kernel, "function", None)]
