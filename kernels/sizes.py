"""Symbolic sizes of a contract (`T`, `K/32`, `(HQ+2*HKV)*D`): solved from the operands, then checked against them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from dieplace.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from dieplace.kernels.registry import Op

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
}


class ContractError(UsageError, ValueError):
    """A call does not fit its op's contract: a wrong name, dtype, shape, layout or attribute; nothing was launched."""

    word = "contract"


def bind_sizes(contract: Op, tensors: Mapping[str, Tensor | None], attrs: Mapping[str, Any]) -> dict[str, int]:
    """Every size of the call. Raises ContractError naming operand, axis, wanted and found size."""
    sizes = {size: int(attrs[attr]) for attr, size in contract.sizes.items()}
    shapes = [(s, tuple(tensors[s.name].shape)) for s in contract.operands if tensors[s.name] is not None]  # type: ignore[union-attr]
    for spec, shape in shapes:
        if len(shape) != len(spec.shape):
            wanted = f"({', '.join(spec.shape)})"
            raise ContractError(f"{contract.name}: operand {spec.name} has shape {shape}, the contract says {wanted}")
        for text, found in zip(spec.shape, shape, strict=True):
            if text.isidentifier():
                sizes.setdefault(text, found)
    for spec, shape in shapes:
        for axis, (text, found) in enumerate(zip(spec.shape, shape, strict=True)):
            _check_size(contract.name, spec.name, axis, text, found, sizes)
    return sizes


def _check_size(op: str, operand: str, axis: int, text: str, found: int, sizes: Mapping[str, int]) -> None:
    try:
        wanted = evaluate(text, sizes)
    except ArithmeticError:
        wanted = None
    if wanted != found:
        known = ", ".join(f"{name}={value}" for name, value in sizes.items())
        shown = text if wanted is None or text == str(wanted) else f"{text} = {wanted}"
        raise ContractError(f"{op}: axis {axis} of {operand} is {found}, the contract says {shown} (with {known})")


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition on sizes holds, e.g. `HQ % HKV == 0`."""
    return bool(evaluate(condition, values))


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The value of an integer expression; division must come out even, else ArithmeticError."""
    return _value(_parsed(text), values)


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATORS[type(node.ops[0])](_value(node.left, values), _value(node.comparators[0], values))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Div):
            if right == 0 or left % right:
                raise ArithmeticError(f"{left} is not a multiple of {right}")
            return left // right
        return _OPERATORS[type(node.op)](left, right)
    raise SyntaxError(f"a size may not contain {ast.dump(node)}")
