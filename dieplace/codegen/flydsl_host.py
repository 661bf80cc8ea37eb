"""The host half of the FlyDSL shim: its private compiler, pipeline and engine names (pinned: flydsl==0.5.0).

`install` puts two hooks under FlyDSL, so that a launcher, a `flyc.compile` handle and `compile_launcher` all take the
same road: lowering goes through a function of ours (the worker and its cache), and engines get the launch callbacks of
the emulator instead of the HIP runtime. FlyDSL's own host code (tracing, argument packing, grid computation) is used
as it is. Nothing else in dieplace imports these names.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flydsl
from flydsl._mlir import ir
from flydsl._mlir.dialects import gpu
from flydsl.compiler import jit_executor, jit_function
from flydsl.compiler.backends import get_backend
from flydsl.compiler.llvm_options import llvm_options

from dieplace.errors import CompileError, UsageError

VERSION: str = flydsl.__version__
PINNED = "0.5.0"
_BINARY_PASS = "gpu-module-to-binary"
_HIP_LIBRARY = "fly_jit_runtime"  # needs libamdhip64: replaced by callbacks when emulating


@dataclass(frozen=True)
class Lowering:
    """What one compile needs, as plain text: the traced module, the passes before code generation and LLVM options."""

    traced_ir: str
    entry: str  # the launcher's name
    passes: tuple[str, ...]
    llvm_options: tuple[tuple[str, bool | int | str], ...]
    arch: str
    bitcode: str  # digest of the device bitcode, which is linked into kernels that call it
    version: str = VERSION


@dataclass(frozen=True)
class Lowered:
    """Code generation's results: ISA text with metadata, LLVM IR, the HSACO, and the host module around each.

    `host_module` holds the ISA text and is what the emulator loads; `device_module` holds the HSACO, for HIP.
    """

    isa: str
    llvm_ir: str
    host_module: str
    hsaco: bytes | None = None
    device_module: str | None = None


def set_target(arch: str) -> None:
    """Make `arch` the target of this process; FlyDSL reads it from the environment and silently assumes gfx942.

    One target a process: some of FlyDSL's helpers remember the first answer, so a second target is refused.
    """
    if VERSION != PINNED:
        raise CompileError(
            f"dieplace uses private names of flydsl {PINNED}, found {VERSION}", hint=f"pip install flydsl=={PINNED}"
        )
    if _state.arch not in (None, arch):
        raise CompileError(
            f"asked to compile for {arch}, but this process already compiles for {_state.arch}",
            hint="use one process for each architecture",
        )
    _state.arch = arch
    os.environ["FLYDSL_GPU_ARCH"] = arch
    os.environ.pop("ARCH", None)  # changes half of the target only (reference: FlyDSL get_rocm_arch does not read it)


def is_launcher(value: Any) -> bool:
    """Whether `value` is a `@flyc.jit` function."""
    return isinstance(value, jit_function.JitFunction)


def parameters(launcher: Any) -> tuple[str, ...]:
    """The launcher's parameter names in order."""
    launcher._ensure_sig()
    return tuple(launcher._sig.parameters)


def bind_arguments(launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by parameter name, defaults filled in; a wrong call is a UsageError."""
    launcher._ensure_sig()
    try:
        bound = launcher._sig.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{launcher.func.__name__}: {error}", hint=f"it takes {', '.join(launcher._sig.parameters)}"
        ) from None
    bound.apply_defaults()
    return dict(bound.arguments)


def artifact_ir(launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hints: dict[str, Any]) -> str:
    """Trace and lower `launcher` for these arguments without launching; the lowered host module's text."""
    with _hints(launcher, hints):
        launcher._compile_only(*args, **kwargs)
    return launcher._last_compiled[1].ir


def handle(launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hints: dict[str, Any]) -> tuple[Any, str]:
    """FlyDSL's `CompiledFunction` for these arguments and the lowered module's text; later calls do not trace."""
    with _hints(launcher, hints):
        function = launcher._compile_or_execute(args, kwargs, execute=False, return_compiled=True)
    return function, function._keepalive.ir


class _hints:
    """Adds compile hints to a launcher for one compile; FlyDSL's own `compile[...]` would keep them for ever."""

    def __init__(self, launcher: Any, hints: dict[str, Any]) -> None:
        self.launcher, self.hints = launcher, hints

    def __enter__(self) -> None:
        self.before = self.launcher.compile_hints
        self.launcher.compile_hints = {**self.before, **self.hints}

    def __exit__(self, *_: object) -> None:
        self.launcher.compile_hints = self.before


class _State:
    arch: str | None = None
    installed = False
    real_compile: Any = None


_state = _State()


def install(
    lower: Callable[[Lowering], str],
    callbacks: dict[str, Any] | None = None,
    called: Callable[[dict[str, Any], Callable[[], Any]], Any] | None = None,
) -> None:
    """Route every lowering of this process through `lower`; with `callbacks`, engines launch into them, not into HIP.

    `lower` returns the text of the lowered host module. `callbacks` maps `mgpu*` names to ctypes function objects that
    the caller keeps alive. `called` is given the arguments by name and the call itself, whenever a launcher or a
    compiled handle is called: only there it is known which tensors a launch may touch.
    """
    if _state.installed:
        return
    # Artifacts of this process hold ISA text under the key of a code object: they must never reach FlyDSL's disk cache.
    os.environ["FLYDSL_RUNTIME_ENABLE_CACHE"] = "0"
    jit_function.MlirCompiler.compile = classmethod(_compile_hook(lower))
    if callbacks is not None:
        jit_executor.ExecutionEngine = _engine_class(jit_executor.ExecutionEngine, callbacks)
    if called is not None:
        jit_function.JitFunction.__call__ = _call_hook(jit_function.JitFunction.__call__, called)
        jit_function.JitFunction._make_compiled_function = _handle_hook(
            jit_function.JitFunction._make_compiled_function
        )
        jit_function.CompiledFunction.__call__ = _handle_call_hook(jit_function.CompiledFunction.__call__, called)
    _state.installed = True


def _compile_hook(lower: Callable[[Lowering], str]) -> Callable[..., Any]:
    def compile(cls: Any, asm: str, *, func_name: str, config: Any) -> Any:
        if config.external or "link_libs" in " ".join(config.fragments):
            raise CompileError(f"{func_name}: external code generation and linked libraries are not supported")
        return ir.Module.parse(lower(_lowering(asm, func_name, config)))

    return compile


def _call_hook(real: Callable[..., Any], called: Callable[[dict[str, Any], Callable[[], Any]], Any]) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ir.Context.current is not None:  # inlined into another launcher that is being traced
            return real(self, *args, **kwargs)
        return called(bind_arguments(self, args, kwargs), lambda: real(self, *args, **kwargs))

    return __call__


def _handle_hook(real: Callable[..., Any]) -> Any:
    """A compiled handle knows only positions: its parameters' names are kept with its artifact."""

    def _make_compiled_function(self: Any, cache_key: Any, bound: Any, call_state: Any) -> Any:
        handle = real(self, cache_key, bound, call_state)
        handle._keepalive.dieplace_names = tuple(bound.arguments)
        return handle

    return _make_compiled_function


def _handle_call_hook(real: Callable[..., Any], called: Callable[[dict[str, Any], Callable[[], Any]], Any]) -> Any:
    def __call__(self: Any, *args: Any) -> Any:
        names = getattr(self._keepalive, "dieplace_names", ()) or tuple(f"argument{i}" for i in range(len(args)))
        return called(dict(zip(names, args, strict=False)), lambda: real(self, *args))

    return __call__


def _lowering(asm: str, func_name: str, config: Any) -> Lowering:
    backend = get_backend()
    passes = tuple(p for p in config.fragments if not p.strip().startswith(_BINARY_PASS))
    # Source locations in `asm` name files and lines: without them an edit elsewhere in a file is still a cache hit.
    text = ir.Module.parse(asm).operation.get_asm(enable_debug_info=False)
    return Lowering(
        traced_ir=text,
        entry=func_name,
        passes=passes,
        llvm_options=tuple(sorted((config.llvm_opts or {}).items())),
        arch=backend.target.arch,
        bitcode=backend.toolkit_fingerprint(),
    )


def _engine_class(base: Any, callbacks: dict[str, Any]) -> Any:
    class Engine(base):
        """FlyDSL's execution engine with the emulator's entry points in place of the HIP runtime library."""

        def __init__(self, module: Any, opt_level: int = 2, shared_libs: tuple[str, ...] = ()) -> None:
            kept = [lib for lib in shared_libs if _HIP_LIBRARY not in lib]
            super().__init__(module, opt_level=opt_level, shared_libs=kept)
            for name, function in callbacks.items():
                self.raw_register_runtime(name, ctypes.cast(function, ctypes.c_void_p))

    return Engine


def lower(job: Lowering, *, link: bool) -> Lowered:
    """Run the passes and generate code; called in the worker, because a mistake can abort the process.

    The ISA needs no linker. With `link`, LLVM runs `$ROCM_PATH/llvm/bin/ld.lld` for the HSACO.
    """
    context = jit_function._create_mlir_context()
    with context, llvm_options(dict(job.llvm_options)):
        module = ir.Module.parse(job.traced_ir)
        jit_function._run_pipeline(module, list(job.passes), verifier=True, print_after_all=False)
        llvm_ir = jit_function._extract_llvm_ir(module) or ""
        text = module.operation.get_asm()
        isa_module = _binary(text, "isa")
        if not link:
            return Lowered(_object(isa_module).decode(), llvm_ir, str(isa_module))
        linked = _binary(text, "fatbin")
        return Lowered(_object(isa_module).decode(), llvm_ir, str(isa_module), _object(linked), str(linked))


def _binary(text: str, form: str) -> Any:
    module = ir.Module.parse(text)
    jit_function._run_pipeline(module, [f"{_BINARY_PASS}{{format={form}}}"], verifier=True, print_after_all=False)
    return module


def _object(module: Any) -> bytes:
    for op in module.body.operations:
        if op.operation.name == "gpu.binary":
            return bytes(gpu.ObjectAttr(ir.ArrayAttr(op.attributes["objects"])[0]).object)
    raise CompileError("code generation gave no device code", hint="does the launcher launch a @flyc.kernel?")
