"""Live runs that are interrupted, killed and gone on with, through the real command on a simulated device."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_steps as simulated

from dieplace.cli import main as frame
from dieplace.errors import Busy, UsageError
from dieplace.experiments import harness
from dieplace.experiments.harness import CONTROL, Measured, Plan, ctrl_c_held, measure
from dieplace.experiments.private_node import private_node
from dieplace.experiments.registry import Options
from dieplace.experiments.run_shape import check_shape
from dieplace.experiments.step_bench import PlacedLayers
from dieplace.experiments.unfinished import Unfinished, clear, continued
from dieplace.run import Run

SLOW = {"SIMULATED_DELAY_S": "0.01"}
RUN = ("bench", "run", "verify", "--shards", "1")


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command as a process of its own, slow enough to be met in the middle of a block."""
    whole = [sys.executable, "-W", "ignore", simulated.__file__, "--backend", "nvidia", *words]
    pipe, environ = subprocess.PIPE, {**os.environ, **SLOW}
    return subprocess.Popen(whole, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def blocks(folder: Path, case: str) -> int:
    """Blocks in the file of a case, 0 before there is one; the file must be whole whenever it is read."""
    path = folder / "unfinished" / f"case-{case}.json"
    return len(json.loads(path.read_text())["measured"]["order"]) if path.exists() else 0


def wait_for(process: subprocess.Popen[str], folder: Path, case: str, count: int) -> None:
    end = time.monotonic() + 60
    while blocks(folder, case) < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with private_node("DPX/NPS2") as made:
        yield made


@pytest.fixture
def finish(node: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command in this process, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    simulated.install(monkeypatch.setattr, node)
    return lambda *words: frame.main(["--backend", "nvidia", *words])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that got Ctrl-C in its second case, as the files and streams it left."""
    folder = tmp_path_factory.mktemp("cut")
    process = begin(folder, *RUN, "--out", "out")
    wait_for(process, folder / "out", "2-tokens", 6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return {"folder": folder / "out", "code": process.returncode, "out": out, "err": err}


def copied(cut: dict[str, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut["folder"], tmp_path / "out"))


def samples(run: Run, arm: str) -> tuple[float, ...]:
    return run.point(arm).quantities["layer_us"].samples


@pytest.mark.slow
def test_ctrl_c_saves_a_complete_run_and_says_how_to_go_on(cut: dict[str, Any]) -> None:
    assert cut["code"] == 130
    run = check_shape(Run.load(cut["folder"] / "gpu0-dpx-nps2.json"), "x")
    assert run.facts["stopped"] == "interrupted" and (cut["folder"] / "report.html").stat().st_size > 10_000
    arms = [f"{n} {arm}" for n in ("1 token", "2 tokens") for arm in ("local", "swapped")]
    assert [point.arm for point in run.points] == arms
    assert len(samples(run, "1 token swapped")) >= 20 > len(samples(run, "2 tokens swapped")) >= 6
    assert all(point.residency_after["moved_evidence"] == "probed" for point in run.points)
    assert any("before 4 tokens, 8 tokens: not measured" in note for note in run.notes)
    assert "slower by" in cut["out"] and "Traceback" not in cut["err"]
    assert "--resume out" in cut["err"] and "interrupted: what was measured is saved" in cut["err"]


def test_resume_goes_on_in_the_same_order_with_all_samples(
    cut: dict[str, Any], finish: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(cut, tmp_path)
    before = Run.load(folder / "gpu0-dpx-nps2.json")
    assert finish("bench", "run", "verify", "--resume", "out") == 0
    after = Run.load(folder / "gpu0-dpx-nps2.json")
    assert after.facts["stopped"] != "interrupted" and len(after.points) == 8
    for arm in ("1 token local", "2 tokens swapped"):
        kept, whole = samples(before, arm), samples(after, arm)
        assert whole[: len(kept)] == kept and len(whole) >= 20
    shuffle, order = random.Random(after.seed), after.facts["order_by_case"]["2 tokens"]
    for block in order:  # what one process, never cut, would have taken
        expected = ["2 tokens local", "2 tokens swapped", CONTROL]
        shuffle.shuffle(expected)
        assert block == expected
    sittings = after.facts["blocks_at_sittings"]
    assert sittings["1 token"] == [0] and sittings["2 tokens"] == [0, len(samples(before, "2 tokens local"))]
    assert len(after.facts["sittings"]) == 2 and len(after.facts["warmups_ns"]["2 tokens local"]) == 2
    assert not (folder / "unfinished").exists()
    assert finish("bench", "run", "verify", "--resume", "out") == 2
    assert "no run is unfinished" in capsys.readouterr().err


def test_resume_needs_neither_name_nor_backend(
    cut: dict[str, Any], finish: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are in the folder; no GPU is looked for to choose a backend."""
    folder = copied(cut, tmp_path)
    assert frame.main(["bench", "run", "--resume", str(folder)]) == 0
    run = Run.load(folder / "gpu0-dpx-nps2.json")
    assert run.experiment == "verify" and run.facts["stopped"] != "interrupted" and len(run.points) == 8
    assert not (folder / "unfinished").exists()
    assert frame.main(["bench", "run", "--resume", str(folder)]) == 2
    assert "no run is unfinished" in capsys.readouterr().err
    assert frame.main(["bench", "run"]) == 2 and "Missing argument 'NAME'" in capsys.readouterr().err


def test_resume_on_another_backend_is_refused_before_anything_is_measured(
    cut: dict[str, Any], finish: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(cut, tmp_path)
    files = {path: path.read_bytes() for path in folder.rglob("*.json")}
    assert frame.main(["--backend", "emulated", "bench", "run", "--resume", str(folder)]) == 2
    assert "was begun on backend nvidia, and emulated is named" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*.json")} == files


@pytest.mark.parametrize(
    ("words", "changed", "keys"),
    [
        (("--resume", "out", "--context", "8192", "--shards", "2"), {}, ["context_tokens", "shards"]),
        (("--out", "out", "--shards", "1"), {"DRIVER": "2.0"}, ["driver_version"]),
        (("--resume", "out"), {"CODE": "cd34"}, ["code_hash of 1 token"]),
    ],
)
def test_what_differs_is_refused_by_name(
    cut: dict[str, Any], finish: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], changed: dict[str, str], keys: list[str],
) -> None:  # fmt: skip
    folder = copied(cut, tmp_path)
    files = {path: path.read_bytes() for path in folder.rglob("case-*.json")}
    for name, value in changed.items():
        monkeypatch.setattr(simulated, name, value)
    assert finish("--json", "bench", "run", "verify", *words) == 2
    assert json.loads(capsys.readouterr().out)["error"]["differing"] == keys
    assert files and {path: path.read_bytes() for path in files} == files


def test_another_experiment_seed_or_device_is_refused(cut: dict[str, Any], tmp_path: Path) -> None:
    folder = copied(cut, tmp_path)
    with pytest.raises(UsageError, match="experiment was 'verify', is 'context'"):
        continued(folder, "context", Options(), ())
    identity = json.loads((folder / "unfinished" / "run.json").read_text())["identity"]
    for key in ("seed", "device", "model", "plan.budget_s", "triton_version"):
        with pytest.raises(UsageError, match=re.escape(key)):
            Unfinished(folder, {**identity, key: "another"}, {})


@pytest.mark.slow
def test_kill_between_blocks_loses_none_that_was_written(finish: Callable[..., int], tmp_path: Path) -> None:
    """kill -9 twice in a row; each time the next command goes on."""
    done = 0
    for words, count in (((*RUN, "--out", "out"), 3), ((*RUN[:3], "--resume", "out"), 9)):
        process = begin(tmp_path, *words)
        wait_for(process, tmp_path / "out", "1-token", count)
        process.kill()
        process.communicate()
        assert blocks(tmp_path / "out", "1-token") >= max(count, done)
        done = blocks(tmp_path / "out", "1-token")
    assert finish(*RUN[:3], "--resume", "out") == 0
    run = Run.load(tmp_path / "out" / "gpu0-dpx-nps2.json")
    begun = run.facts["blocks_at_sittings"]["1 token"]
    assert len(begun) == 3 and begun == sorted(begun) and begun[-1] == done
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu0-dpx-nps2.json", "report.html"]


def test_an_interrupt_before_the_first_block_leaves_no_run(
    finish: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlacedLayers, "look", interrupted)
    assert finish(*RUN, "--out", "out") == 130
    assert not (tmp_path / "out").exists() and "nothing was kept" in capsys.readouterr().err


def test_another_run_into_the_folder_leaves_the_blocks_alone(cut: dict[str, Any], tmp_path: Path) -> None:
    folder = copied(cut, tmp_path)
    words = ["--backend", "emulated", "bench", "run", "cache-type", "--model", "qwen3-0.6b", "--out", str(folder)]
    assert frame.main(words) == 2  # beside the interrupted run's own file
    (folder / "gpu0-dpx-nps2.json").unlink()
    assert frame.main(words) == 0
    assert blocks(folder, "2-tokens") >= 6
    clear(folder, "verify", "nvidia")
    assert not (folder / "unfinished").exists()


def test_two_processes_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    first = Unfinished(tmp_path, {"seed": 1}, {})
    with pytest.raises(Busy, match="another process"):
        Unfinished(tmp_path, {"seed": 1}, {})
    first.close()
    Unfinished(tmp_path, {"seed": 1}, {}).close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "dieplace/unfinished/1"}', '{"schema": "other"}'])
def test_damaged_files_are_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    Unfinished(tmp_path, {"seed": 1}, {}).close()
    (tmp_path / "unfinished" / "run.json").write_text(text)
    with pytest.raises(UsageError, match=r"run\.json cannot be gone on with"):
        Unfinished(tmp_path, {"seed": 1}, {})


def test_lists_of_unequal_length_are_damage(tmp_path: Path) -> None:
    work = Unfinished(tmp_path, {"seed": 1}, {})
    work.keeper("", "ab")(Measured(1, {"a": (1.0,), "b": (), CONTROL: (1.0,)}, {}, (("a", "b", CONTROL),), "under way"))
    with pytest.raises(UsageError, match="more or fewer samples"):
        work.earlier("", "ab")
    work.close()


def test_a_second_press_stops_at_once_and_one_that_arrives_twice_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One press reaches a process of a group twice where its parent passes it on; both frames that hold it hear it."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt), ctrl_c_held() as outer, ctrl_c_held() as inner:
        os.kill(os.getpid(), signal.SIGINT)
        assert inner() and outer()
        now[0] = 0.5
        os.kill(os.getpid(), signal.SIGINT)
        now[0] = 1.5
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second press was not heard")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_between_two_cases_saves_the_first(
    finish: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes, twice at once, while the second case is looked at before anything of it is measured."""
    looks = []
    plain = PlacedLayers.look

    def look(self: PlacedLayers, *given: Any, **named: Any) -> Any:
        looks.append(1)
        if len(looks) == 5:  # two arms before and after, then the second case
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *given, **named)

    monkeypatch.setattr(PlacedLayers, "look", look)
    assert finish(*RUN, "--out", "out") == 130
    run = Run.load(tmp_path / "out" / "gpu0-dpx-nps2.json")
    assert [p.arm for p in run.points] == ["1 token local", "1 token swapped"] and len(looks) == 5
    assert run.facts["stopped"] == "interrupted"


def test_blocks_of_other_arms_or_another_seed_do_not_go_on() -> None:
    plan = Plan(seed=3, max_blocks=4, min_blocks=4, half_width=0.0)
    first = measure({"a": lambda: 1.0, "b": lambda: 2.0}, plan)
    for arms, other in (({"a": 1.0, "c": 2.0}, plan), ({"a": 1.0, "b": 2.0}, Plan(seed=4))):
        takers = {name: lambda value=value: value for name, value in arms.items()}
        begun = Measured(first.seed, first.samples, first.warmups, first.order, "under way")
        with pytest.raises(UsageError, match="measured earlier"):
            measure(takers, other, earlier=begun)
