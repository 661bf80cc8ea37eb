"""Model shapes to a `Workload`: stages of one decode step, bytes by role, hand-offs; no torch needed.

The hand-offs are the six of a layer that the public figures name: Q/K/V, attention release, O merge, top-k, W13 to W2
inside the experts, layer boundary; attention release and boundary poll a separate release word, the others pack value
and tag. Biases, norms, sinks and the embedding row are not counted, as in the published byte tables: under 0.2 % of a
token. `dieplace.kernels.decode` counts them all when it runs a step.
"""

from __future__ import annotations

from collections.abc import Callable

from dieplace.errors import UsageError
from dieplace.kernels.models import ModelShape, model_shape, weight_bytes
from dieplace.workload import Handoff, Operand, Stage, Workload

FLAG_LINE_BYTES = 128  # one sync flag has a cache line of its own: vector L1 and L2 lines are 128 B on gfx950
BF16_BYTES = 2
MAX_TOKENS = 8  # verify rounds of speculative decoding


def stages(
    shape: ModelShape | str,
    *,
    precision: str = "released",
    context_tokens: int = 1024,
    tokens: int = 1,
    shards: int = 1,
    distinct_experts: float | None = None,
) -> Workload:
    """The decode step of `shape` as stages in order, each with distinct bytes over all shards and its repeats.

    `context_tokens` is the number of positions that a token attends to, itself included. With several `tokens` (a
    verify round) the union of experts is read once: `distinct_experts` of them per layer, by default the expectation
    for independent uniform routing. Raises UsageError for a precision, a count or a split that the shape does not have.
    """
    shape = model_shape(shape) if isinstance(shape, str) else shape
    formats = shape.formats(precision)
    _check_counts(shape, context_tokens, tokens, shards)
    distinct = _distinct_experts(shape, tokens, distinct_experts)

    def weights(name: str, count: int, format_class: str, times: float = 1) -> Operand:
        return Operand(f"{name}_weight", "weights", round(weight_bytes(count, formats[format_class]) * times))

    feed_forward = _experts(shape, tokens, distinct, weights) if shape.experts else _mlp(shape, tokens, weights)
    all_stages = (
        _qkv(shape, tokens, weights),
        *_attention(shape, tokens, context_tokens),
        _o_proj(shape, tokens, weights),
        *feed_forward,
        _boundary(shape, tokens),
        Stage("head", (weights("head", shape.vocabulary * shape.hidden, "head"),)),
    )
    return Workload(
        name=f"{shape.name} {precision}",
        stages=all_stages,
        shards=shards,
        tokens=tokens,
        context_tokens=context_tokens,
        layers=shape.layers,
        notes=_notes(shape, tokens, distinct_experts, distinct),
    )


_Weights = Callable[..., Operand]


def _qkv(shape: ModelShape, tokens: int, weights: _Weights) -> Stage:
    payload = tokens * shape.qkv_rows * BF16_BYTES
    operands = (weights("qkv", shape.qkv_rows * shape.hidden, "qkv"), *_packed("qkv", payload))
    return Stage("qkv", operands, Handoff("qkv", "packed", payload), repeats=shape.layers)


def _attention(shape: ModelShape, tokens: int, context_tokens: int) -> list[Stage]:
    """Full layers, then window layers; a verify round of T tokens reads T - 1 positions more than one token does."""
    payload = tokens * shape.attention_width * BF16_BYTES
    kinds = [("attention", context_tokens, shape.layers - shape.window_layers)]
    kinds.append(("attention_window", min(context_tokens, shape.window), shape.window_layers))
    result = []
    for name, positions, repeats in kinds:
        if not repeats:
            continue
        read = shape.kv_bytes_per_position() * (positions + tokens - 1)
        operands = (Operand("kv", "kv_cache", read), *_released("attention", payload))
        result.append(Stage(name, operands, Handoff("attention", "release", payload), repeats=repeats))
    return result


def _o_proj(shape: ModelShape, tokens: int, weights: _Weights) -> Stage:
    payload = tokens * shape.hidden * BF16_BYTES
    operands = (weights("o_proj", shape.attention_width * shape.hidden, "o_proj"), *_packed("merge", payload))
    return Stage("o_proj", operands, Handoff("merge", "packed", payload), repeats=shape.layers)


def _experts(shape: ModelShape, tokens: int, distinct: float, weights: _Weights) -> list[Stage]:
    chosen = tokens * shape.experts_per_token * 8  # an id and a weight, 4 bytes each
    rows = tokens * shape.experts_per_token * shape.intermediate * BF16_BYTES
    router = (weights("router", shape.experts * shape.hidden, "router"), *_packed("top_k", chosen))
    experts = (weights("experts", shape.expert_weights, "experts", distinct), *_packed("w13_w2", rows))
    return [
        Stage("router", router, Handoff("top_k", "packed", chosen), repeats=shape.layers),
        Stage("experts", experts, Handoff("w13_w2", "packed", rows), repeats=shape.layers),
    ]


def _mlp(shape: ModelShape, tokens: int, weights: _Weights) -> list[Stage]:
    payload = tokens * shape.intermediate * BF16_BYTES
    operands = (weights("mlp", shape.expert_weights, "mlp"), *_packed("w13_w2", payload))
    return [Stage("mlp", operands, Handoff("w13_w2", "packed", payload), repeats=shape.layers)]


def _boundary(shape: ModelShape, tokens: int) -> Stage:
    payload = tokens * shape.hidden * BF16_BYTES
    return Stage(
        "boundary", _released("hidden", payload), Handoff("boundary", "release", payload), repeats=shape.layers
    )


def _packed(name: str, payload: int) -> tuple[Operand, ...]:
    """The words of a packed hand-off: 32 bits of value and 32 of tag, so twice the payload."""
    return (Operand(f"{name}_words", "sync_flag", 2 * payload, written=True),)


def _released(name: str, payload: int) -> tuple[Operand, ...]:
    """A plain payload, and the release word with a line of its own."""
    return (
        Operand(f"{name}_out", "activation", payload, written=True),
        Operand(f"{name}_flag", "sync_flag", FLAG_LINE_BYTES, written=True),
    )


def _distinct_experts(shape: ModelShape, tokens: int, given: float | None) -> float:
    if not shape.experts:
        return 0
    top = min(shape.experts, tokens * shape.experts_per_token)
    if given is None:
        missed = (1 - shape.experts_per_token / shape.experts) ** tokens
        return shape.experts_per_token if tokens == 1 else shape.experts * (1 - missed)
    if not shape.experts_per_token <= given <= top:
        raise UsageError(
            f"distinct_experts {given} is not within {shape.experts_per_token}..{top} for {tokens} token(s)"
        )
    return given


def _check_counts(shape: ModelShape, context_tokens: int, tokens: int, shards: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise UsageError(f"tokens is {tokens}; a decode step takes 1 to {MAX_TOKENS}")
    if context_tokens < tokens:
        raise UsageError(f"context_tokens is {context_tokens}; it counts the {tokens} current token(s) too")
    if shards not in (1, 2):
        raise UsageError(f"shards is {shards}; a step runs on one device (1) or as tensor-parallel halves (2)")
    if shape.kv_heads % shards or shape.intermediate % (32 * shards):
        raise UsageError(f"{shape.name} does not split into {shards} shards: {shape.kv_heads} KV heads")


def _notes(shape: ModelShape, tokens: int, given: float | None, distinct: float) -> tuple[str, ...]:
    notes = [
        f"bytes from the shape of {shape.name} ({shape.source})",
        "biases, norms, sinks and the embedding row are not counted",
    ]
    if shape.experts and tokens > 1:
        how = "as given" if given is not None else "expected for independent uniform routing"
        notes.append(f"{distinct:.2f} distinct experts per layer for {tokens} tokens, {how}")
    return tuple(notes)
