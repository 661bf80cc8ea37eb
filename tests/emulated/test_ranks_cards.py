"""A rank on AMD takes a whole card: in DPX both of its logical devices, numbered from 0 for HIP."""

from __future__ import annotations

from pathlib import Path

import pytest

from dieplace.binding.ranks import Launched
from dieplace.emulator.node import create
from dieplace.errors import Unsupported
from dieplace.experiments import rank_cards
from dieplace.experiments.registry import Options, get


@pytest.mark.parametrize(
    ("mode", "rank", "rocr", "hip"),
    [("DPX/NPS2", 0, "0,1", "0,1"), ("DPX/NPS2", 2, "4,5", "0,1"), ("SPX/NPS1", 2, "2", "0")],
)
def test_a_card_with_all_of_its_logical_devices(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, rank: int, rocr: str, hip: str
) -> None:
    """The emulated node stands for the AMD machine: discovery and visibility are the same code."""
    node = create(memory_path / "node", part="MI355X", cards=3, mode=mode).directory
    monkeypatch.setattr(rank_cards.os, "environ", {})
    launched = Launched(rank, 3, rank, 3, 0, "here", 1, "id", 0)
    mine = rank_cards._visible(launched, "emulated", str(node), get("link"), {})
    assert mine.cards == (f"gpu{rank}",) and mine.parts == ("MI355X",) and len(mine.bdfs) == 1
    assert rank_cards.os.environ["ROCR_VISIBLE_DEVICES"] == rocr
    assert rank_cards.os.environ["HIP_VISIBLE_DEVICES"] == hip


def test_one_rank_a_logical_device_is_too_many(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = create(memory_path / "node", part="MI355X", cards=2, mode="DPX/NPS2").directory
    monkeypatch.setattr(rank_cards.os, "environ", {})
    launched = Launched(2, 4, 2, 4, 0, "here", 1, "id", 0)
    with pytest.raises(Unsupported, match=r"4 ranks were started on this host, .* this host has 2 cards") as raised:
        rank_cards._visible(launched, "emulated", str(node), get("link"), {})
    assert raised.value.hint == "torchrun --nproc-per-node 2"


def test_a_modelled_experiment_is_on_the_card_of_its_rank() -> None:
    """Placed, audited and timed on gpu1 of a private node of two; the model gives it the time of gpu0 of one."""
    (mine,) = get("cache-type").run("emulated", Options(card="gpu1", cards=2), lambda text: None)
    (first,) = get("cache-type").run("emulated", Options(), lambda text: None)
    assert len(mine.machine["cards"]) == 2
    for point in mine.points:
        assert point.residency_before is not None
        by_role = point.residency_before["bytes_by_role_device_die"]
        assert {device for devices in by_role.values() for device in devices} == {"gpu1/p0", "gpu1/p1"}
    assert [p.quantities["token_us"].value for p in mine.points] == [
        p.quantities["token_us"].value for p in first.points
    ]
