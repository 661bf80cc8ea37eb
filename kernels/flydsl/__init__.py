"""FlyDSL kernels of the decode ops: which module has which op. Importing this package imports no FlyDSL."""

from __future__ import annotations

_HERE = "dieplace.kernels.flydsl"
OPS: dict[str, str] = {
    "rmsnorm": f"{_HERE}.norm:rmsnorm",
    "qk_norm": f"{_HERE}.norm:qk_norm",
    "rope_kv_append": f"{_HERE}.rope:rope_kv_append",
    "attention_split": f"{_HERE}.attention:attention_split",
    "attention_merge": f"{_HERE}.attention_merge:attention_merge",
    "gemv_bf16": f"{_HERE}.gemv:gemv_bf16",
    "gemv_mxfp4": f"{_HERE}.gemv:gemv_mxfp4",
    "quantize_mxfp8": f"{_HERE}.mxfp8:quantize_mxfp8",
    "gemv_mxfp4_mxfp8": f"{_HERE}.mxfp8:gemv_mxfp4_mxfp8",
    "router_topk": f"{_HERE}.router:router_topk",
    "expert_gate_up": f"{_HERE}.experts:expert_gate_up",
    "expert_down": f"{_HERE}.expert_down:expert_down",
    "mlp_gate_up": f"{_HERE}.mlp:mlp_gate_up",
    "mlp_gate_up_mxfp4": f"{_HERE}.mlp:mlp_gate_up_mxfp4",
    "head_argmax": f"{_HERE}.head:head_argmax",
    "handoff_put": f"{_HERE}.handoff:handoff_put",
    "handoff_sum": f"{_HERE}.handoff:handoff_sum",
    "flag_set": f"{_HERE}.flags:flag_set",
    "flag_wait": f"{_HERE}.flags:flag_wait",
    "epoch_next": f"{_HERE}.flags:epoch_next",
    "flag_visibility": f"{_HERE}.visibility:flag_visibility",
}
