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


TABLES: Mapping[str, Callable[[], str]] = {"weight-swap": weight_swap_table, "published": published_table}


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
