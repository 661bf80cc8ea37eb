"""What a measured step experiment compares: cases, each with its own graph, and in each the arms that move roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dieplace.errors import Unsupported, UsageError
from dieplace.experiments import layer_speed
from dieplace.experiments.registry import Options
from dieplace.experiments.weight_swap_live import share_of
from dieplace.policy import Policy

MODEL, PRECISION = "gpt-oss-120b", "mxfp4"
LIVE = ("nvidia", "amd")  # backends whose devices torch and Triton drive


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


def live_why_not(backend: str) -> str | None:
    """None on the emulated backend and where devices can be measured; elsewhere one sentence why not."""
    from dieplace.experiments.rig_parts import cannot

    if backend in LIVE:
        return cannot(backend)
    from dieplace.experiments.modelled import emulated_only

    return emulated_only(backend)


def refuse_other_forms(experiment: str, backend: str, options: Options) -> None:
    """Unsupported where nothing can be measured, UsageError for a step that the measured one is not.

    UsageError too where torch's allocator is set to segments that cannot be measured (`allocator_settings`).
    """
    from dieplace.allocator_settings import require_fixed_segments

    require_fixed_segments()
    why = live_why_not(backend)
    if why is not None:
        raise Unsupported(f"{experiment} cannot run on the {backend} backend: {why}", hint="name --backend emulated")
    wanted = (MODEL, PRECISION, layer_speed.CONTEXT, 1, "shapes")
    asked = (options.model, options.precision, options.context_tokens, options.shards, options.bytes_from)
    if asked != wanted:
        form = "{}, {}, {} tokens of context, --shards {}, bytes from {}"
        raise UsageError(
            f"{experiment} on {backend} has the form {form.format(*wanted)}; asked: {form.format(*asked)}",
            hint="add --shards 1, and leave --model, --precision, --context and --bytes out",
        )
