"""Contracts of launches that do several ops' work: every operand of the ops they stand for, and the same tolerances.

Small launches cost about 2 us each on an H200 whatever they do, an eighth of the byte floor of a gpt-oss-120b layer.
A fused op writes what its parts would hand on, so that each part is checked by its own contract (`fused_parts`).
"""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.registry import IN_PLACE, REQUIRED, Op

_ONE_TOKEN = ("T == 1", "a later token would read rows that the same launch appends")
_ARRIVED = "programs that are done, counted in the launch: 0 before it and after it"

FUSED_OPS = (
    Op(
        "rope_attention",
        f"rope_kv_append, attention_split and attention_merge of one token in one launch; arrived: {_ARRIVED}",
        (
            p.given("qkv", p.BF16, "T", "(HQ+2*HKV)*D"),
            p.given("cos", p.F32, "P", "HALF"),
            p.given("sin", p.F32, "P", "HALF"),
            p.given("positions", p.I32, "T"),
            p.given("slots", p.I32, "T"),
            p.given("page_table", p.I32, "M"),
            p.given("lengths", p.I32, "T"),
            p.weight("sinks", p.OUT, "HQ", optional=True),
            p.output("q_out", p.BF16, "T", "HQ", "D"),
            p.kv("k_cache", "PAGES", "PAGE", "HKV", "D", use=IN_PLACE),
            p.kv("v_cache", "PAGES", "PAGE", "HKV", "D", use=IN_PLACE),
            p.output("partial", p.F32, "T", "HQ", "SPLITS", "D"),
            p.output("partial_lse", p.F32, "T", "HQ", "SPLITS"),
            p.output("arrived", p.I32, "HKV", use=IN_PLACE),
            p.output("out", p.BF16, "T", "HQ", "D"),
            p.output("lse", p.F32, "T", "HQ"),
        ),
        "dieplace.kernels.fused:rope_attention",
        p.EXPONENT,
        attrs={
            "q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED, "scale": REQUIRED, "window": 0,
            "splits": REQUIRED,
        },
        sizes={"q_heads": "HQ", "kv_heads": "HKV", "head_dim": "D", "splits": "SPLITS"},
        rules=(_ONE_TOKEN, p.GROUPS, ("2*HALF <= D", "the rotated part lies within a head")),
        traffic="dieplace.kernels.fused:rope_attention_traffic",
    ),
    Op(
        "norm_router",
        f"rmsnorm, gemv_bf16 of its result and router_topk of one token in one launch; arrived: {_ARRIVED}",
        (
            p.given("x", p.BF16, "T", "H"),
            p.given("residual", p.BF16, "T", "H", optional=True),
            p.weight("norm", p.OUT, "H"),
            p.weight("router", p.BF16, "E", "H"),
            p.weight("bias", p.BF16, "E", optional=True),
            p.output("normed", p.BF16, "T", "H"),
            p.output("residual_out", p.BF16, "T", "H", optional=True),
            p.output("logits", p.F32, "T", "E"),
            p.output("ids", p.I32, "T", "k"),
            p.output("weights", p.F32, "T", "k"),
            p.output("nonfinite", p.I32, "1"),
            p.output("arrived", p.I32, "1", use=IN_PLACE),
        ),
        "dieplace.kernels.fused:norm_router",
        p.EXPONENT,
        attrs={"eps": REQUIRED, "order": REQUIRED},
        rules=(
            ("T == 1", "every program normalises the token itself"),
            ("E <= 128", "one program ranks up to 128 experts"),
            ("k <= E", "ids are distinct"),
        ),
    ),
)  # fmt: skip
