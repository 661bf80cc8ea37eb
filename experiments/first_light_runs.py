"""Questions that the runs of first light answer: figures that are published nowhere, read off the points of `link`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dieplace.experiments.first_light_questions import Answer, NotAsked, answered, timed_word, without

if TYPE_CHECKING:
    from dieplace.run import Point, Run

BOTH_FULL = 1.6  # two directions at once carry as much as twice one of them, less what requests and replies share
APART = 0.05  # near and far rates that differ by less tell nothing about which die is which


@dataclass(frozen=True)
class Ran:
    """The runs by experiment, and why an experiment has none; `peer_mode` is where link runs between dies belong."""

    origin: str
    runs: Mapping[str, Sequence[Run]]
    whys: Mapping[str, str]
    dies: bool  # the homes are dies of one card, not two GPUs

    def link(self) -> Run:
        """The link run with far memory; NotAsked with the reason there is none."""
        for run in self.runs.get("link", ()):
            if any(_far(point) for point in run.points):
                return run
        why = self.whys.get("link") or "it ran where there is no far memory"
        raise NotAsked(f"the link experiment gave no figures: {why}")


def near_far_latency(ran: Ran) -> Answer:
    """Latency of a dependent load, near and far, from memory."""
    name = "near-far-latency"
    run = ran.link()
    near, far = (_value(_best(run, "latency", side, cache="cold"), "latency_ns") for side in ("near", "far"))
    value = {"near_ns": near, "far_ns": far, "gap_ns": far - near if near is not None and far is not None else None}
    if near is None or far is None:
        return without(
            "unknown", name, "the run has no cold latency on both sides", origin=run_origin(run), value=value
        )
    said = f"a dependent load takes {near:,.0f} ns near and {far:,.0f} ns far: {far - near:+,.0f} ns"
    return answered(
        name, timed_word(run_origin(run)), said, origin=run_origin(run), value=value, evidence=[_where(run)]
    )


def link_directions(ran: Ran) -> Answer:
    """Whether the link carries as much each way when both are busy as when one is."""
    name = "link-directions"
    run = ran.link()
    one = _value(_best(run, "read", "far", cache="cold"), "gb_per_s")
    both = _value(_best(run, "read", "far", directions="both at once"), "gb_per_s")
    value = {"one_gb_per_s": one, "both_gb_per_s": both, "ratio": both / one if one and both else None}
    if not one or not both:
        why = "the run has no far reads in one direction and in both"
        return without("unknown", name, why, origin=run_origin(run), value=value)
    said = f"far reads: {one:,.0f} GB/s by one device, {both:,.0f} by both at once ({both / one:.2f} times)"
    word = "each direction by itself" if both / one >= BOTH_FULL else "directions share"
    return answered(name, word, said, origin=run_origin(run), value=value, evidence=[_where(run)])


def die_affinity(ran: Ran) -> Answer:
    """Whether the XCDs of partition k read range k faster than the other one, for every k."""
    name = "die-affinity"
    if not ran.dies:
        raise NotAsked("each GPU is one die here: there is nothing to tell apart")
    run = ran.link()
    ratios: dict[str, float] = {}
    for reader in dict.fromkeys(str(point.factors.get("reader")) for point in run.points):
        near, far = (_value(_best(run, "latency", side, reader=reader, cache="cold"), "latency_ns")
                     for side in ("near", "far"))  # fmt: skip
        if near and far:
            ratios[reader] = far / near
    value = {"far_over_near_latency": ratios}
    if len(ratios) < 2:
        why = "the run has cold latencies of fewer than two devices"
        return without("unknown", name, why, origin=run_origin(run), value=value)
    told = ", ".join(f"{reader} {ratio:.2f}" for reader, ratio in ratios.items())
    if all(ratio > 1 + APART for ratio in ratios.values()):
        said = f"each partition reads its own range faster: far over near latency {told}"
        return answered(name, "own range is near", said, origin=run_origin(run), value=value)
    if all(ratio < 1 - APART for ratio in ratios.values()):
        said = f"each partition reads the *other* range faster: far over near latency {told}"
        return answered(name, "other range is near", said, origin=run_origin(run), value=value)
    said = f"the ranges are not told apart by latency: far over near {told}"
    return answered(name, "no difference", said, origin=run_origin(run), value=value)


def cache_bandwidth(ran: Ran) -> Answer:
    """The highest rate of reads that the last cache holds, beside that of memory."""
    name = "cache-bandwidth"
    run = ran.link()
    warm = _value(_best(run, "read", "near", cache="warm", largest=True), "gb_per_s")
    cold = _value(_best(run, "read", "near", cache="cold", largest=True), "gb_per_s")
    value = {"warm_gb_per_s": warm, "cold_gb_per_s": cold}
    if not warm or not cold:
        return without("unknown", name, "the run has no warm and cold near reads", origin=run_origin(run), value=value)
    said = f"near reads reach {warm:,.0f} GB/s from the last cache and {cold:,.0f} GB/s from memory"
    if warm <= cold:
        why = f"{said}: the set is too small or too short for the cache's own rate to show"
        return without("unknown", name, why, origin=run_origin(run), value=value, evidence=[_where(run)])
    return answered(
        name, timed_word(run_origin(run)), said, origin=run_origin(run), value=value, evidence=[_where(run)]
    )


def latency_by_stack(ran: Ran) -> Answer:
    """Never: it needs to know which address lies on which stack."""
    raise NotAsked("no public map says which address lies on which HBM stack, so a latency cannot be given to one")


def published_terms(ran: Ran) -> Answer:
    """Never: only its author can say."""
    raise NotAsked(
        "precision, context and requests of the published run are its author's to say; no machine shows them"
    )


def run_origin(run: Run) -> str:
    """`measured`, or `emulated` for whatever did not run on hardware."""
    return "measured" if run.origin == "measured" and run.source == "live" else "emulated"


def _best(
    run: Run, what: str, side: str, *, cache: str | None = None, directions: str = "one", reader: str | None = None,
    largest: bool = False,
) -> Point | None:  # fmt: skip
    found = [
        p for p in run.points
        if p.factors.get("what") == what and p.arm == side and p.factors.get("directions") == directions
        and (cache is None or p.factors.get("cache") == cache) and (reader is None or p.factors.get("reader") == reader)
        and _same_card(p)
    ]  # fmt: skip
    if largest:
        return max(found, key=lambda p: _value(p, "gb_per_s") or 0.0, default=None)
    return max(found, key=lambda p: p.factors.get("working_set_bytes", 0), default=None)


def _same_card(point: Point) -> bool:
    """Points to a home on another card do not count where the run names homes."""
    home, reader = point.factors.get("home"), str(point.factors.get("reader"))
    return home is None or point.arm == "near" or reader == "all" or str(home).split("/")[0] == reader.split("/")[0]


def _far(point: Point) -> bool:
    return point.arm == "far" and any(q.value is not None for q in point.quantities.values())


def _value(point: Point | None, name: str) -> float | None:
    quantity: Any = None if point is None else point.quantities.get(name)
    return None if quantity is None else quantity.value


def _where(run: Run) -> str:
    return f"run {run.name} of {run.created}"
