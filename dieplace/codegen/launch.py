"""From an op's operands to launches: what the registry calls, and where a backend may step in.

op.plan(operands, attrs)     the launches, not run: launcher and arguments
op(operands, attrs)          runs them in order on the current target, each through a bound handle
with run_with(runner): ...   hands each launch to `runner` instead (the emulator with roles and homes, a recorder)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Operands = Mapping[str, Any]
Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a launcher whose parameters bear operand names, and its arguments without the stream."""

    launcher: Any
    args: tuple[Any, ...]
    hints: Mapping[str, Any] = field(default_factory=dict)


Runner = Callable[[Launch, Any], None]


def _supports_all(operands: Operands, attrs: Attrs) -> str | None:
    return None


@dataclass(frozen=True)
class KernelOp:
    """An op of the registry: `plan` makes its launches, `supports` says in one sentence why it cannot, or None."""

    plan: Callable[[Operands, Attrs], list[Launch]]
    supports: Callable[[Operands, Attrs], str | None] = _supports_all

    def __call__(self, operands: Operands, attrs: Attrs, *, stream: Any = None) -> None:
        """Write the output operands in place; operands and attributes have been checked against the contract."""
        runner = _runner.get()
        for launch in self.plan(operands, attrs):
            runner(launch, stream)


def run_bound(launch: Launch, stream: Any = None) -> None:
    """Launch through a compiled handle that is kept for these dtypes and shapes, so that nothing is traced twice."""
    from dieplace.codegen.flydsl import CompileOptions, bind

    key = (launch.launcher, tuple(_signature(a) for a in launch.args), tuple(sorted(launch.hints.items())), _helpers())
    handle = _handles.get(key)
    if handle is None:
        options = CompileOptions(hints=dict(launch.hints))
        handle = _handles[key] = bind(launch.launcher, *launch.args, options=options)
    handle(*launch.args, *([] if stream is None else [stream]))


def _helpers() -> int:
    """Changes when a function that kernels are traced from is replaced: a handle would go on running the old code.

    FlyDSL issue 453 is the same fault in its own cache. Kernels look their helpers up as module attributes.
    """
    global _sources
    if _sources[0] != len(sys.modules):
        found = [module for name, module in sys.modules.items() if name.startswith(_TRACED) and module]
        _sources = (len(sys.modules), [vars(module) for module in found])
    return hash(tuple(id(value) for names in _sources[1] for value in names.values()))


_TRACED = ("dieplace.kernels.flydsl", "dieplace.probes", "dieplace.codegen.flydsl_names")
_sources: tuple[int, list[dict[str, Any]]] = (0, [])


def _signature(argument: Any) -> Any:
    if hasattr(argument, "dtype"):
        return argument.dtype, tuple(argument.shape), tuple(argument.stride())
    return type(argument)


_handles: dict[Any, Any] = {}
_runner: ContextVar[Runner] = ContextVar("runner", default=run_bound)


@contextmanager
def run_with(runner: Runner) -> Iterator[None]:
    """Inside, every launch of every op goes to `runner(launch, stream)`."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)
