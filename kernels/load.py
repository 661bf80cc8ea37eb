"""The weights of a decode step: their shapes per shard, their names in a checkpoint, and how they are filled.

Tensor-parallel halves: query and KV heads, MLP rows and vocabulary rows divide over the shards; the output and down
projections divide their columns and give partial sums. Norms and router are on every shard, biases of partial sums on
the first only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dieplace.errors import Unsupported, UsageError
from dieplace.kernels.models.config import ModelConfig
from dieplace.kernels.placement import Placement
from dieplace.kernels.quantize import BLOCK, mxfp4_quantize
from dieplace.loading import LoadReport, Target, load_safetensors, locate
from dieplace.tensorfile import TensorFile

_ALL = slice(None)
BF16, U8 = torch.bfloat16, torch.uint8
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """A slice of a checkpoint tensor and the rows of a weight that it fills (None: all)."""

    checkpoint: str
    source: tuple[slice, ...]
    rows: slice | None = None


@dataclass(frozen=True)
class Weight:
    """One weight of one shard: shape, dtype and the checkpoint slices it is made of.

    `quantised` blocks are made from bf16 slices while loading, together with the scales of the same name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    quantised: bool = False


@dataclass
class Weights:
    """All weights by shard and name; `layers.3.qkv` and so on. Fill with `load` or `randomise`."""

    config: ModelConfig
    placement: Placement
    formats: Mapping[str, str]
    tied: bool
    plans: list[dict[str, Weight]] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_split(self.config, self.placement.shards)
        for shard in range(self.placement.shards):
            plan = {w.name: w for w in plan_weights(self.config, self.formats, shard, self.placement.shards, self.tied)}
            self.plans.append(plan)
            self.tensors.append(
                {n: self.placement.allocate(shard, "weights", w.shape, w.dtype, n) for n, w in plan.items()}
            )

    def get(self, shard: int, name: str) -> Tensor | None:
        """A weight, or None where the model or the shard has none (a bias, a sink)."""
        if name == "head" and self.tied:
            name = "embed"
        return self.tensors[shard].get(name)

    def checkpoint_targets(self) -> dict[str, list[Target]]:
        """What `load_safetensors` fills, by checkpoint name."""
        targets: dict[str, list[Target]] = {}
        for plan, tensors in zip(self.plans, self.tensors, strict=True):
            for name, weight in plan.items():
                for part in weight.parts:
                    rows = tensors[name] if part.rows is None else tensors[name][part.rows]
                    target = Target(rows, part.source, e8m0=name.endswith("scales"))
                    if weight.quantised:
                        scales = tensors[name.removesuffix("blocks") + "scales"]
                        target = _quantiser(rows, scales if part.rows is None else scales[part.rows], part.source)
                    targets.setdefault(part.checkpoint, []).append(target)
        return targets

    def load(self, files: Any) -> LoadReport:
        """Stream a checkpoint straight into the placed tensors; dense MXFP4 matrices are quantised on the way."""
        refuse_dequantised(self.config, locate(files)[0])
        return load_safetensors(self, files)

    def randomise(self, seed: int) -> None:
        """Weights of a plausible size; the same for every number of shards only in distribution, not in value."""
        for shard, tensors in enumerate(self.tensors):
            for index, (name, tensor) in enumerate(tensors.items()):
                generator = torch.Generator().manual_seed(seed * 1_000_003 + shard * 10_007 + index)
                host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
                _fill(name, host, generator)
                if host is not tensor:
                    tensor.copy_(host)


def head_is_tied(config: ModelConfig, files: Any) -> bool:
    """Whether the head is the embedding, decided from the files first and the configuration second.

    A head in the file that differs from the embedding is used although the configuration says tied (one warning); a
    missing head means tied although the configuration says untied (one warning).
    """
    found, _ = locate(files)
    if HEAD not in found:
        if not config.tied_head:
            warnings.warn(
                f"the configuration says untied, but no file has {HEAD}: the embedding serves as head",
                RuntimeWarning,
                stacklevel=2,
            )
        return True
    if not config.tied_head:
        return False
    if EMBEDDING not in found:
        raise UsageError(f"no file has {EMBEDDING}", hint="a shard is missing, or the files are of another model")
    with TensorFile(found[HEAD]) as head, TensorFile(found[EMBEDDING]) as embedding:
        equal = _equal_in_chunks(head.view(HEAD), embedding.view(EMBEDDING))
    if not equal:
        warnings.warn(
            f"the configuration says tied, but {HEAD} differs from {EMBEDDING}: the file's head is used",
            RuntimeWarning,
            stacklevel=2,
        )
    return equal


def refuse_dequantised(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Unsupported for GPT-OSS files with plain expert matrices: those are (in, out), square for `down_proj`."""
    plain = "model.layers.0.mlp.experts.down_proj"
    if config.experts and plain in found and f"{plain}_blocks" not in found:
        raise Unsupported(
            f"{plain} is stored dequantised, as (in, out); the kernels read MXFP4 blocks, (out, in)",
            hint="use the released checkpoint with _blocks and _scales",
        )


def check_split(config: ModelConfig, shards: int) -> None:
    """UsageError where heads, MLP rows or vocabulary do not divide into whole shards."""
    unit = BLOCK * shards if config.experts else 8 * shards
    for what, count, by in (
        ("KV heads", config.kv_heads, shards),
        ("intermediate size", config.intermediate, unit),
        ("vocabulary", config.vocabulary, shards),
    ):
        if count % by:
            raise UsageError(f"{what} {count} is no multiple of {by}, which {shards} shard(s) need")


def plan_weights(
    config: ModelConfig, formats: Mapping[str, str], shard: int, shards: int, tied: bool
) -> Iterator[Weight]:
    """Every weight of one shard, in the order a token meets them."""
    rows = _share(config.vocabulary, shard, shards)
    norm = torch.float32 if config.family == "gpt_oss" else BF16
    yield Weight("embed", (_size(rows), config.hidden), BF16, (Part(EMBEDDING, (rows,)),))
    for layer in range(config.layers):
        yield from _layer(config, formats, layer, shard, shards, norm)
    yield Weight("norm", (config.hidden,), norm, (Part("model.norm.weight", ()),))
    if not tied:
        yield from _matrix("head", (_size(rows), config.hidden), (Part(HEAD, (rows,)),), formats["head"])


def _layer(
    c: ModelConfig, formats: Mapping[str, str], layer: int, shard: int, shards: int, norm: torch.dtype
) -> Iterator[Weight]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    q, kv = (_share(n * c.head_dim, shard, shards) for n in (c.q_heads, c.kv_heads))
    attention = f"{theirs}.self_attn"
    yield Weight(f"{ours}.input_norm", (c.hidden,), norm, (Part(f"{theirs}.input_layernorm.weight", ()),))
    yield from _matrix(
        f"{ours}.qkv", (_size(q) + 2 * _size(kv), c.hidden), _fused(attention, "weight", q, kv), formats["qkv"]
    )
    if c.attention_bias:
        parts = _fused(attention, "bias", q, kv)
        yield Weight(f"{ours}.qkv.bias", (_size(q) + 2 * _size(kv),), BF16, parts)
    if c.qk_norm:
        for side in ("q_norm", "k_norm"):
            yield Weight(f"{ours}.{side}", (c.head_dim,), BF16, (Part(f"{attention}.{side}.weight", ()),))
    if c.sinks:
        heads = _share(c.q_heads, shard, shards)
        yield Weight(f"{ours}.sinks", (_size(heads),), BF16, (Part(f"{attention}.sinks", (heads,)),))
    o_part = (Part(f"{attention}.o_proj.weight", (_ALL, q)),)
    yield from _matrix(f"{ours}.o_proj", (c.hidden, _size(q)), o_part, formats["o_proj"])
    if c.attention_bias and shard == 0:
        yield Weight(f"{ours}.o_proj.bias", (c.hidden,), BF16, (Part(f"{attention}.o_proj.bias", ()),))
    yield Weight(f"{ours}.post_norm", (c.hidden,), norm, (Part(f"{theirs}.post_attention_layernorm.weight", ()),))
    mlp = _share(c.intermediate, shard, shards)
    yield from (_experts if c.experts else _mlp)(c, formats, ours, f"{theirs}.mlp", mlp, shard)


def _experts(
    c: ModelConfig, formats: Mapping[str, str], ours: str, theirs: str, rows: slice, shard: int
) -> Iterator[Weight]:
    e, h, i, x = c.experts, c.hidden, _size(rows), f"{theirs}.experts"
    both = slice(2 * rows.start, 2 * rows.stop)
    groups = slice(rows.start // BLOCK, rows.stop // BLOCK)
    yield Weight(f"{ours}.router", (e, h), BF16, (Part(f"{theirs}.router.weight", ()),))
    yield Weight(f"{ours}.router.bias", (e,), BF16, (Part(f"{theirs}.router.bias", ()),))
    up, down = f"{ours}.gate_up", f"{ours}.down"
    for suffix, tail, dtype in (("blocks", (BLOCK // 2,), U8), ("scales", (), U8)):
        source = (Part(f"{x}.gate_up_proj_{suffix}", (_ALL, both)),)
        yield Weight(f"{up}.{suffix}", (e, 2 * i, h // BLOCK, *tail), dtype, source)
        source = (Part(f"{x}.down_proj_{suffix}", (_ALL, _ALL, groups)),)
        yield Weight(f"{down}.{suffix}", (e, h, i // BLOCK, *tail), dtype, source)
    yield Weight(f"{up}.bias", (e, 2 * i), BF16, (Part(f"{x}.gate_up_proj_bias", (_ALL, both)),))
    if shard == 0:
        yield Weight(f"{down}.bias", (e, h), BF16, (Part(f"{x}.down_proj_bias", ()),))


def _mlp(
    c: ModelConfig, formats: Mapping[str, str], ours: str, theirs: str, rows: slice, shard: int
) -> Iterator[Weight]:
    for side in ("gate", "up"):
        part = (Part(f"{theirs}.{side}_proj.weight", (rows,)),)
        yield from _matrix(f"{ours}.{side}", (_size(rows), c.hidden), part, formats["mlp"])
    part = (Part(f"{theirs}.down_proj.weight", (_ALL, rows)),)
    yield from _matrix(f"{ours}.down", (c.hidden, _size(rows)), part, formats["mlp"])


def _matrix(name: str, shape: tuple[int, int], parts: tuple[Part, ...], weight_format: str) -> Iterator[Weight]:
    """A bf16 matrix under its own name, or MXFP4 as `name.blocks` and `name.scales`."""
    if weight_format == "bf16":
        yield Weight(name, shape, BF16, parts)
    elif weight_format == "mxfp4":
        groups = shape[1] // BLOCK
        if shape[1] % BLOCK:
            raise UsageError(f"{name}: {shape[1]} columns are not whole MXFP4 blocks of {BLOCK}")
        yield Weight(f"{name}.blocks", (shape[0], groups, BLOCK // 2), U8, parts, quantised=True)
        yield Weight(f"{name}.scales", (shape[0], groups), U8, ())
    else:
        raise Unsupported(f"{name}: no decode kernel reads {weight_format} weights", hint="bf16 or mxfp4")


def _quantiser(blocks: Tensor, scales: Tensor, source: tuple[slice, ...]) -> Target:
    """A target that quantises rows (out, in) by the rule `quantize.SCALE_RULE`."""

    def write(start: int, rows: Tensor) -> None:
        made, exponents = mxfp4_quantize(rows)
        blocks[start : start + len(rows)].copy_(made)
        scales[start : start + len(rows)].copy_(exponents)

    return Target(blocks, source, shape=(blocks.shape[0], blocks.shape[1] * BLOCK), write=write)


def _fused(attention: str, what: str, q: slice, kv: slice) -> tuple[Part, ...]:
    """Rows of Q, then K, then V."""
    parts, start = [], 0
    for side, rows in (("q", q), ("k", kv), ("v", kv)):
        stop = start + _size(rows)
        parts.append(Part(f"{attention}.{side}_proj.{what}", (rows,), slice(start, stop)))
        start = stop
    return tuple(parts)


def _share(count: int, shard: int, shards: int) -> slice:
    return slice(count // shards * shard, count // shards * (shard + 1))


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if name.endswith(".blocks"):
        tensor.random_(0, 256, generator=generator)
    elif name.endswith(".scales"):
        # Uniform codes have a root mean square of 2.9, so this scale makes rows of about unit gain.
        exponent = round(math.log2(1 / (2.9 * math.sqrt(tensor.shape[-1] * BLOCK))))
        tensor.fill_(127 + exponent)
    elif "norm" in name:
        tensor.normal_(1.0, 0.1, generator=generator)
    else:
        deviation = 1 / math.sqrt(tensor.shape[-1]) if tensor.ndim > 1 and not name.endswith("bias") else 0.1
        tensor.normal_(0.0, 1.0 if name == "embed" else deviation, generator=generator)


def _equal_in_chunks(first: Tensor, second: Tensor, rows: int = 4096) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    starts = range(0, first.shape[0], rows)
    return all(torch.equal(first[s : s + rows], second[s : s + rows]) for s in starts)
