"""Odd words after `dieplace bench`: refused in a sentence, or taken and written down as what they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dieplace.cli import main as frame
from dieplace.errors import NoBackend

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
RUN = str(RESULTS / "emulated-mi355x" / "weight-swap" / "dpx-nps2.json")
RUNNING = ("--backend", "emulated", "bench", "run", "weight-swap")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bench", "compare", RUN, RUN, "--fail-on", "nan"), 2, "nan is not a number"),
        (("bench", "compare", RUN, RUN, "--fail-on", "inf"), 2, "inf is not a number"),
        ((*RUNNING, "--out", ""), 2, "--out is empty"),
        ((*RUNNING, "--context", "1" + "0" * 24, "--out", "out"), 3, "cannot allocate"),
        ((*RUNNING, "--context", "1" + "0" * 400, "--out", "out"), 3, "cannot allocate"),
    ],
)
def test_refused(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert frame.main(list(words)) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("name", "works"), [("link", False), ("flags", True), ("weight-swap", True)])
def test_without_a_gpu_only_what_can_work_is_suggested(
    name: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def none() -> None:
        raise NoBackend("no accelerator was found", hint="--backend emulated, cpu, or replayed", reasons={})

    monkeypatch.setattr(importlib.import_module("dieplace.discover"), "open_backend", none)  # a function has its name
    assert frame.main(["bench", "run", name]) == NoBackend.exit_code
    said = capsys.readouterr().err
    assert "no accelerator was found" in said and ("--backend emulated" in said) == works
    assert "replayed" not in said and "cpu" not in said
    assert works or "where there is a GPU" in said


def test_a_label_that_is_no_utf8_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell hands over bytes; Python makes each that is no UTF-8 half of a surrogate pair."""
    monkeypatch.chdir(tmp_path)
    label = b"a\xff<script>".decode("utf-8", "surrogateescape")
    assert frame.main([*RUNNING, "--model", "qwen3-0.6b", "--label", label, "--out", "out"]) == 0
    assert "a\\udcff&lt;script&gt;" in Path("out/report.html").read_text(encoding="utf-8")
    assert frame.main(["bench", "report", "out", "--md", "--out", "page.md"]) == 0


def test_a_report_leaves_no_half_of_itself_and_no_device_out_of_its_way(tmp_path: Path) -> None:
    for kind, target in (("device", "/dev/full"), ("link", str(tmp_path / "link"))):
        if kind == "link":
            Path(target).symlink_to("/dev/full")
        assert frame.main(["bench", "report", RUN, "--out", target]) == 3
        assert Path("/dev/full").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
