"""The table of an experiment that has none of its own: one row a point, every factor that varies, every quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dieplace.experiments.charts import Bar
from dieplace.experiments.live_table import LiveTable, Row, arm_words, digits, points_of, ranged
from dieplace.run import Point, Quantity, Run


def main_quantity(run: Run) -> str | None:
    """The quantity that a run is about: the one it names, else the first with samples, else the first with a value."""
    named = run.facts.get("headline")
    if isinstance(named, str) and any(named in point.quantities for point in run.points):
        return named
    each = [(name, q) for point in run.points for name, q in point.quantities.items() if not _beside(name)]
    sampled = next((name for name, quantity in each if quantity.samples), None)
    return sampled or next((name for name, quantity in each if quantity.value is not None), None)


def _beside(name: str) -> bool:
    """Controls and ratios stand beside a quantity, they are not what a run is about."""
    return name.startswith("control_") or "_over_" in name or name == "penalty"


def tables(runs: Sequence[Run]) -> list[LiveTable]:
    """One table: factors that are the same in every point are told once, below it."""
    found = points_of(runs)
    factors = _keys(point.factors for _, point in found)
    varying = [key for key in factors if len({_text(point.factors.get(key)) for _, point in found}) > 1]
    names = [name for name in _keys(point.quantities for _, point in found)]
    rows = tuple(_row(run, point, runs, varying, names) for run, point in found)
    columns = (
        ("arm", "arm", None),
        *((f"factor_{key}", _spaced(key), None) for key in varying if _tells(key, found)),
        *((f"shown_{name}", _header(name, found), None) for name in names if not name.startswith("control_")),
    )
    steady = {key: found[0][1].factors.get(key) for key in factors if key not in varying}
    note = "".join(f" {_spaced(key)}: {_text(value)}." for key, value in steady.items() if value not in (None, [], ""))
    title = f"Every point of {runs[0].experiment}, {runs[0].origin}"
    main = main_quantity(runs[0])
    unit = next((p.quantities[main].unit for _, p in found if main in p.quantities), "") if main else ""
    values = tuple(f"shown_{name}" for name in names)
    table = LiveTable(title, columns, rows, "", _bars(runs, main), unit, values=values)
    told = _left_out(table, runs) + note + _whys(found)
    return [replace(table, note=told.strip())]


def _left_out(table: LiveTable, runs: Sequence[Run]) -> str:
    """Which points have no row, as they have no value; nothing where all have one."""
    shown = table.shown_rows
    whys: dict[str, list[str]] = {}
    for row, (run, point) in zip(table.rows, points_of(runs), strict=True):
        if row not in shown:
            why = "; ".join(_whys_of(point, points_of(runs))) or "no reason is recorded"
            whys.setdefault(why, []).append(arm_words(run, point, runs))
    if not whys:
        return ""
    each = "; ".join(f"{', '.join(arms)} ({why})" for why, arms in whys.items())
    count = len(table.rows) - len(shown)
    return f"Not in the table, as nothing is known of their time: {count} of {len(table.rows)} points: {each}."


def _row(run: Run, point: Point, runs: Sequence[Run], varying: Sequence[str], names: Sequence[str]) -> Row:
    row: Row = {"run": run.block, "arm": arm_words(run, point, runs)}
    row |= {f"factor_{key}": _text(point.factors[key]) for key in varying if key in point.factors}
    for name in names:
        quantity = point.quantities.get(name)
        if quantity is not None:
            row |= {name: quantity.value, f"{name}_low": quantity.low, f"{name}_high": quantity.high}
            row[f"shown_{name}"] = ranged(quantity, digits(quantity.value or 0.0))
    return row


def _bars(runs: Sequence[Run], main: str | None) -> tuple[Bar, ...]:
    """Bars of the main quantity, where all of its values are of one unit and none is negative."""
    found: list[tuple[str, Quantity, float]] = []
    for run, point in points_of(runs):
        quantity = point.quantities.get(main) if main else None
        if quantity is not None and quantity.value is not None:
            found.append((arm_words(run, point, runs), quantity, quantity.value))
    if not found or len({q.unit for _, q, _ in found}) > 1 or min(value for _, _, value in found) < 0:
        return ()
    return tuple(
        Bar(arm, value, q.low, q.high, (), f"{digits(value).format(value)} {q.unit}") for arm, q, value in found
    )


def _keys(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(key for one in found for key in one))


def _tells(key: str, found: Sequence[tuple[Run, Point]]) -> bool:
    """Whether a factor is worth a column: not where it only repeats the arm's own words."""
    return any(_text(point.factors.get(key)) not in point.arm for _, point in found if key in point.factors)


def _header(name: str, found: Sequence[tuple[Run, Point]]) -> str:
    unit = next((p.quantities[name].unit for _, p in found if name in p.quantities), "")
    words = _spaced(name)
    return words if not unit or words.endswith(f" {unit}") else f"{words}, {unit}"


def _spaced(key: str) -> str:
    return key.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return f"{value:,g}" if isinstance(value, float) else str(value)


def _whys_of(point: Point, found: Sequence[tuple[Run, Point]]) -> list[str]:
    """Why the point lacks quantities that other points have; of a quantity that none has there is no column."""
    known = {name for _, other in found for name, q in other.quantities.items() if q.value is not None}
    each = ((name, q) for name, q in point.quantities.items() if q.value is None and q.why)
    return list(dict.fromkeys(str(q.why) for name, q in each if name in known or not known))


def _whys(found: Sequence[tuple[Run, Point]]) -> str:
    """Why cells of the table are empty, where a point has another value; then what the points note."""
    with_value = [point for _, point in found if any(q.value is not None for q in point.quantities.values())]
    whys = dict.fromkeys(why for point in with_value or [p for _, p in found] for why in _whys_of(point, found))
    notes = dict.fromkeys(note for _, point in found for note in point.notes)
    return "".join([*(f" Empty where: {why}." for why in whys), *(f" {note}." for note in notes)])
