"""The other modelled experiments on private nodes: what is moved, what the three terms say, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from dieplace.clock import arm, parameter_set, time_token
from dieplace.errors import Unsupported, UsageError
from dieplace.experiments import modelled, registry, report, summary
from dieplace.experiments.registry import Options
from dieplace.kernels.step import stages
from dieplace.machine import Machine
from dieplace.memory import Buffer
from dieplace.run import Run

SMALL = Options(model="qwen3-0.6b", precision="mxfp4")


def run(name: str, options: Options = SMALL) -> list[Run]:
    steps: list[str] = []
    experiment = registry.get(name)
    runs = list(experiment.run("emulated", options, steps.append))
    assert len(steps) == experiment.steps  # what the progress bar promises
    assert [r.block for r in runs] == list(experiment.blocks)
    for one in runs:
        assert one.origin == "modelled" and Run.from_json(one.to_json()) == one
    return runs


def dies(found: Run, name: str, role: str) -> tuple[int, int]:
    residency = found.point(name).residency_before
    assert residency is not None
    by_die = residency["bytes_by_role_device_die"][role]["gpu0/p0"]
    return by_die.get("0", 0), by_die.get("1", 0)


def test_placement_is_the_full_factorial() -> None:
    (found,) = run("placement")
    assert len({p.arm for p in found.points}) == 8 and found.points[0].arm == "local"
    for point in found.points:
        moved = set(point.factors["roles_moved"])
        for role in ("weights", "kv_cache", "sync_flag"):
            near, far = dies(found, point.arm, role)
            assert (near == 0) == (role in moved) and (far == 0) == (role not in moved)
    token = {p.arm: p.quantities["token_us"].value or 0.0 for p in found.points}
    # stages are serial in the model, so each role's cost adds up exactly
    parts = sum(token[f"{what} far"] - token["local"] for what in ("weights", "kv", "flags"))
    assert token["weights+kv+flags far"] - token["local"] == pytest.approx(parts, rel=1e-9)
    assert "What the placement adds" in report.page([found])


def test_context_grows_the_cache_and_its_penalty() -> None:
    (found,) = run("context")
    sizes = [dies(found, f"{k}K local", "kv_cache")[0] for k in (1, 8, 32)]
    assert [size // sizes[0] for size in sizes] == [1, 8, 32]  # no window layers in this model
    kv = [found.point(f"{k}K kv far").quantities["penalty"].value or 0.0 for k in (1, 8, 32)]
    weights = [found.point(f"{k}K swapped").quantities["penalty"].value or 0.0 for k in (1, 8, 32)]
    assert kv == sorted(kv) and weights == sorted(weights, reverse=True)


@pytest.mark.slow
def test_verify_reads_the_union_of_experts_once() -> None:
    local, spx = run("verify", Options())
    read = [
        local.point(f"{n} token{'s' * (n > 1)} local").factors["bytes_per_token_by_role"]["weights"] for n in (1, 2, 4)
    ]
    # independent uniform routing over 128 experts, 4 each: 4, 7.875 and 15.27 of 13,219,200 B in 36 layers
    assert (read[1] - read[0]) / (36 * 13_219_200) == pytest.approx(3.875, abs=1e-6)
    assert (read[2] - read[0]) / (36 * 13_219_200) == pytest.approx(128 * (1 - (31 / 32) ** 4) - 4, abs=1e-4)
    assert [p.arm for p in spx.points] == ["1 token local", "2 tokens local", "4 tokens local", "8 tokens local"]
    gains = [p.quantities["penalty"].value or 0.0 for p in spx.points]
    assert gains == sorted(gains, reverse=True)


def test_cache_type_separates_type_from_distance() -> None:
    (found,) = run("cache-type", Options())
    nc = found.point("local-nc")
    assert dies(found, "local-nc", "weights")[1] == 0  # nothing was moved
    assert nc.quantities["distance_us"].value == nc.quantities["link_us"].value == 0.0
    assert nc.quantities["token_us"].by_set == {
        name: time_token(stages("gpt-oss-120b", precision="mxfp4"), arm("local-nc"), parameter_set(name)).token_us
        for name in ("A", "B", "C")
    }


def test_counted_bytes_reach_the_clock_and_name_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are stood in for: 1 MB of weights in each of two stages, nothing else, so the time is known."""
    from dieplace.kernels import counts

    made = counts.Counts({"qkv": {"weights": 10**6}, "experts": {"weights": 10**6}}, ("abc",), 1)
    monkeypatch.setattr(counts, "counts_of", lambda *words, **options: made)
    options = Options(bytes_from="counted")
    (found,) = run("cache-type", options)
    read = {s["stage"]: s["stream_us"] for s in found.point("local").stages}
    assert read["qkv"] == read["experts"] == pytest.approx(1 / 6.346)
    assert sum(read.values()) == pytest.approx(2 / 6.346)
    assert (
        found.code_hash == found.conditions["code_hash"] and found.code_hash is not None and len(found.code_hash) == 12
    )
    assert any("counted by running" in note for note in found.notes)
    assert dies(found, "local", "weights") == (31_457_082_240, 0)  # half of the whole model, whatever was counted
    with pytest.raises(UsageError, match="shapes, counted"):
        next(registry.get("placement").run("emulated", Options(bytes_from="air"), lambda text: None))


def test_counting_tells_each_stage_and_refuses_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not to be counted is refused before anything is counted or placed."""
    from dieplace.kernels import counts

    made = counts.Counts({"qkv": {"weights": 10**6}}, ("abc",), 1)

    def counting(*words: object, progress: Callable[[str], None], **options: object) -> counts.Counts:
        progress("counting the head")
        return made

    monkeypatch.setattr(counts, "counts_of", counting)
    told: list[str] = []
    list(registry.get("cache-type").run("emulated", replace(SMALL, bytes_from="counted"), told.append))
    assert told[0] == "counting the head" and told.count("counting the head") == 1
    with pytest.raises(UsageError, match="one token only"):
        next(registry.get("verify").run("emulated", replace(SMALL, bytes_from="counted"), told.append))
    assert told.count("counting the head") == 1


def test_what_equal_points_need_is_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds differ in cache rows and hand-off words alone: their weights are not allocated, nor hashed, again."""
    made: list[tuple[str, str]] = []
    allocate = modelled._allocate

    def counted(machine: Machine, key: tuple[str, str, str, int]) -> Buffer:
        made.append((key[1], key[0]))
        return allocate(machine, key)

    monkeypatch.setattr(modelled, "_allocate", counted)
    list(registry.get("verify").run("emulated", SMALL, lambda text: None))
    weights = [name for role, name in made if role == "weights"]
    # 28 layers of Q/K/V, O and MLP, and the head: for two devices in DPX/NPS2, then for one in SPX/NPS1
    assert len(weights) == (28 * 3 + 1) * 3
    assert len([name for role, name in made if role == "kv_cache"]) == 28 * 3 * 4


@pytest.mark.parametrize("name", ["context", "placement", "verify"])
def test_each_arm_has_a_column_of_its_own_that_sums_to_its_time(name: str) -> None:
    """The stage table against the times themselves: an arm that shared a column would double it."""
    runs = run(name)
    rows = summary.stage_rows(runs)
    keys = [summary.column_key(one, point) for one, point in summary.points(runs)]
    assert len(set(keys)) == len(keys) and all(re.fullmatch("[a-z][a-z0-9_]*", key.lower()) for key in keys)
    for key, (_, point) in zip(keys, summary.points(runs), strict=True):
        assert rows[-1][key] == pytest.approx(point.quantities["token_us"].value, rel=1e-9)
    with pytest.raises(UsageError, match="arm 'local' is named twice"):
        Options(arms=("local", "swapped", "local"))


def test_a_sweep_says_every_context_and_number_of_tokens() -> None:
    """Neither the page nor the conditions may call a run of three contexts a run of one."""
    (found,) = run("context")
    assert found.conditions["workload"] == ("qwen3-0.6b mxfp4, context 1024/8192/32768, 2 shards, bytes from shapes")
    title = "context, modelled: qwen3-0.6b mxfp4, 1,024, 8,192 and 32,768 tokens of context"
    assert f"<title>{title}</title>" in report.page([found])
    with pytest.raises(UsageError, match="does not take --context"):
        next(registry.get("context").run("emulated", replace(SMALL, context_tokens=8192), lambda text: None))
    rounds = run("verify")[0]
    assert ", rounds of 1/2/4/8 tokens, " in rounds.conditions["workload"]


MODELLED = [n for n in registry.experiment_names() if registry.get(n).cannot("emulated") is None]


@pytest.mark.parametrize("name", [n for n in MODELLED if n not in ("weight-swap", "flags", "first-light")])
def test_refusals(name: str) -> None:
    experiment = registry.get(name)
    assert experiment.summary and experiment.factors
    with pytest.raises(UsageError, match="fixed arms"):
        next(experiment.run("emulated", Options(arms=("local",)), lambda text: None))
    with pytest.raises(UsageError, match="no 1-shard form"):
        next(experiment.run("emulated", Options(shards=1), lambda text: None))
    measured = {"placement", "context", "verify"}
    for backend in ("amd", "cpu") if name in measured else ("amd", "nvidia", "cpu"):
        assert experiment.cannot(backend)
        with pytest.raises(Unsupported, match=f"cannot run on the {backend} backend"):
            next(experiment.run(backend, Options(), lambda text: None))
