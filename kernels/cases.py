"""Inputs for checking kernels: odd sizes, edges of windows and pages, adversarial values; at least 20 per op.

Sizes are small, so that an emulated check of every op takes minutes; the odd ones (2880 is no multiple of 256, 45
groups of 32, 33 rows) are those of real models and of reported faults. Values come from a seeded generator per case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice, product

import torch
from torch import Tensor

from dieplace.kernels import cases_attention, cases_fused, cases_handoff
from dieplace.kernels.cases_values import BF16, F32, VALUES, Case, poisoned, values
from dieplace.kernels.quantize import mxfp8_quantize


def cases(op: str, limit: int | None = None) -> list[Case]:
    """The cases of an op, at most `limit`, always the same ones."""
    return list(islice(_MAKERS[op](), limit))


def _bytes(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _mx(rows: tuple[int, ...], k: int, seed: int, kind: str) -> tuple[Tensor, Tensor]:
    """Blocks and scales; `edges` has scale bytes 0 and 254 too, `nan` one byte 255."""
    groups = k // 32
    scales = _bytes((*rows, groups), seed + 1, 117, 130)
    if kind == "edges":
        scales.flatten()[0::3] = 0
        scales.flatten()[1::7] = 200
    if kind == "nan":
        scales.flatten()[groups // 2] = 255
    return _bytes((*rows, groups, 16), seed), scales


_GEMV = [
    (1, 33, 64),
    (1, 128, 2880),
    (3, 17, 2880),
    (8, 5, 1440),
    (2, 64, 4096),
    (1, 1, 32),
    (4, 100, 96),
    (5, 40, 1024),
]


def _gemv(weight: Callable[[int, int, int, str], dict[str, Tensor]], kinds: tuple[str, ...]) -> Iterator[Case]:
    plan = zip(_GEMV * 3, cycle((True, False, True)), cycle((BF16, F32)), cycle(VALUES), cycle(kinds), strict=False)
    for seed, ((t, n, k), biased, dtype, kind, stored) in enumerate(plan):
        yield Case(
            f"T={t} N={n} K={k} {kind} {stored} bias={biased} out={dtype}",
            {
                "x": values(kind, (t, k), seed),
                **weight(n, k, seed, stored),
                "bias": values("normal", (n,), seed + 3) if biased else None,
                "out": poisoned((t, n), dtype),
            },
            {},
        )


def _mx_operands(n: int, k: int, seed: int, stored: str) -> dict[str, Tensor]:
    blocks, scales = _mx((n,), k, seed, stored)
    return {"blocks": blocks, "scales": scales}


def _gemv_bf16() -> Iterator[Case]:
    return _gemv(lambda n, k, seed, stored: {"weight": values("normal", (n, k), seed + 1)}, ("bf16",))


def _gemv_mxfp4() -> Iterator[Case]:
    return _gemv(_mx_operands, ("plain", "edges", "nan", "plain", "plain"))


def _gemv_mxfp4_mxfp8() -> Iterator[Case]:
    for case in _gemv(_mx_operands, ("plain", "edges", "plain")):
        x = case.operands["x"]
        assert x is not None
        # 2^40 times scales of 2^73 leaves fp32: the format's own range is tested by `edges` with ordinary activations.
        codes, scales = mxfp8_quantize(x.float().clamp(-1e4, 1e4))
        yield Case(case.label, {**case.operands, "x": codes, "x_scales": scales}, case.attrs)


def _quantize_mxfp8() -> Iterator[Case]:
    sizes = [(1, 32), (8, 2880), (3, 96), (2, 4096)]
    for seed, ((t, k), kind) in enumerate(product(sizes, (*VALUES, "nonfinite"))):
        x = values("normal" if kind == "nonfinite" else kind, (t, k), seed)
        if kind == "nonfinite":
            x[0, 0], x[-1, -1] = torch.inf, torch.nan
        outputs = {"out": poisoned((t, k), torch.float8_e4m3fn), "scales": poisoned((t, k // 32), torch.uint8)}
        yield Case(f"T={t} K={k} {kind}", {"x": x, **outputs}, {})


def _router_topk() -> Iterator[Case]:
    kinds = ("normal", "equal", "nan", "one nan", "large", "inf")
    for seed, ((t, e, k), kind) in enumerate(product([(1, 128, 4), (8, 128, 4), (3, 32, 8), (2, 5, 5)], kinds)):
        logits = values(kind if kind in VALUES else "normal", (t, e), seed, F32)
        if kind == "nan":
            logits[:] = torch.nan
        if kind == "one nan":
            logits[0, 3] = torch.nan
        if kind == "inf":
            logits[:, 1::2] = -torch.inf
        shapes = {"ids": ((t, k), torch.int32), "weights": ((t, k), F32), "nonfinite": ((1,), torch.int32)}
        yield Case(f"T={t} E={e} k={k} {kind}", {"logits": logits, **{n: poisoned(*s) for n, s in shapes.items()}}, {})


_MOE = [(1, 64, 32, 8, 4), (2, 96, 64, 8, 4), (1, 2880, 32, 4, 4), (8, 64, 32, 8, 2), (3, 32, 96, 128, 4)]


def _ids(t: int, k: int, experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(t)]).to(torch.int32)


def _expert_gate_up() -> Iterator[Case]:
    for seed, ((t, h, i, e, k), kind) in enumerate(product(_MOE, ("normal", "large", "equal", "zero"))):
        blocks, scales = _mx((e, 2 * i), h, seed, "plain")
        yield Case(
            f"T={t} H={h} I={i} E={e} k={k} {kind}",
            {
                "x": values(kind, (t, h), seed),
                "ids": _ids(t, k, e, seed),
                "blocks": blocks,
                "scales": scales,
                "bias": values("normal", (e, 2 * i), seed + 2),
                "out": poisoned((t, k, i)),
            },
            {"alpha": 1.702, "limit": 7.0},
        )


def _expert_down() -> Iterator[Case]:
    for seed, ((t, i, h, e, k), kind) in enumerate(product(_MOE, ("normal", "large", "equal", "alternating"))):
        blocks, scales = _mx((e, h), i, seed, "plain")
        yield Case(
            f"T={t} H={h} I={i} E={e} k={k} {kind}",
            {
                "x": values(kind, (t, k, i), seed),
                "ids": _ids(t, k, e, seed),
                "weights": torch.softmax(values("normal", (t, k), seed + 3, F32), -1),
                "blocks": blocks,
                "scales": scales,
                "bias": values("normal", (e, h), seed + 2) if seed % 3 else None,
                "out": poisoned((t, h), BF16 if seed % 2 else F32),
            },
            {},
        )


def _mlp(stored: str) -> Iterator[Case]:
    for seed, ((t, i, h), kind) in enumerate(zip(_GEMV * 3, cycle(VALUES), strict=False)):
        x = values("normal" if kind == "large" else kind, (t, h), seed)
        weights: dict[str, Tensor | None] = {}
        for n, side in enumerate(("gate", "up")):
            if stored == "bf16":
                weights[side] = values("normal", (i, h), seed + 1 + n)
            else:
                weights[f"{side}_blocks"], weights[f"{side}_scales"] = _mx((i,), h, seed + 1 + n, "plain")
        yield Case(f"T={t} I={i} H={h} {kind}", {"x": x, **weights, "out": poisoned((t, i))}, {})


def _head_argmax() -> Iterator[Case]:
    for seed, ((t, v, h), kind) in enumerate(zip(_GEMV * 3, cycle(VALUES), strict=False)):
        weight = values("normal", (v, h), seed + 1)
        weight[v // 2 :] = weight[: v - v // 2].clone()  # ties between halves: the lower index must win
        shapes = {"logits": ((t, v), F32), "value": ((t,), F32), "token": ((t,), torch.int32)}
        outputs = {name: poisoned(*shape) for name, shape in shapes.items()}
        attrs = {"vocab": v if seed % 2 else max(1, v - 3), "offset": 0 if seed % 3 else 100544}
        yield Case(f"T={t} V={v} H={h} {kind}", {"x": values(kind, (t, h), seed), "weight": weight, **outputs}, attrs)


_MAKERS: dict[str, Callable[[], Iterator[Case]]] = {
    "rmsnorm": cases_attention.rmsnorm,
    "qk_norm": cases_attention.qk_norm,
    "rope_kv_append": cases_attention.rope,
    "attention_split": cases_attention.attention_split,
    "attention_merge": cases_attention.attention_merge,
    "gemv_bf16": _gemv_bf16,
    "gemv_mxfp4": _gemv_mxfp4,
    "quantize_mxfp8": _quantize_mxfp8,
    "gemv_mxfp4_mxfp8": _gemv_mxfp4_mxfp8,
    "router_topk": _router_topk,
    "expert_gate_up": _expert_gate_up,
    "expert_down": _expert_down,
    "mlp_gate_up": lambda: _mlp("bf16"),
    "mlp_gate_up_mxfp4": lambda: _mlp("mxfp4"),
    "rope_attention": cases_fused.rope_attention,
    "norm_router": cases_fused.norm_router,
    "head_argmax": _head_argmax,
    "handoff_put": cases_handoff.handoff_put,
    "handoff_sum": cases_handoff.handoff_sum,
    "flag_set": cases_handoff.flag_set,
    "flag_wait": cases_handoff.flag_wait,
    "epoch_next": cases_handoff.epoch_next,
    "flag_visibility": cases_handoff.flag_visibility,
    "probe_stream": cases_handoff.probe_stream,
    "probe_chase": cases_handoff.probe_chase,
    "probe_ping_pong": cases_handoff.probe_ping_pong,
}
