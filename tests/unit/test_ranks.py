"""Ranks without their processes: what torchrun says, which cards a rank takes, who knows what of whom."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dieplace.binding import bind, visibility
from dieplace.binding.ranks import Launched, torchrun
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments import rank_cards
from dieplace.experiments.rank_end import RankEnd, as_data, as_error, clash
from dieplace.experiments.rank_others import Limits, Others
from dieplace.experiments.registry import Experiment
from dieplace.machine import Card, Device, Machine

# As `torchrun --nnodes 2 --nproc-per-node 4` of torch 2.13 sets them for the second process of the second node.
SAID = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "45951", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
FIFTH = Launched(5, 8, 1, 4, 1, "node0", 45951, "7", 0)
BDFS = ("0000:18:00.0", "0000:2a:00.0", "0000:3b:00.0", "0000:5d:00.0")


def test_what_torchrun_says() -> None:
    assert torchrun(SAID) == FIFTH
    assert torchrun({**SAID, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == replace(FIFTH, served=False)


def test_other_launchers_are_no_torchrun() -> None:
    """`dieplace exec --per-device` sets RANK and WORLD_SIZE too, and its processes are runs of their own."""
    assert torchrun({key: value for key, value in SAID.items() if not key.startswith("TORCHELASTIC")}) is None
    assert torchrun({"TORCHELASTIC_RUN_ID": ""}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR", "GROUP_RANK"])
@pytest.mark.parametrize("text", ["", "-1", "x", "1e3"])
def test_half_a_launch_is_refused(name: str, text: str) -> None:
    if name == "MASTER_ADDR" and text:
        return
    with pytest.raises(UsageError, match=name):
        torchrun({**SAID, name: text})
    with pytest.raises(UsageError, match="8 of 8"):
        torchrun({**SAID, "RANK": "8"})


class _Nvidia:
    name = "nvidia"

    def snapshot(self, *, links: bool, ask_cuda: bool) -> Machine:
        assert ask_cuda is False  # a driver that was started looks at CUDA_VISIBLE_DEVICES never again
        cards = tuple(Card(f"gpu{i}", b, "H200", 1, None, 132, 1, None, 1, uuid=f"GPU-{i}") for i, b in enumerate(BDFS))
        devices = tuple(
            Device(f"gpu{i}/p0", f"gpu{i}", 0, b, None, 132, 1, f"gpu{i}/mem0", True, True) for i, b in enumerate(BDFS)
        )
        return Machine("live", "nvidia", cards, devices, (), (), stamp=("boot", None))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Four NVIDIA GPUs, and a record of what would be bound."""
    carried: list[Any] = []

    def carry_out(binding: Any, **_: Any) -> bind.Bound:
        carried.append(binding)
        return bind.Bound((0,), None, (), ("set_mempolicy: EPERM",))

    monkeypatch.setattr(sys.modules["dieplace.discover"], "open_backend", lambda *_, **__: _Nvidia())
    monkeypatch.setattr(bind, "carry_out", carry_out)
    monkeypatch.setattr(rank_cards.os, "environ", {})
    return carried


def _experiment(cards: int = 1, switches: Any = None) -> Experiment:
    run: Any = lambda *_: iter(())  # noqa: E731
    return Experiment("made-up", "", {}, run, lambda _: None, switches=switches, cards_a_rank={"nvidia": cards})


def _launched(local: int, of: int) -> Launched:
    return Launched(local, of, local, of, 0, "here", 1, "id", 0)


def _each(ranks: int, cards: int = 1) -> tuple[list[rank_cards.Mine], list[str]]:
    """What every rank takes, each in a fresh process's environment, and what it sees from then on."""
    found, seen = [], []
    for rank in range(ranks):
        rank_cards.os.environ.clear()
        found.append(rank_cards.take(_launched(rank, ranks), "nvidia", None, _experiment(cards)))
        seen.append(rank_cards.os.environ["CUDA_VISIBLE_DEVICES"])
    return found, seen


def test_each_rank_sees_its_own_card_alone(bound: list[Any]) -> None:
    found, seen = _each(4)
    assert [mine.cards for mine in found] == [("gpu0",), ("gpu1",), ("gpu2",), ("gpu3",)]
    assert [mine.bdfs[0] for mine in found] == list(BDFS)
    assert seen == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert len({mine.identity for mine in found}) == 4 and len(bound) == 4
    assert found[0].notes == ("set_mempolicy: EPERM",)


def test_where_the_far_memory_is_another_gpu_a_rank_takes_two(bound: list[Any]) -> None:
    found, seen = _each(2, cards=2)
    assert [mine.cards for mine in found] == [("gpu0", "gpu1"), ("gpu2", "gpu3")]
    assert seen == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    rank_cards.os.environ.clear()
    with pytest.raises(Unsupported, match=r"4 ranks were started .* takes 2, and this host has 4 cards") as raised:
        rank_cards.take(_launched(3, 4), "nvidia", None, _experiment(2))
    assert raised.value.hint == "torchrun --nproc-per-node 2"


def test_more_ranks_than_cards_are_refused(bound: list[Any]) -> None:
    with pytest.raises(Unsupported, match="5 ranks were started on this host"):
        rank_cards.take(_launched(4, 5), "nvidia", None, _experiment())
    with pytest.raises(Unsupported, match="9 ranks were started on this host, and an emulated node has 8 cards"):
        rank_cards.take(_launched(0, 9), "emulated", None, _experiment())
    assert rank_cards.take(_launched(3, 4), "emulated", None, _experiment()).cards == ("gpu3",)


def test_one_visible_card_was_chosen_by_somebody_else(bound: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun ... dieplace exec --by-rank -- dieplace bench run`: rank 2 sees one card, and takes it."""
    monkeypatch.setattr(visibility, "_visible_to_cuda", lambda _: [BDFS[2]])
    rank_cards.os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-2"
    assert rank_cards.take(_launched(2, 4), "nvidia", None, _experiment()).cards == ("gpu2",)


def test_two_ranks_on_one_card_are_refused() -> None:
    def mine(card: str, host: str = "boot") -> Mapping[str, Any]:
        return rank_cards.Mine((card,), ("0000:18:00.0",), ("H200",), (f"{host}/{card}",)).to_json()

    assert clash({0: mine("gpu0"), 1: mine("gpu1"), 2: mine("gpu0", "other host")}) is None
    told = clash({0: mine("gpu1"), 1: mine("gpu0"), 3: mine("gpu0")})
    assert told is not None and told["message"] == "ranks 1 and 3 are both on gpu0 (0000:18:00.0)"
    assert as_error(told).exit_code == 2 and as_data(as_error(told)) == told
    assert clash({0: rank_cards.Mine(("gpu0",)).to_json(), 1: rank_cards.Mine(("gpu0",)).to_json()}) is None  # emulated


def test_a_node_wide_switch_is_not_for_ranks(bound: list[Any]) -> None:
    for name, backend, switches in (("mode", "nvidia", lambda *_: ()), ("first-light", "emulated", None)):
        with pytest.raises(Unsupported, match="about a whole node and its modes"):
            rank_cards.take(_launched(0, 2), backend, None, replace(_experiment(switches=switches), name=name))


class _Notices(dict[str, Any]):
    def seen(self, key: str) -> Any:
        return self.get(key)


def test_the_lowest_rank_alive_leads_and_silence_is_judged_by_ones_own_clock() -> None:
    board, limits = _Notices(), Limits(life_s=20, first_s=120, ending_life_s=4)
    mine = Others(board, 2, 4, limits, now=0.0)  # type: ignore[arg-type]
    board["rank/0"] = {"beat": 1, "ended": False}
    assert mine.leader(1.0) == 0 and mine.leader(20.0) == 0
    assert mine.leader(22.0) == 1  # never heard of, and may still be starting
    assert mine.leader(121.0) == 2
    board["rank/0"] = {"beat": 2, "ended": True}
    assert mine.leader(122.0) == 0  # it lives: slow, not gone
    assert mine.settled(0, 500.0) and mine.gone(0, 500.0)  # what it measured stays
    mine.ending_at = 122.0
    assert mine.leader(125.0) == 0 and mine.leader(127.0) == 2


def test_how_a_rank_ended_in_plain_data() -> None:
    gone = RankEnd(3, why="no sign of life").to_json()
    assert gone["state"] == "lost" and gone["exit_code"] is None and gone["exit_code_why"] == "no sign of life"
    assert RankEnd(1, 0, None, 86, "why").to_json()["exit_code"] == 86


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match=f"MASTER_PORT is '{port}'"):
        torchrun({**SAID, "MASTER_PORT": port})
