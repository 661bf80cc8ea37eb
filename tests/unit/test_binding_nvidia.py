"""Visible devices on NVIDIA: by UUID, within what the caller left visible, and without starting CUDA here."""

import sys
from typing import Any

import pytest

from dieplace.backends.nvidia import nvml, topology
from dieplace.binding import visibility
from dieplace.errors import BackendError, Unsupported
from dieplace.machine import Card, Device, Machine

BDFS = ("0000:18:00.0", "0000:2a:00.0", "0000:3b:00.0")


class _Backend:
    name = "nvidia"

    def snapshot(self, *, links: bool, ask_cuda: bool) -> Machine:
        assert ask_cuda is False  # cuInit here would freeze CUDA_VISIBLE_DEVICES for a worker
        return Machine(
            "live", "nvidia",
            tuple(
                Card(f"gpu{i}", b, "H200", 0x2335, None, 132, 1, None, 1, uuid=f"GPU-{i:08d}")
                for i, b in enumerate(BDFS)
            ),
            tuple(
                Device(f"gpu{i}/p0", f"gpu{i}", 0, b, None, 132, 1, f"gpu{i}/mem0", True, True, aliases=(f"gpu{i}",))
                for i, b in enumerate(BDFS)
            ),
            (), (),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dieplace.discover"], "open_backend", lambda *_, **__: _Backend())


def _look(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, seen: list[str] | None = None) -> visibility.View:
    monkeypatch.setattr(visibility, "_visible_to_cuda", lambda _: list(seen or []))
    return visibility.look(None, None, environ)


def test_devices_are_set_by_uuid_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    view = _look({}, monkeypatch)
    devices = visibility.chosen_devices(view, ["gpu2", "gpu0/p0"])
    assert visibility.environment(view, devices) == {
        "DIEPLACE_DEVICE": "gpu2/p0,gpu0/p0", "CUDA_VISIBLE_DEVICES": "GPU-00000002,GPU-00000000",
    }  # fmt: skip
    assert len(visibility.chosen_devices(view, None)) == 3


def test_within_what_the_caller_left_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    view = _look({"CUDA_VISIBLE_DEVICES": "2,0"}, monkeypatch, [BDFS[2], BDFS[0]])
    assert [d.id for d in visibility.chosen_devices(view, ["all"])] == ["gpu2/p0", "gpu0/p0"]
    with pytest.raises(Unsupported, match=r"gpu1/p0 .*CUDA_VISIBLE_DEVICES='2,0'.*index 1 of the whole node"):
        visibility.chosen_devices(view, ["gpu1"])
    with pytest.raises(Unsupported, match="no device at all"):
        visibility.chosen_devices(_look({"CUDA_VISIBLE_DEVICES": ""}, monkeypatch, []), None)


def test_a_driver_that_cannot_be_asked_is_an_error() -> None:
    with pytest.raises(BackendError, match="CUDA driver cannot be asked"):
        visibility.look(None, None, {"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/nonexistent"})


def test_discovery_leaves_cuda_alone_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Nvml:
        def __enter__(self) -> "_Nvml":
            return self

        def __exit__(self, *_: object) -> None: ...

        def gpus(self) -> list[Any]:
            return []

        def version(self) -> str:
            return "580"

    def started() -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(topology, "Nvml", _Nvml)
    monkeypatch.setattr(topology, "cuda_view", started)
    from dieplace.sysfs import Sysfs

    assert topology.snapshot(Sysfs("/nonexistent"), None, ask_cuda=False).notes == ()
    with pytest.raises(AssertionError):
        topology.snapshot(Sysfs("/nonexistent"), None)
    assert nvml.cuda_view is not started
