"""First light's questions to AMD's library, through the real amdsmi package over a stub of the C library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from first_light_hosts import amd_host_on, node_in
from stub_library import Library, build, short_folder

from dieplace.backends.amd.smi import Smi
from dieplace.experiments.first_light_catalogue import question
from dieplace.experiments.first_light_modes import Switched
from dieplace.experiments.first_light_questions import safely
from dieplace.experiments.first_light_seen import Seen, init_while_unloaded, observe

pytestmark = pytest.mark.real_binding


@pytest.fixture(scope="module")
def rocm() -> Iterator[Path]:
    folder = short_folder()
    yield build(folder / "rocm", folder / "s")
    shutil.rmtree(folder)


def test_the_library_is_asked_in_a_child(memory_path: Path, rocm: Path) -> None:
    """The stub opens no device file; every init has its shutdown; a driver that is away gives a status, not a hang."""
    node, clock = node_in(memory_path)
    with Library(node, rocm.parent / "s") as library:
        host = amd_host_on(node, clock, Smi(str(rocm), timeout_s=60))
        reply = host.library("descriptors")
        assert reply["ok"] and reply["open"] == {k: [] for k in ("before", "initialised", "asked", "shut_down")}
        assert reply["versions"] == {"binding": "7.0.2", "library": "26.0.2"} and library.open_sessions == 0

        class Scene:
            pass

        scene = Scene()
        scene.host, scene.origin = host, "measured"  # type: ignore[attr-defined]
        assert safely(question("amdsmi-descriptors"), scene, "measured").word == "holds none"
        assert host.init_while_away()["ok"] is True
        node.unload()
        away = host.init_while_away()
        assert away["ok"] is False and away["stage"] == "init" and isinstance(away["code"], int)
        node.load()
        seen = Seen("measured", (observe(host.control, None, may_ask=False),), (Switched("DPX/NPS2", 1.0, away=away),))  # type: ignore[arg-type]
        found = init_while_unloaded(seen)
        assert found.word == "fails" and f"({away['code']})" in found.said
    library.path.unlink()


def test_a_library_that_hangs_in_init_is_told(memory_path: Path, rocm: Path) -> None:
    node, clock = node_in(memory_path)
    with Library(node, rocm.parent / "s", hang_in_init=3.0) as library:
        host = amd_host_on(node, clock, Smi(str(rocm), timeout_s=1.0))
        away = host.init_while_away()
        assert away["name"] == "TIMEOUT" and away["stage"] == "child"
        found = init_while_unloaded(Seen("measured", (), (Switched("DPX/NPS2", 1.0, away=away),)))
        assert found.word == "hangs"
    library.path.unlink()
