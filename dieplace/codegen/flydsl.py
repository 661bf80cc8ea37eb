"""Compiles FlyDSL launchers for gfx950 on any machine: ISA text, LLVM IR, resources, code hash, optional HSACO.

    compiled = compile_launcher(launcher, *cpu_tensors)
    launch = bind(launcher, *tensors); launch(*tensors)      # no tracing per call; refuses other dtypes and shapes

The architecture is always set explicitly (FlyDSL assumes gfx942 otherwise). The launcher is traced here every time, so
a changed helper, closure constant or switch is seen (a cache keyed by sources misses them: FlyDSL issue 453); the
traced IR, passes, options, target and FlyDSL version are the key of a cache on disk; a miss is lowered in the
persistent worker process (`worker.py`). FlyDSL accepts several mistakes silently, so what comes back is checked.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dieplace.codegen.cache import CompileCache, default_cache_dir
from dieplace.codegen.checks import check
from dieplace.codegen.linker import find_linker
from dieplace.codegen.metadata import KernelResources, read_kernels
from dieplace.codegen.worker import Worker
from dieplace.errors import CompileError, UsageError

if TYPE_CHECKING:
    from dieplace.codegen.flydsl_host import Lowering

ARCH = "gfx950"


@dataclass(frozen=True)
class CompileOptions:
    """How to compile: FlyDSL hints (`waves_per_eu`, `fast_fp_math`, `llvm_options`), linking, and the cache.

    `cache_dir` None is the user's XDG cache folder; `cache` False neither reads nor writes.
    """

    hints: dict[str, Any] = field(default_factory=dict)
    link: bool = False
    cache: bool = True
    cache_dir: Path | None = None
    arch: str = ARCH


@dataclass(frozen=True)
class Compiled:
    """One launcher compiled for one set of argument types. `code_hash` is SHA-256 of the ISA without comments."""

    name: str
    arch: str
    isa: str
    llvm_ir: str
    kernels: tuple[KernelResources, ...]
    code_hash: str
    key: str  # SHA-256 of traced IR, passes, options, target, bitcode and FlyDSL version
    host_module: str = field(repr=False)  # FlyDSL's lowered host code, device code inside
    hsaco: bytes | None = field(default=None, repr=False)
    device_module: str | None = field(default=None, repr=False)  # as host_module, the HSACO inside
    hsaco_why: str | None = None  # why there is no HSACO
    compiler_output: str = ""
    seconds: float = 0.0  # lowering; tracing not counted; of the first compile where cached
    from_cache: bool = False


def compile_launcher(launcher: Any, *args: Any, options: CompileOptions | None = None, **kwargs: Any) -> Compiled:
    """Compile `launcher` for these arguments (CPU tensors stand for device tensors); nothing is launched.

    Raises CompileError when FlyDSL refuses, when the compiler prints an error or dies, on spills, scratch, more than
    160 KB of LDS or 1024 threads, and on an empty kernel; UsageError when `launcher` is no `@flyc.jit` function.
    """
    host = activate(options, live=_on_device(args, kwargs))
    _require_launcher(host, launcher)
    with _compiling(options):
        text = _translated(launcher, lambda: host.artifact_ir(launcher, args, kwargs, _hints(options)))
    return _by_module(text)


@dataclass(frozen=True)
class BoundKernel:
    """A compiled launcher that is called without tracing: positional arguments only, all of them but a stream.

    FlyDSL's own handle accepts tensors of another dtype or shape and launches the old code; this one refuses them.
    """

    launcher: Any
    compiled: Compiled
    names: tuple[str, ...]
    signature: tuple[Any, ...]
    function: Any = field(repr=False)
    stream: Any = field(repr=False, default=None)

    def __call__(self, *args: Any) -> None:
        """Launch with these arguments; UsageError when one differs in dtype, shape or stride from the compiled one."""
        self.function(*self.complete(args))

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the default stream appended, checked against what was compiled."""
        full = args if len(args) == len(self.names) else (*args, *((self.stream,) * (len(self.names) - len(args))))
        found = tuple(_signature_of(a) for a in full)
        for name, want, got in zip(self.names, self.signature, found, strict=True):
            if want != got:
                raise UsageError(
                    f"{self.compiled.name}: argument {name} was compiled as {want}, got {got}",
                    hint="bind the launcher again for these arguments",
                )
        return full


def bind(launcher: Any, *args: Any, options: CompileOptions | None = None, **kwargs: Any) -> BoundKernel:
    """Compile once and return a handle that launches without tracing; arguments and errors as `compile_launcher`."""
    live = _on_device(args, kwargs)
    host = activate(options, live=live)
    if live != _process.live:
        raise UsageError(
            f"this process {'runs kernels on a device' if _process.live else 'emulates the device'}, and was given "
            f"{'device' if live else 'CPU'} tensors",
            hint="use one process for each",
        )
    _require_launcher(host, launcher)
    full = host.bind_arguments(launcher, args, kwargs)
    with _compiling(options):
        function, text = _translated(launcher, lambda: host.handle(launcher, tuple(full.values()), {}, _hints(options)))
    stream = next((v for v in full.values() if type(v).__name__ == "Stream"), None)
    signature = tuple(_signature_of(v) for v in full.values())
    return BoundKernel(launcher, _by_module(text), tuple(full), signature, function, stream)


def activate(options: CompileOptions | None = None, *, live: bool = False) -> Any:
    """Set the target and put dieplace's compiler under FlyDSL; the first call decides where this process launches.

    Returns the host shim. `live` (device tensors) leaves FlyDSL's HIP runtime in place, and code objects are linked;
    otherwise launches go to the emulator.
    """
    from dieplace.codegen import flydsl_host

    flydsl_host.set_target((options or CompileOptions()).arch)
    if not _process.installed:
        if live:
            flydsl_host.install(_device_module)
        else:
            from dieplace.codegen import host_runtime

            flydsl_host.install(lambda job: _lowered(job).host_module, host_runtime.CALLBACKS, _launch_call)
        _process.installed, _process.live = True, live
    return flydsl_host


def _launch_call(arguments: dict[str, Any], call: Callable[[], Any]) -> Any:
    from dieplace.emulator.execution import launch_call  # compiling alone does not need the emulator

    return launch_call(arguments, call)


class _Process:
    """What this process has compiled: the worker, results by key and by module text, the options of this compile."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.by_key: dict[str, Compiled] = {}
        self.by_module: dict[str, Compiled] = {}
        self.options = CompileOptions()
        self.installed = self.live = False


_process = _Process()


class _compiling:
    def __init__(self, options: CompileOptions | None) -> None:
        self.options = options or CompileOptions()

    def __enter__(self) -> None:
        self.before, _process.options = _process.options, self.options

    def __exit__(self, *_: object) -> None:
        _process.options = self.before


def _lowered(job: Lowering) -> Compiled:
    options = _process.options
    key = job_key(job)
    link = (options.link or _process.live) and find_linker()[0] is not None
    known = _process.by_key.get(key) if options.cache else None
    if known is None or (link and known.hsaco is None):
        store = CompileCache(options.cache_dir or default_cache_dir()) if options.cache else None
        known = store.get(key, link=link) if store else None
        if known is None:
            known = _compile(job, key, options.link or _process.live)
            if store:
                store.put(known)
        _process.by_key[key] = known
    for module in (known.host_module, known.device_module):
        if module is not None:
            _process.by_module[_digest(module)] = known
    check(known)
    return known


def _device_module(job: Lowering) -> str:
    compiled = _lowered(job)
    if compiled.device_module is None:
        raise CompileError(f"{compiled.name} cannot run on a device: {compiled.hsaco_why}", hint="install ROCm's llvm")
    return compiled.device_module


def _compile(job: Lowering, key: str, link: bool) -> Compiled:
    linker, why = find_linker() if link else (None, "linking was not asked for")
    start = time.monotonic()
    lowered, printed = _process.worker.lower(
        job, link=linker is not None, rocm_path=linker.rocm_path if linker else None
    )
    return Compiled(
        name=job.entry,
        arch=job.arch,
        isa=lowered.isa,
        llvm_ir=lowered.llvm_ir,
        kernels=read_kernels(lowered.isa),
        code_hash=code_hash(lowered.isa),
        key=key,
        host_module=lowered.host_module,
        hsaco=lowered.hsaco,
        device_module=lowered.device_module,
        hsaco_why=None if lowered.hsaco else why,
        compiler_output=printed,
        seconds=time.monotonic() - start,
    )


def job_key(job: Lowering) -> str:
    """SHA-256 over everything that decides the generated code."""
    parts = [job.entry, job.passes, job.llvm_options, job.arch, job.bitcode, job.version]
    return hashlib.sha256(json.dumps(parts).encode() + b"\0" + job.traced_ir.encode()).hexdigest()


def code_hash(isa: str) -> str:
    """SHA-256 of the assembly without comments and blank space, equal for equal instructions and metadata."""
    lines = (" ".join(line.split(";")[0].split()) for line in isa.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


def _translated(launcher: Any, work: Callable[[], Any]) -> Any:
    """Run FlyDSL; its own exceptions (tracing mistakes) become CompileError with its text."""
    try:
        return work()
    except (CompileError, UsageError):
        raise
    except Exception as error:
        name = getattr(getattr(launcher, "func", None), "__name__", str(launcher))
        raise CompileError(f"{name} does not compile: {type(error).__name__}: {error}") from error


def _by_module(text: str) -> Compiled:
    return _process.by_module[_digest(text)]


def compiled_of_code(isa: str) -> Compiled | None:
    """The compile of this process that made this assembly text, if any."""
    wanted = code_hash(isa)
    return next((c for c in _process.by_key.values() if c.code_hash == wanted), None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hints(options: CompileOptions | None) -> dict[str, Any]:
    return dict((options or CompileOptions()).hints)


def _require_launcher(host: Any, launcher: Any) -> None:
    if not host.is_launcher(launcher):
        raise UsageError(
            f"expected a @flyc.jit launcher, got {type(launcher).__name__}",
            hint="pass the function that calls .launch()",
        )


def _on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(getattr(value, "is_cuda", False) for value in (*args, *kwargs.values()))


def _signature_of(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return (str(value.dtype), tuple(value.shape), tuple(value.stride()))
    return type(value).__name__
