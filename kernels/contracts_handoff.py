"""The contracts of hand-offs between shards and of flags.

`epoch` is an int32 counter in the memory of the device that runs the op, advanced once a step by `epoch_next`. Where it
is given, a tag or value is counted on from it on the device, 31 bits: a captured graph that is replayed then waits for
its own step's value, and not for one that was baked in (aiter PR 3928, DeepGEMM PR 451). A `record` that notes a wait
that gave up makes the waits after it poll once: a step whose partner is gone ends after one limit, not after all.
"""

from __future__ import annotations

from dieplace.kernels import contracts_parts as p
from dieplace.kernels.registry import IN_PLACE, OUTPUT, REQUIRED, Op, Tolerance

_TAG_RULES = (
    ("tag > 0", "a tag is a positive 31-bit number: 0 is an empty mailbox"),
    ("tag < 2147483648", "31 bits"),
)
_EPOCH = p.given("epoch", p.I32, "1", optional=True)
_RECORD = p.output("record", p.I32, "4", optional=True, use=IN_PLACE)
_STATUS = p.output("status", p.I32, "2", use=IN_PLACE)

HANDOFF_OPS = (
    Op(
        "handoff_put",
        "send fp32 values to the other shard as 64-bit words of value and tag, system scope",
        (p.given("x", p.F32, "N"), p.flag("mailbox", ("int64",), "N", use=OUTPUT), _EPOCH),
        "dieplace.kernels.reference_handoff:handoff_put",
        p.EXACT,
        attrs={"tag": REQUIRED},
        rules=_TAG_RULES,
    ),
    Op(
        "handoff_sum",
        "wait for the other shard's values, each with its tag, and add them; status += (time-outs, last bad tag)",
        (
            p.given("own", p.F32, "N"),
            p.flag("mailbox", ("int64",), "N"),
            p.given("residual", p.BF16, "N", optional=True),
            p.output("out", p.OUT, "N"),
            _STATUS,
            _EPOCH,
            _RECORD,
        ),
        "dieplace.kernels.reference_handoff:handoff_sum",
        Tolerance(p.ONE_ROUNDING, 2.0**-22, "at most two fp32 sums"),
        attrs={"tag": REQUIRED, "spin_limit": 1 << 20},
        rules=_TAG_RULES,
    ),
    Op(
        "flag_set",
        "publish: system-scope release store of a value to every flag line",
        (p.flag("flag", p.I32, "F", use=OUTPUT, strided=True), _EPOCH),
        "dieplace.kernels.reference_handoff:flag_set",
        p.EXACT,
        attrs={"value": REQUIRED},
    ),
    Op(
        "flag_wait",
        "wait until every flag line holds the value, `spin_limit` polls at most; status += (time-outs, last value)",
        (p.flag("flag", p.I32, "F", strided=True), _STATUS, _EPOCH, _RECORD),
        "dieplace.kernels.reference_handoff:flag_wait",
        p.EXACT,
        attrs={"value": REQUIRED, "spin_limit": 1 << 20},
    ),
    Op(
        "epoch_next",
        "one step of the program is over: the counter in device memory goes on by `step`, 31 bits",
        (p.output("epoch", p.I32, "1", use=IN_PLACE),),
        "dieplace.kernels.reference_handoff:epoch_next",
        p.EXACT,
        attrs={"step": 64},
        rules=(("step > 0", "values of a step must not come again in the next one"),),
    ),
    Op(
        "flag_visibility",
        "a writer raises a flag round by round, readers stamp it and acknowledge; stamps and places are the device's",
        (
            p.flag("flag", p.I32, "32", use=IN_PLACE),
            p.flag("acks", p.I32, "A", use=IN_PLACE),
            p.output("stamps", ("int64",), "P", "ROUNDS"),
            p.output("xcc", p.I32, "P"),
        ),
        "dieplace.kernels.reference_handoff:flag_visibility",
        p.EXACT,
        attrs={"first": 1, "spin_limit": 1 << 24, "party": 0, "parties": 0, "scope": "system"},
        rules=(
            ("P >= 2", "a flag has a writer and at least one reader"),
            ("A == 32 * (P - 1)", "each reader acknowledges in a line of its own"),
            ("party < P", "party 0 is the writer, the others are readers"),
            ("party + parties <= P", "party 0 is the writer, the others are readers"),
        ),
    ),
)
