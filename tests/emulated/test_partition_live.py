"""The live backend, as root, in a private mount namespace where an emulated tree is `/sys`, `/proc` and `/dev/dri`.

Writes go through the real amdsmi package in its child process, the reload through a stand-in for modprobe, the record
into a private `/var/lib`. Nothing outside the namespace is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from partition_support import FakeClock, small_node, truth
from stub_library import Library, build, short_folder

pytestmark = pytest.mark.real_binding

UNSHARE = ("unshare", "-m", "--fork", "--kill-child", "--propagation", "private")
ENTER = """
set -e
T={home}; N={node}
mkdir -p $T/dev
mount -t tmpfs -o mode=755 none $T/dev
for f in null zero urandom; do touch $T/dev/$f; mount --bind /dev/$f $T/dev/$f; done
ln -s $N/dev/dri $T/dev/dri
mount -t tmpfs -o mode=755 none /var/lib
[ -d {kept}/dieplace ] && cp -a {kept}/dieplace /var/lib/
mount --bind $T/sbin /usr/sbin
/bin/mount --bind $N/sys /sys
/bin/mount --rbind $T/dev /dev
/bin/mount --bind $N/proc /proc
/bin/mount --bind /dev/null /proc/sys/kernel/osrelease
set +e
"$@"
rc=$?
rm -rf {kept}/dieplace; [ -d /var/lib/dieplace ] && cp -a /var/lib/dieplace {kept}/
exit $rc
"""
MODPROBE = """#!{python} -I
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect({socket!r})
s.sendall(b"modprobe %d" % ("-r" in sys.argv)); s.shutdown(socket.SHUT_WR)
reply = b""
while part := s.recv(4096): reply += part
status, _, text = reply.decode().partition(" ")
if text: print(text, file=sys.stderr)
sys.exit(int(status))
"""


class Host:
    """A host made of an emulated node: `run` executes the command there, on the live backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""  # what the last command wrote on stderr
        self.clock = FakeClock()
        # Plain files cannot answer the selector of supported_nps_configs, so this kernel has none.
        self.node = small_node(folder / "node", self.clock, nps_configs=False)
        self.rocm = build(folder / "rocm", folder / "s")
        self.library = Library(self.node, folder / "s")
        for name in ("home/sbin", "kept"):
            (folder / name).mkdir(parents=True)
        modprobe = folder / "home" / "sbin" / "modprobe"
        modprobe.write_text(MODPROBE.format(python=os.path.realpath(sys.executable), socket=str(folder / "s")))
        modprobe.chmod(0o755)
        self.script = folder / "enter.sh"
        text = ENTER.format(home=folder / "home", node=folder / "node", kept=folder / "kept")
        self.script.write_text(text)

    def run(self, *words: str, rocm: bool = False) -> tuple[int, dict[str, Any]]:
        more = ("--rocm-path", str(self.rocm)) if rocm else ()
        command = [sys.executable, "-m", "dieplace.cli", "--backend", "amd", "--json", "partition", *words, *more]
        done = subprocess.run(
            [*UNSHARE, "/bin/bash", str(self.script), *command],
            capture_output=True, text=True, timeout=180, check=False, cwd="/",
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        self.said = done.stderr
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def record(self) -> Path:
        return self.folder / "kept" / "dieplace" / "partition"


@pytest.fixture
def host() -> Iterator[Host]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a private mount namespace needs root and unshare")
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this container does not allow a private mount namespace")
    folder = short_folder(on_disk=True)
    made = Host(folder)
    with made.library:
        yield made
    shutil.rmtree(folder)


def test_the_live_backend_switches_and_restores(host: Host) -> None:
    code, shown = host.run("show")
    assert code == 0 and shown["source"] == "live" and [card["mode"] for card in shown["cards"]] == ["SPX/NPS1"] * 2
    code, plan = host.run("set", "DPX/NPS2", "--dry-run", rocm=True)
    assert code == 0 and "amdsmi 26.0.2" in plan["plan"]["road"]["memory"] and truth(host.node).is_in("SPX/NPS1")
    code, answer = host.run("set", "DPX/NPS2", "-y", rocm=True)
    assert code == 0 and len(answer["devices"]) == 4 and truth(host.node).is_in("DPX/NPS2")
    assert [call for call in host.library.calls if call.startswith(("set_memory", "modprobe"))] == [
        "set_memory 1000 2", "modprobe 1", "modprobe 0",
    ]  # fmt: skip
    for path in (host.record(), *host.record().iterdir()):
        found = path.stat()
        assert found.st_uid == 0 and not stat.S_IMODE(found.st_mode) & 0o022
    assert host.run("assert", "SPX/NPS1")[0] == 1
    assert host.run("restore", "-y", rocm=True)[0] == 0 and truth(host.node).is_in("SPX/NPS1")
    assert host.library.open_sessions == 0


@pytest.mark.slow
def test_a_slow_modprobe_is_told_about_on_stderr_while_it_runs(host: Host) -> None:
    real = host.library.node.unload
    host.node.unload = lambda: (time.sleep(5), real())  # type: ignore[method-assign]
    code, _ = host.run("set", "DPX/NPS2", "-y", rocm=True)
    line = r"^\[ *([0-9.]+) s\] still unloading the driver, (\d) s of at most 60 s \(modprobe, pid \d+, state"
    still = re.findall(line, host.said, re.MULTILINE)
    assert code == 0 and [told for _, told in still] == ["2", "4"], host.said
    assert 1.5 <= float(still[1][0]) - float(still[0][0]) <= 4


def test_a_busy_module_is_told_with_its_process_and_the_wish_as_pending(host: Host) -> None:
    real = host.library.node.unload

    def late() -> None:
        host.node.start_process("latecomer")
        real()

    host.node.unload = late  # type: ignore[method-assign]
    code, answer = host.run("set", "DPX/NPS2", "-y", rocm=True)
    assert code == 6 and answer["error"]["outcome"] == "pending" and "latecomer" in answer["error"]["message"]
    assert host.run("show")[1]["pending"][0]["memory"] == "NPS2"


def test_without_a_library_the_plan_says_what_to_install_and_uses_sysfs(host: Host) -> None:
    code, plan = host.run("plan", "DPX/NPS2")
    assert code == 0 and plan["plan"]["road"]["memory"] == "through sysfs"
    assert any("--rocm-path" in note for note in plan["plan"]["notes"])
