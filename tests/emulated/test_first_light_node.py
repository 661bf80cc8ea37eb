"""First light's questions of a node, every answer provoked: by faults and styles of the emulated driver, and by the
code for live AMD nodes over the same driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from first_light_hosts import ALLOWED, ToldSmi, amd_host_on, host_on, node_in
from partition_support import truth

from dieplace.errors import BackendError
from dieplace.experiments.first_light_catalogue import QUESTIONS, question
from dieplace.experiments.first_light_host import Host
from dieplace.experiments.first_light_modes import Permission
from dieplace.experiments.first_light_node import NodeScene
from dieplace.experiments.first_light_questions import Answer, answered, safely, without
from dieplace.partition.entry import plan_restore
from dieplace.partition.journal import Record

DIE = 154_610_434_048
VRAM = "/sys/class/kfd/kfd/proc/*/vram_*"
FILES = "/sys/class/kfd/kfd/proc/*"
OPEN = {"before": [], "initialised": ["/dev/dri/renderD128"] * 2, "asked": ["/dev/dri/renderD128"] * 2, "shut_down": []}
SMI: dict[str, dict[str, Any]] = {
    "holds": {"ok": True, "versions": {"library": "24.7.0"}, "open": OPEN},
    "leaks": {"ok": True, "versions": {}, "open": {**OPEN, "shut_down": ["/dev/kfd"]}},
    "clean": {"ok": True, "versions": {}, "open": {**OPEN, "initialised": [], "asked": []}},
    "dead": {"ok": False, "stage": "child", "text": "no answer within 60 s", "code": None, "name": "TIMEOUT"},
    "absent": {"ok": False, "stage": "import", "text": "No module named 'amdsmi'", "code": None, "name": None},
}


class Memory:
    """Files that were changed, and put back."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self.ever: list[str] = []

    def __call__(self, path: str, text: str | None) -> None:
        self.ever.append(path)
        if text is None:
            self.now.pop(path)
        else:
            self.now[path] = text


def scene(host: Host, permission: Permission = ALLOWED, given: Any = DIE, memory: Memory | None = None) -> NodeScene:
    assert host.control is not None

    def ask(name: str) -> Answer:
        if isinstance(given, Exception):
            raise given
        if given is None:
            return without("refused", name, "no device is visible", origin="emulated")
        return answered(name, "filled", "", origin="emulated", value={"got_bytes": given})

    return NodeScene(host, host.control, permission, host.control.read(), memory or Memory(), ask)


# question, what to do to the node before (step, error, more), the styles, what the devices give, the word, the status
CASES: list[tuple[str, tuple[str, str | None, dict[str, Any]] | None, dict[str, Any], Any, str | None, str]] = [
    ("drm-client", None, {}, DIE, "does not block", "answered"),
    # Busy for a moment, or for good: without the client too, so it says nothing about clients.
    ("drm-client", ("write_compute", "EBUSY", {}), {}, DIE, None, "unknown"),
    ("drm-client", ("write_compute", "EBUSY", {"times": None}), {}, DIE, None, "unknown"),
    ("drm-client", ("write_compute", "EINVAL", {}), {}, DIE, None, "unknown"),
    ("drm-client", ("kfd_init", None, {}), {}, DIE, None, "unknown"),
    ("kfd-counters", None, {}, DIE, "readable", "answered"),
    ("kfd-counters", ("read", "EACCES", {"path": VRAM}), {}, DIE, "not readable", "answered"),
    ("kfd-counters", ("read", "ENOENT", {"path": FILES}), {}, DIE, None, "unknown"),
    ("mem-alloc-mode", None, {}, DIE, "cannot spill", "answered"),
    ("mem-alloc-mode", None, {}, DIE + (8 << 30), "can spill", "answered"),
    ("mem-alloc-mode", None, {}, None, "cannot spill, by its sizes", "answered"),
    ("mem-alloc-mode", None, {}, BackendError("the process that asked died"), "cannot spill, by its sizes", "answered"),
    ("mem-alloc-mode", None, {"mem_alloc_mode": False}, DIE, "no such file", "answered"),
    ("amdsmi-descriptors", None, {}, DIE, None, "not-asked"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault", "styles", "given", "word", "status"), CASES, ids=[f"{c[0]}-{c[4] or c[5]}" for c in CASES]
)
def test_what_the_driver_does_decides_the_answer(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, styles: dict[str, Any], given: Any,
    word: str | None, status: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2", **styles)
    if fault is not None:
        node.inject(fault[0], fault[1], **fault[2])
    memory = Memory()
    found = safely(question(name), scene(host_on(node, clock), given=given, memory=memory), "emulated")
    assert (found.word, found.status) == (word, status), found
    assert truth(node).is_in("DPX/NPS2") and node.state.processes == () and memory.now == {}
    assert {card.alloc_mode for card in node.state.cards} == {"CAPPING"}


AMD_CASES: list[tuple[str, Mapping[str, Any], str | None, str]] = [
    ("amdsmi-descriptors", SMI["holds"], "holds until shutdown", "answered"),
    ("amdsmi-descriptors", SMI["leaks"], "holds, even after shutdown", "answered"),
    ("amdsmi-descriptors", SMI["clean"], "holds none", "answered"),
    ("amdsmi-descriptors", SMI["dead"], None, "unknown"),
    ("amdsmi-descriptors", SMI["absent"], None, "not-asked"),
    ("drm-client", {}, "does not block", "answered"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reply", "word", "status"), AMD_CASES, ids=[f"{c[0]}-{c[2] or c[3]}" for c in AMD_CASES]
)
def test_the_code_for_live_nodes(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reply: Any, word: str | None, status: str
) -> None:
    """The render node of the emulated tree is opened by a real process, which is gone afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    host = amd_host_on(node, clock, ToldSmi(descriptors=reply))
    found = safely(question(name), scene(host), "measured")
    assert (found.word, found.status, found.origin) == (word, status, "measured"), found
    if name == "drm-client":
        pid = found.value["client"].split()[1]
        assert "renderD136" in found.value["client"] and not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("refuses", "word", "told"),
    [
        ({1, 2, 3}, "blocks", "as busy 3 times"), ({1}, None, "1 of 3 busy, 2 of 3 taken; without it: 4 of 4 taken"),
        ({2, 3}, None, "1 of 3 taken, 2 of 3 busy"), (set(), "does not block", "3 times"),
    ],
)  # fmt: skip
def test_a_client_blocks_only_where_every_set_with_it_fails_and_none_without(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: set[int], word: str | None, told: str
) -> None:
    """A driver that refuses while the n-th client has the node open, and never else."""
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    host = host_on(node, clock)
    real, clients = host.drm_client, []

    @contextmanager
    def client(facts: Any, card: str) -> Any:
        clients.append(card)
        with real(facts, card) as who:
            if len(clients) in refuses:
                node.inject("write_compute", "EBUSY", times=None)
            try:
                yield who
            finally:
                node.clear_faults()

    monkeypatch.setattr(host, "drm_client", client)
    found = safely(question("drm-client"), scene(host), "emulated")
    assert found.word == word and told in found.said, found
    assert truth(node).is_in("DPX/NPS2") and len(clients) == 3


def test_every_word_of_every_question_of_the_node_is_provoked() -> None:
    wanted = {(q.id, word) for q in QUESTIONS if q.place == "node" for word in q.words}
    by_client = {("drm-client", "blocks")}  # test_a_client_blocks_only_where_...
    assert {(c[0], c[4]) for c in CASES if c[4]} | {(c[0], c[2]) for c in AMD_CASES if c[2]} | by_client == wanted


def test_bytes_in_sentences_are_gigabytes(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    found = safely(question("mem-alloc-mode"), scene(host_on(node, clock)), "emulated")
    assert "154.61 GB" in found.said and str(DIE) not in found.said and found.value["given_bytes"] == DIE


def test_without_leave_nothing_is_written(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    revision = node.state.revision
    for name in ("drm-client", "mem-alloc-mode"):
        found = safely(question(name), scene(host_on(node, clock), Permission()), "emulated")
        assert found.status == "not-asked" and "--allow-mode-changes" in found.said
    node.become(1000)
    assert safely(question("drm-client"), scene(host_on(node, clock)), "emulated").status == "refused"
    assert node.state.revision == revision + 1  # becoming another user, nothing else


def test_a_card_that_is_held_is_not_asked(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    node.start_process("train")
    found = safely(question("drm-client"), scene(host_on(node, clock)), "emulated")
    assert found.status == "refused" and "train" in found.said


def test_a_card_that_does_not_come_back_is_told_and_can_be_restored(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch under a DRM client works and every later write fails: the record still leads back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node, clock = node_in(memory_path, "DPX/NPS2")
    host = host_on(node, clock)
    assert host.control is not None
    real, calls = host.control.set_compute, []

    def once(bdf: str, word: str) -> Any:
        calls.append(word)
        if len(calls) == 2:
            node.inject("write_compute", "EIO", times=3)
        return real(bdf, word)

    host.control.set_compute = once  # type: ignore[method-assign]
    found = safely(question("drm-client"), scene(host), "emulated")
    assert found.status == "refused" and "did not come back to DPX" in found.said
    assert truth(node).compute == ("DPX", "CPX")
    assert str(plan_restore(host.control).targets["gpu1"]) == "DPX/NPS2"
    assert Record(host.control.store).journal() is not None


def test_nobody_reads_what_only_its_owner_may(memory_path: Path) -> None:
    """Real permissions: the files of the tree lie in a folder that only we may enter, then in one for all."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    node, clock = node_in(memory_path, "DPX/NPS2")
    host = amd_host_on(node, clock, ToldSmi())
    memory_path.chmod(0o700)
    with pytest.raises(PermissionError):
        host.read_as_stranger("/sys/module/amdgpu/version")
    memory_path.chmod(0o755)
    assert host.read_as_stranger("/sys/module/amdgpu/version") == ("6.16.13\n", "user 65534")
    with pytest.raises(BackendError, match="No such file"):
        host.read_as_stranger("/sys/no/such/file")


def test_init_while_the_driver_is_away_is_asked_of_new_libraries_only(memory_path: Path) -> None:
    node, clock = node_in(memory_path)
    old = ToldSmi(versions={"ok": True, "versions": {"library": "24.7.0"}})
    assert "loop" in amd_host_on(node, clock, old).init_while_away()["not_asked"] and old.asked == ["versions"]
    gone = ToldSmi(versions={"ok": False, "stage": "import", "text": "no library"})
    assert "no library" in amd_host_on(node, clock, gone).init_while_away()["not_asked"]
    new = ToldSmi(init={"ok": False, "stage": "init", "name": "DRIVER_NOT_LOADED", "code": 34})
    assert amd_host_on(node, clock, new).init_while_away()["code"] == 34


def test_open_device_files_are_counted(tmp_path: Path) -> None:
    """The child's own counting, over links as /proc shows them."""
    from dieplace.backends.amd.smi_child import open_devices

    targets = ("/dev/dri/renderD128", "/dev/kfd", "/dev/null", "socket:[1]", "/dev/dri/card1")
    for number, target in enumerate(targets):
        (tmp_path / str(number)).symlink_to(target)
    assert open_devices(str(tmp_path)) == ["/dev/dri/card1", "/dev/dri/renderD128", "/dev/kfd"]
    code = "from dieplace.backends.amd.smi_child import open_devices; print(open_devices())"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
