"""`dieplace partition` on an emulated node: what it prints, what it changes, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from partition_support import FakeClock, hash_tree, small_node, truth

from dieplace.cli.main import main
from dieplace.emulator.node import Node, create, open_node


class Command:
    """Runs the command in this process against one node, with its record in a private state folder."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], node: Node):
        self.home, self.capsys, self.node = home, capsys, node
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        self.capsys.readouterr()
        code = main(["--backend", "emulated", "--node", str(self.node.directory), "partition", *words])
        self.out, self.err = self.capsys.readouterr()
        return code

    def json(self, *words: str) -> tuple[int, dict[str, Any]]:
        code = self(*words, "--json")
        return code, json.loads(self.out)

    def everything(self) -> str:
        """A hash of the node and of the state folder: what a command that changes nothing must keep."""
        return hash_tree(self.home)


@pytest.fixture
def command(memory_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node = create(memory_path / "node", cards=8, cpu_nodes=2, cores_per_node=1, threads_per_core=1)
    return Command(memory_path, capsys, node)


def shape(node: Node) -> list[tuple[Any, ...]]:
    """Modes, devices, domains and sizes as discovery sees them."""
    from dieplace.backends.emulated import EmulatedBackend

    machine = EmulatedBackend(open_node(node.directory)).snapshot()
    return [
        *((card.id, str(card.mode)) for card in machine.cards),
        *((d.id, d.xccs, d.cus, d.memory_limit_bytes, d.domain, d.render_node) for d in machine.devices),
        *((d.id, d.total_bytes, d.dies) for d in machine.domains),
    ]


def test_plan_names_everything_and_changes_nothing(command: Command) -> None:
    before = command.everything()
    assert command("plan", "DPX/NPS2") == 0
    expected = (
        "record memory mode NPS2",
        "unload the driver",
        "load the driver",
        "8 logical devices become 16",
        "Disturbs 8 cards",
        "Reloads the driver",
        f"`dieplace --backend emulated --node {command.node.directory} partition restore`\n  leads back to SPX/NPS1",
    )
    for words in expected:
        assert words in command.out, words
    code, plan = command.json("set", "DPX/NPS2", "--dry-run")
    assert code == 0 and [step["kind"] for step in plan["plan"]["steps"]][:3] == ["set-memory", "unload", "load"]
    assert plan["plan"]["undo"] == {f"gpu{i}": "SPX/NPS1" for i in range(8)}
    assert command("show") == 0 and command("export") == 0 and command("assert", "SPX/NPS1") == 0
    assert command.everything() == before


def test_there_verified_asserted_and_back(command: Command) -> None:
    before = shape(command.node)
    code, answer = command.json("set", "DPX/NPS2", "-y")
    assert code == 0 and answer["outcome"] == "done" and len(answer["devices"]) == 16
    assert truth(command.node).is_in("DPX/NPS2")
    assert command("assert", "SPX/NPS1") == 1 and "gpu7: is DPX/NPS2, not SPX/NPS1" in command.out
    assert command("assert", "DPX/NPS2") == 0 and command("assert", "dpx_nps2", "--card", "gpu3") == 0
    assert command("restore", "-y") == 0 and truth(command.node).is_in("SPX/NPS1")
    assert shape(command.node) == before
    assert command("restore", "-y") == 3 and "no partition switch is on record" in command.err


def test_progress_goes_to_stderr_with_the_time_and_the_answer_to_stdout(command: Command) -> None:
    assert command("set", "DPX/NPS2", "-y") == 0
    assert " s] unload the driver" in command.err and "unload" not in command.out
    assert command.out.startswith("DPX/NPS2 on 8 cards: verified, 16 logical devices.")
    assert max(len(line) for line in command.out.splitlines() if "renderD" in line) <= 80
    assert command("plan", "SPX/NPS1") == 0
    assert max(len(line) for line in command.out.splitlines() if "`dieplace" not in line) <= 80  # it is for pasting
    told = " ".join(command.out.split())
    assert "the one reload before on this host took" in told


REFUSED = {
    ("set", "SPX/NPS2"): (3, "it offers SPX/NPS1, DPX/NPS1"),
    ("set", "DPX/NPS4"): (3, "it offers SPX/NPS1, DPX/NPS1"),
    ("set", "DPX/NPS1"): (3, "AMD lists SPX/NPS1, DPX/NPS2, QPX/NPS2, CPX/NPS2"),
    ("set", "TPX/NPS1"): (3, "it offers"),
    ("set", "DPY/NPS2"): (2, "one of SPX, DPX, TPX, QPX, CPX"),
    ("set", "DPX"): (2, "for example DPX/NPS2"),
    ("set", "default"): (2, "for example DPX/NPS2"),
    ("set", "DPX/NPS2", "--card", "gpu8"): (3, "gpu0 (0000:05:00.0)"),
    ("set", "DPX/NPS2", "--card", "0000:99:00.0"): (3, "there is gpu0"),
    ("set", "DPX/NPS2", "--card", "gpu1"): (3, "one memory mode holds for the whole hive"),
    ("set", "DPX/NPS2", "--wait", "-1"): (2, ""),
    ("set", "DPX/NPS2", "--wait", "nan"): (2, ""),
    ("set", "DPX/NPS2", "--rocm-path", "/opt/rocm"): (2, "an emulated node has no ROCm"),
    ("set", "DPX/NPS2", "--stop-service", "x.service"): (3, "no systemd"),
    ("set", "DPX/NPS2", "--stop-service", "--help"): (2, "not the name of a systemd unit"),
    ("export", "--profile", "a b]"): (2, "cannot name a mode"),
    ("assert",): (2, "MODE"),
    ("assert", "SPX/NPS1", "-f", "x"): (2, "MODE"),
    ("assert", "SPX/NPS1", "--profile", "x"): (2, "-f FILE"),
    ("apply", "-f", "/nonexistent.toml"): (2, "cannot read"),
    ("frobnicate",): (2, "frobnicate"),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refused_with_its_exit_code_and_nothing_changed(command: Command, words: tuple[str, ...]) -> None:
    code, text = REFUSED[words]
    before = command.everything()
    more = ("-y",) if words[0] == "set" else ()
    assert command(*words, *more) == code, command.err
    assert text in command.err and "Traceback" not in command.err and command.out == ""
    assert command.everything() == before


def test_an_error_is_one_json_value_with_the_offered_modes(command: Command) -> None:
    code, answer = command.json("set", "SPX/NPS2", "-y")
    assert code == 3 and answer["ok"] is False and "DPX/NPS2" in answer["error"]["offered"]


@pytest.mark.parametrize(
    ("styles", "words", "code", "text"),
    [
        ({"virtual_function": True}, ("DPX/NPS2",), 3, "virtual function"),
        ({"vfio_cards": (1,)}, ("DPX/NPS2",), 3, "vfio-pci"),
        ({"nps_caps": ("NPS1",)}, ("DPX/NPS2",), 3, "cannot"),
        ({"uid": 1000}, ("DPX/NPS2",), 4, "sudo "),
    ],
)
def test_hosts_that_do_not_allow_it(
    memory_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    styles: dict[str, Any], words: tuple[str, ...], code: int, text: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dieplace", "partition", "set", "DPX/NPS2", "-y"])
    clock = FakeClock()
    node = small_node(memory_path / "node", clock, **styles)
    command = Command(memory_path, capsys, node)
    before = command.everything()
    assert command("set", *words, "-y") == code
    assert text in command.err
    if code == 4:
        assert "sudo /usr/bin/dieplace partition set DPX/NPS2 -y" in command.err
    assert command.everything() == before


def test_a_managed_cloud_that_refuses_the_write(command: Command) -> None:
    """The file looks writable, root is refused all the same (EACCES)."""
    command.node.inject("write_memory", "EACCES")
    state = truth(command.node)
    assert command("set", "DPX/NPS2", "-y") == 3
    assert "the host or its provider does not allow it" in command.err and truth(command.node) == state
    assert command.json("show")[1]["pending"] == []


def test_busy_lists_pid_and_name_and_incomplete_views_exit_5(command: Command) -> None:
    pid = command.node.start_process("vllm")
    assert command("plan", "DPX/NPS2") == 0 and f"pid {pid} (vllm)" in command.out
    code, answer = command.json("set", "DPX/NPS2", "-y")
    assert code == 5 and answer["error"]["holders"][0]["pid"] == pid
    command.node.end_process(pid)
    command.node.start_process("hidden", in_this_pid_namespace=False)
    assert command("set", "DPX/NPS2", "-y") == 5 and truth(command.node).is_in("SPX/NPS1")


def test_nobody_to_ask_declines_and_shows_the_plan_even_when_quiet(command: Command) -> None:
    assert command("set", "DPX/NPS2", "-q") == 7
    assert "Disturbs 8 cards" in command.err and truth(command.node).is_in("SPX/NPS1")


def test_export_applies_and_profiles_are_refused_before_any_write(command: Command, tmp_path: Path) -> None:
    assert command("export", "--profile", "mine") == 0
    exported = tmp_path / "e.toml"
    exported.write_text(command.out)
    assert command("set", "DPX/NPS2", "-y") == 0
    assert command("assert", "-f", str(exported)) == 1
    assert command("apply", "-f", str(exported), "-y") == 0 and truth(command.node).is_in("SPX/NPS1")
    assert command("assert", "-f", str(exported), "--profile", "mine") == 0
    assert command("apply", "-f", str(exported), "-y") == 0 and "already" in command.out
    for text, code in {
        'version = 1\n[modes.a]\nall = "DPX/NPS2"\ngpu0 = "DPX/NPS2"': 2,
        'version = 1\n[modes.a]\ngpu0 = "DPX/NPS2"\ngpu1 = "SPX/NPS1"': 3,
        'version = 1\n[modes.a]\ngpu0 = "DPX/NPS2"': 3,
        'version = 1\n[modes.a]\ngpu77 = "DPX/NPS2"': 3,
        'version = 1\n[modes.a]\nall = "DPX/NPS2"\n[modes.b]\nall = "SPX/NPS1"': 2,
    }.items():
        exported.write_text(text)
        before = command.everything()
        assert command("apply", "-f", str(exported), "-y") == code, text
        assert command.everything() == before


def test_mixed_compute_modes_under_one_memory_mode(command: Command, tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text('version = 1\n[modes.a]\ngpu0 = "CPX/NPS1"\n3 = "QPX/NPS1"\n')
    assert command("apply", "-f", str(profile), "-y", "--allow-unvalidated") == 0
    assert truth(command.node).compute[:4] == ("CPX", "SPX", "SPX", "QPX") and "8 XCDs" not in command.out
    assert command("restore", "-y") == 0 and truth(command.node).is_in("SPX/NPS1")


def test_a_pending_memory_mode_is_shown_by_every_later_command(command: Command) -> None:
    command.node.inject("unload", "ETIMEDOUT")
    code, answer = command.json("set", "DPX/NPS2", "-y")
    assert code == 6 and answer["error"]["outcome"] == "pending" and "cannot be read back" in answer["error"]["message"]
    for words in (("show",), ("plan", "SPX/NPS1"), ("plan", "DPX/NPS2")):
        assert command(*words) == 0 and "Memory mode NPS2 is pending" in command.out, words
    main(["--backend", "emulated", "--node", str(command.node.directory), "list"])
    printed = command.capsys.readouterr()
    assert "Memory mode NPS2 is pending" in " ".join((printed.out + printed.err).split())
    code, shown = command.json("show")
    assert shown["pending"][0]["memory"] == "NPS2" and shown["pending"][0]["boot_id"] == command.node.boot_id
    assert command("restore", "-y") == 0 and truth(command.node).is_in("SPX/NPS1")
    assert command.node.state.loads == 3  # one load applies the wish, another undoes it: nothing else clears it
    assert command.json("show")[1]["standing"] == []


def test_a_reboot_loses_a_pending_memory_mode_and_that_is_told(command: Command) -> None:
    command.node.inject("unload", "ETIMEDOUT")
    assert command("set", "DPX/NPS2", "-y") == 6
    command.node.reboot()
    shown = command.json("show")[1]
    assert shown["pending"] == [] and any("lost by the reboot" in text for text in shown["standing"])
    assert command("restore", "-y") == 0 and command.json("show")[1]["standing"] == []


def test_somebody_else_reloading_resolves_the_wish(command: Command) -> None:
    command.node.inject("unload", "ETIMEDOUT")
    assert command("set", "DPX/NPS2", "-y") == 6
    command.node.clear_faults()
    command.node.reload()
    shown = command.json("show")[1]
    assert shown["pending"] == [] and shown["standing"] == []
    assert command("set", "DPX/NPS2", "-y") == 0 and "already" in command.out
    assert command("restore", "-y") == 0 and truth(command.node).is_in("SPX/NPS1")


def test_nothing_of_ours_is_left_open_or_attached(command: Command) -> None:
    """After any command no descriptor of ours is open under the node, and KFD lists no process of ours."""
    for words in (("show",), ("plan", "DPX/NPS2"), ("set", "DPX/NPS2", "-y"), ("restore", "-y")):
        assert command(*words) == 0
        mine = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ]
        assert not [
            path for path in mine if path.startswith(str(command.home)) or "/dev/dri" in path or "/dev/kfd" in path
        ]
        assert command.node.sysfs().names("/sys/class/kfd/kfd/proc") == [] and command.node.state.processes == ()


def test_the_group_imports_no_heavy_module() -> None:
    code = (
        "import sys; from dieplace.cli.main import main; main(['partition', '--help']); import dieplace.cli.partition;"
        "bad = {'torch','numpy','scipy','matplotlib','flydsl','amdsmi','pyrsmi'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_from_python_the_context_restores_also_after_an_exception(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dieplace as dp
    from dieplace.backends.emulated import EmulatedBackend

    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    clock = FakeClock()
    node = small_node(memory_path / "node", clock)
    machine = EmulatedBackend(node).snapshot()
    plan = machine.plan("DPX/NPS2")
    with pytest.raises(ZeroDivisionError), dp.partitioned(plan) as inner:
        assert len(inner.devices) == 4 and truth(node).is_in("DPX/NPS2")
        with pytest.raises(dp.StaleMachine):
            machine.check_fresh()
        with dp.partitioned(inner.plan("CPX/NPS2")) as innermost:
            assert len(innermost.devices) == 16
        assert truth(node).is_in("DPX/NPS2")
        raise ZeroDivisionError
    assert truth(node).is_in("SPX/NPS1")
    with pytest.raises(dp.StaleMachine):
        dp.apply(plan)
    fresh = EmulatedBackend(node).snapshot()
    after = dp.apply(fresh.plan({"gpu0": "CPX/NPS1"}, allow_unvalidated=True))
    assert len(after.devices_of("gpu0")) == 8
    assert len(dp.restore(after).devices) == 2 and truth(node).is_in("SPX/NPS1")
    with pytest.raises(dp.Unsupported):
        dp.restore(after)
