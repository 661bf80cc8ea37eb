"""Kernel speed on one NVIDIA GPU: ratios to ceilings measured in the same run, never to a datasheet.

Run as `python -m dieplace.experiments.kernel_speed [--out FILE] [--layers N]`. Each case is captured in a CUDA graph
that walks over distinct operands, so that no weight is in the last-level cache when it is used again; samples are
device event times of whole replays divided by the launches in them. Ratios need no clock of the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Speed:
    """One timed case: bytes that must move for a launch, every sample in ns, and the rate of the median."""

    name: str
    bytes_per_launch: int
    launches_per_replay: int
    samples_ns: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        """Median time of one launch."""
        return statistics.median(self.samples_ns)

    @property
    def gb_per_s(self) -> float:
        """Bytes over median time."""
        return self.bytes_per_launch / self.median_ns


def timed(name: str, nbytes: int, launches: Sequence[Callable[[], object]], replays: int = 25) -> Speed:
    """Capture `launches` in one graph, replay it, and keep every sample; the first replays warm up untimed."""
    import torch

    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e6 / len(launches))
    return Speed(name, nbytes, len(launches), tuple(samples))


def copy_speed(buffers: Sequence[Any]) -> Speed:
    """`Tensor.copy_` between distinct 1 GiB buffers, both directions counted."""
    pairs = list(zip(buffers[::2], buffers[1::2], strict=True))
    return timed("torch copy_", 2 * buffers[0].nbytes, [partial(b.copy_, a) for a, b in pairs])


def read_speed(buffers: Sequence[Any]) -> Speed:
    """The streaming read: every byte loaded once with 128-bit loads, one partial sum a program."""
    import torch

    from dieplace.probes.triton_stream import read

    out = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    return timed(
        "streaming read", buffers[0].nbytes, [partial(read, b.view(torch.int32), out, device=None) for b in buffers]
    )


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
    rows = 524288
    blocks = [b.view(rows, width // 32, 16) for b in buffers]
    scales = torch.randint(118, 126, (rows, width // 32), dtype=torch.uint8, device="cuda")
    wide = torch.empty(1, rows, device="cuda", dtype=torch.bfloat16)
    packed = [
        partial(gemv_mxfp4, {"x": x, "blocks": b, "scales": scales, "bias": None, "out": wide}, {}) for b in blocks
    ]
    return [
        timed("gemv_bf16 1 GiB", dense[0].nbytes, ours),
        timed("torch.mv bf16 1 GiB", dense[0].nbytes, theirs),
        timed("gemv_mxfp4 524288x4096", blocks[0].nbytes + scales.nbytes, packed),
    ]


def report(speeds: Sequence[Speed], ceiling: Speed) -> list[dict[str, Any]]:
    """Rows with the ratio of each case's rate to the ceiling's."""
    return [
        {**asdict(s), "median_ns": s.median_ns, "gb_per_s": s.gb_per_s, "of_ceiling": s.gb_per_s / ceiling.gb_per_s}
        for s in speeds
    ]


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

    from dieplace.experiments.layer_speed import layer_speeds

    torch.manual_seed(1)
    buffers = [torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda") for _ in range(4)]
    for b in buffers:  # no NaN or infinity among the bf16 values: exponent bits are kept small
        b.view(torch.int16).bitwise_and_(-16385).bitwise_or_(0x2000)
    speeds = [copy_speed(buffers), read_speed(buffers), *gemv_speeds(buffers)]
    del buffers
    torch.cuda.empty_cache()
    ceiling = max(speeds[:2], key=lambda s: s.gb_per_s)
    speeds += layer_speeds(options.layers)
    rows = report(speeds, ceiling)
    for row in rows:
        rate = f"{row['gb_per_s']:>8.0f} GB/s {row['of_ceiling']:>6.2f}"
        print(f"{row['name']:<32} {row['median_ns'] / 1e3:>10.2f} us {rate}", file=sys.stderr)
    result = {
        "schema": "dieplace/kernel-speed/1",
        "origin": "measured",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
        "ceiling": ceiling.name,
        "cases": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
