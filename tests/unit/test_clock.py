"""The clock against published check values: `mi355x-model`, section 3, to the digits printed there."""

from __future__ import annotations

import itertools
import math

import pytest

from dieplace.clock import Placement, arm, over_sets, parameter_set, time_token
from dieplace.errors import UsageError
from dieplace.kernels.step import stages
from dieplace.workload import Operand, Stage, Workload

SPX = Placement("spx-nps1", interleaved=True)

# set: token DPX/NPS2, SPX/NPS1, swapped (us) | extra per layer, data share | Q/K/V, top-k, merge, attention, experts
CHECK = {
    "C": (722.3, 770.0, 827.4, 1.3270, 0.8493, (0.1874, 0.1085, 0.0873, 0.1071, 0.0209)),
    "A": (679.3, 731.4, 869.5, 1.4485, 0.8719, (0.2610, 0.1401, 0.1105, 0.1162, 0.0250)),
    "B": (649.7, 700.3, 831.7, 1.3952, 0.8614, (0.2493, 0.1694, 0.1085, 0.1085, 0.0279)),
}
# the older table of the same fits, two digits: swapped and SPX ratios
RATIOS = {"A": (1.077, 1.280), "B": (1.078, 1.280), "C": (1.066, 1.146)}


@pytest.fixture(scope="module")
def step() -> Workload:
    return stages("gpt-oss-120b", precision="mxfp4", context_tokens=1024)


@pytest.mark.parametrize("name", sorted(CHECK))
def test_check_values_to_their_printed_digits(step: Workload, name: str) -> None:
    local_us, spx_us, swapped_us, extra_us, share, gains = CHECK[name]
    p = parameter_set(name)
    spx = time_token(step, SPX, p)
    assert round(time_token(step, arm("local"), p).token_us, 1) == local_us
    assert round(spx.token_us, 1) == spx_us
    assert round(time_token(step, arm("swapped"), p).token_us, 1) == swapped_us
    assert round(spx.extra_per_layer_us, 4) == extra_us
    assert spx.data_share is not None and round(spx.data_share, 4) == share
    found = spx.gains()
    assert tuple(round(found[k], 4) for k in ("qkv", "top_k", "merge", "attention", "experts")) == gains


@pytest.mark.parametrize("name", sorted(RATIOS))
def test_ratios_of_the_fit_table(step: Workload, name: str) -> None:
    p = parameter_set(name)
    spx, swapped = RATIOS[name]
    local = time_token(step, arm("local"), p).token_us
    # the table rounds SPX/DPX of A from the unrounded fit; one in the last digit is its own rounding
    assert time_token(step, SPX, p).token_us / local == pytest.approx(spx, abs=0.0006)
    assert time_token(step, arm("swapped"), p).token_us / local == pytest.approx(swapped, abs=0.0006)


def test_streaming_floor_of_the_reference(step: Workload) -> None:
    """B 6.346 TB/s, eta 0: 439 us of the token is streaming, the head 48.5 us, experts 8.33 us a layer."""
    token = time_token(step, arm("local"), parameter_set("A"))
    by_name = {s.name: s for s in token.stages}
    assert round(sum(s.stream_us * s.repeats for s in token.stages)) == 439
    assert round(by_name["head"].stream_us, 1) == 48.5
    assert round(by_name["experts"].stream_us, 2) == 8.33
    assert round(by_name["qkv"].stream_us, 2) == 1.23


@pytest.mark.parametrize(
    ("arm_name", "context", "low", "high"),
    [
        ("swapped", 8192, 0.255, 0.265),  # 26 %
        ("swapped", 32768, 0.215, 0.225),  # 22 %
        ("swapped-experts", 1024, 0.15, 0.19),
        ("swapped-dense", 1024, 0.055, 0.085),  # 6 to 8 %
        ("swapped-kv_cache", 1024, 0.005, 0.015),  # about 1 %
        ("swapped-kv_cache", 8192, 0.026, 0.0325),
        ("swapped-kv_cache", 32768, 0.085, 0.095),  # about 9 %
        ("swapped-sync_flag", 1024, 0.047, 0.060),
    ],
)
def test_fitted_sets_fall_in_the_published_prediction_ranges(
    arm_name: str, context: int, low: float, high: float
) -> None:
    work = stages("gpt-oss-120b", precision="mxfp4", context_tokens=context)
    for name in ("A", "B"):
        assert low <= time_token(work, arm(arm_name), parameter_set(name)).penalty <= high


def test_dense_32b_is_predicted_as_the_reference_says() -> None:
    """No router, three times the streaming a hand-off: SPX +2.4 to +4.6 %, swapped +31 to +36 %."""
    work = stages("qwen3-32b", precision="mxfp4", context_tokens=1024)
    for name in ("A", "B"):
        p = parameter_set(name)
        assert 0.024 <= time_token(work, SPX, p).penalty <= 0.046
        assert 0.31 <= time_token(work, arm("swapped"), p).penalty <= 0.36


def test_polling_waves_on_a_far_line_cost_half_a_millisecond(step: Workload) -> None:
    """100 waves, 27 ns each, five hand-offs, 36 layers: 0.486 ms, all of it cache type and none of it distance."""
    flags = Placement("flags", peer_share={"sync_flag": 1.0}, polling_waves=100)
    p = parameter_set("A")
    few = time_token(step, arm("swapped-sync_flag"), p).extra
    many = time_token(step, flags, p).extra
    assert many.cache_type_us == pytest.approx(100 * 0.027 * 5 * 36)
    assert few.cache_type_us == 0.0
    assert many.distance_us == few.distance_us


def test_the_three_terms_are_separate_and_add_up(step: Workload) -> None:
    p = parameter_set("A")
    swapped = time_token(step, arm("swapped"), p)
    extra = swapped.extra
    assert swapped.token_us - swapped.local_us == pytest.approx(
        extra.distance_us + extra.link_us + extra.cache_type_us, rel=1e-12
    )
    assert extra.distance_us == pytest.approx(36 * 5 * 0.098)
    # local but cached as if remote: 4.2 % of the weight streams (2.7454 GB at 6.346 TB/s) and nothing else
    nc = time_token(step, arm("local-nc"), p).extra
    assert (nc.distance_us, nc.link_us, nc.wait_us) == (0.0, 0.0, 0.0)
    assert nc.cache_type_us == pytest.approx(2745.3888 / 6.346 * 0.042, rel=1e-9)


def test_interleave_meets_both_ends_and_has_a_threshold(step: Workload) -> None:
    p = parameter_set("A")
    times = [time_token(step, arm(f"interleave-{k}/8"), p) for k in range(9)]
    assert times[0].token_us == time_token(step, arm("local"), p).token_us
    assert times[8].token_us == pytest.approx(time_token(step, arm("swapped"), p).token_us, rel=1e-12)
    assert all(a.token_us < b.token_us for a, b in itertools.pairwise(times))
    # a link of 2.3635 TB/s a direction carries up to 0.745 of 6.346 TB/s: five eighths do not meet it, six do
    assert [t.extra.link_us > 0 for t in times] == [False] * 6 + [True] * 3


def test_dpx_nps1_is_not_told_apart_from_spx_nps1(step: Workload) -> None:
    """The model has no crossing between two devices: same memory, same time. A report must say so."""
    dpx = Placement("dpx-nps1", interleaved=True)
    for name in ("A", "B", "C"):
        assert (
            time_token(step, dpx, parameter_set(name)).token_us == time_token(step, SPX, parameter_set(name)).token_us
        )


def test_the_value_is_of_set_a_and_the_range_covers_the_sets(step: Workload) -> None:
    penalty = over_sets(step, arm("swapped"), lambda t: t.penalty)
    assert penalty.low == penalty.by_set["C"]
    assert penalty.value == penalty.by_set["A"]
    token = over_sets(step, arm("swapped"), lambda t: t.token_us)
    assert math.isclose(token.value, 869.5, rel_tol=1e-4)
    assert (token.low, token.high) == (min(token.by_set.values()), max(token.by_set.values()))


def test_every_set_tells_label_source_and_ranges() -> None:
    for name in ("A", "B", "C"):
        p = parameter_set(name)
        assert p.label and p.source and p.fitted_to
        for knob, (low, high) in p.ranges.items():
            assert low <= getattr(p, knob) <= high, (name, knob)
    assert parameter_set("C").fitted_to == "nothing"


def test_unknown_words_are_told(step: Workload) -> None:
    for wrong in ("interleave-9/8", "sideways", ""):
        with pytest.raises(UsageError, match="interleave-k/8"):
            arm(wrong)
    with pytest.raises(UsageError, match="A, B, C"):
        parameter_set("D")
    with pytest.raises(UsageError, match="between 0 and 1"):
        Placement("x", peer_share={"weights": 1.5})
    with pytest.raises(UsageError, match="weights, kv_cache"):
        Placement("x", peer_share={"weight": 0.5})
    odd = Workload("odd", (Stage("fft", (Operand("a", "weights", 10),)),))
    with pytest.raises(UsageError, match="no rule for stage 'fft'"):
        time_token(odd, arm("local"), parameter_set("A"))


@pytest.mark.parametrize(
    ("tokens", "experts", "time_ratio", "spx_ratio"),
    [(1, None, 1.0, 1.078), (2, 7.0, 1.34, 1.060), (4, 11.7, 1.88, 1.045)],
)
def test_verify_rounds_follow_the_reference(tokens: int, experts: float, time_ratio: float, spx_ratio: float) -> None:
    """Published distinct experts a layer, 7 and 11.7, with set B: 1.34 and 1.88 steps; the SPX penalty falls."""
    p = parameter_set("B")
    one = time_token(stages("gpt-oss-120b", precision="mxfp4"), arm("local"), p).token_us
    work = stages("gpt-oss-120b", precision="mxfp4", tokens=tokens, distinct_experts=experts)
    assert round(time_token(work, arm("local"), p).token_us / one, 2) == time_ratio
    assert round(1 + time_token(work, SPX, p).penalty, 3) == spx_ratio
