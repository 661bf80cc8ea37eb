"""Runs as rows for tables, and as sentences; the command, the report and the README print these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dieplace.experiments.live_table import run_words
from dieplace.run import Point, Quantity, Run

ROLES = ("weights", "kv_cache", "sync_flag")
TERMS = ("distance_us", "link_us", "cache_type_us", "wait_us")


def title_word(runs: Sequence[Run]) -> str:
    """`modelled` or `measured`: stands in every title of numbers. Runs of two origins are never put in one table."""
    origins = {run.origin for run in runs}
    if len(origins) != 1:
        raise ValueError(f"runs of different origin in one table: {', '.join(sorted(origins))}")
    return origins.pop()


def points(runs: Sequence[Run]) -> Iterator[tuple[Run, Point]]:
    """Every point with its run, in order."""
    for run in runs:
        for point in run.points:
            yield run, point


def arm_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an arm: token time and what it is slower by than all-local memory, with ranges."""
    return [
        {
            "run": run.block,
            "mode": run.facts.get("mode"),
            "arm": point.arm,
            **_spread("token_us", point.quantities["token_us"]),
            **_spread("penalty_percent", point.quantities["penalty"], 100),
            "penalty_unfitted_percent": _of_set(point.quantities["penalty"], "C", 100),
        }
        for run, point in points(runs)
    ]


def term_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an arm: microseconds a token that the placement adds, by cause (headline set)."""
    return [
        {
            "run": run.block,
            "arm": point.arm,
            "all_local_us": point.quantities["all_local_us"].value,
            **{term: point.quantities[term].value for term in TERMS},
            "token_us": point.quantities["token_us"].value,
        }
        for run, point in points(runs)
    ]


def stage_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a stage: microseconds a token in each arm (headline set), all repeats together; the last row is the sum.

    Window and full attention are one stage here, as the published figures do not tell them apart.
    """
    found: dict[str, dict[str, Any]] = {}
    for run, point in points(runs):
        column = column_key(run, point)
        for stage in point.stages:
            name = "attention" if stage["stage"] == "attention_window" else str(stage["stage"])
            row = found.setdefault(name, {"stage": name, "repeats": 0})
            row[column] = row.get(column, 0.0) + stage["total_us"] * stage["repeats"]
    first = next(points(runs), None)
    for stage in first[1].stages if first else ():
        name = "attention" if stage["stage"] == "attention_window" else str(stage["stage"])
        found[name]["repeats"] += stage["repeats"]
    rows = list(found.values())
    columns = [column_key(run, point) for run, point in points(runs)]
    total = {"stage": step_word(runs), "repeats": None, **{c: sum(row.get(c, 0.0) for row in rows) for c in columns}}
    return [*rows, total]


def column_key(run: Run, point: Point) -> str:
    """`dpx_nps2_swapped_us`: the key of an arm's column."""
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{run.block}_{point.arm.replace('/', '_of_')}_us")


def residency_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an arm, role and device: bytes on each die."""
    rows = []
    for run, point in points(runs):
        by_role = (point.residency_before or {}).get("bytes_by_role_device_die", {})
        for role in ROLES:
            for device, dies in sorted(by_role.get(role, {}).items()):
                rows.append(
                    {
                        "run": run.block,
                        "arm": point.arm,
                        "role": role,
                        "device": device,
                        **{f"die{die}_bytes": int(dies.get(str(die), 0)) for die in (0, 1)},
                    }
                )
    return rows


def step_word(runs: Sequence[Run]) -> str:
    """What one time is of: a token, or a round of several."""
    return "round" if runs[0].experiment == "verify" else "token"


def workload_words(runs: Sequence[Run]) -> str:
    """`gpt-oss-120b mxfp4, 1,024, 8,192 and 32,768 tokens of context`: the model and every context of the points."""
    work = runs[0].workload
    if "context_tokens" not in work:
        return str(work["name"])
    found = sorted({int(p.factors.get("context_tokens", run.workload["context_tokens"])) for run, p in points(runs)})
    words = [f"{tokens:,}" for tokens in found]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{work['name']}, {listed} tokens of context"


def crossing_bytes(run: Run, point: Point) -> dict[str, float]:
    """Bytes that one step reads or writes across the link, by role: audited shares times the step's bytes."""
    per_step = point.factors.get("bytes_per_token_by_role") or run.workload["bytes_per_token_by_role"]
    by_role = (point.residency_before or {}).get("bytes_by_role_device_die", {})
    found = {}
    for role, devices in by_role.items():
        total, far = far_bytes(run, devices)
        found[role] = per_step.get(role, 0) * (far / total if total else 0.0)
    return found


def far_bytes(run: Run, devices: Mapping[str, Mapping[str, int]]) -> tuple[float, float]:
    """All of the placed bytes by device and die, and those off the die that reads them.

    A device over both dies reads each page from both, so half of it from afar.
    """
    dies_of = {device["id"]: device["dies"] for device in run.machine["devices"]}
    total = far = 0.0
    for device, dies in devices.items():
        readers = dies_of[device]
        for die, nbytes in dies.items():
            total += nbytes
            far += nbytes * sum(reader != int(die) for reader in readers) / len(readers)
    return total, far


def verdicts(runs: Sequence[Run]) -> list[str]:
    """One sentence for each arm that is slower than all-local memory in any parameter set."""
    said = []
    for run, point in points(runs):
        penalty = point.quantities["penalty"]
        if penalty.value == 0 and penalty.high == 0:
            continue
        what = run.block if point.arm == "local" else f"{run.block} {point.arm}"
        said.append(f"{run.origin}: {what} is slower than all-local memory by {percent(penalty)}")
    return said


def left_out(runs: Sequence[Run]) -> dict[str, str]:
    """Blocks that an experiment did not take, with the reason, as its runs say."""
    return {str(block): str(why) for run in runs for block, why in run.facts.get("left_out", {}).items()}


def notes(runs: Sequence[Run]) -> list[str]:
    """What the runs note, each once; one that not all of them hold names those that do."""
    several = len({run.experiment for run in runs}) > 1
    held: dict[str, list[Run]] = {}
    for run in runs:
        for note in dict.fromkeys(run.notes):
            held.setdefault(note, []).append(run)
    return [note if len(of) == len(runs) else f"{_holders(of, runs, several)}: {note}" for note, of in held.items()]


def _holders(of: Sequence[Run], runs: Sequence[Run], several: bool) -> str:
    """`weight-swap, verify gpu0-gpu1`: experiments all of whose runs are among `of`, and the other runs by block."""
    words: list[str] = []
    for experiment in dict.fromkeys(run.experiment for run in of):
        own = [run for run in runs if run.experiment == experiment]
        named = [run for run in own if any(run is one for one in of)]
        blocks = [run_words(run, own) for run in named]
        if several and len(named) == len(own):
            words.append(experiment)
        else:
            words += [f"{experiment} {block}" if several else block for block in blocks]
    return ", ".join(words)


def percent(found: Quantity) -> str:
    """`28.0 % [14.6, 28.0]`; `unknown` with the why where there is no value."""
    if found.value is None:
        return f"unknown ({found.why})"
    text = f"{found.value * 100:.1f} %"
    if found.low is not None and found.high is not None:
        text += f" [{found.low * 100:.1f}, {found.high * 100:.1f}]"
    return text


def _spread(name: str, found: Quantity, factor: float = 1) -> dict[str, float | None]:
    numbers = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: None if value is None else value * factor for key, value in numbers.items()}


def _of_set(found: Quantity, name: str, factor: float) -> float | None:
    values: Mapping[str, float] = found.by_set
    return values[name] * factor if name in values else None
