"""Tables and sentences of measured runs; the command and the report print them.

`link`, decode steps and merged runs of several ranks have tables of their own; any other experiment gets the generic
one, so that a run of an experiment that this release does not know can still be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dieplace.experiments import generic_tables, link_tables, step_tables
from dieplace.experiments.live_table import LiveTable, arm_words, run_words
from dieplace.run import Point, Quantity, Run

if TYPE_CHECKING:
    from dieplace.experiments.statistics import Estimate

__all__ = ["LiveTable", "is_live", "sentences", "tables"]


def is_live(runs: Sequence[Run]) -> bool:
    """Whether these runs are shown by this module: all but those whose quantities are the clock's."""
    if not runs:
        return False
    clocked = any("token_us" in point.quantities for point in runs[0].points)
    return runs[0].origin == "measured" or runs[0].experiment in ("link", "scale-out") or not clocked


def tables(runs: Sequence[Run]) -> list[LiveTable]:
    """Every table of these runs that has something in it, in order of showing."""
    return [table for table in _tables(runs) if table.rows and table.columns]


def _tables(runs: Sequence[Run]) -> list[LiveTable]:
    if runs[0].experiment == "scale-out":
        from dieplace.experiments import scale_out_tables

        return scale_out_tables.tables(runs)
    if runs[0].experiment == "link":
        return [link_tables.latency_table(runs), link_tables.rate_table(runs)]
    if step_tables.is_step(runs):
        return [step_tables.time_table(runs), *step_tables.stage_tables(runs), step_tables.residency_table(runs)]
    return [*generic_tables.tables(runs), step_tables.residency_table(runs)]


def sentences(runs: Sequence[Run]) -> list[str]:
    """What the runs show, in words; each verdict names the control it was judged by."""
    if runs[0].experiment == "scale-out":
        from dieplace.experiments import scale_out_tables

        return scale_out_tables.sentences(runs)
    found = [words for run in runs for point in run.points for words in _sentences(runs, run, point)]
    return [*found, *(words for run in runs for words in _drifts(runs, run))]


def _drifts(runs: Sequence[Run], run: Run) -> Iterator[str]:
    """One sentence a run of the arms whose samples moved with their order; each is tested by itself, at 1 in 100."""
    told = run.facts.get("drift")
    if not isinstance(told, Mapping):
        return
    found = {str(arm): spaced(str(words)) for arm, words in told.items() if not str(words).startswith("no drift")}
    if found:
        which = f"{words} " if (words := run_words(run, runs)) else ""
        arms = "; ".join(f"{arm}: {words}" for arm, words in found.items())
        many = f"{len(found)} of {len(told)} series of samples moved with time"
        yield f"{run.origin}: {which}{many} (by chance 1 in 100 would seem to): {arms}"


def spaced(text: str) -> str:
    """`+5.4%`, as earlier releases wrote it into runs, as `+5.4 %`."""
    return re.sub(r"(?<=\d)%", " %", text)


def _sentences(runs: Sequence[Run], run: Run, point: Point) -> Iterator[str]:
    if run.experiment == "link" and not link_tables.headline(run, point):
        return
    of_link = run.experiment == "link"
    what = f"{run_words(run, runs)} {link_tables.what_words(point)}".strip() if of_link else _arm(runs, run, point)
    penalty = point.quantities.get("penalty")
    if penalty is not None and penalty.value is None:
        yield f"{run.origin}: no penalty is told for {what}, because {penalty.why}"
        return
    ratios = {n: q for n, q in point.quantities.items() if n.startswith("time_over_") and q.value is not None}
    for name, ratio in ratios.items():
        if not ratio.method.startswith("A/A"):
            yield f"{run.origin}: {what} {_verdict(run, point, ratio, _base(run, point, name))}"


def _arm(runs: Sequence[Run], run: Run, point: Point) -> str:
    return f"{run.block} {point.arm}" if len(runs) == 1 else arm_words(run, point, runs)


def _base(run: Run, point: Point, name: str) -> str:
    """What a ratio is to: of decode steps the first arm of the point's case, `8K local`; else what the name says."""
    if name == "time_over_local":
        found = [p for p in run.points if _is_control(p.quantities.get(name)) and _same_case(p, point)]
        return found[0].arm if found else "local"
    return name.removeprefix("time_over_").replace("_", " ")


def _same_case(one: Point, other: Point) -> bool:
    return one.factors.get("case") == other.factors.get("case")


def _verdict(run: Run, point: Point, ratio: Quantity, base: str) -> str:
    from dieplace.experiments.statistics import MIN_PAIRS, Estimate, verdict

    assert ratio.value is not None
    count = len(_samples(point)) or MIN_PAIRS  # a run of another release may keep ratios alone
    estimate = Estimate(ratio.value, ratio.low, ratio.high, count, ratio.method)
    found = verdict(estimate, control=_control(run, point), clock_share=run.facts.get("clock_share"))
    if found.kind == "no difference":
        return f"shows {found.words} from {base}"
    return f"is {found.words}" + (f" than {base}" if found.kind in ("slower", "faster") else "")


def _control(run: Run, point: Point) -> Estimate | None:
    """The A/A ratio that judges a point: of `link` its own case's, of a step its case's, else the run's."""
    from dieplace.experiments.statistics import Estimate

    found = [
        (p, q) for p in run.points for n, q in p.quantities.items() if n.startswith("time_over_") and _is_control(q)
    ]
    for other, ratio in found:
        of_case = other.factors == point.factors if run.experiment == "link" else _same_case(other, point)
        if of_case and ratio.value is not None:
            return Estimate(ratio.value, ratio.low, ratio.high, len(_samples(other)), ratio.method)
    return None


def _is_control(quantity: Quantity | None) -> bool:
    return quantity is not None and quantity.value is not None and quantity.method.startswith("A/A")


def _samples(point: Point) -> tuple[float, ...]:
    return max((q.samples for q in point.quantities.values()), key=len, default=())
