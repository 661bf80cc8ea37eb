"""Every command, option, module and page that README and docs name is there: a page must not promise what is not."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dieplace.cli.main import build

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.skipif(not PAGES[0].exists(), reason="the pages are not part of an installed package")


def commands(page: str) -> Iterator[str]:
    """Lines of fenced blocks and code spans that begin with `dieplace`, without what explains them."""
    fenced = [line for block in re.findall(r"```[a-z]*\n(.*?)```", page, flags=re.S) for line in block.splitlines()]
    spans = re.findall(r"`(dieplace [^`]*)`", re.sub(r"```.*?```", "", page, flags=re.S).replace("\n", " "))
    for line in (*fenced, *spans):
        if re.match(r"dieplace\s", line):
            yield re.split(r"\s{2,}| > | \| sudo | # ", line)[0].strip()


def wrong(line: str) -> str | None:
    """What of a command line does not exist, or None."""
    group: click.Command = build()
    options = _options(group)
    alternatives = False
    for word in shlex.split(line.replace("[", "").replace("]", ""))[1:]:
        if word == "--":
            break
        if word == "|":
            alternatives = True
        elif word.startswith("-"):
            if word.split("=")[0] not in options:
                return f"{word} is no option of {group.name}"
        elif isinstance(group, click.Group) and (word.isalpha() or alternatives):
            found = group.get_command(click.Context(group), word)
            if found is None:
                if _is_value(line, word):
                    continue
                return f"{group.name} has no command {word}"
            if f"| {word}" not in line and f"{word} |" not in line:
                group, options = found, options | _options(found)
    return None


def _options(command: click.Command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}


def _is_value(line: str, word: str) -> bool:
    return re.search(rf"--[a-z-]+[ =]{re.escape(word)}\b", line) is not None


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_and_options_exist(path: Path) -> None:
    faults = [f"{line}: {fault}" for line in commands(path.read_text(encoding="utf-8")) if (fault := wrong(line))]
    assert faults == []


def test_enough_commands_are_read() -> None:
    assert len([line for path in PAGES for line in commands(path.read_text(encoding="utf-8"))]) >= 40


@pytest.mark.parametrize(
    "line",
    ["dieplace parttion show", "dieplace partition sow", "dieplace bench run x --modle y", "dieplace list | tpo"],
)
def test_what_does_not_exist_is_found(line: str) -> None:
    assert wrong(line) is not None


MODULES = sorted(p for folder in ("dieplace", "kernels", "experiments", "cli") for p in (ROOT / folder).rglob("*.py"))
_MODULE_LINE = re.compile(r"python -m (dieplace[a-z_.]*)([^`\n]*)")


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    files = {name for name in re.findall(r"\]\(([^)#:]+)\)", text) if not name.startswith("http")}
    assert [name for name in files if not (path.parent / name).exists()] == []


def test_modules_take_the_options_that_pages_and_docstrings_name() -> None:
    seen = []
    for path in (*PAGES, *MODULES):
        for module, rest in _MODULE_LINE.findall(path.read_text(encoding="utf-8")):
            found = importlib.util.find_spec(module.rstrip("."))
            assert found is not None and found.origin is not None, f"{path.name}: {module}"
            source = Path(found.origin).read_text(encoding="utf-8")
            for option in re.findall(r"--[a-z-]+", rest):
                assert f'"{option}"' in source, f"{path.name}: {module} has no {option}"
                seen.append(option)
    assert "--out" in seen and "--layers" in seen
