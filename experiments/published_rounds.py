"""Published figures of rounds of several tokens and of the work around the placement, beside what the model gives."""

from __future__ import annotations

from collections.abc import Mapping

from dieplace.clock import Placement, over_sets, parameter_set, time_token
from dieplace.clock.parameters import HEADLINE_SET
from dieplace.experiments.modelled_run import as_quantity
from dieplace.experiments.published_row import CONTEXT, FIT, MODEL, PRECISION, Row, exact, get, percent, times
from dieplace.kernels.models import model_shape, weight_bytes
from dieplace.kernels.step import stages
from dieplace.run import Quantity

SPECULATION = 1.27  # published for GSM8K, taken as it is
_EXPERTS_READ = {2: 7.0, 4: 11.7}  # published: distinct experts a layer in rounds of 2 and 4 tokens
_BLOCK = 32


def rounds(spx: Mapping[str, Quantity] | None) -> tuple[Row, ...]:
    """Rounds of several tokens, and what speculation multiplies."""
    four, two = _EXPERTS_READ[4], _EXPERTS_READ[2]
    experts = "independent uniform routing; real tokens share experts, which no shape can tell"
    return (
        Row(
            "verify, 4 tokens: experts read a layer",
            "about 11.7",
            "experts",
            four,
            four,
            _distinct(4),
            experts,
        ),
        Row(
            "verify, 2 tokens: experts read a layer",
            "about 7",
            "experts",
            two,
            two,
            _distinct(2),
            experts,
        ),
        Row(
            "verify, 4 tokens: local memory is worth more",
            "more than at 1 token",
            "%",
            None,
            None,
            percent(_verify_gain(4, four)) if spx else None,
            "contradicted: expert bytes grow and gain least, so the modelled gain falls with tokens (value: 4 tokens,"
            " 11.7 experts)",
        ),
        Row(
            "GSM8K: residency alone",
            "1.08x",
            "x",
            1.08,
            1.08,
            times(get(spx, "penalty"), 1.0),
            f"the figure of placement alone, as a ratio; {FIT}",
        ),
        Row("GSM8K: speculation alone", "1.27x", "x", SPECULATION, SPECULATION, None, _speculation()),
        Row(
            "GSM8K: residency 1.08x and speculation 1.27x together",
            "about 1.36x",
            "x",
            1.36,
            1.36,
            times(get(spx, "penalty"), SPECULATION),
            "speculation is not modelled: the modelled residency is multiplied by the published 1.27",
        ),
    )


def _distinct(tokens: int) -> Quantity:
    shape = model_shape(MODEL)
    expected = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens)
    return Quantity("experts", "modelled", expected, expected, expected, "expectation from the shape alone")


def _verify_gain(tokens: int, experts: float) -> Quantity:
    work = stages(MODEL, precision=PRECISION, context_tokens=CONTEXT, tokens=tokens, distinct_experts=experts)
    return as_quantity(over_sets(work, Placement("spx-nps1", interleaved=True), lambda t: t.penalty), "share")


def _speculation() -> str:
    """Why there is no modelled figure, and what the model does say: how many tokens a round would have to accept."""
    one = _round_us(1, float(model_shape(MODEL).experts_per_token))
    needed = [f"{SPECULATION * _round_us(n, experts) / one:.2f} of {n}" for n, experts in _EXPERTS_READ.items()]
    return (
        "not modelled: how many drafted tokens are accepted is the text's doing. At modelled round times (set"
        f" {HEADLINE_SET}) a round would have to give {' or '.join(needed)} tokens, drafting not counted"
    )


def _round_us(tokens: int, experts: float) -> float:
    work = stages(MODEL, precision=PRECISION, context_tokens=CONTEXT, tokens=tokens, distinct_experts=experts)
    return time_token(work, Placement("local"), parameter_set(HEADLINE_SET)).token_us


def around() -> tuple[Row, ...]:
    """Figures of the work around the placement that are of this model."""
    return (
        Row(
            "MXFP4 weights: fewer bytes than BF16",
            "about 3.8x",
            "x",
            3.8,
            3.8,
            exact(weight_bytes(_BLOCK, "bf16") / weight_bytes(_BLOCK, "mxfp4"), "x", "size of one block"),
            "32 values share a scale byte: 17 bytes against 64",
        ),
        Row(
            "gpt-oss-120b, whole stack: tokens a second",
            "about 1,470, stock 784",
            "tokens/s",
            None,
            None,
            None,
            "with a drafter, on prompts not named: a round's time and its accepted tokens cannot be told apart. The"
            " model gives one token a step without it",
        ),
    )
