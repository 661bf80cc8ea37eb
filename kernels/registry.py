"""The registry: what each op promises, and which backends can run it.

An op is a name with operands (role, dtype, shape), attributes, a float64 torch reference and a tolerance with its
reason. FlyDSL and Triton modules offer implementations under the same names, looked up when first used. A call is
checked against the contract before any launch; what a kernel cannot do falls back to the reference with one warning,
or is an error under `strict=True`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.sizes import ContractError, bind_sizes, holds

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "flydsl", "triton")
# Buffer descriptors carry a 32-bit byte count (AMD CDNA ISA, buffer resource, num_records).
MAX_EXTENT_BYTES = 2**32 - 1
INPUT, OUTPUT, IN_PLACE = "input", "output", "in place"


@dataclass(frozen=True)
class OperandSpec:
    """One operand: `dtypes` are torch names; `shape` holds sizes as text (`T`, `K/32`); `use` says who writes it."""

    name: str
    role: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    use: str = INPUT
    optional: bool = False
    layout: str = "checkpoint"
    strided: bool = False  # lines with a stride of their own (flags) need not be contiguous


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed deviation: rounding * u |v| + accumulation * (sum of magnitudes) + floor; u = unit roundoff."""

    rounding: float
    accumulation: float
    reason: str
    floor: float = 2.0**-126


@dataclass(frozen=True)
class Op:
    """The contract of one op; `reference` and `traffic` are `module:function`, imported when first used."""

    name: str
    summary: str
    operands: tuple[OperandSpec, ...]
    reference: str
    tolerance: Tolerance
    attrs: Mapping[str, Any] = field(default_factory=dict)  # name -> default; REQUIRED has none
    sizes: Mapping[str, str] = field(default_factory=dict)  # attribute name -> the size it fixes
    rules: tuple[tuple[str, str], ...] = ()  # (condition on sizes and attributes, why)
    traffic: str | None = None
    max_extent_bytes: int = MAX_EXTENT_BYTES

    def operand(self, name: str) -> OperandSpec:
        """The operand called `name`."""
        return next(spec for spec in self.operands if spec.name == name)

    @property
    def outputs(self) -> tuple[OperandSpec, ...]:
        """What the op writes, in-place operands included."""
        return tuple(spec for spec in self.operands if spec.use != INPUT)


REQUIRED = object()


@dataclass(frozen=True)
class Call:
    """A checked call: plain tensors by name, every attribute, every size."""

    op: Op
    operands: Mapping[str, Tensor | None]
    attrs: Mapping[str, Any]
    sizes: Mapping[str, int]


def op(name: str) -> Op:
    """The contract called `name`; UsageError lists the names there are."""
    from dieplace.kernels.contracts import OPS

    if name in OPS:
        return OPS[name]
    raise UsageError(f"no op is called {name!r}", hint=f"one of {', '.join(OPS)}", known=list(OPS))


def op_names() -> tuple[str, ...]:
    """Names of all ops, in the order of a decode step."""
    from dieplace.kernels.contracts import OPS

    return tuple(OPS)


def offered(backend: str) -> Mapping[str, str]:
    """Op names that `backend` implements, each with its `module:function`; imports no vendor package."""
    if backend not in BACKENDS:
        raise UsageError(f"no kernel backend is called {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return {name: op(name).reference for name in op_names()}
    kernels = dict(importlib.import_module(f"dieplace.kernels.{backend}").OPS)
    # The probes live with the library, which may not import kernels, but are listed and checked here.
    probes = importlib.import_module("dieplace.probes").OPS if backend == "flydsl" else {}
    return {**kernels, **probes}


def implementation(name: str, backend: str) -> Callable[..., None] | None:
    """The function `f(operands, attrs, *, stream=None)` of a kernel backend, or None where it has none.

    Unsupported where the package that the kernels are written in is not installed.
    """
    target = offered(backend).get(op(name).name)
    try:
        return resolve(target) if target else None
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != backend:
            raise
        raise Unsupported(f"{backend} is not installed", hint="see: dieplace doctor") from missing


def resolve(target: str) -> Callable[..., Any]:
    """The object named `module:function`."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def check_call(name: str, operands: Mapping[str, Any], attrs: Mapping[str, Any] | None = None) -> Call:
    """The call, checked: names, layouts, dtypes, shapes, rules. Raises ContractError (also a ValueError)."""
    contract = op(name)
    attributes = _attributes(contract, attrs or {})
    tensors = _tensors(contract, operands)
    sizes = bind_sizes(contract, tensors, attributes)
    for condition, why in contract.rules:
        if not holds(condition, {**sizes, **attributes}):
            raise ContractError(f"{name}: {condition} does not hold for {_text(sizes)}", hint=why, op=name)
    return Call(contract, tensors, attributes, sizes)


def run(
    name: str,
    operands: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    backend: str = "reference",
    strict: bool = False,
    stream: Any = None,
) -> str:
    """Run an op: its output operands are written in place; returns the backend that ran.

    What `backend` cannot do runs as the reference with one warning per reason, or raises Unsupported under `strict`.
    """
    return run_call(check_call(name, operands, attrs), backend=backend, strict=strict, stream=stream)


def run_call(call: Call, *, backend: str = "reference", strict: bool = False, stream: Any = None) -> str:
    """`run` for a call that was checked already."""
    if backend == "reference":
        run_reference(call)
        return backend
    kernel, reason = _kernel(call, backend)
    if kernel is not None and reason is None:
        kernel(call.operands, call.attrs, stream=stream)
        return backend
    if strict:
        raise Unsupported(
            f"{call.op.name} for {_text(call.sizes)}: {reason}", hint="strict=False runs the torch reference"
        )
    _warn_once(f"{call.op.name}: {reason}; the torch reference runs instead")
    run_reference(call)
    return "reference"


def _kernel(call: Call, backend: str) -> tuple[Callable[..., None] | None, str | None]:
    """The kernel, and why it cannot run this call."""
    try:
        kernel = implementation(call.op.name, backend)
    except Unsupported as missing:
        return None, missing.message
    return kernel, f"{backend} has no kernel for it" if kernel is None else _cannot(kernel, call)


def run_reference(call: Call) -> None:
    """Write the reference's results, rounded once, into the output operands."""
    from dieplace.kernels.reference import rounded

    for name, expected in resolve(call.op.reference)(call.operands, call.attrs).items():
        target = call.operands[name]
        if target is not None:
            target.copy_(rounded(expected.value, target.dtype))


def bytes_by_role(call: Call) -> dict[str, int]:
    """Distinct bytes that the call touches, by role; an op whose reads depend on its data has a `traffic` function."""
    from dieplace.workload import ROLES

    total = dict.fromkeys(ROLES, 0)
    for name, nbytes in bytes_by_operand(call).items():
        total[call.op.operand(name).role] += nbytes
    return total


def bytes_by_operand(call: Call) -> dict[str, int]:
    """Distinct bytes that the call touches of each operand it was given."""
    counted = resolve(call.op.traffic)(call) if call.op.traffic else {}
    given = {name: tensor for name, tensor in call.operands.items() if tensor is not None}
    return {name: counted.get(name, tensor.numel() * tensor.element_size()) for name, tensor in given.items()}


def _attributes(contract: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(given) - set(contract.attrs)
    missing = [name for name, default in contract.attrs.items() if default is REQUIRED and name not in given]
    if unknown or missing:
        what = f"unknown attribute(s) {sorted(unknown)}" if unknown else f"attribute(s) {missing} not given"
        raise ContractError(f"{contract.name}: {what}", hint=f"it takes {', '.join(contract.attrs) or 'none'}")
    return {**contract.attrs, **given}


def _tensors(contract: Op, given: Mapping[str, Any]) -> dict[str, Tensor | None]:
    from dieplace.kernels.layout import CHECKPOINT, Laid, require_layout

    known = {spec.name for spec in contract.operands}
    if set(given) - known:
        raise ContractError(f"{contract.name}: unknown operand(s) {sorted(set(given) - known)}")
    tensors: dict[str, Tensor | None] = {}
    for spec in contract.operands:
        value = given.get(spec.name)
        if value is None and not spec.optional:
            raise ContractError(f"{contract.name}: operand {spec.name} is missing")
        if value is not None and (isinstance(value, Laid) or spec.layout != CHECKPOINT):
            value = require_layout(spec.name, value, spec.layout)
        _check_dtype(contract, spec, value)
        tensors[spec.name] = value
    return tensors


def _check_dtype(contract: Op, spec: OperandSpec, value: Tensor | None) -> None:
    if value is None:
        return
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in spec.dtypes:
        wanted = " or ".join(spec.dtypes)
        raise ContractError(f"{contract.name}: operand {spec.name} is {dtype}, the contract says {wanted}")
    if not (spec.strided or value.is_contiguous()):
        raise ContractError(f"{contract.name}: operand {spec.name} is not contiguous", hint="pass t.contiguous()")


def _cannot(kernel: Callable[..., None], call: Call) -> str | None:
    for name, tensor in call.operands.items():
        extent = 0 if tensor is None else tensor.numel() * tensor.element_size()
        if extent > call.op.max_extent_bytes:
            return f"{name} spans {extent} bytes, the kernel addresses at most {call.op.max_extent_bytes}"
    supports = getattr(kernel, "supports", None)
    return supports(call.operands, call.attrs) if supports else None


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


__all__: Sequence[str] = (
    "BACKENDS",
    "Call",
    "ContractError",
    "Op",
    "OperandSpec",
    "Tolerance",
    "bytes_by_operand",
    "bytes_by_role",
    "check_call",
    "implementation",
    "offered",
    "op",
    "op_names",
    "resolve",
    "run",
    "run_call",
    "run_reference",
)
