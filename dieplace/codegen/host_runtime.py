"""Stands in for the HIP runtime under FlyDSL's compiled host code: the `mgpu*` entry points as Python callbacks.

FlyDSL's host function computes the grid, packs pointers to the arguments and calls load, get-function and launch. Here
"loading" reads ISA text, and "launching" builds the kernel-argument block from the metadata and notes a `HostLaunch`.
`collect` gives what a call of a launcher launched. Callbacks must not raise through C: an exception is kept and raised
there.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from dieplace.codegen.metadata import KernelResources, read_kernels
from dieplace.errors import KernelFault

_P, _I32, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
_AXES = {"x": 0, "y": 1, "z": 2}


@dataclass(frozen=True)
class HostLaunch:
    """One kernel launch as the host code asked for it; `kernarg` is the argument block the kernel will read."""

    isa: str
    resources: KernelResources
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds_bytes: int
    kernarg: bytes
    stream: int


_notes: ContextVar[list[HostLaunch] | None] = ContextVar("notes", default=None)
_failures: list[BaseException] = []
_modules: dict[int, str] = {}
_functions: dict[int, tuple[str, str]] = {}
_handles: dict[tuple[int, str], int] = {}  # host code asks for the function at every launch
_numbers = itertools.count(1)  # handles are never used twice: compiled host code may keep an old one


@contextmanager
def collect() -> Iterator[list[HostLaunch]]:
    """The launches made by FlyDSL's host code inside, in order; an exception of a callback comes out at the end."""
    notes: list[HostLaunch] = []
    token = _notes.set(notes)
    _failures.clear()
    try:
        yield notes
    finally:
        _notes.reset(token)
    if _failures:
        first = _failures[0]
        _failures.clear()
        raise first


def note(launch: HostLaunch) -> None:
    """Note a launch that other host code than FlyDSL's asked for; KernelFault where nobody collects."""
    notes = _notes.get()
    if notes is None:
        raise KernelFault(
            f"{launch.resources.name} was launched with no emulated device",
            hint="launch through dieplace.emulator.execution.run",
        )
    notes.append(launch)


def _load(text: int, *_: int) -> int:
    handle = next(_numbers)
    _modules[handle] = ctypes.string_at(text).decode()
    return handle


def _unload(
    module: int,
    modules: dict[int, str] = _modules,
    functions: dict[int, tuple[str, str]] = _functions,
    handles: dict[tuple[int, str], int] = _handles,
) -> None:
    # The tables are arguments because engines also end at interpreter exit, when this module's globals are gone.
    modules.pop(module, None)
    for key in [key for key in handles if key[0] == module]:
        functions.pop(handles.pop(key))


def _get_function(module: int, name: int) -> int:
    key = (module, ctypes.string_at(name).decode())
    if key not in _handles:
        _handles[key] = next(_numbers)
        _functions[_handles[key]] = (_modules[module], key[1])
    return _handles[key]


@lru_cache(maxsize=256)
def _resources(isa: str, name: str) -> KernelResources:
    return next(kernel for kernel in read_kernels(isa) if kernel.name == name)


def _launch(
    function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, lds: int, stream: int, params: int, *_: int
) -> None:
    try:
        isa, name = _functions[function]
        resources = _resources(isa, name)
        grid, block = (gx, gy, gz), (bx, by, bz)
        kernarg = argument_block(resources, grid, block, params)
        note(HostLaunch(isa, resources, grid, block, lds, kernarg, stream or 0))
    except BaseException as error:  # C is above us: kept, and raised again by `collect`
        _failures.append(error)


def argument_block(
    resources: KernelResources, grid: tuple[int, int, int], block: tuple[int, int, int], params: int
) -> bytes:
    """The kernel-argument bytes: explicit arguments from `params` (pointers to values), hidden ones computed."""
    out = bytearray(resources.kernarg_bytes)
    pointers = ctypes.cast(params or 0, ctypes.POINTER(_P))
    explicit = 0
    for argument in resources.args:
        if argument.kind.startswith("hidden_"):
            value = _hidden(argument.kind, grid, block)
            if value is not None:
                struct.pack_into("<I" if argument.size == 4 else "<H", out, argument.offset, value)
            continue
        pointer = pointers[explicit]
        out[argument.offset : argument.offset + argument.size] = ctypes.string_at(pointer, argument.size)
        explicit += 1
    return bytes(out)


def _hidden(kind: str, grid: tuple[int, int, int], block: tuple[int, int, int]) -> int | None:
    """Implicit arguments of code object v5 that depend on the launch; the others stay zero (LLVM AMDGPUUsage)."""
    if kind.startswith("hidden_block_count_"):
        return grid[_AXES[kind[-1]]]
    if kind.startswith("hidden_group_size_"):
        return block[_AXES[kind[-1]]]
    if kind == "hidden_grid_dims":
        return 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1
    return None


# Kept for the life of the process: compiled host code holds their addresses.
CALLBACKS = {
    "mgpuModuleLoadJIT": ctypes.CFUNCTYPE(_P, _P, _I32)(_load),
    "mgpuModuleLoad": ctypes.CFUNCTYPE(_P, _P, _SIZE)(_load),
    "mgpuModuleUnload": ctypes.CFUNCTYPE(None, _P)(lambda module, unload=_unload: unload(module)),
    "mgpuModuleGetFunction": ctypes.CFUNCTYPE(_P, _P, _P)(_get_function),
    "mgpuLaunchKernel": ctypes.CFUNCTYPE(None, _P, _I64, _I64, _I64, _I64, _I64, _I64, _I32, _P, _P, _P, _SIZE)(
        _launch
    ),
    "mgpuStreamCreate": ctypes.CFUNCTYPE(_P)(lambda: 1),
    "mgpuStreamDestroy": ctypes.CFUNCTYPE(None, _P)(lambda stream: None),
    "mgpuStreamSynchronize": ctypes.CFUNCTYPE(None, _P)(lambda stream: None),
}
