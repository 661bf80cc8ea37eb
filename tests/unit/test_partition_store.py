"""The record of switches on disk: who may own it, what it refuses to follow, and what survives a power cut."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from partition_support import FakeClock

from dieplace.errors import Busy, DieplaceError, NotAllowed, Unsupported
from dieplace.partition.journal import Record, Wish
from dieplace.partition.store import Store, emulated_directory

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="changing a file's owner needs root")


def test_reading_creates_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert store.read("journal.json") is None and Record(store).wishes() == () and Record(store).journal() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("shared", "folder", "file"), [(False, 0o700, 0o600), (True, 0o755, 0o644)])
def test_modes_do_not_depend_on_the_callers_umask(tmp_path: Path, shared: bool, folder: int, file: int) -> None:
    old = os.umask(0)
    try:
        store = Store(tmp_path / "s", shared=shared)
        store.write("x.json", {"a": 1})
        with store.lock(0, FakeClock()):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == folder
    assert stat.S_IMODE((tmp_path / "s" / "x.json").stat().st_mode) == file
    assert all(not path.stat().st_mode & 0o022 for path in (tmp_path / "s").iterdir())
    assert store.read("x.json") == {"a": 1}


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text('{"a": 1}')
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (real / "journal.json").symlink_to(victim)
    (real / "lock").symlink_to(victim)
    store = Store(real)
    with pytest.raises(Unsupported, match="cannot be opened"):
        store.read("journal.json")
    with pytest.raises(Unsupported, match="cannot lock"), store.lock(0, FakeClock()):
        pass
    (tmp_path / "linked").symlink_to(real)
    with pytest.raises(Unsupported, match="cannot be opened as a folder"):
        Store(tmp_path / "linked").read("journal.json")
    store.write("journal.json", {"b": 2})
    assert victim.read_text() == '{"a": 1}' and not (real / "journal.json").is_symlink()


def test_what_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.write("x.json", {})
    (tmp_path / "s" / "x.json").chmod(0o666)
    with pytest.raises(Unsupported, match="may be written by others"):
        store.read("x.json")
    (tmp_path / "s").chmod(0o777)
    with pytest.raises(Unsupported, match="may be written by others"):
        store.write("y.json", {})
    (tmp_path / "s").chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(Unsupported, match="may be written by others"):
        store.read("y.json")


@root_only
def test_another_users_files_are_not_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.write("x.json", {})
    os.chown(tmp_path / "s" / "x.json", 12345, 12345)
    with pytest.raises(Unsupported, match="belongs to user 12345"):
        store.read("x.json")
    os.chown(tmp_path / "s", 12345, 12345)
    with pytest.raises(Unsupported, match="belongs to user 12345"):
        store.write("x.json", {})
    with pytest.raises(NotAllowed):
        Store(tmp_path / "t", owner=12345).write("x.json", {})


@pytest.mark.parametrize("content", ["", "[]", "{", "\0\0", '{"steps": 3}'])
def test_a_damaged_record_is_told_and_never_taken_for_none(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path / "s")
    store.write("journal.json", {})
    (tmp_path / "s" / "journal.json").write_text(content)
    with pytest.raises(DieplaceError, match=r"journal\.json"):
        Record(store).journal()


def test_the_new_value_is_on_disk_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *a, **k: order.append("rename") or real_rename(*a, **k))
    Store(tmp_path / "s").write("x.json", {})
    assert order == ["file", "rename", "folder"]


def test_a_failed_write_leaves_the_old_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s")
    store.write("x.json", {"old": 1})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unsupported, match="No space left"):
        store.write("x.json", {"new": 2})
    assert store.read("x.json") == {"old": 1}


def test_the_lock_names_its_holder_waits_and_is_free_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from dieplace.partition.store import Store;"
        "from dieplace.partition.control import SystemClock\n"
        f"with Store(Path({str(tmp_path / 's')!r})).lock(0, SystemClock()):\n print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    clock = FakeClock()
    try:
        with pytest.raises(Busy, match=f"pid {holder.pid}"), Store(tmp_path / "s").lock(10, clock):
            pass
        assert 1009 < clock.time < 1011
    finally:
        holder.kill()
        holder.wait()
    with Store(tmp_path / "s").lock(0, clock):
        pass


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    """A modprobe orphaned by a kill must keep the next switch out until it ends."""
    store, clock = Store(tmp_path / "s"), FakeClock()
    with store.lock(0, clock) as lock:
        child = subprocess.Popen(["/bin/sleep", "60"], pass_fds=(lock,))
    with pytest.raises(Busy), store.lock(0, clock):
        pass
    child.kill()
    child.wait()
    with store.lock(0, clock):
        pass


def test_emulated_nodes_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "x"))
    (tmp_path / "n").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "n")
    assert emulated_directory(tmp_path / "n") == emulated_directory(tmp_path / "same")
    assert emulated_directory(tmp_path / "n") != emulated_directory(tmp_path / "m")
    assert str(emulated_directory(tmp_path / "n")).startswith(str(tmp_path / "x" / "dieplace"))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the XDG rules say: ignore it
    monkeypatch.setenv("HOME", str(tmp_path / "h"))
    assert str(emulated_directory(tmp_path / "n")).startswith(str(tmp_path / "h" / ".local" / "state"))


def test_an_uncertain_wish_stands_beside_a_certain_one_and_a_certain_one_replaces_all(tmp_path: Path) -> None:
    record = Record(Store(tmp_path / "s"))
    record.put_wish(Wish("hive a", "NPS2", "NPS1", "boot", True))
    record.put_wish(Wish("hive a", "NPS4", "NPS1", "boot", False))
    record.put_wish(Wish("hive b", "NPS2", "NPS1", "boot", True))
    assert [(w.scope, w.memory) for w in record.wishes()] == [
        ("hive a", "NPS2"),
        ("hive a", "NPS4"),
        ("hive b", "NPS2"),
    ]
    record.put_wish(Wish("hive a", "NPS4", "NPS1", "boot", True))
    assert {(w.scope, w.memory) for w in record.wishes()} == {("hive b", "NPS2"), ("hive a", "NPS4")}
