"""Rotary tables from a model configuration: plain, linear, Llama 3 and YaRN; phases in float64, tables in fp32.

Phases in bf16 or fp32 lose the position at long contexts (position 4095 becomes 4096 in bf16), so they are never formed
below float64. YaRN: "YaRN: Efficient Context Window Extension", sections 3.2 and 3.4, with the parameter names of
Hugging Face configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dieplace.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rope:
    """Rotation of one layer: kind, base, rotated dimensions, and the kind's own parameters."""

    kind: str
    base: float
    rotary_dim: int
    parameters: tuple[tuple[str, float], ...] = field(default=())

    def get(self, name: str, default: float | None = None) -> float:
        """A parameter of the kind; UsageError when it is needed and absent."""
        value = dict(self.parameters).get(name, default)
        if value is None:
            raise UsageError(f"rope parameter {name} is missing for {self.kind}")
        return value


def ropes_of(
    raw: Mapping[str, Any], layer_types: Sequence[str], head_dim: int, base: float, where: str = "config"
) -> tuple[Rope, ...]:
    """One Rope per layer. A dictionary keyed by layer type gives each type its own; a flat one serves all."""
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    given = raw.get(key)
    if given is None:
        given = _family_default(raw)
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: {key} is {given!r}, not an object")
    nested = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    if not nested:
        return (_rope(raw, given, head_dim, base, f"{where}: {key}"),) * len(layer_types)
    unknown = sorted(set(given) - set(_LAYER_TYPES))
    missing = sorted(set(layer_types) - set(nested))
    if unknown or missing:
        what = f"{key}.{unknown[0]} is not a layer type" if unknown else f"{key}.{missing[0]} is missing"
        raise UsageError(f"{where}: {what}", hint=f"layer types: {', '.join(_LAYER_TYPES)}")
    by_type = {t: _rope(raw, nested[t], head_dim, base, f"{where}: {key}.{t}") for t in set(layer_types)}
    return tuple(by_type[t] for t in layer_types)


def tables(rope: Rope, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, rotary_dim / 2), fp32, the attention factor multiplied in."""
    import torch

    inverse, factor = frequencies(rope)
    phase = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return (phase.cos() * factor).to(torch.float32), (phase.sin() * factor).to(torch.float32)


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Inverse frequencies (rotary_dim / 2) in float64 and the factor on cos and sin."""
    import torch

    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    plain = rope.base**-exponent
    if rope.kind == "linear":
        return plain / rope.get("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain), _yarn_factor(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1 model code)."""
    import torch

    factor, low, high = (rope.get(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.get("original_max_position_embeddings")
    wave = 2 * math.pi / plain
    blend = ((original / wave - low) / (high - low)).clamp(0, 1)
    mixed = (1 - blend) * plain / factor + blend * plain
    return torch.where(wave > original / low, plain / factor, torch.where(wave < original / high, plain, mixed))


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    import torch

    dim, original = rope.rotary_dim, rope.get("original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", 1):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / rope.get("factor") * ramp + plain * (1 - ramp)


def _yarn_factor(rope: Rope) -> float:
    given = dict(rope.parameters)
    if "attention_factor" in given:
        return given["attention_factor"]

    def scale(strength: float) -> float:
        return 1.0 if rope.get("factor") <= 1 else 0.1 * strength * math.log(rope.get("factor")) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def _rope(raw: Mapping[str, Any], given: Mapping[str, Any], head_dim: int, base: float, where: str) -> Rope:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KINDS:
        raise Unsupported(f"{where}.rope_type is {kind!r}", hint=f"supported: {', '.join(_KINDS)}")
    partial = given.get("partial_rotary_factor")
    partial = raw.get("partial_rotary_factor") if partial is None else partial
    rotary = int(head_dim * positive(1.0 if partial is None else partial, f"{where}: partial_rotary_factor"))
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise UsageError(f"{where}: {partial} of head size {head_dim} is not a positive even number of dimensions")
    theta = given.get("rope_theta")
    numbers = {
        k: _float(v, f"{where}.{k}") for k, v in given.items() if isinstance(v, int | float) and k not in _COMMON
    }
    original = "original_max_position_embeddings"
    if kind in ("yarn", "llama3") and original not in numbers:
        numbers[original] = positive(raw.get("max_position_embeddings"), f"{where}: max_position_embeddings")
    rope = Rope(
        kind, positive(base if theta is None else theta, f"{where}.rope_theta"), rotary, tuple(sorted(numbers.items()))
    )
    for name in _NEEDED[kind]:
        positive(rope.get(name), f"{where}.{name}")
    if kind == "yarn":
        if rope.base == 1:
            raise UsageError(f"{where}.rope_theta is 1, and yarn divides by its logarithm")
        for name in ("beta_fast", "beta_slow"):
            positive(rope.get(name, 1.0), f"{where}.{name}")
    return rope


# Parameters that a kind cannot do without; each divides or is a logarithm's argument.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def positive(value: Any, what: str) -> float:
    """A finite number above 0; UsageError with `what` otherwise."""
    number = _float(value, what)
    if not number > 0:
        raise UsageError(f"{what} is {value!r}, not a number above 0")
    return number


def _float(value: Any, what: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{what} is {value!r}, not a finite number")
    return number


_COMMON = ("rope_theta", "partial_rotary_factor")


def _family_default(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `transformers` assumes where a configuration names no scaling: YaRN x32 for GPT-OSS, none for the others."""
    if raw.get("model_type") == "gpt_oss" or "GptOssForCausalLM" in (raw.get("architectures") or []):
        return {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    return {"rope_type": "default"}
