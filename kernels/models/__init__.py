"""Model shapes: the sizes that decide how many bytes a decode step reads; no torch needed.

The shapes are data files (`kernels/models/*.toml`), each with its source. Bytes are decimal where printed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dieplace.errors import UsageError

# Bytes per weight as exact fractions. MXFP4: blocks of 32 values, 16 bytes of e2m1 pairs + one e8m0 scale byte
# (OCP Microscaling Formats v1.0, section 5.2).
BYTES_PER_WEIGHT: Mapping[str, tuple[int, int]] = {
    "fp32": (4, 1),
    "bf16": (2, 1),
    "fp8": (1, 1),
    "mxfp4": (17, 32),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder model; `precisions` maps a name to the weight format of each class.

    `experts` is 0 for a dense model; `intermediate` is then the MLP's width, else one expert's. `window_layers` of the
    `layers` attend to the last `window` tokens only, the current one included.
    """

    name: str
    family: str
    source: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_head: bool
    kv_format: str
    precisions: Mapping[str, Mapping[str, str]]
    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    window_layers: int = 0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused Q, K and V projection."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        """Columns of the output projection: all query heads."""
        return self.q_heads * self.head_dim

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.intermediate * self.hidden

    def kv_bytes_per_position(self) -> int:
        """Bytes of K and V of one layer and one position."""
        return weight_bytes(2 * self.kv_heads * self.head_dim, self.kv_format)

    def formats(self, precision: str) -> Mapping[str, str]:
        """Weight format of each class under `precision`; UsageError names the precisions there are."""
        if precision in self.precisions:
            return self.precisions[precision]
        known = ", ".join(self.precisions)
        raise UsageError(
            f"{self.name} has no precision {precision!r}", hint=f"one of {known}", known=list(self.precisions)
        )


def weight_bytes(count: int, weight_format: str) -> int:
    """Bytes of `count` weights stored as `weight_format`; MXFP4 counts must be whole blocks of 32."""
    numerator, denominator = BYTES_PER_WEIGHT[weight_format]
    if count * numerator % denominator:
        raise UsageError(f"{count} weights are not whole {weight_format} blocks of {denominator}")
    return count * numerator // denominator


def model_names() -> tuple[str, ...]:
    """Names of the shapes that ship, in alphabetical order."""
    return tuple(sorted(entry.name[: -len(".toml")] for entry in _folder() if entry.name.endswith(".toml")))


@cache
def model_shape(name: str) -> ModelShape:
    """The shape called `name`; UsageError lists the names there are."""
    if name not in model_names():
        known = ", ".join(model_names())
        raise UsageError(f"no model shape is called {name!r}", hint=f"one of {known}", known=list(model_names()))
    text = files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return shape_from_table(tomllib.loads(text))


def shape_from_table(table: Mapping[str, Any]) -> ModelShape:
    """A checked ModelShape from a parsed data file; UsageError names the key that is wrong."""
    try:
        shape = ModelShape(**table)
    except TypeError as problem:
        raise UsageError(f"model shape {table.get('name', '?')!r}: {problem}") from None
    _check(shape)
    return shape


def _check(shape: ModelShape) -> None:
    classes = {"qkv", "o_proj", "head"} | ({"router", "experts"} if shape.experts else {"mlp"})
    if shape.kv_heads < 1 or shape.q_heads % shape.kv_heads:
        raise UsageError(f"{shape.name}: {shape.q_heads} query heads are not a multiple of {shape.kv_heads} KV heads")
    if shape.window_layers and not shape.window:
        raise UsageError(f"{shape.name}: window_layers is {shape.window_layers} but window is 0")
    if not 0 <= shape.window_layers <= shape.layers:
        raise UsageError(f"{shape.name}: window_layers {shape.window_layers} is not within 0..{shape.layers}")
    for precision, formats in shape.precisions.items():
        unknown = set(formats.values()) - set(BYTES_PER_WEIGHT)
        if set(formats) != classes or unknown:
            raise UsageError(f"{shape.name}, precision {precision}: needs a known format for {sorted(classes)}")


def _folder() -> list[Any]:
    return list(files(__name__).iterdir())
