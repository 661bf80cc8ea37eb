"""Markdown tables of the README, made from committed results: `python -m dieplace.experiments.readme_tables [FILE]`.

Between `<!-- table: NAME -->` and `<!-- end table -->` a page holds the table NAME. Without FILE all tables are
printed; with FILE the page is rewritten in place. A test checks that README and results agree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from dieplace.errors import UsageError
from dieplace.experiments import published, summary
from dieplace.experiments.readme_more import GPUS, MEASURED, MORE, markdown
from dieplace.run import Point, Quantity, Run

_BLOCK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
_FOLDER = Path("emulated-mi355x") / "weight-swap"
_BLOCKS = ("dpx-nps2", "spx-nps1", "dpx-nps1")


def results_folder() -> Path:
    """The committed results; UsageError outside a checkout (they are no part of the wheel)."""
    folder = Path(__file__).resolve().parent / "results"
    if not folder.is_dir():
        raise UsageError("there are no committed results here", hint="run it in a checkout of dieplace")
    return folder


def weight_swap_table() -> str:
    """Time per token of each run and arm, modelled."""
    runs = _runs()
    body = [
        (
            run.block,
            point.arm,
            _ranged(point.quantities["token_us"], "{:.0f}"),
            _ranged(point.quantities["penalty"], "{:.1f}", 100),
            f"{point.quantities['penalty'].by_set['C'] * 100:.1f}",
        )
        for run, point in summary.points(runs)
    ]
    word = summary.title_word(runs)
    head = ("run", "arm", f"token, us, {word}", f"slower than all-local, %, {word}", "unfitted set C, %")
    title = f"{summary.workload_words(runs)}, {word}, emulated MI355X; range over sets."
    return f"{title}\n\n{markdown(head, body)}"


def published_table() -> str:
    """Every published figure beside the model's, with the residual."""
    runs = _runs()
    word = summary.title_word(runs)
    body = []
    for row in published.rows(runs):
        modelled = "-" if row.modelled is None else _ranged(row.modelled, "{:.3g}")
        residual = "-" if row.residual is None else f"{row.residual:+.2f}"
        body.append((row.claim, row.published, modelled, residual, row.reason))
    return markdown(("figure", "published", word, "residual", "why"), body)


def link_table() -> str:
    """Near and far memory of the two test GPUs at the largest working set, measured."""
    run = Run.load(results_folder() / GPUS / "link" / "gpu0-gpu1.json")
    body = []
    for point in run.points:
        factors, quantities = point.factors, point.quantities
        if factors["working_set_bytes"] != 1 << 30 or factors["reader"] not in ("gpu0/p0", "all"):
            continue
        both = ", both directions at once" if factors["directions"] != "one" else ""
        if factors["what"] == "latency":
            value = f"{quantities['latency_ns'].value:.0f} ns, {quantities['latency_cycles'].value:.0f} cycles"
        else:
            value = f"{quantities['gb_per_s'].value:,.0f} GB/s"
        share = quantities["of_ceiling"].value if "of_ceiling" in quantities else None
        of_ceiling = "-" if share is None else f"{share:.2f}"
        body.append((f"{factors['what']}{both}", point.arm, value, of_ceiling, _interval(quantities["time_over_near"])))
    head = ("what", "memory", "measured", "of the run's ceiling", "time over near's (near's own: A/A)")
    return f"{MEASURED.format('1 GiB, cold; GPU 0 executes')}\n\n{markdown(head, body)}"


def live_swap_table() -> str:
    """One layer with its weights near and far on the two test GPUs, measured, with the prediction."""
    run = _live_run("weight-swap")
    title = MEASURED.format("gpt-oss-120b layer in MXFP4, 1,024 tokens of context, under a graph")
    head = ("arm", "moved, MB a layer", "weights are", *_STEP_HEAD)
    body = [
        (point.arm, _moved(point), str((point.residency_before or {}).get("moved_evidence")), *_step_cells(point))
        for point in run.points
    ]
    note = "The first row's ratio is the A/A control; interleaved rows have the prediction that reads both at once."
    return f"{title} {note}\n\n{markdown(head, body)}"


def live_placement_table() -> str:
    """All eight placements of weights, KV cache and flags, measured."""
    run = _live_run("placement")
    title = MEASURED.format("One layer and its two hand-offs, weights, KV cache and flags near or far")
    body = [(point.arm, _moved(point), *_step_cells(point)) for point in run.points]
    return f"{title} The first row's ratio is the A/A control.\n\n{markdown(('arm', 'moved, MB', *_STEP_HEAD), body)}"


def live_context_table() -> str:
    """Weights or KV cache far at three contexts, measured."""
    run = _live_run("context")
    title = MEASURED.format("One layer at three lengths of context")
    body = [(point.arm, _moved(point), *_step_cells(point)) for point in run.points]
    note = "The ratio of a local row is its A/A control."
    return f"{title} {note}\n\n{markdown(('context and arm', 'moved, MB', *_STEP_HEAD), body)}"


def live_verify_table() -> str:
    """Rounds of 1 to 8 tokens with weights near and far, measured."""
    run = _live_run("verify")
    title = MEASURED.format("One layer for rounds of 1, 2, 4 and 8 tokens")
    body = [
        (point.arm, f"{point.factors['experts_read_per_layer']:.4g}", _moved(point), *_step_cells(point))
        for point in run.points
    ]
    head = ("round and arm", "experts read", "moved, MB", *_STEP_HEAD)
    return f"{title} The ratio of a local row is its A/A control.\n\n{markdown(head, body)}"


_STEP_HEAD = ("layer, us", "time over local's", "predicted, us", "of measured")


def _live_run(name: str) -> Run:
    return Run.load(results_folder() / GPUS / name / "gpu0-gpu1.json")


def _moved(point: Point) -> str:
    return f"{point.factors['moved_bytes_per_layer'] / 1e6:.1f}"


def _step_cells(point: Point) -> tuple[str, ...]:
    """Time, ratio and prediction; where near and far are read at the same time, the prediction that says so."""
    found = point.quantities
    kind = "predicted_together" if "predicted_together_us" in found else "predicted"
    predicted, ratio = found.get(f"{kind}_us"), found.get(f"{kind}_over_measured")
    return (
        f"{found['layer_us'].value:.1f}",
        _interval(found["time_over_local"]),
        "-" if predicted is None else f"{predicted.value:.1f}",
        "-" if ratio is None else f"{ratio.value:.2f}",
    )


def _interval(found: Quantity) -> str:
    if found.value is None or found.low is None or found.high is None:
        return "-"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _of_results(make: Callable[[Path], str]) -> str:
    return make(results_folder())


TABLES: Mapping[str, Callable[[], str]] = {
    "weight-swap": weight_swap_table,
    "published": published_table,
    "link": link_table,
    "weight-swap-h200": live_swap_table,
    "placement-h200": live_placement_table,
    "context-h200": live_context_table,
    "verify-h200": live_verify_table,
    **{name: partial(_of_results, make) for name, make in MORE.items()},
}


def filled(page: str) -> str:
    """The page with every marked table made anew; UsageError for a name that no table has."""

    def fill(found: re.Match[str]) -> str:
        name = found.group(2)
        if name not in TABLES:
            raise UsageError(f"no table is called {name!r}", hint=f"there is {', '.join(TABLES)}")
        return f"{found.group(1)}{TABLES[name]()}\n{found.group(4)}"

    if page.count("<!-- table:") != len(_BLOCK.findall(page)):
        raise UsageError("a table marker has no end", hint="close each with <!-- end table -->")
    return _BLOCK.sub(fill, page)


def main(words: Sequence[str]) -> int:
    """Print all tables, or rewrite the page named."""
    if not words:
        for name, make in TABLES.items():
            sys.stdout.write(f"<!-- table: {name} -->\n{make()}\n<!-- end table -->\n\n")
        return 0
    path = Path(words[0])
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    path.write_text(filled(page), encoding="utf-8")
    return 0


def _runs() -> tuple[Run, ...]:
    return tuple(Run.load(results_folder() / _FOLDER / f"{block}.json") for block in _BLOCKS)


def _ranged(found: Quantity, form: str, factor: float = 1) -> str:
    if found.value is None:
        return "-"
    text = form.format(found.value * factor)
    if found.low is None or found.high is None or found.low == found.high:
        return text
    return f"{text} ({form.format(found.low * factor)} to {form.format(found.high * factor)})"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"readme_tables: {error}")
