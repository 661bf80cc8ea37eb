"""The contracts of the decode ops, in the order of a decode step.

T is the number of tokens (1 to 8), H the hidden size, HQ and HKV the query and KV heads, D the head size. Weights are
(out, in) as the checkpoints store MXFP4 blocks and linear layers. Accumulation is fp32, one rounding at the end unless
the summary says otherwise.
"""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.contracts_attention import ATTENTION_OPS, NORM_OPS
from dieplace.kernels.contracts_fused import FUSED_OPS
from dieplace.kernels.contracts_handoff import HANDOFF_OPS
from dieplace.kernels.contracts_linear import EXPERT_OPS, LINEAR_OPS
from dieplace.kernels.contracts_probe import PROBES
from dieplace.kernels.registry import REQUIRED, Op

_TOKEN_OPS = (
    Op(
        "head_argmax",
        "logits and the greedy token among the first `vocab` rows; ties to the lowest index, NaN never wins",
        (
            p.given("x", p.BF16, "T", "H"),
            p.weight("weight", p.BF16, "V", "H"),
            p.output("logits", p.F32, "T", "V"),
            p.output("value", p.F32, "T"),
            p.output("token", p.I32, "T"),
        ),
        "dieplace.kernels.reference_linear:head_argmax",
        p.LINEAR,
        attrs={"vocab": REQUIRED, "offset": 0},
        rules=(p.TOKENS, ("vocab <= V", "padded rows lie after the vocabulary")),
    ),
)

_STEP_OPS = (*NORM_OPS, *ATTENTION_OPS, *LINEAR_OPS, *EXPERT_OPS, *FUSED_OPS, *_TOKEN_OPS)
OPS: dict[str, Op] = {contract.name: contract for contract in (*_STEP_OPS, *HANDOFF_OPS, *PROBES)}
