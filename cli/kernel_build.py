"""`dieplace kernel list | build | check`: ops and their kernels, what they compile to, and whether they are right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import click

from dieplace.cli import render
from dieplace.cli.table import Column, Table
from dieplace.errors import CompileError, Unsupported, UsageError

KERNEL_BACKENDS = ("flydsl", "triton")
_WITHOUT_GPU = "without a GPU: --device emulated, --kernels flydsl or reference, or set TRITON_INTERPRET=1"
EMULATED = "emulated"


@click.command("list")
@click.pass_context
def list_kernels(ctx: click.Context) -> None:
    """List ops in the order of a decode step, their operands by role, and the backends that have a kernel."""
    from dieplace.kernels import registry

    rows = [_op_row(registry.op(name)) for name in registry.op_names()]
    columns = [
        Column("op", "op"),
        *(Column(backend, backend, show=_yes) for backend in KERNEL_BACKENDS),
        Column("weights", "weights", show=_joined),
        Column("tolerance", "tolerance"),
    ]
    note = "tolerance: roundings of the output type + fp32 accumulation, in units of the summed magnitudes"
    render.answer(
        ctx,
        "kernel-list/1",
        {"ops": rows},
        source=None,
        table=lambda: [Table(columns, rows, notes=[note])],
        csv_table=lambda: [Table(_csv_columns(), rows)],
    )


@click.command("build")
@click.argument("ops", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every op that has a kernel.")
@click.option(
    "--kernels", type=click.Choice(KERNEL_BACKENDS), default="flydsl", show_default=True, help="Whose kernels."
)
@click.option(
    "--case", "number", default=0, show_default=True, help="The check case whose shapes and types to compile."
)
@click.pass_context
def build(ctx: click.Context, ops: tuple[str, ...], every: bool, kernels: str, number: int) -> None:
    """Compile the kernels of OPS for gfx950 and show what they need. Exit 1: one does not compile."""
    from dieplace.kernels.building import build_op

    names = _chosen(ops, every, kernels)
    for name in names:
        _case(name, number)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    with render.progress(ctx, "compiling", len(names)) as step:
        for name in names:
            step(name)
            try:
                rows += [asdict(built) for built in build_op(name, number, kernels)]
            except CompileError as problem:
                failed.append({"op": name, "reason": str(problem)})
    columns = [
        Column("op", "op"),
        Column("kernel", "kernel"),
        *(Column(key, text, right=True) for key, text in _RESOURCES.items()),
    ]
    bad = [Column("op", "op"), Column("reason", "does not compile")]
    render.answer(
        ctx,
        "kernel-build/1",
        {"arch": "gfx950", "language": kernels, "kernels": rows, "failed": failed},
        source="compiler",
        ok=not failed,
        table=lambda: [
            Table(columns, rows, title="kernels for gfx950"),
            *([Table(bad, failed)] if failed else []),
        ],
    )
    if failed:
        ctx.exit(1)


@click.command("check")
@click.argument("ops", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every op that the backend has a kernel for.")
@click.option(
    "--kernels",
    type=click.Choice((*KERNEL_BACKENDS, "reference")),
    default="flydsl",
    show_default=True,
    help="Whose kernels; flydsl runs on the emulated card where there is no AMD GPU, triton with --device emulated.",
)
@click.option("--limit", type=click.IntRange(1), help="At most so many cases an op.")
@click.option(
    "--device",
    help="torch device that holds the operands, or emulated: Triton kernels compiled for gfx950, run on the emulated"
    " card.  [default: cuda for triton, else cpu]",
)
@click.pass_context
def check(
    ctx: click.Context, ops: tuple[str, ...], every: bool, kernels: str, limit: int | None, device: str | None
) -> None:
    """Run the kernels of OPS on their check cases and compare with the float64 reference. Exit 1: one is wrong."""
    from dieplace.kernels.check import check_op

    names = _chosen(ops, every, kernels)
    device = _usable_device(device, kernels)
    results = []
    emulated = device == EMULATED
    with render.progress(ctx, "checking", len(names)) as step, _on_emulated_card(kernels if emulated else ""):
        for name in names:
            step(name)
            results.append(check_op(name, kernels, limit=limit, device="cpu" if emulated else device))
    rows = [
        {**asdict(r), "ok": r.ok, "failed": len(r.failures), "worst_ratio": _finite(r.worst_ratio)} for r in results
    ]
    failures = [{"op": r.op, "case": f.case, "reason": f.reason} for r in results for f in r.failures]
    columns = [
        Column("op", "op"),
        Column("cases", "cases", right=True),
        Column("failed", "failed", right=True),
        Column("worst_ratio", "worst / tolerance", right=True, show=lambda v: "-" if v is None else f"{v:.3f}"),
        Column("seconds", "s", right=True, show=lambda v: f"{v:.1f}"),
    ]
    wrong = [Column("op", "op"), Column("case", "case"), Column("reason", "reason")]
    ok = not failures
    render.answer(
        ctx,
        "kernel-check/1",
        {"kernels": kernels, "results": rows, "cases": sum(r.cases for r in results)},
        source=EMULATED if kernels == "flydsl" and device == "cpu" else device,
        ok=ok,
        table=lambda: [
            Table(columns, rows, title=f"{kernels} kernels against the float64 reference"),
            *([Table(wrong, failures)] if failures else []),
        ],
    )
    if not ok:
        ctx.exit(1)


_RESOURCES = {
    "vgprs": "VGPRs",
    "sgprs": "SGPRs",
    "lds_bytes": "LDS B",
    "waves_per_simd": "waves/SIMD",
    "instructions": "instr",
}


def _op_row(op: Any) -> dict[str, Any]:
    from dieplace.kernels import registry

    return {
        "op": op.name,
        "summary": op.summary,
        **{backend: op.name in registry.offered(backend) for backend in KERNEL_BACKENDS},
        "weights": [spec.name for spec in op.operands if spec.role == "weights"],
        "operands": [
            {"name": s.name, "role": s.role, "dtypes": s.dtypes, "shape": s.shape, "use": s.use, "optional": s.optional}
            for s in op.operands
        ],
        "attributes": list(op.attrs),
        "tolerance": f"{op.tolerance.rounding:g} + {op.tolerance.accumulation:.1e}",
        "tolerance_reason": op.tolerance.reason,
        "max_extent_bytes": op.max_extent_bytes,
    }


def _csv_columns() -> list[Column]:
    keys = ("op", *KERNEL_BACKENDS, "weights", "tolerance", "tolerance_reason", "max_extent_bytes", "summary")
    return [Column(key, key) for key in keys]


def _chosen(ops: tuple[str, ...], every: bool, backend: str) -> list[str]:
    """Names in step order; unknown ones, none at all and names beside --all are usage errors."""
    from dieplace.kernels import registry

    if bool(ops) == every:
        raise UsageError("name ops or pass --all, not both" if ops else "no op named", hint="dieplace kernel list")
    for name in ops:
        registry.op(name)
        if name not in registry.offered(backend):
            raise UsageError(f"{backend} has no kernel for {name}", hint="dieplace kernel list")
    wanted = set(ops) or set(registry.offered(backend))
    return [name for name in registry.op_names() if name in wanted]


def _usable_device(asked: str | None, kernels: str) -> str:
    """The torch device of the operands, checked before the first case; Triton's interpreter alone runs on the CPU."""
    import torch

    interpreted = kernels == "triton" and _interpreted()
    if asked == EMULATED:
        return _emulated_device(kernels, interpreted)
    name = asked or ("cuda" if kernels == "triton" and not interpreted else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"torch knows no device {name!r}", hint="cpu, cuda, cuda:1, or emulated") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"kernels are not checked on {name!r}", hint="cpu, cuda, or cuda:1")
    if device.type == "cpu":
        if kernels == "triton" and not interpreted:
            raise Unsupported("triton kernels run on a GPU, and --device is cpu", hint=_WITHOUT_GPU)
        return name
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (device.index or 0):
        what = f"torch {torch.__version__} sees {count or 'no'} GPU{'' if count < 2 else 's'} here"
        raise Unsupported(f"{kernels} kernels cannot be checked on {name}: {what}", hint=_WITHOUT_GPU)
    return name


def _emulated_device(kernels: str, interpreted: bool) -> str:
    """FlyDSL kernels run there by themselves; Triton's are compiled for it, unless they are interpreted."""
    if kernels == "reference":
        raise UsageError("the reference is plain torch and runs on no card", hint="leave --device out")
    if interpreted:
        raise Unsupported("TRITON_INTERPRET is set: Triton interprets its kernels and compiles none", hint="unset it")
    return EMULATED if kernels == "triton" else "cpu"


def _on_emulated_card(kernels: str) -> AbstractContextManager[object]:
    """Where Triton's launches go for the time of a check."""
    if kernels != "triton":
        return nullcontext()
    from dieplace.emulator.triton_launch import triton_kernels

    return triton_kernels()


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError as error:
        raise Unsupported("triton is not installed", hint="pip install triton; see: dieplace doctor") from error
    return bool(knobs.runtime.interpret)


def _case(name: str, number: int) -> int:
    from dieplace.kernels.cases import cases

    count = len(cases(name))
    if not 0 <= number < count:
        raise UsageError(f"{name} has no case {number}", hint=f"0 to {count - 1}")
    return number


def _yes(value: Any) -> str:
    return "yes" if value else "-"


def _joined(value: Any) -> str:
    return " ".join(value) or "-"


def _finite(ratio: float) -> float | None:
    return ratio if ratio < float("inf") else None
