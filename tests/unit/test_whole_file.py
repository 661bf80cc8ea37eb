"""Files that are written whole or not at all, wherever the path leads."""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from dieplace.errors import Unsupported, UsageError
from dieplace.whole_file import write_whole


def test_a_new_file_and_its_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        write_whole(tmp_path / "a" / "b.txt", "text")
    assert not (tmp_path / "a").exists()
    path = write_whole(tmp_path / "a" / "b.txt", "text", folders=True)
    assert path.read_text() == "text" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["b.txt"]


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    assert write_whole(tmp_path / "a", "b\udcffc").read_bytes() == b"b\\udcffc"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`--out /dev/null` as root must leave /dev/null what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and os.read(reader, 10) == b"text"
    os.close(reader)


def test_a_folder_or_a_part_of_the_way_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "b", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot write"):
            write_whole(path, "text")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(Unsupported, match="File too large"):
            write_whole(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["a"]
