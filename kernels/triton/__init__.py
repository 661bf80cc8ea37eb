"""Triton versions of the decode ops: same names, contracts and references as the FlyDSL ones.

They run on NVIDIA and, as a second opinion, on AMD; on the CPU with `TRITON_INTERPRET=1` (set before the first
import of a kernel module). This file imports neither torch nor triton.
"""

from __future__ import annotations

_HERE = "dieplace.kernels.triton"

OPS: dict[str, str] = {
    "rmsnorm": f"{_HERE}.norm:rmsnorm",
    "qk_norm": f"{_HERE}.norm:qk_norm",
    "rope_kv_append": f"{_HERE}.rope:rope_kv_append",
    "gemv_bf16": f"{_HERE}.gemv:gemv_bf16",
    "gemv_mxfp4": f"{_HERE}.gemv:gemv_mxfp4",
    "attention_split": f"{_HERE}.attention:attention_split",
    "attention_merge": f"{_HERE}.attention:attention_merge",
    "router_topk": f"{_HERE}.router:router_topk",
    "expert_gate_up": f"{_HERE}.experts:expert_gate_up",
    "expert_down": f"{_HERE}.experts:expert_down",
    "rope_attention": f"{_HERE}.rope_attention:rope_attention",
    "norm_router": f"{_HERE}.router:norm_router",
    "mlp_gate_up": f"{_HERE}.gemv:mlp_gate_up",
    "head_argmax": f"{_HERE}.head:head_argmax",
    "handoff_put": f"{_HERE}.handoff:handoff_put",
    "handoff_sum": f"{_HERE}.handoff:handoff_sum",
    "flag_set": f"{_HERE}.handoff:flag_set",
    "flag_wait": f"{_HERE}.handoff:flag_wait",
    "epoch_next": f"{_HERE}.handoff:epoch_next",
    "flag_visibility": f"{_HERE}.visibility:flag_visibility",
}
