"""Markdown tables of the README, made from committed results: `python -m dieplace.experiments.readme_tables [FILE]`.

Between `<!-- table: NAME -->` and `<!-- end table -->` a page holds the table NAME. Without FILE all tables are
printed; with FILE the page is rewritten in place. A test checks that README and results agree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dieplace.errors import UsageError
from dieplace.experiments import published, summary
from dieplace.run import Quantity, Run

_BLOCK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
_FOLDER = Path("emulated-mi355x") / "weight-swap"
_GPUS = Path("nvidia-h200-x2")
_LIVE_TITLE = "{}; measured on 2 x H200: it validates the harness and the code, not the MI355X."
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
    return f"{title}\n\n{_markdown(head, body)}"


def published_table() -> str:
    """Every published figure beside the model's, with the residual."""
    runs = _runs()
    word = summary.title_word(runs)
    body = []
    for row in published.rows(runs):
        modelled = "-" if row.modelled is None else _ranged(row.modelled, "{:.3g}")
        residual = "-" if row.residual is None else f"{row.residual:+.2f}"
        body.append((row.claim, row.published, modelled, residual, row.reason))
    return _markdown(("figure", "published", word, "residual", "why"), body)


def link_table() -> str:
    """Near and far memory of the two test GPUs at the largest working set, measured."""
    run = Run.load(results_folder() / _GPUS / "link" / "gpu0-gpu1.json")
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
    return f"{_LIVE_TITLE.format('1 GiB, cold; GPU 0 executes')}\n\n{_markdown(head, body)}"


def live_swap_table() -> str:
    """One layer with its weights near and far on the two test GPUs, measured, with the prediction."""
    body = []
    for name in ("gpu0-gpu1", "interleave"):
        run = Run.load(results_folder() / _GPUS / "weight-swap" / f"{name}.json")
        for point in run.points:
            if name == "interleave" and not point.arm.startswith("interleave"):
                continue
            found = point.quantities
            predicted, ratio = found.get("predicted_us"), found.get("predicted_over_measured")
            body.append(
                (
                    point.arm,
                    f"{point.factors['moved_bytes_per_layer'] / 1e6:.1f}",
                    str((point.residency_before or {}).get("moved_evidence")),
                    f"{found['layer_us'].value:.1f}",
                    _interval(found["time_over_local"]),
                    "-" if predicted is None else f"{predicted.value:.1f}",
                    "-" if ratio is None else f"{ratio.value:.2f}",
                )
            )
    head = ("arm", "moved, MB a layer", "weights are", "layer, us", "time over local's", "predicted, us", "of measured")
    title = _LIVE_TITLE.format("gpt-oss-120b layer in MXFP4, 1,024 tokens of context, under a graph")
    return f"{title} The first row's ratio is the A/A control.\n\n{_markdown(head, body)}"


def _interval(found: Quantity) -> str:
    if found.value is None or found.low is None or found.high is None:
        return "-"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


TABLES: Mapping[str, Callable[[], str]] = {
    "weight-swap": weight_swap_table,
    "published": published_table,
    "link": link_table,
    "weight-swap-h200": live_swap_table,
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


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"readme_tables: {error}")
