"""Public reports about what comes after a switch: which device a program gets, what schedulers and errors say.

As in `test_partition_rows.py`, the number is the report's row in our issue log and the name its repository and thread.
Rows 30 and 40, which need a stand-in for HIP, are in `test_exec_verify.py`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from partition_support import FAST, FakeClock, control_for, plan_for, small_node, switch, truth

from dieplace.backends.emulated import EmulatedBackend
from dieplace.binding.readback import kfd_trouble
from dieplace.cli.main import main
from dieplace.discover import discover
from dieplace.emulator.node import Node
from dieplace.errors import Busy, NoSuchMode, NotVerified, RolledBack, Unsupported, UsageError
from dieplace.modes import Mode
from dieplace.partition.control import Limits, SystemClock
from dieplace.partition.entry import build, carry_out
from dieplace.partition.journal import Record
from dieplace.partition.store import Store, emulated_directory
from dieplace.partition.words import ByIndex, modes_for, read_word
from dieplace.policy import Policy
from dieplace.sysfs import Sysfs

Make = Callable[..., tuple[Node, FakeClock]]
KFD = "sys/class/kfd/kfd/topology/nodes"


@pytest.fixture
def make(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "DIEPLACE_BACKEND"):
        monkeypatch.delenv(name, raising=False)

    def made(**styles: Any) -> tuple[Node, FakeClock]:
        clock = FakeClock()
        return small_node(memory_path / "node", clock, **styles), clock

    return made


def control(node: Node, clock: FakeClock) -> Any:
    return control_for(node, clock, node.directory.parent / "state")


def command(node: Node, *words: str) -> list[str]:
    return ["--backend", "emulated", "--node", str(node.directory), *words]


def walk(node: Node) -> list[dict[str, str]]:
    """GPU nodes of KFD in the runtime's order, read from the files."""
    base = node.directory / KFD
    found = [
        dict(line.split() for line in (base / str(number) / "properties").read_text().splitlines())
        for number in sorted(int(path.name) for path in base.iterdir())
    ]
    return [words for words in found if words["cpu_cores_count"] == "0"]


@pytest.mark.parametrize(("part", "names"), [("MI355X", "SPX DPX QPX CPX"), ("MI300A", "SPX TPX CPX")])
def test_row_11_amdsmi_132_a_mode_by_index_is_its_place_in_the_drivers_list(make: Make, part: str, names: str) -> None:
    node, clock = make(part=part)
    facts = control(node, clock).read()
    cards = [card.id for card in facts.cards]
    path = node.directory / f"sys/bus/pci/devices/{node.bdfs()[0]}/compute_partition_config/supported_xcp_configs"
    assert path.read_text().replace(",", "").split() == names.split()
    for index, name in enumerate(names.split()):
        assert modes_for(facts, cards, read_word(f"{index}/nps1")) == dict.fromkeys(cards, Mode(name, "NPS1"))
    with pytest.raises(NoSuchMode, match=f"lists 0 SPX, .*{len(names.split()) - 1} CPX"):
        modes_for(facts, cards, read_word(f"{len(names.split())}/NPS1"))


def test_row_11_amdsmi_132_an_index_on_the_command_line(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    node, _ = make()
    assert main(command(node, "partition", "plan", "1/NPS2")) == 0
    assert "To reach DPX/NPS2 on 2 cards" in capsys.readouterr().out
    assert main(command(node, "partition", "set", "1/NPS2", "-y")) == 0 and truth(node).is_in("DPX/NPS2")
    assert main(command(node, "partition", "assert", "1/NPS2")) == 0
    assert main(command(node, "partition", "assert", "0/NPS1")) == 1
    for words, code in ((("1",), 2), (("1/NPS3",), 2), (("1/2",), 2), (("-1/NPS2",), 2), (("9/NPS2",), 3)):
        assert main(command(node, "partition", "plan", *words)) == code, words
    assert main(command(node, "partition", "plan", "1")) == 2
    assert "for example 1/NPS2" in capsys.readouterr().err


def test_row_11_amdsmi_132_an_index_that_is_ambiguous_or_meaningless_is_refused(make: Make) -> None:
    node, clock = make()
    facts = control(node, clock).read()
    first, second = facts.cards
    mixed = replace(facts, cards=(first, replace(second, supported_compute=("SPX", "TPX", "CPX"))))
    with pytest.raises(UsageError, match="index 1 is ambiguous here: DPX on gpu0, TPX on gpu1"):
        modes_for(mixed, ["gpu0", "gpu1"], ByIndex(1, "NPS1"))
    assert modes_for(mixed, ["gpu1"], ByIndex(1, "NPS1")) == {"gpu1": Mode("TPX", "NPS1")}
    assert modes_for(mixed, ["gpu0", "gpu1"], ByIndex(0, "NPS1")) == dict.fromkeys(
        ("gpu0", "gpu1"), Mode("SPX", "NPS1")
    )
    bare = replace(facts, cards=(replace(first, supported_compute=()), second))
    with pytest.raises(Unsupported, match="index 1 means nothing there"):
        modes_for(bare, ["gpu0"], ByIndex(1, "NPS1"))


def test_row_20_legacy_rocm_build_3144_a_device_without_access_is_warned_about(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The KFD node of gpu1 is visible and its render node gives EACCES: HIP fails altogether, so it must be told."""
    node, _ = make()
    assert main(command(node, "--json", "doctor")) == 0
    before = {row["what"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert before["open its render nodes"]["works"]
    (node.directory / "dev/dri/renderD136").chmod(0o600)
    node.become(1000)
    notes = " ".join(discover("emulated", node=node.directory).notes)
    assert "/dev/dri/renderD136 cannot be opened (EACCES): the whole HIP runtime fails" in notes
    assert main(command(node, "--json", "doctor")) == 0
    told = {row["what"]: row for row in json.loads(capsys.readouterr().out)["checks"]}["open its render nodes"]
    assert not told["works"] and "/dev/dri/renderD136 (EACCES)" in told["why"] and "never by chmod" in told["do"]


def test_row_26_k8s_device_plugin_54_memory_is_asked_for_by_die(make: Make) -> None:
    """A policy names a die; the emulated HBM's own account says where the bytes went, and a switch makes it anew."""
    node, _ = make(mode="DPX/NPS2")
    backend = EmulatedBackend(node)
    machine, mib = backend.snapshot(), 1 << 20
    names = [domain.id for domain in machine.domains if domain.card == "gpu1"]
    kept = []
    for die, policy in ((0, Policy.local(strict=True)), (1, Policy.local(strict=True)), (0, Policy.peer())):
        before = {name: backend.memory.hbm.used_bytes(name) for name in names}
        kept.append(machine.allocate((4 * mib,), dtype="uint8", device=f"gpu1/p{die}", policy=policy, role="weights"))
        grown = {name: backend.memory.hbm.used_bytes(name) - before[name] for name in names}
        home = die if policy != Policy.peer() else 1 - die
        assert grown == {f"gpu1/mem{home}": 4 * mib, f"gpu1/mem{1 - home}": 0}


VERSIONS = r"\[dieplace [0-9.]+, amdgpu 6\.16\.13, kernel 6\.8\.0-emulated\]"


def test_row_28_gpu_operator_235_140_errors_name_the_versions(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    node, clock = make()
    ctl = control(node, clock)
    with pytest.raises(NoSuchMode, match=VERSIONS) as refused:
        plan_for(ctl, "SPX/NPS2")
    assert refused.value.facts["versions"]["amdgpu"] == "6.16.13"
    node.inject("write_memory", "EINVAL")
    with pytest.raises(Unsupported, match=VERSIONS):
        switch(ctl, "DPX/NPS2")
    node.inject("nps_switch")
    with pytest.raises(RolledBack, match=VERSIONS) as back:
        switch(ctl, "DPX/NPS2")
    assert str(back.value).count("amdgpu 6.16.13") == 1
    assert main(command(node, "--json", "partition", "plan", "SPX/NPS2")) == 3
    assert json.loads(capsys.readouterr().out)["error"]["versions"]["kernel"] == "6.8.0-emulated"


def test_row_28_an_odd_device_count_names_the_versions_and_a_users_mistake_does_not(make: Make) -> None:
    node, clock = make(cards=8, ast=True)
    with pytest.raises(NotVerified, match=rf"gpu7: has 7 devices.*{VERSIONS}"):
        switch(control(node, clock), "CPX/NPS2", limits=Limits(ready_s=30, poll_s=5, reset_s=5))
    node.end_process(node.start_process("holder"))
    node.start_process("holder")
    with pytest.raises(Busy) as busy:
        switch(control(node, clock), "DPX/NPS2")
    assert "amdgpu 6" not in str(busy.value) and "versions" not in busy.value.facts


def test_row_28_the_librarys_versions_are_named_once_it_was_asked(make: Make) -> None:
    class Library:
        def ask(self, op: str, **request: str) -> dict[str, Any]:
            if op == "versions":
                return {"ok": True, "versions": {"binding": "7.0.2", "library": "26.0.2"}}
            return {"ok": False, "stage": "call", "text": "no", "code": 32, "name": "NOT_INIT"}

    node, clock = make()
    ctl = control(node, clock)
    ctl.smi = Library()
    with pytest.raises(RolledBack, match=r"amdgpu 6\.16\.13, .*amdsmi 7\.0\.2, libamd_smi 26\.0\.2\]"):
        switch(ctl, "DPX/NPS1", allow_unvalidated=True)


def test_row_41_slurm_operator_57_every_partition_is_a_line_with_its_own_file(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    node, _ = make(mode="CPX/NPS2", other_render=1)
    assert main(command(node, "partition", "export", "--for", "slurm")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NodeName=")]
    files = [dict(word.split("=", 1) for word in line.split())["File"] for line in lines]
    assert files == [f"/dev/dri/renderD{words['drm_render_minor']}" for words in walk(node)]
    assert len(set(files)) == 16 and all((node.directory / name.lstrip("/")).exists() for name in files)
    assert all("AutoDetect=off" in line and "Count=" not in line for line in lines)


def test_row_43_pytorch_131901_140318_a_switch_moves_the_order_and_the_index_follows(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a switch of the first card its devices come last in the runtime's walk: an old index is another die."""
    node, _ = make()

    def rocr(device: str) -> str:
        assert main(command(node, "--json", "exec", "--device", device, "--print")) == 0
        added = json.loads(capsys.readouterr().out)["processes"][0]["environment"]
        assert added["HIP_VISIBLE_DEVICES"] == "0"
        return str(added["ROCR_VISIBLE_DEVICES"])

    assert (rocr("gpu0/p0"), rocr("gpu1/p0")) == ("0", "1")
    node.write_compute(node.bdfs()[0], "DPX")
    order = [(int(words["location_id"]) >> 8, int(words["location_id"]) & 7) for words in walk(node)]
    buses = [int(bdf[5:7], 16) for bdf in node.bdfs()]
    expected = {
        name: str(order.index((buses[card], p)))
        for name, card, p in (("gpu0/p0", 0, 0), ("gpu0/p1", 0, 1), ("gpu1/p0", 1, 0))
    }
    assert expected == {"gpu1/p0": "0", "gpu0/p0": "1", "gpu0/p1": "2"}
    assert {name: rocr(name) for name in expected} == expected


def test_row_47_legacy_rocm_build_5379_a_launch_during_a_switch_is_told_to_try_again(make: Make) -> None:
    node, _ = make(mode="DPX/NPS2")
    store = Store(emulated_directory(node.directory))
    run = [sys.executable, "-m", "dieplace.cli", *command(node, "exec", "--device", "gpu0/p1", "--", "echo", "started")]

    def launch() -> subprocess.CompletedProcess[str]:
        return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)

    with store.lock(0, SystemClock()):
        held = launch()
        assert (held.returncode, held.stdout) == (125, "")
        assert "/dev/kfd gives EINVAL" in held.stderr and "start it again" in held.stderr
        shown = subprocess.run([*run[:-3], "--print"], capture_output=True, text=True, timeout=120, check=False)
        assert "ROCR_VISIBLE_DEVICES=1" in shown.stdout and shown.returncode == 0
    assert launch().stdout == "started\n"


def test_row_47_an_unfinished_switch_counts_only_while_its_process_lives(make: Make) -> None:
    node, clock = make()
    ctl = control(node, clock)
    ctl.store = Store(emulated_directory(node.directory))
    backend = EmulatedBackend(node)
    assert backend.switching() is None
    plan, record = plan_for(ctl, "DPX/NPS2"), Record(ctl.store)
    journal = record.begin(plan)
    assert "a partition switch to DPX/NPS2 on 2 cards is running" in (backend.switching() or "")
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    record.update(journal, pid=ended.pid)
    assert backend.switching() is None
    record.update(journal, pid=os.getpid(), boot_id="another boot")
    assert backend.switching() is None
    record.update(journal, outcome="done")
    assert backend.switching() is None


def test_row_47_einval_from_kfd_is_explained_by_the_checking_child() -> None:
    busy = kfd_trouble(Sysfs("/", faults={"/dev/kfd": errno.EINVAL})) or ""
    assert "EINVAL" in busy and "try again in a few seconds" in busy
    denied = kfd_trouble(Sysfs("/", faults={"/dev/kfd": errno.EACCES})) or ""
    assert "EACCES" in denied and "try again" not in denied


def test_k8s_gpu_dra_driver_88_a_driver_from_an_image_is_not_reloaded(make: Make) -> None:
    """KMM loads amdgpu out of an image: the host's own tree has none, and a plain modprobe would load nothing."""
    node, clock = make()
    ctl = control(node, clock)
    index = next((node.directory / "lib/modules").iterdir()) / "modules.dep"
    text = index.read_text()
    index.chmod(0o644)
    index.write_text("kernel/drivers/gpu/drm/ast/ast.ko.zst:\nextra/not_amdgpu.ko: kernel/amdgpu.ko\n")
    with pytest.raises(Unsupported, match=r"not in this host's module tree .* KMM .* NodeModulesConfig"):
        plan_for(ctl, "DPX/NPS2")
    assert truth(node).is_in("SPX/NPS1")
    facts = ctl.read()
    only_compute = build(ctl, facts, {"gpu0": Mode("DPX", "NPS1")}, allow_unvalidated=True)
    assert carry_out(only_compute, ctl, limits=FAST).word == "done"
    for suffix in (".ko", ".ko.zst", ".ko.xz"):
        index.write_text(text.replace(".ko", suffix))
        assert ctl.read().reload_why_not is None
