"""Whether what a kernel wrote agrees with the float64 reference, under the op's tolerance.

Most outputs compare value by value. Where a contract leaves a choice (how attention cuts its splits, which of two
logits that differ by less than the tolerance wins) the comparison is of what the choice must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dieplace.kernels import reference_attention, reference_probe
from dieplace.kernels.fused import COUNTER, PARTS, part_calls, part_results
from dieplace.kernels.quantize import BLOCK, SCALE_NAN
from dieplace.kernels.reference import Expected, rounded, wide
from dieplace.kernels.reference_linear import first_largest
from dieplace.kernels.registry import Call, Tolerance, resolve

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Deviation:
    """The worst element of one output: `ratio` is |error| / allowed; above 1 (or NaN where none belongs) is wrong."""

    operand: str
    ratio: float
    index: tuple[int, ...] = ()
    found: float = 0.0
    wanted: float = 0.0

    @property
    def ok(self) -> bool:
        """Within tolerance."""
        return self.ratio <= 1

    def __str__(self) -> str:
        place = f"{self.operand}{list(self.index)}"
        return f"{place} is {self.found:.9g}, reference {self.wanted:.9g}, {self.ratio:.3g} x the tolerance"


def compare(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """One Deviation per output; `before` holds the operands as they were given, `found` what the kernel wrote."""
    if before.op.name in PARTS:
        return _compare_parts(before, found)
    special = _SPECIAL.get(before.op.name)
    if special:
        return special(before, found)
    expected = resolve(before.op.reference)(before.operands, before.attrs)
    outputs = [spec for spec in before.op.outputs if before.operands[spec.name] is not None]
    return [worst(spec.name, found[spec.name], expected[spec.name], before.op.tolerance) for spec in outputs]


def worst(operand: str, found: Tensor, expected: Expected, tolerance: Tolerance) -> Deviation:
    """The element that deviates most, in units of what the tolerance allows there."""
    wanted = wide(rounded(expected.value, found.dtype))
    got = wide(found)
    if not got.numel():
        return Deviation(operand, 0.0)
    exact = found.dtype not in _UNIT_ROUNDOFF or not (tolerance.rounding or tolerance.accumulation)
    allowed = torch.zeros_like(got) if exact else _allowed(found.dtype, expected, tolerance)
    same = (got == wanted) | (torch.isnan(got) & torch.isnan(wanted))
    error = (got - wide(expected.value)).abs()
    ratio = torch.where(same, 0.0, torch.where(allowed > 0, error / allowed, torch.inf)).nan_to_num(nan=torch.inf)
    flat = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
    return Deviation(operand, float(ratio.max()), index, float(got[index]), float(wanted[index]))


def _allowed(dtype: torch.dtype, expected: Expected, tolerance: Tolerance) -> Tensor:
    value = wide(expected.value)
    size = wide(expected.size)
    floor = max(tolerance.floor, 2.0**-133 if dtype == torch.bfloat16 else 2.0**-126)
    allowed = tolerance.rounding * _UNIT_ROUNDOFF[dtype] * value.abs() + tolerance.accumulation * size + floor
    return allowed.nan_to_num(nan=0.0, posinf=0.0)


def _compare_parts(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Each part of a fused op by its own contract, on what the kernel handed to it; the counter is zero again."""
    after = {**before.operands, **found}
    deviations = []
    for part, call in part_calls(before.op.name, before.operands, after, before.attrs):
        for deviation in compare(call, part_results(part, after)):
            deviations.append(replace(deviation, operand=part.operands[deviation.operand]))
    counter = found[COUNTER]
    exact = Tolerance(0, 0, "counted, not computed")
    return [*deviations, worst(COUNTER, counter, Expected(torch.zeros_like(counter)), exact)]


def _compare_splits(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """The merged partials against whole attention; an empty split must hold zeros and -inf so that it cannot weigh."""
    value, lse, size = reference_attention.attention(before.operands, before.attrs)
    partial, sums = wide(found["partial"]), wide(found["partial_lse"])
    merged, total, _ = reference_attention.merge(partial, sums, None)
    stray = torch.where(torch.isneginf(sums)[..., None], partial, torch.zeros(())).abs()
    tolerance = before.op.tolerance
    lse_size = lse.abs().nan_to_num(posinf=0) + 1
    return [
        worst("partial", merged.to(torch.float32), Expected(value, size), tolerance),
        worst("partial_lse", total.to(torch.float32), Expected(lse, lse_size), tolerance),
        worst("partial", stray.to(torch.float32), Expected(torch.zeros_like(stray)), tolerance),
    ]


def _compare_head(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Logits by value; the token by the kernel's own logits, which the tolerance may order otherwise than float64."""
    expected = resolve(before.op.reference)(before.operands, before.attrs)
    own = wide(found["logits"])[:, : before.attrs["vocab"]].nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    value, token = first_largest(own)
    exact = Tolerance(0, 0, "chosen, not computed")
    return [
        worst("logits", found["logits"], expected["logits"], before.op.tolerance),
        worst("value", found["value"], Expected(value), exact),
        worst("token", found["token"], Expected(token + before.attrs["offset"]), exact),
    ]


def _compare_mxfp8(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Bytes are exact; the elements of a block whose scale is NaN mean nothing."""
    expected = resolve(before.op.reference)(before.operands, before.attrs)
    dead = (expected["scales"].value == SCALE_NAN).repeat_interleave(BLOCK, -1)
    codes = [torch.where(dead, 0, t.cpu().view(torch.uint8)) for t in (found["out"], expected["out"].value)]
    return [
        worst("scales", found["scales"], expected["scales"], before.op.tolerance),
        worst("out", codes[0], Expected(codes[1]), before.op.tolerance),
    ]


def _compare_stream(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Lanes fold in any order: the XOR over all of them counts."""
    expected = resolve(before.op.reference)(before.operands, before.attrs)["out"].value
    folds = [torch.tensor([reference_probe.fold(words)]) for words in (found["out"], expected)]
    return [worst("out", folds[0], Expected(folds[1]), before.op.tolerance)]


def _compare_probe(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Index, rounds and last value; ticks must only not run backwards, the place be one of eight XCDs."""
    expected = resolve(before.op.reference)(before.operands, before.attrs)
    rows, wanted = found["out"].view(-1, 4), expected["out"].value.view(-1, 4)
    columns = [0] if before.op.name == "probe_chase" else [0, 2]
    sane = ((rows[:, 1] >= 0) & (rows[:, 3] >= 0) & (rows[:, 3] < 8)).to(torch.int32)
    exact = before.op.tolerance
    flags = [worst(n, found[n], expected[n], exact) for n in ("ping", "pong") if n in expected]
    return [
        worst("out", rows[:, columns], Expected(wanted[:, columns]), exact),
        worst("out", sane, Expected(torch.ones_like(sane)), exact),
        *flags,
    ]


def _compare_visibility(before: Call, found: Mapping[str, Tensor]) -> list[Deviation]:
    """Last values; stamps of one device in order, no reader's before its writer's; places of parties that there are."""
    expected = resolve(before.op.reference)(before.operands, before.attrs)
    stamps, exact = found["stamps"], before.op.tolerance
    written = stamps < torch.iinfo(torch.int64).max  # what an output is poisoned with
    later = torch.ones_like(written)
    later[1:] &= stamps[1:] >= stamps[0]
    later[:, 1:] &= stamps[:, 1:] >= stamps[:, :-1]
    sane = ((stamps >= 0) & written & later).to(torch.int32)
    placed = ((found["xcc"] >= 0) & (found["xcc"] < MOST_PLACES)).to(torch.int32)
    return [
        *(worst(name, found[name], expected[name], exact) for name in ("flag", "acks")),
        worst("stamps", sane, Expected(torch.ones_like(sane)), exact),
        worst("xcc", placed, Expected(torch.ones_like(placed)), exact),
    ]


MOST_PLACES = 1024  # XCDs of a card or SMs of a GPU: more there are not
_SPECIAL: dict[str, Any] = {
    "probe_stream": _compare_stream,
    "probe_chase": _compare_probe,
    "probe_ping_pong": _compare_probe,
    "flag_visibility": _compare_visibility,
    "quantize_mxfp8": _compare_mxfp8,
    "attention_split": _compare_splits,
    "head_argmax": _compare_head,
}
