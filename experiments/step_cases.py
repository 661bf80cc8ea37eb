"""What a measured step experiment compares: cases, each with its own graph, and in each the arms that move roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments import layer_speed
from dieplace.experiments.registry import Options
from dieplace.experiments.weight_swap_live import share_of
from dieplace.policy import Policy

MODEL, PRECISION = "gpt-oss-120b", "mxfp4"


@dataclass(frozen=True)
class StepArm:
    """One arm: where the roles go that leave home."""

    name: str
    homes: Mapping[str, Policy] = field(default_factory=dict)

    def share(self, role: str) -> float:
        """The share of a role's bytes on the peer."""
        return share_of(self.homes[role]) if role in self.homes else 0.0

    @property
    def partial(self) -> bool:
        """Whether some role lies in both places."""
        return any(0 < self.share(role) < 1 for role in self.homes)


@dataclass(frozen=True)
class Case:
    """Arms over one step, the first of them with everything at home; `missing` arms have no form here, and why.

    `name` is empty where an experiment has one case; `factors` are put on each of its points.
    """

    name: str
    arms: tuple[StepArm, ...]
    context_tokens: int = layer_speed.CONTEXT
    tokens: int = 1
    handoffs: bool = False
    factors: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that some arm moves: those are probed in every arm."""
        return tuple(dict.fromkeys(role for arm in self.arms for role in arm.homes))


def refuse_other_forms(experiment: str, options: Options, contexts: Sequence[int] = (layer_speed.CONTEXT,)) -> None:
    """UsageError for a model, precision, context or number of shards that the measured step does not have."""
    wanted = (MODEL, PRECISION, 1)
    asked = (options.model, options.precision, options.shards)
    if asked == wanted and options.context_tokens in contexts and options.bytes_from == "shapes":
        return
    raise UsageError(
        f"{experiment} on nvidia has the form {MODEL}, {PRECISION}, {' or '.join(map(str, contexts))} tokens, one"
        f" shard, bytes from shapes; asked: {options.model}, {options.precision}, {options.context_tokens},"
        f" {options.shards}, bytes from {options.bytes_from}",
        hint="add --shards 1",
    )
