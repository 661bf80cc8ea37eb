"""The only code that prints: answers to stdout, everything else to stderr.

One command gives one answer: `answer(ctx, schema, payload, table=...)`. JSON is exactly one value, also for errors;
JSON and CSV never pass through a terminal library. Tables are plain text of at most 80 columns.
Colours: NO_COLOR wins over FORCE_COLOR; without either only a terminal gets them (no-color.org, force-color.org).
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import click

from dieplace.cli import terminal
from dieplace.cli.options import OFF_WORDS, settings
from dieplace.cli.suggested import named
from dieplace.cli.table import Column, Document, Prose, Table, layout, wrapped
from dieplace.errors import Declined, DieplaceError, UsageError

Body = Iterable[Table | str]


def answer(
    ctx: click.Context,
    schema: str,
    payload: Mapping[str, Any],
    *,
    table: Callable[[], Body],
    source: str | None = None,
    ok: bool = True,
    csv_table: Callable[[], Body] | None = None,
    svg: Callable[[], str] | None = None,
) -> None:
    """Print the command's one answer in the form that was asked for.

    `schema` is "list/1" (printed as dieplace/list/1); `payload` is plain data; `table` gives tables and lines of
    text and is called for table and CSV output only (CSV prints the raw values of every Table, those of `csv_table`
    where given); `source` is `machine.source`. Call it once a run. An answer that says no: `answer(..., ok=False)`,
    then `ctx.exit(1)`.
    """
    form = settings(ctx).output
    if form == "json":
        value = {"schema": f"dieplace/{schema}", "source": source, "ok": ok, **payload}
        emit(to_json(value))
    elif form == "csv":
        emit(to_csv((csv_table or table)()))
    elif form == "svg":
        if svg is None:
            raise UsageError(f"`{ctx.command_path}` has no drawing", hint="only `dieplace topo` takes -o svg")
        emit(svg())
    else:
        emit(to_text(_named(ctx, table()), bold=_colours(sys.stdout), width=_width()))
    settings(ctx).answered = True


def _named(ctx: click.Context, body: Body) -> Iterator[Table | str]:
    """The body with its suggestions as they can be pasted, each part of the kind that it was."""
    for part in body:
        if isinstance(part, Table):
            yield replace(part, notes=[named(ctx, note) for note in part.notes])
        else:
            yield part if isinstance(part, Document) else type(part)(named(ctx, part))


def to_json(value: Any) -> str:
    """One strict JSON value, ASCII, ending in a newline; a number that JSON cannot hold becomes null with a why."""
    return json.dumps(_strict(value), indent=2, allow_nan=False, default=_as_data) + "\n"


def to_csv(body: Body) -> str:
    """Every table of the answer as CSV with a header of keys; several tables are parted by an empty line.

    An answer without any table gives its lines, under the header `text`: never an empty file.
    """
    parts, body = [], list(body)
    if not any(isinstance(part, Table) for part in body):
        lines = [line for part in body for line in str(part).splitlines()]
        body = [Table([Column("text", "text")], [{"text": line} for line in lines])]
    for table in body:
        if isinstance(table, Table):
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow([column.key for column in table.columns])
            writer.writerows([_cell(row.get(column.key)) for column in table.columns] for row in table.rows)
            parts.append(text.getvalue())
    return "\n".join(parts)


def to_text(body: Body, *, bold: bool = False, width: int = 80) -> str:
    """Tables and lines as text; lines of text are passed through, Prose is broken at the width."""
    return "".join(_as_text(part, bold, width) for part in body)


def _as_text(part: Table | str, bold: bool, width: int) -> str:
    if isinstance(part, Table):
        return layout(part, width=width, bold=bold)
    return f"{wrapped(part, width) if isinstance(part, Prose) else part}\n"


def say(ctx: click.Context, text: str) -> None:
    """A line of progress on stderr; nothing with -q, and never a failure of the work itself."""
    if not settings(ctx).quiet:
        terminal.line(named(ctx, text))


def warn(ctx: click.Context, text: str) -> None:
    """A warning on stderr; nothing with -q."""
    say(ctx, f"warning: {text}")


def note(text: str) -> None:
    """A line on stderr that -q does not hide (questions, errors)."""
    terminal.line(named(click.get_current_context(silent=True), text))


class Steps:
    """Progress of one piece of work: call it with what was done; `within` tells of the step under way.

    On a terminal it is the last line; what is written meanwhile comes above it.
    """

    SECONDS_BETWEEN_LINES = 10  # of a step under way, where there is no terminal to draw on

    def __init__(self, ctx: click.Context, label: str, total: int | None) -> None:
        self._ctx, self._label, self._total = ctx, label, total
        self._done = 0
        self._told_at = time.monotonic()
        self.live = not settings(ctx).quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str) -> None:
        """One step is done."""
        self._done += 1
        self._told_at = time.monotonic()
        self._tell(text)

    def within(self, text: str) -> None:
        """The step under way has come so far: the bar is drawn anew, or from time to time a line is written."""
        if self.live or time.monotonic() - self._told_at >= self.SECONDS_BETWEEN_LINES:
            self._told_at = time.monotonic()
            self._tell(text)

    def wipe(self) -> None:
        """Take the bar away."""
        if self.live:
            terminal.wipe()

    def _tell(self, text: str) -> None:
        head = f"{self._label} {self._done}/{self._total}" if self._total else f"{self._label} {self._done}"
        if self.live:
            terminal.draw(f"{_bar(self._done, self._total)}{head} {text}")
        else:
            say(self._ctx, f"{head} {text}")


@contextmanager
def progress(ctx: click.Context, label: str, total: int | None = None) -> Iterator[Steps]:
    """`with progress(ctx, "building", 12) as step: step("gemv")`: a bar on a terminal, else one line a step."""
    steps = Steps(ctx, label, total)
    try:
        yield steps
    finally:
        steps.wipe()


def confirm(ctx: click.Context, question: str, *, yes: bool) -> None:
    """Ask once on stderr; `yes` skips the question. Raises Declined on no, or where there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Declined("there is no terminal to ask, so nothing was changed", hint="use -y to go on without a question")
    terminal.wipe()
    terminal.raw(f"{question} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("the question was answered no, so nothing was changed")


def failure(error: DieplaceError, *, as_json: bool, ctx: click.Context | None) -> int:
    """Print an error and give its exit code; as the one JSON value on stdout unless an answer is out already."""
    already = bool(ctx and settings(ctx).answered)
    hint = named(ctx, error.hint) if error.hint else error.hint
    if as_json and not already:
        told = {**error.to_json(), "hint": hint}
        emit(to_json({"schema": "dieplace/error/1", "source": None, "ok": False, "error": told}))
    else:
        note(f"dieplace: {named(ctx, error.message)}")
        if hint:
            note(f"  {hint}")
    return error.exit_code


def usage(text: str, *, as_json: bool) -> int:
    """A bare group: its help on stderr, exit code 2."""
    if as_json:
        return failure(UsageError("no command was given", hint="see: dieplace --help"), as_json=True, ctx=None)
    note(text)
    return 2


def bug(error: Exception, *, as_json: bool, ctx: click.Context | None) -> int:
    """A fault of dieplace itself: the traceback on stderr, exit code 70."""
    note("".join(traceback.format_exception(error)).rstrip())
    wrapped = DieplaceError(
        f"a bug in dieplace: {type(error).__name__}: {error}", hint="please report it with the lines above"
    )
    return failure(wrapped, as_json=as_json, ctx=ctx)


def emit(text: str) -> None:
    """Write to stdout, in plain characters where the stream cannot encode more; BrokenPipeError passes."""
    terminal.write(sys.stdout, text)
    sys.stdout.flush()


def prepare_streams() -> None:
    """Never fail on a character: what a stream cannot encode is replaced (PYTHONIOENCODING=ascii, LC_ALL=C)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def flush() -> None:
    """Flush stdout now, so that a closed pipe is seen here and not while Python shuts down."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def reader_went_away() -> int:
    """Point stdout at nothing so that Python's own last flush is quiet; 141 is what SIGPIPE gives in a shell."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = io.StringIO()
    return 141


def _bar(done: int, total: int | None) -> str:
    if not total:
        return ""
    full = min(20, 20 * done // total)
    return "[" + "#" * full + "." * (20 - full) + "] "


def _colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    forced = os.environ.get("FORCE_COLOR", "")
    if forced and forced.lower() not in OFF_WORDS:
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _width() -> int:
    """80 columns, more only on a terminal that is wider."""
    if not sys.stdout.isatty():
        return 80
    try:
        return max(80, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return 80


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value)
    return value


def _strict(value: Any) -> Any:
    """Replace NaN and infinities by null with a why beside them, and keys by text."""
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, item in value.items():
            out[str(key)] = _strict(item)
            if isinstance(item, float) and not math.isfinite(item):
                out[f"{key}_why"] = f"not a finite number ({item})"
        return out
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _as_data(value: Any) -> Any:
    from dataclasses import asdict, is_dataclass

    from dieplace.modes import Mode

    if isinstance(value, Mode) or not is_dataclass(value):
        return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
    return _strict(asdict(value))  # type: ignore[arg-type]


def gigabytes(value: int | float | None) -> str:
    """Bytes as decimal GB with one decimal, `-` for unknown."""
    return "-" if value is None else f"{value / 1e9:,.1f}"


def amount(value: int | float | None) -> str:
    """Bytes as decimal GB with the unit, in words where unknown."""
    return "size unknown" if value is None else f"{gigabytes(value)} GB"


def count_of(value: int | None, noun: str) -> str:
    """`4 XCDs`, `1 XCD`, `XCDs unknown`."""
    return f"{noun}s unknown" if value is None else f"{value} {noun}{'' if value == 1 else 's'}"


def legend(whys: Mapping[str, str] | Sequence[str]) -> list[str]:
    """Lines under a table that say why a cell is `-`."""
    items = [f"{key}: {why}" for key, why in whys.items()] if isinstance(whys, Mapping) else list(whys)
    return [f"  {item}" for item in dict.fromkeys(items)]
