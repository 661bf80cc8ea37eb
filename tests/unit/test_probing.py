"""What latency says of a buffer's home: levels that can be told apart, windows, bytes by domain, disagreement."""

from __future__ import annotations

import pytest

from dieplace.errors import Misplaced
from dieplace.probing import Levels, homes_of, window_of
from dieplace.residency import Item, Residency

MIB = 1 << 20
LEVELS = Levels(near=(600.0, 640.0, 700.0), far=(1400.0, 1500.0, 1700.0))


@pytest.mark.parametrize(
    ("nbytes", "window"),
    [(1, None), (4095, None), (4096, 4096), (8191, 4096), (8192, 8192), (2 * MIB - 1, MIB), (9 * MIB, 2 * MIB)],
)
def test_windows_are_powers_of_two_up_to_an_object(nbytes: int, window: int | None) -> None:
    assert window_of(nbytes) == window


def test_every_window_counts_and_the_rest_goes_with_the_last() -> None:
    cycles = [650, 1500, 650, 1600]
    assert homes_of(cycles, LEVELS, 9 * MIB, "near", "far") == {"near": 4 * MIB, "far": 5 * MIB}
    assert homes_of([1500], LEVELS, 5000, "near", "far") == {"far": 5000}
    split = [650] * 32 + [1500] * 32  # local for the first 64 MiB only
    assert homes_of(split, LEVELS, 128 * MIB, "near", "far") == {"near": 64 * MIB, "far": 64 * MIB}


@pytest.mark.parametrize(
    "levels",
    [
        Levels((600.0, 1300.0), (1400.0, 1500.0)),  # one near window beyond the limit
        Levels((600.0, 640.0), (620.0, 1500.0)),
        Levels((600.0,) * 8, (600.0,) * 8),
        Levels((), (1400.0,)),
        Levels((0.0,), (0.0,)),  # no clock
    ],
)
def test_levels_that_cannot_be_told_apart_say_why(levels: Levels) -> None:
    assert levels.why_not
    assert LEVELS.why_not is None


def test_a_disagreement_is_told_and_refused() -> None:
    item = Item("w", "weights", 4, ("a",), {"a": 4}, "probed", 0, "p0", None, "latency says a, the driver b")
    with pytest.raises(Misplaced, match="evidence disagrees: w: latency says a"):
        Residency((item,)).require_placed()
    assert item.to_json()["disagreement"] == "latency says a, the driver b"
