"""A result: what was compared, under which conditions, with every sample kept; immutable, versioned JSON.

Modelled quantities have a value and a range over parameter sets and no samples; measured ones keep all samples.
The file never holds NaN: an unknown number is `null` with a `..._why` beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dieplace.errors import UsageError
from dieplace.whole_file import write_whole

SCHEMA = "dieplace/run/1"
ORIGINS = ("measured", "reported", "modelled")


@dataclass(frozen=True)
class Quantity:
    """One number with its unit, origin, range and how both came about.

    `method` names the interval or range. `samples` are in order of taking; `by_set` has one value a parameter set.
    A `value` of None needs a `why`; a number that is not finite becomes None with that why.
    """

    unit: str
    origin: str
    value: float | None
    low: float | None = None
    high: float | None = None
    method: str = ""
    samples: tuple[float, ...] = ()
    by_set: Mapping[str, float] = field(default_factory=dict)
    why: str | None = None

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"origin {self.origin!r} is none of {', '.join(ORIGINS)}")
        if self.origin == "modelled" and self.samples:
            raise ValueError("a modelled quantity has no samples")
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                object.__setattr__(self, name, None)
                object.__setattr__(self, "why", self.why or f"{name} is not a finite number ({number})")
        if any(not math.isfinite(s) for s in self.samples):
            raise ValueError("a sample is not a finite number")
        if self.value is None and not self.why:
            raise ValueError("a quantity without a value needs a why")

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"unit": self.unit, "origin": self.origin, "value": self.value}
        if self.value is None:
            body["value_why"] = self.why
        body["low"], body["high"], body["method"] = self.low, self.high, self.method
        if self.low is None or self.high is None:
            body["low_why"] = body["high_why"] = self.why or "no interval was computed"
        body["samples"] = list(self.samples)
        body["by_set"] = dict(self.by_set)
        return body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Quantity:
        return cls(
            unit=data["unit"],
            origin=data["origin"],
            value=data["value"],
            low=data["low"],
            high=data["high"],
            method=data["method"],
            samples=tuple(data["samples"]),
            by_set=dict(data["by_set"]),
            why=data.get("value_why") or data.get("low_why"),
        )


@dataclass(frozen=True)
class Point:
    """One combination of levels: its quantities by name, its stages, and the audits before and after it."""

    arm: str
    quantities: Mapping[str, Quantity]
    factors: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...] = ()
    residency_before: Mapping[str, Any] | None = None
    residency_after: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "arm": self.arm,
            "factors": dict(self.factors),
            "quantities": {name: q.to_json() for name, q in self.quantities.items()},
            "stages": [dict(stage) for stage in self.stages],
            "notes": list(self.notes),
        }
        for name in ("residency_before", "residency_after"):
            body[name] = getattr(self, name)
            if body[name] is None:
                body[f"{name}_why"] = "no audit was taken"
        return body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        return cls(
            arm=data["arm"],
            quantities={name: Quantity.from_json(q) for name, q in data["quantities"].items()},
            factors=data["factors"],
            stages=tuple(data["stages"]),
            residency_before=data["residency_before"],
            residency_after=data["residency_after"],
            notes=tuple(data["notes"]),
        )


@dataclass(frozen=True)
class Run:
    """One experiment in one block (a mode is a block): points, conditions, machine, and what is to be known of it.

    `origin` is that of all its points. `code_hash` names the kernels that ran, equal in all arms of a block.
    """

    experiment: str
    block: str
    origin: str
    source: str
    points: tuple[Point, ...]
    conditions: Mapping[str, Any]
    workload: Mapping[str, Any]
    machine: Mapping[str, Any]
    created: str
    label: str = ""
    seed: int | None = None
    seed_why: str | None = None
    code_hash: str | None = None
    code_hash_why: str | None = None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def point(self, arm: str) -> Point:
        """The first point of an arm; UsageError lists the arms."""
        for point in self.points:
            if point.arm == arm:
                return point
        raise UsageError(f"no arm {arm!r} in {self.name}", hint=f"there is {', '.join(p.arm for p in self.points)}")

    @property
    def name(self) -> str:
        """`weight-swap/dpx-nps2`."""
        return f"{self.experiment}/{self.block}"

    def to_json(self) -> dict[str, Any]:
        """Plain data under the versioned schema, strict: no NaN, no infinity."""
        body: dict[str, Any] = {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "block": self.block,
            "label": self.label,
            "origin": self.origin,
            "source": self.source,
            "created": self.created,
            "seed": self.seed,
            "code_hash": self.code_hash,
            "conditions": dict(self.conditions),
            "workload": dict(self.workload),
            "notes": list(self.notes),
            "facts": dict(self.facts),
            "points": [point.to_json() for point in self.points],
            "machine": dict(self.machine),
        }
        for name in ("seed", "code_hash"):
            if body[name] is None:
                body[f"{name}_why"] = getattr(self, f"{name}_why") or "not recorded"
        plain: dict[str, Any] = json.loads(json.dumps(body, allow_nan=False))
        return plain

    def save(self, path: str | Path) -> Path:
        """Write the file whole or not at all (temporary file, fsync, rename)."""
        return write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", folders=True)

    @classmethod
    def from_json(cls, data: Any) -> Run:
        """Rebuild a run of any version this release reads; UsageError says what is wrong with the data."""
        schema = data.get("schema") if isinstance(data, dict) else None
        reader = _READERS.get(str(schema))
        if reader is None:
            found = repr(schema) if isinstance(data, dict) else type(data).__name__
            raise UsageError(
                f"not a run file: found {found}", hint=f"this release reads {', '.join(sorted(_READERS))}", found=schema
            )
        try:
            return _typed(reader(data))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"not a complete run file: {type(error).__name__} {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a run file; a file with NaN, Infinity or no JSON at all is a UsageError that says so."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text") from error
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not strict JSON: {error}") from error
        try:
            return cls.from_json(data)
        except UsageError as error:  # of several files that were named, which one
            raise UsageError(f"{path}: {error.message}", hint=error.hint, **error.facts) from error


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"it holds {word}, which is no JSON number")


def _read_1(data: Mapping[str, Any]) -> Run:
    return Run(
        experiment=data["experiment"],
        block=data["block"],
        origin=data["origin"],
        source=data["source"],
        points=tuple(Point.from_json(point) for point in data["points"]),
        conditions=dict(data["conditions"]),
        workload=dict(data["workload"]),
        machine=dict(data["machine"]),
        created=data["created"],
        label=data["label"],
        seed=data["seed"],
        seed_why=data.get("seed_why"),
        code_hash=data["code_hash"],
        code_hash_why=data.get("code_hash_why"),
        notes=tuple(data["notes"]),
        facts=dict(data["facts"]),
    )


def _typed(run: Run) -> Run:
    """The run, once its own parts are of their kinds; a TypeError or ValueError says which is not."""
    for name in ("experiment", "block", "origin", "source", "created", "label"):
        if not isinstance(getattr(run, name), str):
            raise TypeError(f"{name} is no text")
    if isinstance(run.seed, bool) or not isinstance(run.seed, int | None):
        raise TypeError("seed is no whole number")
    if not isinstance(run.code_hash, str | None):
        raise TypeError("code_hash is no text")
    if run.origin not in ORIGINS:
        raise ValueError(f"origin {run.origin!r} is none of {', '.join(ORIGINS)}")
    if not all(isinstance(note, str) for note in run.notes):
        raise TypeError("a note is no text")
    for quantity in (q for point in run.points for q in point.quantities.values()):
        numbers = [quantity.value, quantity.low, quantity.high, *quantity.samples, *quantity.by_set.values()]
        for number in numbers:
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
                raise TypeError(f"{number!r} is no number")
    return run


# One reader a version ever written: files of old releases stay readable.
_READERS = {SCHEMA: _read_1}
