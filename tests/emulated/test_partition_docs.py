"""What docs/partitioning.md prints: the unit is the one that is exported, systemd reads it, its command line works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from partition_support import FakeClock, small_node, truth

import dieplace
from dieplace.cli.main import main
from dieplace.exporters import systemd
from dieplace.partition.profile import parse_profile

PAGE = Path(dieplace.__file__).parent.parent / "docs" / "partitioning.md"


@pytest.fixture
def page() -> str:
    if not PAGE.exists():
        pytest.skip("the documentation is not part of an installed package")
    return PAGE.read_text()


def unit_of(page: str) -> str:
    found = re.search(r"<!-- unit -->\n```ini\n(.*?)```", page, flags=re.S)
    assert found is not None
    return found[1]


def test_the_unit_is_the_exported_one_and_systemd_accepts_it(page: str, tmp_path: Path) -> None:
    assert unit_of(page) == systemd("/usr/local/bin/dieplace", profile="decode")
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed, so nothing can check the unit's syntax")
    path = tmp_path / "dieplace-partition.service"
    path.write_text(unit_of(page).replace("/usr/local/bin/dieplace", "/bin/true"))
    done = subprocess.run([tool, "verify", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert "dieplace-partition.service" not in done.stderr, done.stderr


def test_the_units_command_applies_a_profile_once(
    page: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(memory_path / "xdg"))
    node = small_node(memory_path / "node", FakeClock())
    profile = memory_path / "partition.toml"
    profile.write_text('version = 1\n[modes.decode]\nall = "DPX/NPS2"\n')
    line = next(line for line in unit_of(page).splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))[1:]
    words[words.index("--file") + 1] = str(profile)
    for _ in range(2):
        assert main(["--backend", "emulated", "--node", str(node.directory), *words]) == 0
        assert truth(node).is_in("DPX/NPS2")
    assert node.state.loads == 2  # the second run found it done


def test_the_example_profile_is_read(page: str) -> None:
    found = re.search(r"```toml\n(.*?)```", page, flags=re.S)
    assert found is not None and set(parse_profile(found[1]).modes) == {"decode", "mixed"}
