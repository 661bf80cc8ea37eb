"""The command's frame: exit codes, the one JSON value, streams, colours, pipes and interrupts."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from dieplace import errors
from dieplace.cli import main as frame
from dieplace.cli import render
from dieplace.cli.options import settings, switch
from dieplace.cli.table import Column, Table, layout

# The command line's contract: the only meanings of each code.
CODES = {
    "UsageError": 2, "Unsupported": 3, "NoBackend": 3, "NoSuchDevice": 3, "NoSuchMode": 3, "NotAllowed": 4, "Busy": 5,
    "PlacementError": 3, "DomainFull": 3, "Misplaced": 1, "ApplyFailed": 6, "NotVerified": 6, "Pending": 6,
    "RolledBack": 6, "StaleMachine": 6, "CheckFailed": 1, "Incomparable": 2, "CompileError": 3, "KernelFault": 3,
    "Declined": 7, "BackendError": 3, "DieplaceError": 70,
    "LaunchFailed": 125, "CannotRun": 126, "NotFound": 127,  # `exec`, before its program starts
}  # fmt: skip
RUN = Path(__file__).resolve().parents[2] / "experiments/results/emulated-mi355x/weight-swap/dpx-nps2.json"
DIEPLACE = [sys.executable, "-m", "dieplace.cli"]


def environment(tmp_path, **more):
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("DIEPLACE_", "_DIEPLACE")) and "COLOR" not in k}
    return {**keep, "XDG_STATE_HOME": str(tmp_path), "PYTHONSAFEPATH": "1", **more}


def dieplace(tmp_path, *words, env=None, **keywords):
    return subprocess.run(
        [*DIEPLACE, *words], env=environment(tmp_path, **(env or {})), capture_output=True, text=True, **keywords
    )


def errors_of_the_tree():
    return {n: v for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.DieplaceError)}


def test_the_table_names_every_error_and_every_error_has_its_code():
    assert {name: kind.exit_code for name, kind in errors_of_the_tree().items()} == CODES


@pytest.fixture
def raising(monkeypatch):
    """A command `boom` that raises what the test wants."""

    def arm(error):
        def callback():
            raise error

        root = frame.build()
        root.add_command(click.Command("boom", callback=callback))
        monkeypatch.setattr(frame, "build", lambda: root)

    return arm


@pytest.mark.parametrize("name", sorted(CODES))
def test_each_error_ends_with_its_code_and_one_json_value(raising, capsys, name):
    raising(errors_of_the_tree()[name]("asked, found", hint="do this", asked="x"))
    assert frame.main(["--json", "boom"]) == CODES[name]
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "dieplace/error/1" and value["ok"] is False
    assert value["error"]["message"] == "asked, found" and value["error"]["hint"] == "do this"
    assert value["error"]["asked"] == "x"
    assert frame.main(["boom"]) == CODES[name]
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err == "dieplace: asked, found\n  do this\n"


def interrupted_question():
    """What click raises when Ctrl-C or the end of stdin meets its prompt."""
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise click.Abort() from None
    except click.Abort as error:
        return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.Abort(), 7),
        (interrupted_question(), 130),
        (KeyboardInterrupt(), 130),
        (click.UsageError("no"), 2),
        (click.BadParameter("no"), 2),
        (click.ClickException("no"), 2),
        (click.exceptions.Exit(5), 5),
        (ValueError("a bug"), 70),
        (BrokenPipeError(), 141),
    ],
)
def test_everything_else_that_can_be_raised(raising, capsys, error, code):
    raising(error)
    assert frame.main(["boom"]) == code
    text = capsys.readouterr().err
    assert ("Traceback" in text) == (code == 70)


def test_a_bug_in_json_is_one_value_with_the_traceback_on_stderr(raising, capsys):
    raising(ZeroDivisionError("x"))
    assert frame.main(["boom", "--json"]) == 70
    streams = capsys.readouterr()
    assert json.loads(streams.out)["ok"] is False and "ZeroDivisionError" in streams.err


@pytest.mark.parametrize(
    "words", [["--json", "lisst"], ["lisst", "--json"], ["list", "-o", "json", "--nope"], ["-ojson", "x"]]
)
def test_usage_errors_answer_in_json_too(capsys, words):
    assert frame.main(words) == 2
    assert json.loads(capsys.readouterr().out)["error"]["word"] == "usage"


def test_a_word_after_the_double_dash_is_not_ours():
    assert not frame.asks_for_json(["exec", "--", "prog", "--json"])
    assert frame.asks_for_json(["exec", "--json", "--", "prog"])


def test_a_bare_command_is_usage(capsys):
    assert frame.main([]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and "Usage: dieplace" in streams.err


def test_a_near_miss_is_named(capsys):
    assert frame.main(["tpoo"]) == 2
    assert "did you mean topo?" in capsys.readouterr().err


def test_a_missing_module_is_told_plainly(monkeypatch, capsys):
    monkeypatch.setitem(frame.COMMANDS, "place", ("dieplace.cli.no_such_module:x", "Later."))
    assert frame.main(["place"]) == 3
    assert "not part of this installation" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-o", "csv", "list"], ["list", "-o", "csv"], ["-o", "json", "list", "-o", "csv"]])
def test_global_options_are_taken_on_both_sides(tmp_path, words):
    done = dieplace(tmp_path, "--backend", "emulated", *words)
    assert done.returncode == 0 and done.stdout.startswith("id,card,part,mode,share,xcds,cus,hbm_bytes,")
    assert done.stdout == dieplace(tmp_path, *words, "--backend", "emulated").stdout


def all_commands():
    """The path of every command and group, the root's included."""
    root = frame.build()
    paths = [[], *([name] for name in frame.COMMANDS)]
    with click.Context(root, info_name="dieplace") as ctx:
        for name in frame.COMMANDS:
            command = root.get_command(ctx, name)
            if isinstance(command, click.Group):
                paths += [[name, child] for child in command.list_commands(ctx)]
    return paths


def test_help_is_everywhere(capsys):
    paths = all_commands()
    assert len(paths) > 20 and ["partition", "set"] in paths
    for path in paths:
        for flag in ("-h", "--help"):
            assert frame.main([*path, flag]) == 0, path
            text = capsys.readouterr().out
            assert text.startswith(f"Usage: {' '.join(['dieplace', *path])}"), path
            assert max(map(len, text.splitlines())) <= 80, path


def test_json_is_strict_and_ascii():
    text = render.to_json({"x": float("nan"), "y": [float("inf"), 1.5], "name": "µ", "z": None})
    value = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert value["x"] is None and "finite" in value["x_why"] and value["y"] == [None, 1.5]
    assert text.isascii()


@pytest.mark.parametrize(
    ("word", "value"), [("", None), ("0", False), ("No", False), ("false", False), ("1", True), ("YES", True)]
)
def test_switches_of_the_environment(monkeypatch, word, value):
    monkeypatch.setenv("DIEPLACE_X", word)
    assert switch("DIEPLACE_X") is value


def test_an_unknown_switch_word_is_usage(monkeypatch):
    monkeypatch.setenv("DIEPLACE_X", "maybe")
    with pytest.raises(errors.UsageError, match="neither on nor off"):
        switch("DIEPLACE_X")


def test_an_unknown_backend_in_the_environment_is_usage(tmp_path):
    done = dieplace(tmp_path, "list", env={"DIEPLACE_BACKEND": "banana"})
    assert done.returncode == 2 and "banana" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"NO_COLOR": "", "FORCE_COLOR": "1"}, True),
    ],
)
def test_colours(tmp_path, variables, coloured):
    done = dieplace(tmp_path, "--backend", "emulated", "list", env=variables)
    assert ("\x1b[" in done.stdout) == coloured and "\x1b[" not in done.stderr
    for form in ("json", "csv"):
        assert "\x1b" not in dieplace(tmp_path, "--backend", "emulated", "list", "-o", form, env=variables).stdout


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
@pytest.mark.parametrize(
    "words",
    [["list"], ["topo"], ["topo", "-m", "distance"], ["--node", "/nowhere/\u65e5", "--backend", "replayed", "list"]],
)
def test_plain_characters_where_the_stream_knows_no_others(tmp_path, variables, words):
    done = subprocess.run(
        [*DIEPLACE, "--backend", "emulated", *words], env=environment(tmp_path, **variables), capture_output=True
    )
    assert done.returncode == (3 if "replayed" in words else 0)
    assert b"Traceback" not in done.stderr
    if variables.get("PYTHONIOENCODING") != "cp1252":
        assert done.stdout.isascii() and done.stderr.isascii()
    if words == ["topo"]:
        assert b"`- gpu" in done.stdout or b"\xe2" not in done.stdout


def test_a_reader_that_stops_is_quiet(tmp_path):
    """A closed pipe is never exit 1 or 70 (click 712 and 625); the output is larger than a pipe's 64 KiB."""
    dieplace(tmp_path, "emulate", "new", str(tmp_path / "n"), "--mode", "CPX/NPS2")
    base = f"{sys.executable} -u -m dieplace.cli --backend emulated --node {tmp_path / 'n'}"
    for words, reader in (
        ("list --json", "head -c 10"),
        ("list", "head -n 1"),
        ("topo --json", "head -c 10"),
        (f"bench show {RUN} --json", "head -c 10"),
        ("--help", "true"),
    ):
        script = f"{base} {words} | {reader} >/dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True)
        assert done.stderr == "", words
        assert done.stdout.strip() in ("0", "141"), words


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is played by /dev/full, which is not here")
@pytest.mark.parametrize("words", ["--backend cpu list", "--backend cpu list --json", "--version", "--help"])
def test_a_full_disk_is_no_bug(tmp_path, words):
    script = f"{sys.executable} -m dieplace.cli {words} >/dev/full"
    done = subprocess.run(["bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 3 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("group", ["partition", "bench", "emulate", "kernel", "place"])
def test_the_list_of_a_group_has_whole_sentences(capsys, group):
    assert frame.main([group, "--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.split("Commands:")[1] and max(map(len, text.splitlines())) <= 80


def test_csv_is_never_an_empty_file(capsys):
    """Answers that are sentences, and a table without rows, are rows and a header all the same."""
    assert frame.main(["completion", "bash", "-o", "csv"]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["text"] and len(rows) > 5
    assert render.to_csv([Table([Column("a", "A")], []), "a remark"]) == "a\n"


def test_usage_messages_are_one_line(capsys):
    """click lists the choices of a missing argument one a line, with tabs."""
    assert frame.main(["completion"]) == 2
    assert "bash, zsh, fish\n" in capsys.readouterr().err


def test_a_closed_stderr_does_not_stop_the_work(tmp_path):
    script = f"{sys.executable} -m dieplace.cli --backend emulated list --json 2>&-"
    done = subprocess.run(["bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True


def test_ctrl_c_is_130_and_quiet(tmp_path):
    code = (
        "import sys, time, click\nfrom dieplace.cli import main as frame\nroot = frame.build()\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(30)\n"
        "root.add_command(click.Command('wait', callback=wait))\nframe.build = lambda: root\n"
        "sys.exit(frame.main(['wait']))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130 and err == ""


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 7), ("\n", 7), ("", 7)])
def test_questions_are_asked_on_stderr_of_a_terminal_only(monkeypatch, capsys, answer, code):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    root = frame.build()

    @click.command("ask")
    @click.pass_context
    def ask(ctx):
        render.confirm(ctx, "reload the driver of all 8 cards?", yes=False)

    root.add_command(ask)
    monkeypatch.setattr(frame, "build", lambda: root)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert frame.main(["ask"]) == code
    streams = capsys.readouterr()
    assert streams.out == "" and "reload the driver of all 8 cards? [y/N]" in streams.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert frame.main(["ask"]) == 7
    assert "no terminal" in capsys.readouterr().err


def test_quiet_hides_progress_but_not_errors(monkeypatch, capsys):
    root = frame.build()

    @click.command("work")
    @click.pass_context
    def work(ctx):
        with render.progress(ctx, "building", 2) as step:
            step("one")
            step("two")
        render.warn(ctx, "odd")
        raise errors.UsageError("wrong")

    root.add_command(work)
    monkeypatch.setattr(frame, "build", lambda: root)
    assert frame.main(["work"]) == 2
    assert capsys.readouterr().err == "building 1/2 one\nbuilding 2/2 two\nwarning: odd\ndieplace: wrong\n"
    monkeypatch.setattr(frame, "build", lambda: root)
    assert frame.main(["-q", "work"]) == 2
    assert capsys.readouterr().err == "dieplace: wrong\n"


def test_a_second_value_is_never_printed_after_an_answer(monkeypatch, capsys):
    root = frame.build()

    @click.command("twice")
    @click.pass_context
    def twice(ctx):
        render.answer(ctx, "twice/1", {"x": 1}, table=lambda: ["x"])
        raise errors.CheckFailed("and yet no")

    root.add_command(twice)
    monkeypatch.setattr(frame, "build", lambda: root)
    assert frame.main(["--json", "twice"]) == 1
    streams = capsys.readouterr()
    assert json.loads(streams.out)["x"] == 1 and "and yet no" in streams.err


def test_settings_are_made_where_a_command_runs_alone():
    assert settings(click.Context(click.Command("x"))).output == "table"


@pytest.mark.parametrize("width", [30, 60, 80])
def test_tables_fit_and_lose_nothing(width):
    rows = [{"a": "x" * 3, "b": "word " * 30, "n": 12345}, {"a": None, "b": "a-b/c" * 40, "n": None}]
    table = Table(
        [Column("a", "a"), Column("b", "text"), Column("n", "number", right=True)], rows, "title", ["note " * 30]
    )
    text = layout(table, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("word") == 30 and "12345" in text
    assert re.sub(r"[^abc/-]", "", text).count("a-b/c") >= 30 or width < 80


def test_shells_are_completed_without_importing_a_command(tmp_path):
    done = dieplace(
        tmp_path, env={"_DIEPLACE_COMPLETE": "bash_complete", "COMP_WORDS": "dieplace pa", "COMP_CWORD": "1"}
    )
    assert done.returncode == 0 and done.stdout.split() == ["plain,partition"]
    for shell in ("bash", "zsh", "fish"):
        script = dieplace(tmp_path, "completion", shell).stdout
        assert f"_DIEPLACE_COMPLETE={shell}_complete" in script
    assert (
        subprocess.run(["bash", "-n"], input=dieplace(tmp_path, "completion", "bash").stdout, text=True).returncode == 0
    )
