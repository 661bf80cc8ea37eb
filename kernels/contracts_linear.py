"""The contracts of matrix-vector products, the router, experts and the dense MLP."""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.registry import Op

_BIAS = p.weight("bias", p.BF16, "N", optional=True)
_MX_WEIGHT = (p.weight("blocks", p.U8, "N", "K/32", "16"), p.weight("scales", p.SCALES, "N", "K/32"), _BIAS)

LINEAR_OPS = (
    Op(
        "gemv_bf16",
        "out = x W^T + bias with bf16 weights",
        (p.given("x", p.BF16, "T", "K"), p.weight("weight", p.BF16, "N", "K"), _BIAS, p.output("out", p.OUT, "T", "N")),
        "dieplace.kernels.reference_linear:gemv_bf16",
        p.LINEAR,
        rules=(p.TOKENS,),
    ),
    Op(
        "gemv_mxfp4",
        "out = x W^T + bias with MXFP4 weights, activations bf16",
        (p.given("x", p.BF16, "T", "K"), *_MX_WEIGHT, p.output("out", p.OUT, "T", "N")),
        "dieplace.kernels.reference_linear:gemv_mxfp4",
        p.LINEAR,
        rules=(p.TOKENS, p.MX),
    ),
    Op(
        "quantize_mxfp8",
        "bf16 to e4m3 with an e8m0 scale per 32 values; scale rule ocp-floor, ties to even, saturating",
        (
            p.given("x", p.BF16, "T", "K"),
            p.output("out", ("float8_e4m3fn",), "T", "K"),
            p.output("scales", p.U8, "T", "K/32"),
        ),
        "dieplace.kernels.reference_linear:quantize_mxfp8",
        p.EXACT,
        rules=(p.TOKENS, p.MX),
    ),
    Op(
        "gemv_mxfp4_mxfp8",
        "out = x W^T + bias on the scaled matrix instruction: MXFP8 activations, MXFP4 weights",
        (
            p.given("x", ("float8_e4m3fn",), "T", "K"),
            p.given("x_scales", p.SCALES, "T", "K/32"),
            *_MX_WEIGHT,
            p.output("out", p.OUT, "T", "N"),
        ),
        "dieplace.kernels.reference_linear:gemv_mxfp4_mxfp8",
        p.LINEAR,
        rules=(p.TOKENS, p.MX),
    ),
)

EXPERT_OPS = (
    Op(
        "router_topk",
        "top-k of up to 128 logits (NaN never wins, ties to the lowest index, ids distinct), softmax over the chosen",
        (
            p.given("logits", p.F32, "T", "E"),
            p.output("ids", p.I32, "T", "k"),
            p.output("weights", p.F32, "T", "k"),
            p.output("nonfinite", p.I32, "1"),
        ),
        "dieplace.kernels.reference_moe:router_topk",
        p.EXPONENT,
        rules=(p.TOKENS, ("E <= 128", "one wave ranks up to 128 experts"), ("k <= E", "ids are distinct")),
    ),
    Op(
        "expert_gate_up",
        "gate and up of the chosen experts (rows g0,u0,g1,u1,...), clamped SwiGLU; a distinct expert is read once",
        (
            p.given("x", p.BF16, "T", "H"),
            p.given("ids", p.I32, "T", "k"),
            p.weight("blocks", p.U8, "E", "2*I", "H/32", "16"),
            p.weight("scales", p.SCALES, "E", "2*I", "H/32"),
            p.weight("bias", p.BF16, "E", "2*I"),
            p.output("out", p.BF16, "T", "k", "I"),
        ),
        "dieplace.kernels.reference_moe:expert_gate_up",
        p.EXPONENT,
        attrs={"alpha": 1.702, "limit": 7.0},
        rules=(p.TOKENS, ("H % 32 == 0", "MX blocks hold 32 values")),
        traffic="dieplace.kernels.traffic:experts",
        max_extent_bytes=2**40,  # one expert at a time is addressed: 128 experts of gpt-oss-120b are 1.06 GB a tensor
    ),
    Op(
        "expert_down",
        "down projection of the chosen experts, summed by the router's weights; a distinct expert is read once",
        (
            p.given("x", p.BF16, "T", "k", "I"),
            p.given("ids", p.I32, "T", "k"),
            p.given("weights", p.F32, "T", "k"),
            p.weight("blocks", p.U8, "E", "H", "I/32", "16"),
            p.weight("scales", p.SCALES, "E", "H", "I/32"),
            p.weight("bias", p.BF16, "E", "H", optional=True),
            p.output("out", p.OUT, "T", "H"),
        ),
        "dieplace.kernels.reference_moe:expert_down",
        p.LINEAR,
        rules=(p.TOKENS, ("I % 32 == 0", "MX blocks hold 32 values")),
        traffic="dieplace.kernels.traffic:experts",
        max_extent_bytes=2**40,
    ),
    Op(
        "mlp_gate_up",
        "silu(x Wg^T) * (x Wu^T), bf16 weights (Qwen3, Llama)",
        (
            p.given("x", p.BF16, "T", "H"),
            p.weight("gate", p.BF16, "I", "H"),
            p.weight("up", p.BF16, "I", "H"),
            p.output("out", p.BF16, "T", "I"),
        ),
        "dieplace.kernels.reference_linear:mlp_gate_up",
        p.EXPONENT,
        rules=(p.TOKENS,),
    ),
    Op(
        "mlp_gate_up_mxfp4",
        "silu(x Wg^T) * (x Wu^T), MXFP4 weights",
        (
            p.given("x", p.BF16, "T", "H"),
            p.weight("gate_blocks", p.U8, "I", "H/32", "16"),
            p.weight("gate_scales", p.SCALES, "I", "H/32"),
            p.weight("up_blocks", p.U8, "I", "H/32", "16"),
            p.weight("up_scales", p.SCALES, "I", "H/32"),
            p.output("out", p.BF16, "T", "I"),
        ),
        "dieplace.kernels.reference_linear:mlp_gate_up_mxfp4",
        p.EXPONENT,
        rules=(p.TOKENS, ("H % 32 == 0", "MX blocks hold 32 values")),
    ),
)
