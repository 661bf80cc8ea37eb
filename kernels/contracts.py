"""The contracts of the decode ops, in the order of a decode step.

T is the number of tokens (1 to 8), H the hidden size, HQ and HKV the query and KV heads, D the head size. Weights are
(out, in) as the checkpoints store MXFP4 blocks and linear layers. Accumulation is fp32, one rounding at the end unless
the summary says otherwise.
"""

from __future__ import annotations

from dieplace.kernels.contracts_probe import PROBES
from dieplace.kernels.registry import IN_PLACE, OUTPUT, REQUIRED, Op, OperandSpec, Tolerance

_BF16, _F32, _I32, _U8 = ("bfloat16",), ("float32",), ("int32",), ("uint8",)
_OUT = ("bfloat16", "float32")
_SCALES = ("uint8", "float8_e8m0fnu")

_TOKENS = ("T <= 8", "a decode step takes 1 to 8 tokens")
_GROUPS = ("HQ % HKV == 0", "query heads share KV heads in equal groups")
_MX = ("K % 32 == 0", "MX blocks hold 32 values")

ONE_ROUNDING = 1.01  # unit roundoffs of the output type; the hundredth covers a tie broken by the accumulation error

LINEAR = Tolerance(
    ONE_ROUNDING, 2.0**-18, "fp32 sums: at most 64 roundings of 2^-24 in any path of a lane's sum and the wave's tree"
)
EXPONENT = Tolerance(
    ONE_ROUNDING, 2.0**-17, "fp32 sums and exp2, reciprocal within 2 ulp (ISA: v_exp_f32, v_rcp_f32 1 ulp)"
)
NORM = Tolerance(
    2.02, 2.0**-20, "an fp32 sum of squares can move the inner bf16 rounding of after_cast by one unit: two roundings"
)
EXACT = Tolerance(0.0, 0.0, "values are copied or chosen, not computed", floor=0.0)


def _w(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False) -> OperandSpec:
    return OperandSpec(name, "weights", dtypes, shape, optional=optional)


def _a(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False) -> OperandSpec:
    return OperandSpec(name, "activation", dtypes, shape, optional=optional)


def _out(name: str, dtypes: tuple[str, ...], *shape: str, optional: bool = False, use: str = OUTPUT) -> OperandSpec:
    return OperandSpec(name, "activation", dtypes, shape, use=use, optional=optional)


def _kv(name: str, *shape: str, use: str = "input") -> OperandSpec:
    return OperandSpec(name, "kv_cache", _BF16, shape, use=use)


def _flag(name: str, dtypes: tuple[str, ...], *shape: str, use: str = "input", strided: bool = False) -> OperandSpec:
    return OperandSpec(name, "sync_flag", dtypes, shape, use=use, strided=strided)


_NORM_OPS = (
    Op(
        "rmsnorm",
        "residual add and RMSNorm; the weight multiplies before (GPT-OSS) or after (Llama, Qwen3) the cast to bf16",
        (
            _a("x", _BF16, "T", "H"),
            _a("residual", _BF16, "T", "H", optional=True),
            _w("weight", _OUT, "H"),
            _out("out", _BF16, "T", "H"),
            _out("residual_out", _BF16, "T", "H", optional=True),
        ),
        "dieplace.kernels.reference_norm:rmsnorm",
        NORM,
        attrs={"eps": REQUIRED, "order": REQUIRED},
        rules=(_TOKENS,),
    ),
    Op(
        "qk_norm",
        "RMSNorm of each query and key head, weight after the cast (Qwen3); values untouched",
        (
            _out("qkv", _BF16, "T", "(HQ+2*HKV)*D", use=IN_PLACE),
            _w("q_weight", _BF16, "D"),
            _w("k_weight", _BF16, "D"),
        ),
        "dieplace.kernels.reference_norm:qk_norm",
        NORM,
        attrs={"q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED, "eps": REQUIRED},
        sizes={"q_heads": "HQ", "kv_heads": "HKV", "head_dim": "D"},
        rules=(_TOKENS, _GROUPS),
    ),
    Op(
        "rope_kv_append",
        "rotate the first 2*HALF dimensions of Q and K by tables, append K, V at flat cache slots; slot -1 is skipped",
        (
            _a("qkv", _BF16, "T", "(HQ+2*HKV)*D"),
            _a("cos", _F32, "P", "HALF"),
            _a("sin", _F32, "P", "HALF"),
            _a("positions", _I32, "T"),
            _a("slots", _I32, "T"),
            _out("q_out", _BF16, "T", "HQ", "D"),
            _kv("k_cache", "S", "HKV", "D", use=IN_PLACE),
            _kv("v_cache", "S", "HKV", "D", use=IN_PLACE),
        ),
        "dieplace.kernels.reference_norm:rope_kv_append",
        Tolerance(ONE_ROUNDING, 2.0**-22, "two fp32 products and one sum"),
        attrs={"q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED},
        sizes={"q_heads": "HQ", "kv_heads": "HKV", "head_dim": "D"},
        rules=(_TOKENS, _GROUPS, ("2*HALF <= D", "the rotated part lies within a head")),
        traffic="dieplace.kernels.traffic:rope_kv_append",
    ),
)

_ATTENTION_OPS = (
    Op(
        "attention_split",
        "decode attention of one sequence over splits of its paged cache; row t sees max(0, len - window) <= j < len",
        (
            _a("q", _BF16, "T", "HQ", "D"),
            _kv("k_cache", "PAGES", "PAGE", "HKV", "D"),
            _kv("v_cache", "PAGES", "PAGE", "HKV", "D"),
            _a("page_table", _I32, "M"),
            _a("lengths", _I32, "T"),
            _out("partial", _F32, "T", "HQ", "SPLITS", "D"),
            _out("partial_lse", _F32, "T", "HQ", "SPLITS"),
        ),
        "dieplace.kernels.reference_attention:attention_split",
        EXPONENT,
        attrs={"scale": REQUIRED, "window": 0, "splits": REQUIRED},
        sizes={"splits": "SPLITS"},
        rules=(_TOKENS, _GROUPS),
        traffic="dieplace.kernels.traffic:attention_split",
    ),
    Op(
        "attention_merge",
        "merge the splits; a sink enlarges the denominator once and has no value; nothing seen gives zeros",
        (
            _a("partial", _F32, "T", "HQ", "SPLITS", "D"),
            _a("partial_lse", _F32, "T", "HQ", "SPLITS"),
            _w("sinks", _OUT, "HQ", optional=True),
            _out("out", _BF16, "T", "HQ", "D"),
            _out("lse", _F32, "T", "HQ"),
        ),
        "dieplace.kernels.reference_attention:attention_merge",
        EXPONENT,
        rules=(_TOKENS,),
    ),
)

_BIAS = _w("bias", _BF16, "N", optional=True)
_MX_WEIGHT = (_w("blocks", _U8, "N", "K/32", "16"), _w("scales", _SCALES, "N", "K/32"), _BIAS)

_LINEAR_OPS = (
    Op(
        "gemv_bf16",
        "out = x W^T + bias with bf16 weights",
        (_a("x", _BF16, "T", "K"), _w("weight", _BF16, "N", "K"), _BIAS, _out("out", _OUT, "T", "N")),
        "dieplace.kernels.reference_linear:gemv_bf16",
        LINEAR,
        rules=(_TOKENS,),
    ),
    Op(
        "gemv_mxfp4",
        "out = x W^T + bias with MXFP4 weights, activations bf16",
        (_a("x", _BF16, "T", "K"), *_MX_WEIGHT, _out("out", _OUT, "T", "N")),
        "dieplace.kernels.reference_linear:gemv_mxfp4",
        LINEAR,
        rules=(_TOKENS, _MX),
    ),
    Op(
        "quantize_mxfp8",
        "bf16 to e4m3 with an e8m0 scale per 32 values; scale rule ocp-floor, ties to even, saturating",
        (
            _a("x", _BF16, "T", "K"),
            _out("out", ("float8_e4m3fn",), "T", "K"),
            _out("scales", _U8, "T", "K/32"),
        ),
        "dieplace.kernels.reference_linear:quantize_mxfp8",
        EXACT,
        rules=(_TOKENS, _MX),
    ),
    Op(
        "gemv_mxfp4_mxfp8",
        "out = x W^T + bias on the scaled matrix instruction: MXFP8 activations, MXFP4 weights",
        (
            _a("x", ("float8_e4m3fn",), "T", "K"),
            _a("x_scales", _SCALES, "T", "K/32"),
            *_MX_WEIGHT,
            _out("out", _OUT, "T", "N"),
        ),
        "dieplace.kernels.reference_linear:gemv_mxfp4_mxfp8",
        LINEAR,
        rules=(_TOKENS, _MX),
    ),
)

_EXPERT_OPS = (
    Op(
        "router_topk",
        "top-k of up to 128 logits (NaN never wins, ties to the lowest index, ids distinct), softmax over the chosen",
        (
            _a("logits", _F32, "T", "E"),
            _out("ids", _I32, "T", "k"),
            _out("weights", _F32, "T", "k"),
            _out("nonfinite", _I32, "1"),
        ),
        "dieplace.kernels.reference_moe:router_topk",
        EXPONENT,
        rules=(_TOKENS, ("E <= 128", "one wave ranks up to 128 experts"), ("k <= E", "ids are distinct")),
    ),
    Op(
        "expert_gate_up",
        "gate and up of the chosen experts (rows g0,u0,g1,u1,...), clamped SwiGLU; a distinct expert is read once",
        (
            _a("x", _BF16, "T", "H"),
            _a("ids", _I32, "T", "k"),
            _w("blocks", _U8, "E", "2*I", "H/32", "16"),
            _w("scales", _SCALES, "E", "2*I", "H/32"),
            _w("bias", _BF16, "E", "2*I"),
            _out("out", _BF16, "T", "k", "I"),
        ),
        "dieplace.kernels.reference_moe:expert_gate_up",
        EXPONENT,
        attrs={"alpha": 1.702, "limit": 7.0},
        rules=(_TOKENS, ("H % 32 == 0", "MX blocks hold 32 values")),
        traffic="dieplace.kernels.traffic:experts",
        max_extent_bytes=2**40,  # one expert at a time is addressed: 128 experts of gpt-oss-120b are 1.06 GB a tensor
    ),
    Op(
        "expert_down",
        "down projection of the chosen experts, summed by the router's weights; a distinct expert is read once",
        (
            _a("x", _BF16, "T", "k", "I"),
            _a("ids", _I32, "T", "k"),
            _a("weights", _F32, "T", "k"),
            _w("blocks", _U8, "E", "H", "I/32", "16"),
            _w("scales", _SCALES, "E", "H", "I/32"),
            _w("bias", _BF16, "E", "H", optional=True),
            _out("out", _OUT, "T", "H"),
        ),
        "dieplace.kernels.reference_moe:expert_down",
        LINEAR,
        rules=(_TOKENS, ("I % 32 == 0", "MX blocks hold 32 values")),
        traffic="dieplace.kernels.traffic:experts",
        max_extent_bytes=2**40,
    ),
    Op(
        "mlp_gate_up",
        "silu(x Wg^T) * (x Wu^T), bf16 weights (Qwen3, Llama)",
        (
            _a("x", _BF16, "T", "H"),
            _w("gate", _BF16, "I", "H"),
            _w("up", _BF16, "I", "H"),
            _out("out", _BF16, "T", "I"),
        ),
        "dieplace.kernels.reference_linear:mlp_gate_up",
        EXPONENT,
        rules=(_TOKENS,),
    ),
    Op(
        "mlp_gate_up_mxfp4",
        "silu(x Wg^T) * (x Wu^T), MXFP4 weights",
        (
            _a("x", _BF16, "T", "H"),
            _w("gate_blocks", _U8, "I", "H/32", "16"),
            _w("gate_scales", _SCALES, "I", "H/32"),
            _w("up_blocks", _U8, "I", "H/32", "16"),
            _w("up_scales", _SCALES, "I", "H/32"),
            _out("out", _BF16, "T", "I"),
        ),
        "dieplace.kernels.reference_linear:mlp_gate_up_mxfp4",
        EXPONENT,
        rules=(_TOKENS, ("H % 32 == 0", "MX blocks hold 32 values")),
    ),
)

_TOKEN_OPS = (
    Op(
        "head_argmax",
        "logits and the greedy token among the first `vocab` rows; ties to the lowest index, NaN never wins",
        (
            _a("x", _BF16, "T", "H"),
            _w("weight", _BF16, "V", "H"),
            _out("logits", _F32, "T", "V"),
            _out("value", _F32, "T"),
            _out("token", _I32, "T"),
        ),
        "dieplace.kernels.reference_linear:head_argmax",
        LINEAR,
        attrs={"vocab": REQUIRED, "offset": 0},
        rules=(_TOKENS, ("vocab <= V", "padded rows lie after the vocabulary")),
    ),
    Op(
        "handoff_put",
        "send fp32 values to the other shard as 64-bit words of value and tag, system scope",
        (_a("x", _F32, "N"), _flag("mailbox", ("int64",), "N", use=OUTPUT)),
        "dieplace.kernels.reference_handoff:handoff_put",
        EXACT,
        attrs={"tag": REQUIRED},
        rules=(
            ("tag > 0", "a tag is a positive 31-bit number: 0 is an empty mailbox"),
            ("tag < 2147483648", "31 bits"),
        ),
    ),
    Op(
        "handoff_sum",
        "wait for the other shard's values, each with its tag, and add them; status += (time-outs, last bad tag)",
        (
            _a("own", _F32, "N"),
            _flag("mailbox", ("int64",), "N"),
            _a("residual", _BF16, "N", optional=True),
            _out("out", _OUT, "N"),
            _out("status", _I32, "2", use=IN_PLACE),
        ),
        "dieplace.kernels.reference_handoff:handoff_sum",
        Tolerance(ONE_ROUNDING, 2.0**-22, "at most two fp32 sums"),
        attrs={"tag": REQUIRED, "spin_limit": 1 << 20},
        rules=(
            ("tag > 0", "a tag is a positive 31-bit number: 0 is an empty mailbox"),
            ("tag < 2147483648", "31 bits"),
        ),
    ),
    Op(
        "flag_set",
        "publish: system-scope release store of a value to every flag line",
        (_flag("flag", _I32, "F", use=OUTPUT, strided=True),),
        "dieplace.kernels.reference_handoff:flag_set",
        EXACT,
        attrs={"value": REQUIRED},
    ),
    Op(
        "flag_wait",
        "wait until every flag line holds the value, `spin_limit` polls at most; status += (time-outs, last value)",
        (_flag("flag", _I32, "F", strided=True), _out("status", _I32, "2", use=IN_PLACE)),
        "dieplace.kernels.reference_handoff:flag_wait",
        EXACT,
        attrs={"value": REQUIRED, "spin_limit": 1 << 20},
    ),
)

OPS: dict[str, Op] = {
    contract.name: contract
    for contract in (*_NORM_OPS, *_ATTENTION_OPS, *_LINEAR_OPS, *_EXPERT_OPS, *_TOKEN_OPS, *PROBES)
}
