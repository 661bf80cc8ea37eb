"""Stands in for an AMD GPU under Triton: kernels are compiled for gfx950 as on the real card, and each launch becomes a
`HostLaunch` of their assembly, with the argument block that the kernel will read.

Triton asks its active driver for the target, loads code objects through it, and launches through the driver's launcher
class; all three are here. The assembly is the file that Triton keeps beside the code object. Arguments are packed by
the kernel's own metadata: the explicit ones in order, then two pointers for scratch memory that no kernel here uses.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dieplace.codegen.host_runtime import HostLaunch
from dieplace.codegen.metadata import KernelResources, read_kernels
from dieplace.errors import CompileError, Unsupported

ARCH, WAVE = "gfx950", 64
LDS_BYTES = 160 << 10  # of one compute unit (AMD CDNA 4 ISA, LDS)
Run = Callable[[Mapping[str, Any], HostLaunch], None]
_INLINE = re.compile(r'asm (?:sideeffect )?"(?:[^"\\]|\\.)*", "([^"]*)"')
_REGISTERS = ("s", "v", "a", "VA", "n", "i", "I", "J", "A", "B", "C", "DA", "DB")  # LLVM AMDGPUUsage, asm constraints
_FORMATS = {
    "i1": "<B", "u1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
    "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip


class Launcher:
    """What Triton makes for each compiled kernel, and calls for each launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature, self.metadata = dict(src.signature), metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, told: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        run = _run.get()
        if run is None:
            raise Unsupported(
                f"Triton kernel {self.metadata.name} was launched with no GPU",
                hint="see dieplace.emulator.triton_launch",
            )
        if enter is not None:
            enter(told)
        named = list(zip(self.signature.items(), arguments, strict=True))
        made = host_launch(_texts[function], self.metadata, (x, y, z), [(t, a) for (_, t), a in named])
        run({name: value for (name, kind), value in named if kind.startswith("*")}, made)
        if leave is not None:
            leave(told)


class Driver:
    """What Triton asks of a driver, answered for one gfx950 device that is not there."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": LDS_BYTES, "multiprocessor_count": 128},
            load_binary=lambda name, binary, shared, device: (0, next(_numbers), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        """The target that kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", ARCH, WAVE)

    def get_current_device(self) -> str:
        """Triton keeps compiled kernels by device: none of a GPU in this machine is taken for one of these."""
        return f"a {ARCH} that is not there"

    def get_current_stream(self, device: str) -> int:
        """One stream: launches keep their order."""
        return 0


# Kernels outlive a use of this module in Triton's caches, so what they need is kept for the life of the process.
_DRIVER = Driver()
_texts: dict[int, str] = {}
_numbers = itertools.count(1)
_run: ContextVar[Run | None] = ContextVar("run", default=None)


def note_loaded(module: Any, function: int, name: str, files: Mapping[str, str], digest: str) -> None:
    """Triton's hook at the end of loading a kernel: which assembly its handle stands for."""
    kept = {Path(file).suffix: Path(path) for file, path in files.items()}
    if ".amdgcn" not in kept or ".llir" not in kept:
        raise CompileError(f"Triton kept no assembly of {name}", hint=f"was it compiled for {ARCH}?")
    refuse_foreign_assembly(name, kept[".llir"].read_text())
    _texts[function] = kept[".amdgcn"].read_text()


def host_launch(
    isa: str, metadata: Any, grid: tuple[int, int, int], arguments: Sequence[tuple[str, Any]]
) -> HostLaunch:
    """One launch from Triton's metadata and (type, value) pairs; Unsupported for scratch or clusters."""
    resources = _resources(isa)
    for what in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, what, 0):
            raise Unsupported(f"Triton kernel {resources.name} wants {what}", hint="the emulated card gives it none")
    block = (metadata.num_warps * WAVE, 1, 1)
    return HostLaunch(isa, resources, grid, block, metadata.shared, argument_block(resources, arguments), 0)


def argument_block(resources: KernelResources, arguments: Sequence[tuple[str, Any]]) -> bytes:
    """The kernel-argument bytes: explicit arguments by Triton's types, constants left out; the rest stays zero."""
    out = bytearray(resources.kernarg_bytes)
    places = iter(resources.args)
    for kind, value in arguments:
        if kind == "constexpr":
            continue
        place = next(places)
        is_pointer = kind.startswith("*")
        form = "<Q" if is_pointer else _FORMATS.get(kind)
        if form is None or struct.calcsize(form) != place.size:
            raise CompileError(f"{resources.name}: an argument of type {kind} does not fit {place.size} bytes")
        struct.pack_into(form, out, place.offset, value.data_ptr() if is_pointer else value)
    return bytes(out)


def refuse_foreign_assembly(name: str, llvm_ir: str) -> None:
    """CompileError where inline assembly names register classes that gfx950 does not have, such as PTX ones.

    LLVM says so on the standard error alone and leaves the block out: the kernel that comes back does something else.
    """
    for constraints in _INLINE.findall(llvm_ir):
        for one in constraints.split(","):
            letter = one.lstrip("=&+*~")
            if not (letter.startswith("{") or letter.isdigit() or letter in _REGISTERS):
                raise CompileError(
                    f"Triton kernel {name} has inline assembly for another target (constraint {one!r})",
                    hint=f"choose the assembly by Triton's target: {ARCH} has registers s, v and a",
                )


@lru_cache(maxsize=256)
def _resources(isa: str) -> KernelResources:
    found = read_kernels(isa)
    if len(found) != 1:
        raise CompileError(f"an assembly of Triton has {len(found)} kernels, one was expected")
    return found[0]


@contextmanager
def launching(run: Run) -> Iterator[None]:
    """Inside, Triton compiles for gfx950 and gives every launch to `run(tensors by parameter name, launch)`.

    Unsupported under Triton's interpreter, which compiles nothing; CompileError for what cannot be compiled.
    """
    from triton import knobs
    from triton.backends import backends
    from triton.runtime.driver import driver

    if knobs.runtime.interpret:
        raise Unsupported("Triton interprets its kernels here (TRITON_INTERPRET)", hint="unset it: they are compiled")
    before, token = driver._active, _run.set(run)
    hooks = knobs.runtime.kernel_load_end_hook
    hooks.add(note_loaded)
    driver.set_active(_DRIVER)
    try:
        yield
    except RuntimeError as error:
        # The AMD back end raises it where LLVM cannot assemble what was generated: inline assembly of another vendor.
        if not str(error).startswith("AMD LLVM"):
            raise
        raise CompileError(f"Triton cannot compile for {ARCH}: {error}", hint="is there inline PTX in it?") from error
    finally:
        _run.reset(token)
        hooks.remove(note_loaded)
        # Where there is no GPU it stays: kernels ask the active driver once more when they go.
        if before is not None or any(one.driver.is_active() for one in backends.values()):
            driver._active = before
