"""Reading a saved machine back: every field's type and every id's form is checked before anything uses it.

A machine file travels in bug reports and run files, so it may be damaged or made by hand; what is wrong is told as a
UsageError with the place, never met later as a TypeError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any

from dieplace.errors import UsageError
from dieplace.machine import SCHEMA, Card, Device, Domain, Figure, Link, Machine
from dieplace.modes import Mode

ORIGINS = ("measured", "reported", "modelled")
MOST_PARTS = 1024  # more XCDs, dies or stacks than any card has: a damaged number
_IDS = {
    Card: re.compile(r"gpu[0-9]{1,4}"),
    Device: re.compile(r"gpu[0-9]{1,4}/p[0-9]{1,3}"),
    Domain: re.compile(r"gpu[0-9]{1,4}/mem[0-9]{1,3}|host/node[0-9]{1,5}"),
}


def machine_from_json(data: Any) -> Machine:
    """Rebuild a snapshot; its source becomes `replayed` and it has no session. UsageError says what is wrong where."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"not a machine file: expected schema {SCHEMA}, found {found!r}")
    stamp = _typed(data, "stamp", list, "the file")
    if len(stamp) != 2 or not all(isinstance(item, (str, NoneType)) for item in stamp):
        raise UsageError("not a complete machine file: stamp is not [boot id, generation id]")
    notes = _typed(data, "notes", list, "the file")
    return Machine(
        source="replayed",
        backend=_typed(data, "backend", str, "the file"),
        cards=_items(data, "cards", _card),
        devices=_items(data, "devices", lambda item, where: _build(Device, item, where)),
        domains=_items(data, "domains", lambda item, where: _build(Domain, item, where)),
        links=_items(data, "links", _link),
        notes=tuple(str(note) for note in notes),
        stamp=(stamp[0], stamp[1]),
        host=_typed(data, "host", dict, "the file"),
    )


def _items(data: dict[str, Any], key: str, build: Callable[[Any, str], Any]) -> tuple[Any, ...]:
    return tuple(build(item, f"{key}[{i}]") for i, item in enumerate(_typed(data, key, list, "the file")))


def _card(item: Any, where: str) -> Card:
    if isinstance(item, dict) and isinstance(item.get("mode"), dict):
        item = {**item, "mode": "/".join(str(item["mode"].get(key)) for key in ("compute", "memory"))}
    if isinstance(item, dict) and isinstance(item.get("mode"), str):
        item = {**item, "mode": Mode.parse(item["mode"])}
    card: Card = _build(Card, item, where)
    for key in ("xccs", "dies", "stacks_per_die"):
        value = getattr(card, key)
        if value is not None and not 0 < value <= MOST_PARTS:
            raise UsageError(f"not a sound machine file: {where}.{key} is {value}")
    return card


def _link(item: Any, where: str) -> Link:
    if isinstance(item, dict):
        figures = {key: _figure(item.get(key), f"{where}.{key}") for key in ("bandwidth", "latency")}
        item = {**item, **figures}
    link: Link = _build(Link, item, where)
    return link


def _figure(item: Any, where: str) -> Figure:
    figure: Figure = _build(Figure, item, where)
    if figure.origin not in ORIGINS:
        raise UsageError(f"not a sound machine file: {where}.origin is {figure.origin!r}, none of {', '.join(ORIGINS)}")
    return figure


def _build(kind: Any, item: Any, where: str) -> Any:
    """One object of a dataclass from its JSON form; each value must fit the field's annotation."""
    if not isinstance(item, dict):
        raise UsageError(f"not a complete machine file: {where} is no object")
    known = {field.name: field for field in fields(kind)}
    item = _whys_inside(item, known)
    strange = sorted(set(item) - set(known))
    if strange:
        raise UsageError(f"not a sound machine file: {where} has an unknown key {strange[0]!r}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name not in item:
            if field.default is MISSING and field.default_factory is MISSING:
                raise UsageError(f"not a complete machine file: {where} has no {name!r}")
            continue
        value = tuple(item[name]) if isinstance(item[name], list) else item[name]
        if not _fits(value, str(field.type)):
            raise UsageError(f"not a sound machine file: {where}.{name} is {item[name]!r:.60}, not {field.type}")
        values[name] = value
    pattern = _IDS.get(kind)
    if pattern is not None and not pattern.fullmatch(values["id"]):
        raise UsageError(f"not a sound machine file: {where}.id is {values['id']!r:.60}")
    return kind(**values)


def _whys_inside(item: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """A `KEY_why` beside a known key goes into `whys`: run files leave serial numbers out and say so in that way."""
    told = {key[: -len("_why")]: key for key in item if key.endswith("_why") and key[: -len("_why")] in known}
    if not told or not isinstance(item.get("whys", {}), dict):
        return item
    rest = {key: value for key, value in item.items() if key not in told.values()}
    return {**rest, "whys": {**item.get("whys", {}), **{name: item[key] for name, key in told.items()}}}


def _fits(value: Any, annotation: str) -> bool:
    return any(_fits_one(value, part.strip()) for part in annotation.split(" | "))


def _fits_one(value: Any, annotation: str) -> bool:
    plain = {"str": str, "bool": bool, "None": NoneType, "Mode": Mode, "Figure": Figure}.get(annotation)
    if plain is not None:
        return isinstance(value, plain)
    if annotation == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation.startswith("tuple["):
        inner = annotation[len("tuple[") :].split(",")[0]
        return isinstance(value, tuple) and all(_fits_one(item, inner) for item in value)
    if annotation.startswith("dict["):
        return isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair)
    return False


def _typed(data: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(data.get(key), kind):
        raise UsageError(f"not a complete machine file: {where} has no {key!r} of the right type")
    return data[key]
