"""The decode-step model: local time of each stage, and what a placement adds, in separate terms.

Times in microseconds. Assumptions: stages are serial and use the whole card; both dies work on one token; compute is
free; each layer has six hand-offs, two of which (attention release, layer boundary) use a separate release word. What
a placement adds is kept apart as distance (far loads and hand-offs), link (bandwidth), cache type (NC) and wait.

With s(bytes) = bytes / local streaming: a stage takes s(weights + KV) plus, where it ends in a hand-off, the local
hand-off and that hand-off's fixed work. SPX/NPS1 streams at the interleaved rate, pays x far steps a packed hand-off,
one step and a wait a release, and half a step at each of Q/K/V, O and router (the first load is far with probability
1/2). Moved weights stream at max(link share, 1) x 1.042 of the local time and pay a whole step at each first load.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dieplace.clock.arms import Placement
from dieplace.clock.parameters import ParameterSet
from dieplace.errors import UsageError
from dieplace.workload import Stage, Workload

# First loads of weights after a hand-off: an expert stage has two (W13, then W2). The head follows no hand-off.
_FIRST_LOADS = {
    "qkv": 1,
    "attention": 0,
    "attention_window": 0,
    "o_proj": 1,
    "router": 1,
    "experts": 2,
    "mlp": 2,
    "boundary": 0,
    "head": 0,
}
# In SPX/NPS1 the expert stage's far first loads are inside its hand-off's far steps; in a dense model the MLP follows
# the O merge directly, where the router does otherwise.
_HALF_STEP_STAGES = ("qkv", "o_proj", "router", "mlp")
# Waves polling a far line: counted at every hand-off but the layer boundary, five of six, as the source counts.
_NOT_POLLED_BY_MANY = ("boundary",)
_HEADS = ("head",)


@dataclass(frozen=True)
class Terms:
    """Microseconds that a placement adds to local time, by cause."""

    distance_us: float = 0.0
    link_us: float = 0.0
    cache_type_us: float = 0.0
    wait_us: float = 0.0

    @property
    def total_us(self) -> float:
        return self.distance_us + self.link_us + self.cache_type_us + self.wait_us

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Terms:
        """Every term multiplied, for a stage that repeats."""
        return Terms(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class StageTime:
    """One stage, one repeat: local streaming, local hand-off, and what the placement adds to each."""

    name: str
    handoff: str | None
    repeats: int
    stream_us: float
    handoff_us: float
    stream_extra: Terms
    handoff_extra: Terms

    @property
    def local_us(self) -> float:
        return self.stream_us + self.handoff_us

    @property
    def extra(self) -> Terms:
        return self.stream_extra + self.handoff_extra

    @property
    def total_us(self) -> float:
        return self.local_us + self.extra.total_us


@dataclass(frozen=True)
class TokenTime:
    """One token under one placement and one parameter set."""

    placement: Placement
    parameters: ParameterSet
    layers: int
    stages: tuple[StageTime, ...]

    @property
    def local_us(self) -> float:
        return sum(stage.local_us * stage.repeats for stage in self.stages)

    @property
    def extra(self) -> Terms:
        total = Terms()
        for stage in self.stages:
            total += stage.extra.times(stage.repeats)
        return total

    @property
    def token_us(self) -> float:
        return self.local_us + self.extra.total_us

    @property
    def penalty(self) -> float:
        """Share by which the token is slower than all-local: 0.28 means 28 %."""
        return self.token_us / self.local_us - 1

    @property
    def extra_per_layer_us(self) -> float:
        """What the placement adds to one layer, the head left out."""
        return self._layer_extra().total_us / self.layers

    @property
    def data_share(self) -> float | None:
        """Share of a layer's extra time that moves data rather than waits; None where nothing is added."""
        extra = self._layer_extra()
        return 1 - extra.wait_us / extra.total_us if extra.total_us > 0 else None

    def _layer_extra(self) -> Terms:
        total = Terms()
        for stage in self.stages:
            if stage.name not in _HEADS:
                total += stage.extra.times(stage.repeats)
        return total

    def gains(self) -> dict[str, float]:
        """How much of each published piece local memory saves: extra / (local + extra).

        Keys are hand-off names (`qkv`, `top_k`, `merge`, `attention`), for which streaming is left out, and the
        stage name `experts` or `mlp`, for which it is counted.
        """
        found: dict[str, float] = {}
        for stage in self.stages:
            whole = stage.name in ("experts", "mlp")
            local = stage.local_us if whole else stage.handoff_us
            extra = stage.extra.total_us if whole else stage.handoff_extra.total_us
            name = stage.name if whole else stage.handoff
            if name is not None and name != "boundary" and local + extra > 0:
                found[name] = extra / (local + extra)
        return found


def time_token(workload: Workload, placement: Placement, parameters: ParameterSet) -> TokenTime:
    """Time of one token (one step of `workload.tokens` tokens); UsageError for a stage the model does not know."""
    stages = tuple(_time_stage(stage, placement, parameters) for stage in workload.stages)
    return TokenTime(placement, parameters, workload.layers, stages)


def _time_stage(stage: Stage, placement: Placement, p: ParameterSet) -> StageTime:
    if stage.name not in _FIRST_LOADS:
        raise UsageError(f"the clock has no rule for stage {stage.name!r}", hint=f"it knows {', '.join(_FIRST_LOADS)}")
    handoff_us = 0.0
    if stage.handoff is not None:
        handoff_us = p.handoff_us + p.fixed_us.get(stage.handoff.name, 0.0)
    streams = {role: stream_us(stage, role, p) for role in ("weights", "kv_cache")}
    if placement.interleaved:
        stream_extra = _interleaved_stream(stage, sum(streams.values()), p)
        handoff_extra = _interleaved_handoff(stage, p)
    else:
        stream_extra = Terms()
        for role, local in streams.items():
            stream_extra += _moved_stream(stage, role, local, placement, p)
        handoff_extra = _moved_handoff(stage, placement, p)
    return StageTime(
        name=stage.name,
        handoff=stage.handoff.name if stage.handoff else None,
        repeats=stage.repeats,
        stream_us=sum(streams.values()),
        handoff_us=handoff_us,
        stream_extra=stream_extra,
        handoff_extra=handoff_extra,
    )


def stream_us(stage: Stage, role: str, p: ParameterSet) -> float:
    """All-local streaming time of one role's bytes in one repeat of a stage."""
    nbytes = sum(operand.nbytes for operand in stage.operands if operand.role == role)
    return nbytes / (p.local_tb_per_s * 1e6)


def _interleaved_stream(stage: Stage, local_us: float, p: ParameterSet) -> Terms:
    half = 0.5 * p.far_step_us if stage.name in _HALF_STEP_STAGES else 0.0
    return Terms(distance_us=half, link_us=p.local_gain * local_us)


def _interleaved_handoff(stage: Stage, p: ParameterSet) -> Terms:
    if stage.handoff is None:
        return Terms()
    if stage.handoff.kind == "release":
        return Terms(distance_us=p.far_step_us, wait_us=p.release_wait_us)
    return Terms(distance_us=p.packed_steps * p.far_step_us)


def _moved_stream(stage: Stage, role: str, local_us: float, placement: Placement, p: ParameterSet) -> Terms:
    share = placement.share(role, stage.name)
    if local_us == 0.0 or (share == 0.0 and role not in placement.cached_as_remote):
        return Terms()
    # Both dies read their peer at once, so each direction carries half of the moved bytes.
    over_link = max(share * p.local_tb_per_s / (2 * p.link_tb_per_s), 1.0)
    nc_share = 1.0 if role in placement.cached_as_remote else share
    loads = _FIRST_LOADS[stage.name] if role == "weights" else 1
    return Terms(
        distance_us=share * loads * p.far_step_us,
        link_us=local_us * (over_link - 1),
        cache_type_us=local_us * over_link * nc_share * (p.nc_streaming_factor - 1),
    )


def _moved_handoff(stage: Stage, placement: Placement, p: ParameterSet) -> Terms:
    share = placement.share("sync_flag", stage.name)
    if stage.handoff is None or share == 0.0:
        return Terms()
    steps = 1.0 if stage.handoff.kind == "release" else p.packed_steps
    polled = stage.handoff.name not in _NOT_POLLED_BY_MANY
    return Terms(
        distance_us=share * steps * p.far_step_us,
        cache_type_us=share * placement.polling_waves * p.nc_polling_wave_us if polled else 0.0,
    )
