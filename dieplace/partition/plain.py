"""From JSON back to dataclasses, with every type checked: what a record on disk says is never taken on trust."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from dieplace.modes import Mode

_INTEGER_LIMIT = 1 << 63  # no number that the driver prints is larger; a huge one would only fail later


def from_plain(kind: Any, value: Any) -> Any:
    """`value` as `kind` (a dataclass, a Mode in text, tuples, dicts, unions, plain types); TypeError or ValueError."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _first(get_args(kind), value)
    if origin is tuple:
        return _tuple(get_args(kind), value)
    if origin is dict:
        _require(isinstance(value, dict), kind, value)
        return {str(key): from_plain(get_args(kind)[1], item) for key, item in value.items()}
    if kind is Mode:
        _require(isinstance(value, str), kind, value)
        return Mode.parse(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, value)
    fits = value is None if kind is type(None) else isinstance(value, kind)
    _require(fits and not (kind is int and isinstance(value, bool)), kind, value)
    if kind is int and abs(value) >= _INTEGER_LIMIT:
        raise ValueError(f"a number of {len(str(value))} digits")
    return value


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return from_plain(kind, value)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"{str(value)[:40]!r} fits none of its kinds")


def _tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    _require(isinstance(value, (list, tuple)), tuple, value)
    if kinds[-1] is Ellipsis:
        return tuple(from_plain(kinds[0], item) for item in value)
    _require(len(value) == len(kinds), tuple, value)
    return tuple(from_plain(kind, item) for kind, item in zip(kinds, value, strict=True))


def _dataclass(kind: Callable[..., Any], value: Any) -> Any:
    _require(isinstance(value, dict), kind, value)
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no field of {getattr(kind, '__name__', kind)}")
    return kind(**{name: from_plain(hints[name], item) for name, item in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: hint for name, hint in get_type_hints(kind).items() if name in names}


def _require(fits: bool, kind: Any, value: Any) -> None:
    if not fits:
        raise TypeError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', kind)}")
