"""Makes docs/kernels.md: registers, occupancy and instructions per weight byte of every kernel.

    python -m dieplace.kernels.flydsl.table docs/kernels.md        write the page
    python -m dieplace.kernels.flydsl.table --check docs/kernels.md exit 1 when it is not what the kernels give now

Registers come from the assembly's metadata, instructions from a run on the emulator at the row lengths of gpt-oss-120b
and Qwen3-32B with few rows; nothing is measured on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dieplace.codegen.flydsl import compile_launcher
from dieplace.codegen.metadata import KernelResources
from dieplace.emulator.execution import run
from dieplace.kernels import registry

VGPRS_A_LANE = 512  # gfx90a and later, VGPRs and AGPRs in one file (LLVM AMDGPUUsage, "Register Allocation")
VGPR_GRANULE = 8
MAX_WAVES_A_SIMD = 8
BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8


@dataclass(frozen=True)
class Sample:
    """One call to compile and count: an op with operands of a real row length."""

    op: str
    what: str
    operands: Mapping[str, Any]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One kernel of a sample; `per_byte` is wave-instructions per byte of weights (of KV cache for attention)."""

    kernel: str
    what: str
    resources: KernelResources
    instructions: int
    per_byte: float | None

    @property
    def waves_a_simd(self) -> int:
        """Waves that fit the registers of one SIMD."""
        used = -(-self.resources.vgpr // VGPR_GRANULE) * VGPR_GRANULE
        return min(MAX_WAVES_A_SIMD, VGPRS_A_LANE // used)


def mxfp4(rows: tuple[int, ...], k: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of weight 0.5 everywhere: counts do not depend on values."""
    return torch.full((*rows, k // 32, 16), 0x11, dtype=U8), torch.full((*rows, k // 32), 127, dtype=U8)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of zeros."""
    return torch.zeros(shape, dtype=dtype)


def linear_samples() -> Iterator[Sample]:
    """GEMVs, MLP and head."""
    for tokens, k in ((1, 2560), (1, 2880), (8, 2880)):
        operands = {"x": zeros(tokens, k), "weight": zeros(64, k), "bias": zeros(64), "out": zeros(tokens, 64)}
        yield Sample("gemv_bf16", f"{tokens} x {k}", operands, {})
    for tokens, k in ((1, 2048), (1, 2880), (2, 2880), (4, 2880), (8, 2880)):
        blocks, scales = mxfp4((64,), k)
        operands = {"x": zeros(tokens, k), "blocks": blocks, "scales": scales, "out": zeros(tokens, 64)}
        yield Sample("gemv_mxfp4", f"{tokens} x {k}", operands, {})
    for tokens in (1, 8):
        blocks, scales = mxfp4((64,), 2880)
        x, x_scales = zeros(tokens, 2880, dtype=U8).view(torch.float8_e4m3fn), torch.full((tokens, 90), 127, dtype=U8)
        operands = {"x": x, "x_scales": x_scales, "blocks": blocks, "scales": scales, "out": zeros(tokens, 64)}
        yield Sample("gemv_mxfp4_mxfp8", f"{tokens} x 2880", operands, {})
    x = zeros(8, 2880)
    yield Sample(
        "quantize_mxfp8",
        "8 x 2880",
        {"x": x, "out": zeros(8, 2880, dtype=U8).view(torch.float8_e4m3fn), "scales": zeros(8, 90, dtype=U8)},
        {},
    )
    yield Sample(
        "mlp_gate_up",
        "1 x 5120",
        {"x": zeros(1, 5120), "gate": zeros(64, 5120), "up": zeros(64, 5120), "out": zeros(1, 64)},
        {},
    )
    (gate, gate_scales), (up, up_scales) = mxfp4((64,), 5120), mxfp4((64,), 5120)
    operands = {"gate_blocks": gate, "gate_scales": gate_scales, "up_blocks": up, "up_scales": up_scales}
    yield Sample("mlp_gate_up_mxfp4", "1 x 5120", {"x": zeros(1, 5120), **operands, "out": zeros(1, 64)}, {})
    yield Sample(
        "head_argmax",
        "1 x 2880",
        {
            "x": zeros(1, 2880),
            "weight": zeros(64, 2880),
            "logits": zeros(1, 64, dtype=F32),
            "value": zeros(1, dtype=F32),
            "token": zeros(1, dtype=I32),
        },
        {"vocab": 60, "offset": 0},
    )


def expert_samples() -> Iterator[Sample]:
    """Router and experts of gpt-oss-120b: 4 of 128, hidden and inner 2880; few rows and experts."""
    for tokens in (1, 8):
        logits = torch.arange(tokens * 128, dtype=F32).reshape(tokens, 128)
        outputs = {
            "ids": zeros(tokens, 4, dtype=I32),
            "weights": zeros(tokens, 4, dtype=F32),
            "nonfinite": zeros(1, dtype=I32),
        }
        yield Sample("router_topk", f"{tokens} of 128", {"logits": logits, **outputs}, {})
        ids = (torch.arange(tokens * 4, dtype=I32) % 8).reshape(tokens, 4)
        blocks, scales = mxfp4((8, 64), 2880)
        bias = zeros(8, 64)
        yield Sample(
            "expert_gate_up",
            f"{tokens} x 2880",
            {
                "x": zeros(tokens, 2880),
                "ids": ids,
                "blocks": blocks,
                "scales": scales,
                "bias": bias,
                "out": zeros(tokens, 4, 32),
            },
            {},
        )
        yield Sample(
            "expert_down",
            f"{tokens} x 2880",
            {
                "x": zeros(tokens, 4, 2880),
                "ids": ids,
                "weights": torch.full((tokens, 4), 0.25),
                "blocks": blocks,
                "scales": scales,
                "bias": bias,
                "out": zeros(tokens, 64),
            },
            {},
        )


def attention_samples() -> Iterator[Sample]:
    """Split and merge for one KV head's group of gpt-oss-120b (8 of 64, window 128) and Qwen3-32B (8 of 128)."""
    for tokens, group, head_dim, window in ((1, 8, 64, 0), (1, 8, 64, 128), (1, 8, 128, 0), (8, 8, 64, 0)):
        context, splits = 512, 4
        caches = {name: zeros(context // 16, 16, 1, head_dim) for name in ("k_cache", "v_cache")}
        operands = {
            "q": zeros(tokens, group, head_dim),
            **caches,
            "page_table": torch.arange(context // 16, dtype=I32),
            "lengths": torch.arange(context - tokens + 1, context + 1, dtype=I32),
            "partial": zeros(tokens, group, splits, head_dim, dtype=F32),
            "partial_lse": zeros(tokens, group, splits, dtype=F32),
        }
        what = f"{tokens} x {group} heads of {head_dim}" + (f", window {window}" if window else "")
        yield Sample("attention_split", what, operands, {"scale": 0.125, "window": window, "splits": splits})
    yield Sample(
        "attention_merge",
        "8 heads of 64, 4 splits",
        {
            "partial": zeros(1, 8, 4, 64, dtype=F32),
            "partial_lse": zeros(1, 8, 4, dtype=F32),
            "sinks": zeros(8),
            "out": zeros(1, 8, 64),
            "lse": zeros(1, 8, dtype=F32),
        },
        {},
    )


def small_samples() -> Iterator[Sample]:
    """Norms, RoPE, hand-offs and flags."""
    row = {name: zeros(1, 2880) for name in ("x", "residual", "out", "residual_out")}
    norm = {**row, "weight": zeros(2880, dtype=F32)}
    yield Sample("rmsnorm", "1 x 2880, residual", norm, {"eps": 1e-5, "order": "before_cast"})
    qkv = zeros(1, 10240)
    heads = {"q_heads": 64, "kv_heads": 8, "head_dim": 128}
    weights = {"q_weight": zeros(128), "k_weight": zeros(128)}
    yield Sample("qk_norm", "64 + 8 heads of 128", {"qkv": qkv, **weights}, {**heads, "eps": 1e-6})
    rope = {
        "qkv": qkv,
        "cos": zeros(4, 64, dtype=F32),
        "sin": zeros(4, 64, dtype=F32),
        "positions": zeros(1, dtype=I32),
        "slots": zeros(1, dtype=I32),
        "q_out": zeros(1, 64, 128),
        "k_cache": zeros(4, 8, 128),
        "v_cache": zeros(4, 8, 128),
    }
    yield Sample("rope_kv_append", "64 + 8 heads of 128", rope, heads)
    n = 2880
    mailbox = torch.full((n,), 1 << 32, dtype=torch.int64)
    status = {"status": zeros(2, dtype=I32)}
    yield Sample("handoff_put", f"{n} words", {"x": zeros(n, dtype=F32), "mailbox": mailbox.clone()}, {"tag": 1})
    own = {"own": zeros(n, dtype=F32), "mailbox": mailbox, "out": zeros(n)}
    yield Sample("handoff_sum", f"{n} words", {**own, **status}, {"tag": 1})
    yield Sample("flag_set", "1 flag", {"flag": zeros(1, dtype=I32)}, {"value": 1})
    yield Sample("flag_wait", "1 flag", {"flag": zeros(1, dtype=I32) + 1, **status}, {"value": 1})
    yield Sample("epoch_next", "1 counter", {"epoch": zeros(1, dtype=I32)}, {"step": 64})
    parties = {"stamps": zeros(3, 2, dtype=torch.int64), "xcc": zeros(3, dtype=I32)}
    lines = {"flag": zeros(32, dtype=I32), "acks": zeros(64, dtype=I32)}
    yield Sample("flag_visibility", "2 readers, 2 rounds", {**lines, **parties}, {"first": 1, "spin_limit": 1 << 16})


def samples() -> Iterator[Sample]:
    """Every kernel at least once."""
    yield from linear_samples()
    yield from expert_samples()
    yield from attention_samples()
    yield from small_samples()


def measure(sample: Sample) -> list[Row]:
    """Compile and run the launches of a sample; weight bytes are the contract's."""
    call = registry.check_call(sample.op, sample.operands, sample.attrs)
    kernel: Any = registry.implementation(sample.op, "flydsl")
    by_role = registry.bytes_by_role(call)
    nbytes = by_role["kv_cache"] if sample.op == "attention_split" else by_role["weights"]
    counted = sample.op not in ("rmsnorm", "qk_norm", "rope_kv_append", "attention_merge") and nbytes > 0
    rows = []
    for number, launch in enumerate(kernel.plan(call.operands, call.attrs)):
        resources = compile_launcher(launch.launcher, *launch.args).kernels[0]
        instructions = run(launch.launcher, *launch.args, two_die=False).instructions
        per_byte = instructions / nbytes if counted and number == 0 else None
        name = sample.op if number == 0 else f"{sample.op}, second launch"
        rows.append(Row(name, sample.what, resources, instructions, per_byte))
    return rows


HEADER = """# The FlyDSL kernels

Made by `python -m dieplace.kernels.flydsl.table docs/kernels.md`; a test compares the page with what the kernels give.

VGPRs count AccVGPRs too, as the hardware allocates them together: 512 a lane and SIMD, in steps of 8. Instructions are
wave-instructions executed on the emulator with few rows (64 rows of weights, 512 tokens of context), the workgroup's
prologue included; per byte of weights, or of KV cache for attention, as the contract counts them. Nothing here was
measured on a device.

| kernel | shape | VGPRs | waves per SIMD | LDS bytes | instructions per byte |
| --- | --- | --- | --- | --- | --- |
"""

FOOTER = """
## How they read

- A wave owns four row steps; each row goes to 64, 32 or 16 lanes, whichever leaves few of them idle (2880 MXFP4 weights
  are 90 items of 16 bytes: 32 lanes). One buffer descriptor covers the wave's rows and ends with the matrix, so that
  what lies behind a row or the last row reads as zero, without branches. A matrix may be larger than 4 GiB.
- MXFP4 is converted with scale 1 and a block's sum multiplied by its scale in fp32: scale byte 0 is 2^-127, 255 is NaN.
  The matrix form (`gemv_mxfp4_mxfp8`) is kept beside it; which is faster on the chip is not known, the caller chooses.
- Experts: the first (token, choice) that names an expert reads it for all that do; no weight byte is asked for twice.
- Attention cuts the keys that any row sees into `splits` equal runs, the last may be empty; sinks join in the merge.
- Hand-offs are 64-bit words of value and tag, flags are released and acquired; both are polled at most `spin_limit`
  times, and belong in the memory of the die that polls.

## Budgets and cache bits

Budgets, checked by tests: MXFP4 GEMV at most 0.14 instructions per weight byte at K = 2048, bf16 GEMV at most 0.042 at
K = 2560 (what the first trial kernels needed); at most 256 registers everywhere, so that two waves share a SIMD, and at
most 128 for one token of GEMV, expert, norm and hand-off kernels, so that four do; no spills, no scratch, no `flat_`.

| name in `codegen/cache_bits.py` | instruction suffix | used for |
| --- | --- | --- |
"""


def page() -> str:
    """The whole of docs/kernels.md."""
    from dieplace.codegen.cache_bits import TABLE

    lines = []
    for sample in samples():
        for row in measure(sample):
            per_byte = "" if row.per_byte is None else f"{row.per_byte:.3f}"
            cells = (row.kernel, row.what, row.resources.vgpr, row.waves_a_simd, row.resources.lds_bytes, per_byte)
            lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    bits = [f"| {name} | {' '.join(f'`{s}`' for s in b.isa) or 'none'} | {b.why} |" for name, b in TABLE.items()]
    return HEADER + "\n".join(lines) + "\n" + FOOTER + "\n".join(bits) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the page; 0 when it is written or right, 1 when it differs, 2 for wrong arguments."""
    check = "--check" in arguments
    paths = [a for a in arguments if not a.startswith("-")]
    if len(paths) != 1:
        print("usage: python -m dieplace.kernels.flydsl.table [--check] PATH", file=sys.stderr)
        return 2
    made, path = page(), Path(paths[0])
    if not check:
        path.write_text(made)
        return 0
    return 0 if path.exists() and path.read_text() == made else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
