"""Kernel speed on one NVIDIA GPU: ratios to ceilings measured in the same run, never to a datasheet.

Run as `python -m dieplace.experiments.kernel_speed [--out FILE] [--layers N]`. `timed_cases` says how times are taken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dieplace.experiments.timed_cases import Speed, WrongResult, rows, timed

GIB = 1 << 30
COPY, READ = "torch copy_", "streaming read"
SAMPLED_ROWS = 509  # a prime: rows at every place of a program


def copy_speed(buffers: Sequence[Any]) -> Speed:
    """`Tensor.copy_` between distinct 1 GiB buffers, both directions counted."""
    pairs = list(zip(buffers[::2], buffers[1::2], strict=True))
    return timed(COPY, 2 * buffers[0].nbytes, [partial(b.copy_, a) for a, b in pairs])


def read_speed(buffers: Sequence[Any]) -> Speed:
    """The streaming read: every byte loaded once with 128-bit loads, one partial sum a program."""
    import torch

    from dieplace.probes.triton_stream import read

    out = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    return timed(READ, buffers[0].nbytes, [partial(read, b.view(torch.int32), out, device=None) for b in buffers])


def gemv_speeds(buffers: Sequence[Any]) -> list[Speed]:
    """A 1 GiB bf16 GEMV (131,072 x 4,096) by our kernel and by `torch.mv`, and an MXFP4 one (524,288 x 4,096)."""
    import torch

    from dieplace.kernels.triton.gemv import gemv_bf16, gemv_mxfp4

    width = 4096
    x = torch.randn(1, width, device="cuda").bfloat16()
    dense = [b.view(torch.bfloat16).view(-1, width) for b in buffers]
    out = torch.empty(1, dense[0].shape[0], device="cuda", dtype=torch.bfloat16)
    ours = [partial(gemv_bf16, {"x": x, "weight": w, "bias": None, "out": out}, {}) for w in dense]
    theirs = [partial(torch.mv, w, x[0], out=out[0]) for w in dense]
    count = 524288
    blocks = [b.view(count, width // 32, 16) for b in buffers]
    scales = torch.randint(118, 126, (count, width // 32), dtype=torch.uint8, device="cuda")
    wide = torch.empty(1, count, device="cuda", dtype=torch.bfloat16)
    _require_rows(x, blocks[0], scales, wide)
    packed = [
        partial(gemv_mxfp4, {"x": x, "blocks": b, "scales": scales, "bias": None, "out": wide}, {}) for b in blocks
    ]
    return [
        timed("gemv_bf16 1 GiB", dense[0].nbytes, ours),
        timed("torch.mv bf16 1 GiB", dense[0].nbytes, theirs),
        timed("gemv_mxfp4 524288x4096", blocks[0].nbytes + scales.nbytes, packed),
    ]


def _require_rows(x: Any, blocks: Any, scales: Any, out: Any) -> None:
    """Rows from all over the wide product agree with the float64 reference, before it is timed."""
    from dieplace.kernels import registry
    from dieplace.kernels.compare import compare

    registry.run(
        "gemv_mxfp4", {"x": x, "blocks": blocks, "scales": scales, "bias": None, "out": out}, backend="triton",
        strict=True,
    )  # fmt: skip
    some = slice(5, None, blocks.shape[0] // SAMPLED_ROWS)
    operands = {"x": x, "blocks": blocks[some], "scales": scales[some], "bias": None, "out": out[:, some]}
    kept = {name: None if tensor is None else tensor.contiguous().cpu() for name, tensor in operands.items()}
    found = {name: tensor for name, tensor in kept.items() if tensor is not None}
    for deviation in compare(registry.check_call("gemv_mxfp4", kept), found):
        if not deviation.ok:
            raise WrongResult(f"gemv_mxfp4 of {blocks.shape[0]} rows: {deviation}", hint="nothing was timed")


def conditions() -> dict[str, Any]:
    """Time, driver, and the clocks, power and temperature of every GPU now; null with a why where NVML is silent."""
    from dieplace.backends.nvidia.telemetry import read_all

    version, readings, why = read_all()
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver_version": version,
        "gpus": [reading.to_json() for reading in readings],
        **({} if why is None else {"driver_version_why": why}),
    }


def _buffers(count: int) -> list[Any]:
    """1 GiB each, without NaN or infinity among their bf16 values: exponent bits are kept small."""
    import torch

    found = [torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    for one in found:
        one.view(torch.int16).bitwise_and_(-16385).bitwise_or_(0x2000)
    return found


def with_floors(stages: Sequence[dict[str, Any]], ceiling: Speed) -> list[dict[str, Any]]:
    """Each stage with the time that its bytes take at the ceiling; null where next to none move."""
    rate = ceiling.gb_per_s
    assert rate is not None
    return [
        {**one, "floor_ns": one["bytes"] / rate}
        if one["bytes"]
        else {**one, "floor_ns": None, "floor_ns_why": "activations only"}
        for one in stages
    ]


def result(speeds: Sequence[Speed], stages: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The run as JSON: every sample, and where the time of the layer goes."""
    # A rate above the ceiling would mean that a cache served it: the fastest of all plain streams of the run is taken.
    streams = [speed for speed in speeds if speed.name == COPY or speed.name.startswith(READ)]
    ceiling = max(streams, key=lambda s: s.gb_per_s or 0)
    return {
        "schema": "dieplace/kernel-speed/2",
        "origin": "measured",
        **facts,
        "ceiling": ceiling.name,
        "layer_stages": with_floors(stages, ceiling),
        "cases": rows(speeds, ceiling),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write every sample as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        parser.exit(3, "kernel_speed: it needs an NVIDIA GPU, a CUDA build of torch and Triton: see dieplace doctor\n")
    import triton

    from dieplace.experiments.layer_times import layer_speeds

    torch.manual_seed(1)
    before = conditions()
    buffers = _buffers(4)
    speeds = [copy_speed(buffers), read_speed(buffers), *gemv_speeds(buffers)]
    del buffers
    torch.cuda.empty_cache()
    cases, stages = layer_speeds(options.layers)
    torch.cuda.empty_cache()
    # The ceiling is taken first and the layer last: the read at the end tells whether the card slowed down in between.
    again = replace(read_speed(_buffers(2)), name=f"{READ}, at the end")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    facts = {"device": torch.cuda.get_device_name(), "versions": versions, "before": before, "after": conditions()}
    found = result([*speeds, *cases, again], stages, facts)
    for line in table(found):
        print(line, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def table(found: dict[str, Any]) -> list[str]:
    """The cases and the stages in words."""
    lines = []
    for row in found["cases"]:
        rate = "-" if row["gb_per_s"] is None else f"{row['gb_per_s']:>8.0f} GB/s {row['of_ceiling']:>6.2f}"
        lines.append(f"{row['name']:<36} {row['median_ns'] / 1e3:>10.2f} us {rate}")
    for one in found["layer_stages"]:
        floor = "-" if one["floor_ns"] is None else f"{one['floor_ns'] / 1e3:.2f}"
        times = f"alone {one['alone_ns'] / 1e3:.2f} us, in the layer {one['in_layer_ns'] / 1e3:.2f} us"
        lines.append(f"{one['stage']:<12} floor {floor} us, {times}")
    return lines


def stage_table(found: dict[str, Any]) -> str:
    """Where the time of the layer goes, as Markdown: us, each stage against its floor."""
    by_name = {row["name"]: row for row in found["cases"]}
    whole = by_name["layer, Triton ops"]
    ceiling = by_name[found["ceiling"]]["gb_per_s"]

    def us(ns: float | None) -> str:
        return "-" if ns is None else f"{ns / 1e3:.1f}"

    lines = ["| stage | MB | floor | alone | in the layer |", "| --- | --- | --- | --- | --- |"]
    for one in found["layer_stages"]:
        times = (us(one[key]) for key in ("floor_ns", "alone_ns", "in_layer_ns"))
        lines.append(f"| {one['stage']} | {one['bytes'] / 1e6:.1f} | {' | '.join(times)} |")
    nbytes, ns = whole["bytes_per_launch"], whole["median_ns"]
    lines.append(f"| whole layer | {nbytes / 1e6:.1f} | {us(nbytes / ceiling)} | - | {us(ns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
