"""A decode step on references: tiny models as `transformers` decodes them, with one shard and with two."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import MAKERS, TOLERANCE, build, dense, follow, gpt_oss, greedy

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.decode import DENSE_MXFP4, DecodeModel, Settings, open_model
from dieplace.kernels.load import head_is_tied
from dieplace.kernels.models.config import shape_of
from dieplace.kernels.quantize import mxfp4_dequantize, mxfp4_quantize
from dieplace.kernels.step import stages


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("family", MAKERS)
def test_sixteen_tokens_as_transformers_decodes_them(family: str, shards: int, tmp_path: Path) -> None:
    theirs, config = MAKERS[family](tmp_path)
    follow(theirs, build(tmp_path, config, shards, splits=3, page=4))


def test_the_tolerance_would_catch_a_wrong_window_sink_or_rotation(tmp_path: Path) -> None:
    """Each fault alone pushes some step out of tolerance."""
    from dataclasses import replace

    theirs, config = gpt_oss(tmp_path)
    sequence, wanted = greedy(theirs, first=5)
    faults = {
        "window one token wide": replace(config, window=9),
        "no window": replace(config, layer_types=("full_attention",) * 2),
        "no sinks": replace(config, sinks=False),
        "limit": replace(config, limit=0.5),
        "YaRN forgotten": replace(config, ropes=(replace(config.ropes[0], kind="default"),) * 2),
    }
    for fault, wrong in faults.items():
        ours = DecodeModel(wrong, settings=Settings(capacity=64))
        ours.weights.load(tmp_path)
        worst = max(
            float((ours.step([t]).logits[0] - row).abs().max() / row.abs().max())
            for t, row in zip(sequence, wanted, strict=False)
        )
        assert worst > TOLERANCE, fault


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_pages_splits_and_verify_rounds_change_nothing(family: str, tmp_path: Path) -> None:
    """Several tokens at once give the logits of one by one; a rewind drops the rejected ones."""
    _, config = MAKERS[family](tmp_path)
    tokens = [5, 17, 3, 80, 41, 2, 9, 33, 60, 7]
    one = build(tmp_path, config, 1, splits=1)
    single = torch.cat([one.step([t]).logits for t in tokens])
    many = build(tmp_path, config, 1, splits=7, page=4)
    many.page_tables[0].copy_(torch.randperm(16, generator=torch.Generator().manual_seed(0)).to(torch.int32))
    rounds = [many.step(tokens[:3]).logits, many.step(tokens[3:4]).logits, many.step([1, 2, 3]).logits]
    many.rewind(3)
    rounds[2] = many.step(tokens[4:]).logits
    assert (torch.cat(rounds) - single).abs().max() <= TOLERANCE / 2 * single.abs().max()
    assert many.position == 10


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_bytes_of_a_step_are_those_of_the_shapes(family: str, tmp_path: Path) -> None:
    """Weights of the matrices and KV rows per stage, counted while running, equal the model's shape."""
    _, config = MAKERS[family](tmp_path)
    formats = {"qkv": "bf16", "o_proj": "bf16", "head": "bf16"}
    formats |= {"router": "bf16", "experts": "mxfp4"} if config.experts else {"mlp": "bf16"}
    model = build(tmp_path, config, 1)
    for token in range(11):
        step = model.step([token])
    shape = stages(shape_of(config, "tiny", formats), context_tokens=11)
    matrices = {"weight", "blocks", "scales", "gate", "up"}
    for stage in shape.stages:
        if stage.name == "boundary":
            continue
        counted = next(s for s in step.workload.stages if s.name == stage.name)
        weights = sum(
            o.nbytes for o in counted.operands if o.role == "weights" and o.name.split(".")[1] in matrices
            and not o.name.startswith("rmsnorm")
        )  # fmt: skip
        kv = sum(o.nbytes for o in counted.operands if o.role == "kv_cache" and not o.written)
        assert weights == stage.repeats * sum(o.nbytes for o in stage.operands if o.role == "weights")
        assert kv == stage.repeats * sum(o.nbytes for o in stage.operands if o.role == "kv_cache")


def test_two_shards_read_each_matrix_once_between_them(tmp_path: Path) -> None:
    """Norms, router and their biases are on both shards; everything else divides."""
    _, config = gpt_oss(tmp_path)
    totals = {s: build(tmp_path, config, s).step([3]).ledger.bytes_by_role() for s in (1, 2)}
    replicated = (
        2 * (2 * 64 * 4 + (8 * 64 + 8) * 2) + 64 * 4 + 64 * 2
    )  # norms, router and bias; final norm; embedding row
    assert totals[2]["weights"] - totals[1]["weights"] == replicated
    assert totals[2]["kv_cache"] == totals[1]["kv_cache"]
    assert totals[1]["sync_flag"] == 0 < totals[2]["sync_flag"]


def test_dense_mxfp4_steps_run_from_a_seed(tmp_path: Path) -> None:
    _, config = gpt_oss(tmp_path)
    formats = {**DENSE_MXFP4}
    outputs = []
    for mxfp8 in (False, True):
        model = DecodeModel(config, formats=formats, settings=Settings(capacity=16, mxfp8=mxfp8))
        model.weights.randomise(seed=4)
        outputs.append(model.step([1]).logits)
    assert not torch.equal(*outputs) and torch.isfinite(outputs[0]).all()
    assert torch.nn.functional.cosine_similarity(*outputs).item() > 0.9


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    """Configuration, tied head and weights from one Hugging Face folder."""
    _, config = dense(tmp_path, "qwen3")
    opened, built = open_model(tmp_path, settings=Settings(capacity=64)), build(tmp_path, config, 1)
    assert opened.tied and opened.name == tmp_path.name
    assert torch.equal(opened.step([4]).logits, built.step([4]).logits)


@pytest.mark.parametrize("shards", [1, 2])
def test_dense_weights_are_quantised_while_loading(shards: int, tmp_path: Path) -> None:
    """Against a `transformers` model whose matrices were replaced by what MXFP4 holds of them."""
    theirs, config = dense(tmp_path, "qwen3")
    for name, parameter in theirs.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = mxfp4_dequantize(*mxfp4_quantize(parameter.data), torch.float32)
    model = DecodeModel(config, shards=shards, formats=DENSE_MXFP4, settings=Settings(capacity=16))
    report = model.weights.load(tmp_path)
    assert sum("quantised while loading" in note for note in report.notes) == 2 * 7
    for step, row in zip((5, 17, 3, 80), greedy_rows(theirs, [5, 17, 3, 80]), strict=True):
        found = model.step([step]).logits[0]
        assert float((found - row).abs().max()) <= TOLERANCE * float(row.abs().max())


def greedy_rows(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits after each of the given tokens."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("config_says", "file_has", "tied", "warned"),
    [
        (True, None, True, False),
        (True, "equal", True, False),
        (True, "other", False, True),
        (False, None, True, True),
        (False, "other", False, False),
    ],
)
def test_a_head_is_tied_by_its_file_first(
    config_says: bool, file_has: str | None, tied: bool, warned: bool, tmp_path: Path
) -> None:
    from dataclasses import replace

    from safetensors.torch import load_file

    _, config = dense(tmp_path, "qwen3")
    config = replace(config, tied_head=config_says)
    state = load_file(tmp_path / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    if file_has:
        state[HEAD] = embedding.clone() if file_has == "equal" else embedding.flip(0).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert head_is_tied(config, tmp_path) is tied
    assert len(seen) == warned
    model = DecodeModel(config, tied=tied, settings=Settings(capacity=8))
    model.weights.load(tmp_path)
    step = model.step([3])
    head = next(s for s in step.workload.stages if s.name == "head")
    assert sum(o.nbytes for o in head.operands if o.name == "head_argmax.weight") == embedding.numel() * 2
    allocated = sum(t.numel() for t in model.weights.tensors[0].values() if t.shape == embedding.shape)
    assert allocated == embedding.numel() * (1 if tied else 2)
    used = model.weights.get(0, "head")
    assert used is not None and torch.equal(used, state[HEAD] if file_has == "other" else embedding)


@pytest.mark.parametrize("backend", ["reference", pytest.param("flydsl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_reports_logits_that_are_not_finite(shards: int, backend: str, tmp_path: Path) -> None:
    """Case e13: NaN in the router is never chosen, a whole row of it is survived, and the step says how many."""
    _, config = gpt_oss(tmp_path)
    model = build(tmp_path, config, shards, backend=backend)
    assert (model.step([5]).nonfinite, model.step([6, 7]).nonfinite_logits) == (0, 0)
    for shard in range(shards):
        bias = model.weights.get(shard, "layers.1.router.bias")
        assert bias is not None
        bias[3] = torch.nan
    one = model.step([8, 9])
    assert one.nonfinite == 2 and torch.isfinite(one.logits).all()  # one expert of one layer, two tokens
    for shard in range(shards):
        bias = model.weights.get(shard, "layers.1.router.bias")
        assert bias is not None
        bias.fill_(torch.nan)
    whole = model.step([10])
    assert whole.nonfinite == config.experts and torch.isfinite(whole.logits).all()
    best = model.step([11]).tokens[0]
    model.rewind(1)
    shard, row = divmod(best, config.vocabulary // shards)
    head = model.weights.get(shard, "head")
    assert head is not None
    head[row] = torch.nan
    broken = model.step([11])
    assert broken.nonfinite_logits == 1 and broken.tokens != (best,)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    _, config = gpt_oss(tmp_path)
    with pytest.raises(UsageError, match="KV heads 1 is no multiple of 2"):
        DecodeModel(replace(config, q_heads=1, kv_heads=1), shards=2)
    model = build(tmp_path, config, 1)
    for tokens in ([], [0] * 9, [96], [-1]):
        with pytest.raises(UsageError):
            model.step(tokens)
    with pytest.raises(UsageError, match="do not fit a cache of 64"):
        for _ in range(9):
            model.step([0] * 8)
    with pytest.raises(UsageError, match="the model takes"):
        wider = DecodeModel(replace(config, hidden=96), settings=Settings(capacity=8))
        wider.weights.load(tmp_path)


def test_files_without_an_embedding_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    dense(tmp_path, "qwen3")
    state = load_file(tmp_path / "model.safetensors")
    embedding = state.pop("model.embed_tokens.weight")
    for files in ({**state, HEAD: embedding}, state):  # a head to compare it with, and none
        save_file(files, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=r"model\.embed_tokens\.weight"):
            open_model(tmp_path)


def test_dequantised_experts_are_refused(tmp_path: Path) -> None:
    """`down_proj` is square in GPT-OSS and stored (in, out) when dequantised: its shape cannot tell."""
    model, config = gpt_oss(tmp_path)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=r"stored dequantised, as \(in, out\)"):
        build(tmp_path, config, 1)


def test_scale_byte_255_is_refused_by_tensor_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, config = gpt_oss(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.experts\.down_proj_scales: 1 scale byte"):
        build(tmp_path, config, 2)
