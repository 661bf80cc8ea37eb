"""The contracts of norms, rotation with cache append, and decode attention."""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.registry import IN_PLACE, REQUIRED, Op, Tolerance

NORM_OPS = (
    Op(
        "rmsnorm",
        "residual add and RMSNorm; the weight multiplies before (GPT-OSS) or after (Llama, Qwen3) the cast to bf16",
        (
            p.given("x", p.BF16, "T", "H"),
            p.given("residual", p.BF16, "T", "H", optional=True),
            p.weight("weight", p.OUT, "H"),
            p.output("out", p.BF16, "T", "H"),
            p.output("residual_out", p.BF16, "T", "H", optional=True),
        ),
        "dieplace.kernels.reference_norm:rmsnorm",
        p.NORM,
        attrs={"eps": REQUIRED, "order": REQUIRED},
        rules=(p.TOKENS,),
    ),
    Op(
        "qk_norm",
        "RMSNorm of each query and key head, weight after the cast (Qwen3); values untouched",
        (
            p.output("qkv", p.BF16, "T", "(HQ+2*HKV)*D", use=IN_PLACE),
            p.weight("q_weight", p.BF16, "D"),
            p.weight("k_weight", p.BF16, "D"),
        ),
        "dieplace.kernels.reference_norm:qk_norm",
        p.NORM,
        attrs={"q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED, "eps": REQUIRED},
        sizes={"q_heads": "HQ", "kv_heads": "HKV", "head_dim": "D"},
        rules=(p.TOKENS, p.GROUPS),
    ),
    Op(
        "rope_kv_append",
        "rotate the first 2*HALF dimensions of Q and K by tables, append K, V at flat cache slots; slot -1 is skipped",
        (
            p.given("qkv", p.BF16, "T", "(HQ+2*HKV)*D"),
            p.given("cos", p.F32, "P", "HALF"),
            p.given("sin", p.F32, "P", "HALF"),
            p.given("positions", p.I32, "T"),
            p.given("slots", p.I32, "T"),
            p.output("q_out", p.BF16, "T", "HQ", "D"),
            p.kv("k_cache", "S", "HKV", "D", use=IN_PLACE),
            p.kv("v_cache", "S", "HKV", "D", use=IN_PLACE),
        ),
        "dieplace.kernels.reference_norm:rope_kv_append",
        Tolerance(p.ONE_ROUNDING, 2.0**-22, "two fp32 products and one sum"),
        attrs={"q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED},
        sizes={"q_heads": "HQ", "kv_heads": "HKV", "head_dim": "D"},
        rules=(p.TOKENS, p.GROUPS, ("2*HALF <= D", "the rotated part lies within a head")),
        traffic="dieplace.kernels.traffic:rope_kv_append",
    ),
)

ATTENTION_OPS = (
    Op(
        "attention_split",
        "decode attention of one sequence over splits of its paged cache; row t sees max(0, len - window) <= j < len",
        (
            p.given("q", p.BF16, "T", "HQ", "D"),
            p.kv("k_cache", "PAGES", "PAGE", "HKV", "D"),
            p.kv("v_cache", "PAGES", "PAGE", "HKV", "D"),
            p.given("page_table", p.I32, "M"),
            p.given("lengths", p.I32, "T"),
            p.output("partial", p.F32, "T", "HQ", "SPLITS", "D"),
            p.output("partial_lse", p.F32, "T", "HQ", "SPLITS"),
        ),
        "dieplace.kernels.reference_attention:attention_split",
        p.EXPONENT,
        attrs={"scale": REQUIRED, "window": 0, "splits": REQUIRED},
        sizes={"splits": "SPLITS"},
        rules=(p.TOKENS, p.GROUPS),
        traffic="dieplace.kernels.traffic:attention_split",
    ),
    Op(
        "attention_merge",
        "merge the splits; a sink enlarges the denominator once and has no value; nothing seen gives zeros",
        (
            p.given("partial", p.F32, "T", "HQ", "SPLITS", "D"),
            p.given("partial_lse", p.F32, "T", "HQ", "SPLITS"),
            p.weight("sinks", p.OUT, "HQ", optional=True),
            p.output("out", p.BF16, "T", "HQ", "D"),
            p.output("lse", p.F32, "T", "HQ"),
        ),
        "dieplace.kernels.reference_attention:attention_merge",
        p.EXPONENT,
        rules=(p.TOKENS,),
    ),
)
