"""Times of the gpt-oss-120b layer on one NVIDIA GPU: whole, by stage, and in plain torch ops.

Where the time goes is asked in two ways. *Alone* is a stage's launches one after the other. *In the layer* is the whole
layer's time less that of the layer without the stage: launches overlap, so the first does not add up to the whole and
the second is what leaving the stage out would save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dieplace.experiments.layer_speed import (
    Layer,
    make_layer,
    overlapped_stages,
    stage_bytes,
    triton_stages,
    workspace,
)
from dieplace.experiments.timed_cases import OTHER_BYTES, Speed, WrongResult, timed

LAYER, ONE_LAUNCH_AN_OP, TORCH = "layer, Triton ops", "layer, Triton ops, one launch an op", "layer, torch ops"
TORCH_LAYERS = 4  # their dequantised experts take 4 GB each
AGREEMENT = 0.02  # of the largest output: bf16 roundings of a whole layer, summed in another order

Stages = Sequence[tuple[str, Callable[[], None]]]


def layer_speeds(count: int) -> tuple[list[Speed], list[dict[str, Any]]]:
    """The cases, and for every stage of the fused layer its bytes and times (the floor is the caller's to add)."""
    import torch

    layers = [make_layer(seed) for seed in range(count)]
    w = workspace()
    fused = [overlapped_stages(layer, w) for layer in layers]
    single = [triton_stages(layer, w) for layer in layers]
    _agree(layers, fused, single, w)
    nbytes = layers[0].read_bytes
    whole = timed(LAYER, nbytes, [in_order(one) for one in fused])
    speeds = [whole, timed(ONE_LAUNCH_AN_OP, nbytes, [in_order(one) for one in single])]
    stages = []
    for number, (name, _) in enumerate(fused[0]):
        moved = stage_bytes(layers[0], name)
        alone = timed(f"stage {name}", moved, [one[number][1] for one in fused])
        rest = timed(
            f"layer without {name}", nbytes - moved, [in_order([*one[:number], *one[number + 1 :]]) for one in fused]
        )
        speeds += [alone, rest]
        in_layer = whole.median_ns - rest.median_ns
        stages.append({"stage": name, "bytes": moved, "alone_ns": alone.median_ns, "in_layer_ns": in_layer})
    speeds += [
        timed(f"single op {name}", stage_bytes(layers[0], name), [one[number][1] for one in single])
        for number, (name, _) in enumerate(single[0])
    ]
    del fused, single
    torch.cuda.empty_cache()
    return [*speeds, _torch_speed(layers[: min(count, TORCH_LAYERS)], w, nbytes)], stages


def in_order(stages: Stages) -> Callable[[], None]:
    """One function that makes all launches in order."""

    def run() -> None:
        for _, launch in stages:
            launch()

    return run


def _torch_speed(layers: Sequence[Layer], w: dict[str, Any], nbytes: int) -> Speed:
    from dieplace.experiments.torch_layer import dequantised, dequantised_experts, torch_layer

    matrices = [dequantised_experts(layer, dequantised(layer)) for layer in layers]
    found = timed(TORCH, nbytes, [partial(torch_layer, layer, m, w) for layer, m in zip(layers, matrices, strict=True)])
    return replace(found, no_rate=OTHER_BYTES)


def _agree(layers: Sequence[Layer], fused: Sequence[Stages], single: Sequence[Stages], w: dict[str, Any]) -> None:
    """The fused layer, the single ops and the torch layer give the same output, before any of them is timed."""
    import torch

    from dieplace.experiments.torch_layer import dequantised, dequantised_experts, torch_layer

    found = {}
    for name, stages in (("fused and overlapped", fused[0]), ("one launch an op", single[0])):
        in_order(stages)()
        torch.cuda.synchronize()
        found[name] = (w["y"].float() + w["r2"].float()).clone()
    layer = layers[0]
    wanted = torch_layer(layer, dequantised_experts(layer, dequantised(layer)), w).float()
    for name, value in found.items():
        error = ((value - wanted).abs().max() / wanted.abs().max()).item()
        if not error <= AGREEMENT:  # NaN too
            raise WrongResult(
                f"the layer, {name}, is off by {error:.2g} of the torch layer's largest output, at most {AGREEMENT}",
                hint="dieplace kernel check --all --kernels triton",
            )
    torch.cuda.empty_cache()
