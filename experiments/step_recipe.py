"""How a measured decode step is built: a gpt-oss-120b layer's operands and launches, and the role of each operand.

The layer's own launches come from `layer_speed`; with hand-offs, a flag is set and waited for behind the attention and
behind the experts of every layer, where two shards would meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dieplace.experiments import layer_speed

Launch = Callable[[], None]
Stage = tuple[str, Launch]

LINE_BYTES = 128  # a flag alone on its line, as SyncFlags lays them out
# Stage names after which a hand-off comes, where the layer has them; the last stage always has one.
HANDOFF_AFTER = "o_proj"
HANDOFFS = 2
SPIN_LIMIT = 1 << 20  # polls: a second or so, where a flag takes microseconds
VALUES_A_STEP = 64  # the counter moves by as much: hand-offs of one step have the values 1 to 63
_ROLE_OF = {"k": "kv_cache", "v": "kv_cache", "x": "activation", "flags": "sync_flag"}
_EXPERT = ("up_", "down_")
_SPLITS = {1024: 16}  # of attention over the context; beyond 1K enough programs to read a long cache at once
_LONG_SPLITS = 64


def role_of(operand: str) -> str:
    """The role of an operand of a layer; what is no cache, flag or activation is a weight."""
    return _ROLE_OF.get(operand, "weights")


@dataclass(frozen=True)
class Recipe:
    """A step on the current device: operands of layer n, the workspace of all, a layer's launches, and closing ones.

    `check` raises where the workspace tells of a failed wait.
    """

    layer: Callable[[int], layer_speed.Layer]
    workspace: Callable[[], dict[str, Any]]
    stages: Callable[[layer_speed.Layer, dict[str, Any]], Sequence[Stage]]
    closing: Callable[[dict[str, Any]], Sequence[Stage]] = lambda work: ()
    check: Callable[[dict[str, Any]], None] = lambda work: None


def gpt_oss(context_tokens: int = layer_speed.CONTEXT, tokens: int = 1, *, handoffs: bool = False) -> Recipe:
    """The gpt-oss-120b layer in MXFP4 with `context_tokens` in its cache, for a round of `tokens` tokens.

    One token runs as fast as the ops go, in fused and overlapping launches; more run in one launch an op.
    """
    splits = _SPLITS.get(context_tokens, _LONG_SPLITS)
    plain = Recipe(
        lambda number: layer_speed.make_layer(number, context=context_tokens, tokens=tokens),
        lambda: layer_speed.workspace(context=context_tokens, tokens=tokens, splits=splits),
        layer_speed.overlapped_stages if tokens == 1 else layer_speed.triton_stages,
    )
    return recipe_with_handoffs(plain) if handoffs else plain


def reads_by_role(layer: layer_speed.Layer, experts_read: float) -> dict[str, float]:
    """Distinct bytes that one pass over a layer reads, by role; of the experts those that were chosen."""
    found: dict[str, float] = {}
    for name, tensor in layer.t.items():
        share = experts_read / layer_speed.EXPERTS if name.startswith(_EXPERT) else 1.0
        found[role_of(name)] = math.fsum((found.get(role_of(name), 0.0), tensor.nbytes * share))
    found.pop("activation", None)
    return found


def recipe_with_handoffs(plain: Recipe) -> Recipe:
    """The same step with two flags set and awaited in each layer, counted in device memory from replay to replay."""
    from dieplace.kernels.arrival import require_arrival
    from dieplace.kernels.triton import handoff

    def layer(number: int) -> layer_speed.Layer:
        import torch

        made = plain.layer(number)
        flags = torch.zeros(HANDOFFS, LINE_BYTES // 4, dtype=torch.int32, device=made.t["x"].device)
        return layer_speed.Layer({**made.t, "flags": flags})

    def workspace() -> dict[str, Any]:
        import torch

        made = plain.workspace()

        def zeros(count: int) -> Any:
            return torch.zeros(count, dtype=torch.int32, device=made["y"].device)

        return {**made, "epoch": zeros(1), "wait_status": zeros(2), "wait_record": zeros(4)}

    def stages(one: layer_speed.Layer, work: dict[str, Any]) -> list[Stage]:
        return with_handoffs(list(plain.stages(one, work)), [_meet(one, work, n) for n in range(HANDOFFS)])

    def _meet(one: layer_speed.Layer, work: dict[str, Any], number: int) -> list[Stage]:
        flag = one.t["flags"][number : number + 1, 0]
        value = {"value": number + 1, "spin_limit": SPIN_LIMIT}
        told = {"status": work["wait_status"], "record": work["wait_record"], "epoch": work["epoch"]}
        return [
            ("flag_set", lambda: handoff.flag_set({"flag": flag, "epoch": work["epoch"]}, value)),
            ("flag_wait", lambda: handoff.flag_wait({"flag": flag, **told}, value)),
        ]

    def check(work: dict[str, Any]) -> None:
        require_arrival(
            work["wait_status"], flag="a layer's hand-off", expected=0, waiter="the step", record=work["wait_record"]
        )

    def closing(work: dict[str, Any]) -> list[Stage]:
        return [("epoch_next", lambda: handoff.epoch_next({"epoch": work["epoch"]}, {"step": VALUES_A_STEP}))]

    return Recipe(layer, workspace, stages, closing, check)


def with_handoffs(stages: Sequence[Stage], meetings: Sequence[Sequence[Stage]]) -> list[Stage]:
    """The first meeting behind the attention's output projection, the last behind the layer's last stage."""
    behind = next((i for i, (name, _) in enumerate(stages) if HANDOFF_AFTER in name), len(stages) // 2)
    return [*stages[: behind + 1], *meetings[0], *stages[behind + 1 :], *meetings[1]]


def together(launches: Sequence[Stage]) -> Launch:
    """One function that makes all launches in order."""

    def run() -> None:
        for _, launch in launches:
            launch()

    return run


def experts_chosen(ids: Any) -> int:
    """How many distinct experts the tokens of a round chose."""
    return len(set(ids.flatten().tolist()))
