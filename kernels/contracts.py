"""The contracts of the decode ops, in the order of a decode step.

T is the number of tokens (1 to 8), H the hidden size, HQ and HKV the query and KV heads, D the head size. Weights are
(out, in) as the checkpoints store MXFP4 blocks and linear layers. Accumulation is fp32, one rounding at the end unless
the summary says otherwise.
"""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.contracts_attention import ATTENTION_OPS, NORM_OPS
from dieplace.kernels.contracts_linear import EXPERT_OPS, LINEAR_OPS
from dieplace.kernels.contracts_probe import PROBES
from dieplace.kernels.registry import IN_PLACE, OUTPUT, REQUIRED, Op, Tolerance

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
    Op(
        "handoff_put",
        "send fp32 values to the other shard as 64-bit words of value and tag, system scope",
        (p.given("x", p.F32, "N"), p.flag("mailbox", ("int64",), "N", use=OUTPUT)),
        "dieplace.kernels.reference_handoff:handoff_put",
        p.EXACT,
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
            p.given("own", p.F32, "N"),
            p.flag("mailbox", ("int64",), "N"),
            p.given("residual", p.BF16, "N", optional=True),
            p.output("out", p.OUT, "N"),
            p.output("status", p.I32, "2", use=IN_PLACE),
        ),
        "dieplace.kernels.reference_handoff:handoff_sum",
        Tolerance(p.ONE_ROUNDING, 2.0**-22, "at most two fp32 sums"),
        attrs={"tag": REQUIRED, "spin_limit": 1 << 20},
        rules=(
            ("tag > 0", "a tag is a positive 31-bit number: 0 is an empty mailbox"),
            ("tag < 2147483648", "31 bits"),
        ),
    ),
    Op(
        "flag_set",
        "publish: system-scope release store of a value to every flag line",
        (p.flag("flag", p.I32, "F", use=OUTPUT, strided=True),),
        "dieplace.kernels.reference_handoff:flag_set",
        p.EXACT,
        attrs={"value": REQUIRED},
    ),
    Op(
        "flag_wait",
        "wait until every flag line holds the value, `spin_limit` polls at most; status += (time-outs, last value)",
        (p.flag("flag", p.I32, "F", strided=True), p.output("status", p.I32, "2", use=IN_PLACE)),
        "dieplace.kernels.reference_handoff:flag_wait",
        p.EXACT,
        attrs={"value": REQUIRED, "spin_limit": 1 << 20},
    ),
)

OPS: dict[str, Op] = {
    contract.name: contract for contract in (*NORM_OPS, *ATTENTION_OPS, *LINEAR_OPS, *EXPERT_OPS, *_TOKEN_OPS, *PROBES)
}
