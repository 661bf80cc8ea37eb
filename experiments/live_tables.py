"""Tables and sentences of measured runs; the command and the report print them.

`link`, decode steps and merged runs of several ranks have tables of their own; any other experiment gets the generic
one, so that a run of an experiment that this release does not know can still be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        return [step_tables.time_table(runs), step_tables.stage_table(runs), step_tables.residency_table(runs)]
    return [*generic_tables.tables(runs), step_tables.residency_table(runs)]


def sentences(runs: Sequence[Run]) -> list[str]:
    """What the runs show, in words; each verdict names the control it was judged by."""
    if runs[0].experiment == "scale-out":
        from dieplace.experiments import scale_out_tables

        return scale_out_tables.sentences(runs)
    return [words for run in runs for point in run.points for words in _sentences(runs, run, point)]


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
            against = "" if name in ("time_over_local", "time_over_near") else f", against {_base(name)}"
            yield f"{run.origin}: {what} is {_verdict(run, point, ratio)}{against}"


def _arm(runs: Sequence[Run], run: Run, point: Point) -> str:
    return f"{run.block} {point.arm}" if len(runs) == 1 else arm_words(run, point, runs)


def _base(name: str) -> str:
    return name.removeprefix("time_over_").replace("_", " ")


def _verdict(run: Run, point: Point, ratio: Quantity) -> str:
    from dieplace.experiments.statistics import MIN_PAIRS, Estimate, verdict

    assert ratio.value is not None
    count = len(_samples(point)) or MIN_PAIRS  # a run of another release may keep ratios alone
    found = Estimate(ratio.value, ratio.low, ratio.high, count, ratio.method)
    return verdict(found, control=_control(run, point), clock_share=run.facts.get("clock_share")).words


def _control(run: Run, point: Point) -> Estimate | None:
    """The A/A ratio that judges a point: of `link` its own case's, of a step its case's, else the run's."""
    from dieplace.experiments.statistics import Estimate

    found = [
        (p, q) for p in run.points for n, q in p.quantities.items() if n.startswith("time_over_") and _is_control(q)
    ]
    for other, ratio in found:
        of_case = other.factors.get("case") == point.factors.get("case")
        if (other.factors == point.factors if run.experiment == "link" else of_case) and ratio.value is not None:
            return Estimate(ratio.value, ratio.low, ratio.high, len(_samples(other)), ratio.method)
    return None


def _is_control(quantity: Quantity) -> bool:
    return quantity.value is not None and quantity.method.startswith("A/A")


def _samples(point: Point) -> tuple[float, ...]:
    return max((q.samples for q in point.quantities.values()), key=len, default=())
