"""Bytes that the kernels' own ISA reads at gpt-oss-120b's real sizes, counted on the emulator, against arithmetic."""

import json
from pathlib import Path

import pytest

from dieplace.clock import arm, parameter_set, time_token
from dieplace.errors import Unsupported
from dieplace.kernels import counts
from dieplace.kernels.models import model_shape
from dieplace.kernels.step import stages
from dieplace.workload import Workload

H, HQ, HKV, D, E, K, WIDTH, V = 2880, 64, 8, 64, 128, 4, 2880, 201088


def read(workload: Workload) -> dict[str, dict[str, int]]:
    """Weight and KV bytes of each stage."""
    return {
        s.name: {role: sum(o.nbytes for o in s.operands if o.role == role) for role in counts.ROLES_READ}
        for s in workload.stages
    }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dieplace" / "counts"


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "size"), [("released", (2, 1)), ("mxfp4", (17, 32))])
def test_weight_bytes_of_a_token_to_the_byte(precision: str, size: tuple[int, int], cache: Path) -> None:
    """One layer of each kind and the whole head; biases (bf16), norms (fp32) and sinks (bf16) are read too."""

    def dense(weights: int) -> int:
        return weights * size[0] // size[1]

    qkv_rows = (HQ + 2 * HKV) * D
    found = read(counts.counted_stages("gpt-oss-120b", precision=precision, context_tokens=1024))
    assert found == {
        "qkv": {"weights": dense(qkv_rows * H) + 2 * qkv_rows, "kv_cache": 0},
        "attention": {"weights": 2 * HQ, "kv_cache": 2 * HKV * D * 2 * 1024},
        "attention_window": {"weights": 2 * HQ, "kv_cache": 2 * HKV * D * 2 * 128},
        "o_proj": {"weights": dense(HQ * D * H) + 2 * H, "kv_cache": 0},
        "router": {"weights": 2 * E * H + 2 * E, "kv_cache": 0},
        "experts": {"weights": K * (3 * WIDTH * H * 17 // 32 + 2 * (2 * WIDTH + H)), "kv_cache": 0},
        "boundary": {"weights": 2 * 4 * H, "kv_cache": 0},
        "head": {"weights": dense(V * H) + 4 * H, "kv_cache": 0},
    }


@pytest.mark.slow
def test_two_shards_and_a_dense_model(cache: Path) -> None:
    """Qwen3-0.6B as halves: matrices divide, norms are on both; its tied head is counted once."""
    found = counts.counted_stages("qwen3-0.6b", precision="mxfp4", context_tokens=300, shards=2)
    shape = stages("qwen3-0.6b", precision="mxfp4", context_tokens=300, shards=2)
    small = {"qkv": 2 * 2 * 2 * 128, "boundary": 2 * 2 * 2 * 1024, "head": 2 * 2 * 1024}
    for name, wanted in read(shape).items():
        assert read(found)[name] == {**wanted, "weights": wanted["weights"] + small.get(name, 0)}


@pytest.mark.slow
def test_counts_are_kept_by_kernel_code_and_feed_the_clock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = counts.counted_stages("qwen3-0.6b", precision="mxfp4", context_tokens=64)
    assert len(list(cache.glob("*.json"))) == 1

    def counted_again(*arguments: object) -> counts.Counts:
        raise AssertionError("the cache was not used")

    monkeypatch.setattr(counts, "_count", counted_again)
    assert counts.counted_stages("qwen3-0.6b", precision="mxfp4", context_tokens=64) == first
    monkeypatch.setattr(counts, "_VERSION", counts._VERSION + 1)  # stands for any change of the sources
    with pytest.raises(AssertionError, match="cache was not used"):
        counts.counted_stages("qwen3-0.6b", precision="mxfp4", context_tokens=64)
    assert "counted on the emulator, code " in first.bytes_from
    by_shape = stages("qwen3-0.6b", precision="mxfp4", context_tokens=64)
    counted, shaped = (time_token(w, arm("local"), parameter_set("C")).token_us for w in (first, by_shape))
    assert shaped < counted < 1.01 * shaped


def test_formats_without_a_kernel_are_refused(cache: Path) -> None:
    with pytest.raises(Unsupported, match="no decode kernel reads fp8 weights"):
        counts.counted_stages("gpt-oss-120b", precision="fp8")
    assert not cache.exists()


def test_a_damaged_cache_is_counted_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counts.Counts({"qkv": {"weights": 7}}, ("a",), 1)
    calls: list[str] = []

    def count(*arguments: object) -> counts.Counts:
        calls.append("counted")
        return made

    monkeypatch.setattr(counts, "_count", count)
    shape = model_shape("qwen3-0.6b")
    assert counts.counts_of(shape, "mxfp4", 64, 1) == made
    path = next(cache.glob("*.json"))
    assert counts.counts_of(shape, "mxfp4", 64, 1) == made and calls == ["counted"]
    for damage in ("{", "[]", json.dumps({"version": 1})):
        path.write_text(damage)
        assert counts.counts_of(shape, "mxfp4", 64, 1) == made
    assert len(calls) == 4


def test_a_cache_that_cannot_be_written_costs_a_warning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are used all the same, and once counted they serve the rest of the process."""
    cache.parent.parent.joinpath("dieplace").write_text("a file where the folder would be")
    calls: list[str] = []

    def count(*arguments: object) -> counts.Counts:
        calls.append("counted")
        return counts.Counts({"qkv": {"weights": 7}}, ("a",), 1)

    monkeypatch.setattr(counts, "_count", count)
    shape = model_shape("qwen3-0.6b")
    with pytest.warns(RuntimeWarning, match="counts are not kept for the next time"):
        first = counts.counts_of(shape, "mxfp4", 64, 1)
    assert counts.counts_of(shape, "mxfp4", 64, 1) == first and calls == ["counted"]


def test_counts_depend_on_every_source_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the interpreter, not only of a kernel, must not be answered from old counts."""
    shape = model_shape("qwen3-0.6b")
    before = counts._key(shape, "mxfp4", 64, 1)
    read: set[str] = set()
    plain = Path.read_bytes

    def changed(path: Path) -> bytes:
        read.add(path.name)
        return plain(path) + (b"#" if path.name == "hierarchy.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert counts._key(shape, "mxfp4", 64, 1) != before
    assert {"gemv.py", "layer.py", "decode.py", "flydsl.py", "traffic.py", "execution.py"} <= read
