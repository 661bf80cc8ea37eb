"""More Markdown tables from committed results: flags and kernel speed on the test GPUs, modes of the emulated card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dieplace.errors import UsageError
from dieplace.run import Point, Run

GPUS = Path("nvidia-h200-x2")
_MODES = ("spx-nps1", "dpx-nps1", "dpx-nps2")
_SPEED_ROWS = {
    "streaming read": "streaming read, 1 GiB: the ceiling",
    "torch copy_": "`Tensor.copy_`, read and written",
    "gemv_bf16 1 GiB": "GEMV, bf16, 1 GiB",
    "torch.mv bf16 1 GiB": "`torch.mv`, bf16, 1 GiB",
    "gemv_mxfp4 524288x4096": "GEMV, MXFP4, 524,288 x 4,096",
    "layer, Triton ops": "gpt-oss-120b layer, Triton ops",
    "layer, torch ops": "the same layer, torch ops",
}
MEASURED = "{}; measured on 2 x H200: it validates the harness and the code, not the MI355X."


def flags_table(results: Path) -> str:
    """Round trips of a sync flag by its home and the number of its pollers, medians in us."""
    run = Run.load(results / GPUS / "flags" / "gpu0-gpu1.json")
    homes = list(dict.fromkeys(str(point.factors["home"]) for point in run.points))
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for point in run.points:
        key = int(point.factors["pollers"]), str(point.factors["pollers_on"])
        rows.setdefault(key, {})[str(point.factors["home"])] = _trip(point)
    head = ("pollers", "on", *(f"flag at the {home}, us" for home in homes))
    body = [(str(count), where, *(found.get(home, "-") for home in homes)) for (count, where), found in rows.items()]
    title = MEASURED.format("From a flag's store to the last acknowledgement, by the writer's clock")
    return f"{title}\n\n{markdown(head, body)}"


def _trip(point: Point) -> str:
    samples = point.quantities["round_trip_ns"].samples
    return f"{median(samples) / 1000:.2f}" if samples else "-"


def shards_table(results: Path) -> str:
    """One layer as two halves on two GPUs, all weights of both at home or on the other GPU, with the prediction."""
    run = Run.load(results / GPUS / "weight-swap" / "gpu0-gpu1-shards2.json")
    rows = []
    for point in run.points:
        found = point.quantities
        samples, ratio, predicted = found["layer_us"].samples, found["time_over_local"], found.get("predicted_us")
        told = "-" if ratio.low is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        foretold = "-" if predicted is None or predicted.value is None else f"{predicted.value:.1f}"
        share = "-" if foretold == "-" else f"{(predicted.value or 0) / median(samples):.2f}"  # type: ignore[union-attr]
        rows.append(
            (
                point.arm, f"{point.factors['moved_bytes_per_layer'] / 1e6:.1f}", f"{median(samples):.1f}", told,
                foretold, share,
            )
        )  # fmt: skip
    head = ("arm", "moved by each, MB", "layer, us", "time over local's", "predicted, us", "of measured")
    title = MEASURED.format("One layer as two tensor-parallel halves")
    return f"{title} The first row's ratio is the A/A control.\n\n{markdown(head, rows)}"


def kernel_speed_table(results: Path) -> str:
    """Speed of the Triton kernels, medians: GB/s, share of the run's own streaming read, and the layer beside torch."""
    body = json.loads((results / GPUS / "kernel-speed.json").read_text(encoding="utf-8"))
    times = {case["name"]: case for case in body["cases"]}
    ceiling = _rate(times[body["ceiling"]])
    rows = []
    for name, words in _SPEED_ROWS.items():
        if name not in times:
            raise UsageError(f"kernel-speed.json has no case {name!r}", hint="measure it again: kernel_speed --out")
        rate = _rate(times[name])
        time_us = median(times[name]["samples_ns"]) / 1000
        rows.append((words, f"{time_us:,.1f}", f"{rate:,.0f}", f"{rate / ceiling:.2f}"))
    title = f"Measured on one {body['device']}, a graph each, weights cold: it says nothing about an MI355X."
    note = "A layer counts the bytes that it must read, so that its share is that of its byte floor."
    return f"{title} {note}\n\n{markdown(('what', 'us', 'GB/s', 'of the ceiling'), rows)}"


def _rate(case: Mapping[str, Any]) -> float:
    return float(case["bytes_per_launch"]) / median(case["samples_ns"])


def mode_table(results: Path) -> str:
    """One token in each mode of the emulated card, one node led through them, modelled."""
    runs = [Run.load(results / "emulated-mi355x" / "mode" / f"{block}.json") for block in _MODES]
    rows = []
    for run in runs:
        (point,) = run.points
        token, slower = point.quantities["token_us"], point.quantities["penalty"]
        steps = run.facts["switch"]["steps"]
        reload = "no" if not steps else "with a reload" if any("unload" in step for step in steps) else "without one"
        rows.append(
            (
                run.facts["mode"], str(len(run.machine["devices"])), reload, f"{token.value:.1f}",
                f"{token.low:.1f} to {token.high:.1f}", f"{(slower.value or 0) * 100:.1f}",
            )
        )  # fmt: skip
    head = (
        "mode",
        "logical devices",
        "switched to",
        "token, us, modelled",
        "range over sets",
        "slower than all-local, %",
    )
    title = f"{runs[0].workload['name']}, {runs[0].workload['context_tokens']:,} tokens of context, modelled."
    return f"{title}\n\n{markdown(head, rows)}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; a bar in a cell is escaped."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


MORE: Mapping[str, Callable[[Path], str]] = {
    "flags-h200": flags_table,
    "shards-h200": shards_table,
    "kernel-speed-h200": kernel_speed_table,
    "mode": mode_table,
}
