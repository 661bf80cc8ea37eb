"""`dieplace exec`: run a program that sees the right die and sits on the right CPUs, in numactl's words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from dieplace import numberlist
from dieplace.cli import render
from dieplace.cli.options import settings
from dieplace.cli.table import Column, Table
from dieplace.errors import DieplaceError, LaunchFailed, UsageError

if TYPE_CHECKING:
    from dieplace.binding.prepare import Prepared, Request
    from dieplace.binding.verify import Check

_KEEP_CODES = (2, 3, 4, 126, 127)


@click.command(
    "exec",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Run a program bound to a die.",
)
@click.option(
    "-d", "--device", "devices", multiple=True, metavar="gpuN/pM[,..]",
    help="Devices the program sees, in this order; gpuN is all of a card, all is every visible one.",
)  # fmt: skip
@click.option("--per-device", is_flag=True, help="Start the program once for each device.")
@click.option("--by-rank", is_flag=True, help="Take the one device whose number is this process's local rank.")
@click.option(
    "--keep-visible", is_flag=True, help="With the two above: all devices stay visible, only the host side differs."
)
@click.option(
    "--visible-by", type=click.Choice(("rocr", "hip")), default="rocr", show_default=True,
    help="AMD: the variable that hides the other devices; hip for programs that refuse ROCR_VISIBLE_DEVICES (Ray).",
)  # fmt: skip
@click.option("-m", "--membind", metavar="NODES", help="Allocate host memory on these NUMA nodes only.")
@click.option("-p", "--preferred", metavar="NODE", help="Prefer this NUMA node for host memory.")
@click.option("-i", "--interleave", metavar="NODES", help="Spread host memory over these NUMA nodes.")
@click.option("-N", "--cpunodebind", metavar="NODES", help="Run on the CPUs of these NUMA nodes.")
@click.option("-C", "--cpus", "--physcpubind", metavar="LIST", help="Run on these CPUs.")
@click.option("--strict", is_flag=True, help="Do not start the program unless all of it holds.")
@click.option("--print", "show", is_flag=True, help="Show the environment and the binding, and run nothing.")
@click.option("--verify", is_flag=True, help="First let a child read back what it sees, and fail on a mismatch.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def exec_command(
    ctx: click.Context, command: tuple[str, ...], show: bool, verify: bool, strict: bool, **words: Any
) -> None:
    """Run COMMAND bound to a die: dieplace exec --device gpu0/p1 -- vllm serve ...

    Devices are chosen within what the caller's ROCR_, HIP_ and CUDA_VISIBLE_DEVICES leave visible. Without --device
    only the host side is bound, on any machine. Near a device means: the CPUs of its NUMA node and a preference for
    its memory. Lists are numactl's: 0-3,8 all !2 +0.

    The program replaces this one, so its status is the program's. Before it starts: 2 usage, 3 not possible here, 4
    needs privilege, 125 another failure, 126 it cannot be run, 127 it is not there.
    """
    try:
        _run(ctx, command, show, verify, strict, words)
    except DieplaceError as error:
        if error.exit_code in _KEEP_CODES or (show or not command):
            raise
        raise LaunchFailed(error.message, hint=error.hint, **error.facts) from error


def _run(
    ctx: click.Context, command: tuple[str, ...], show: bool, verify: bool, strict: bool, words: dict[str, Any]
) -> None:
    from dieplace.binding.prepare import prepare
    from dieplace.binding.visibility import refuse_during_switch

    request = _request(ctx, words)
    if not command and not show and not verify:
        raise UsageError("no program was named", hint="dieplace exec --device gpu0/p1 -- CMD; or --print, or --verify")
    if request.devices is not None and not show:
        refuse_during_switch(request.backend, request.node, os.environ)
    prepared = prepare(request, os.environ)
    if show:
        _print(ctx, prepared, command)
        return
    for text in dict.fromkeys(note for item in prepared for note in item.notes()):
        render.say(ctx, f"dieplace: {text}")
    if verify:
        _verify(ctx, prepared, command, strict)
    if not command:
        return
    if request.per_device:
        _run_group(ctx, command, prepared, strict)
    else:
        _become(ctx, command, prepared[0], strict)


def _request(ctx: click.Context, words: dict[str, Any]) -> Request:
    from dieplace.binding.prepare import Request

    memory = [(name, words[name]) for name in ("membind", "preferred", "interleave") if words[name] is not None]
    if len(memory) > 1:
        raise UsageError(f"--{memory[0][0]} and --{memory[1][0]} contradict each other", hint="use one of them")
    names = tuple(name.strip() for text in words["devices"] for name in text.split(","))
    if "" in names:
        raise UsageError("an empty device name was given", hint="write --device gpu0/p0,gpu0/p1")
    if not names and (words["per_device"] or words["by_rank"]):
        names = ("all",)
    policy, nodes = memory[0] if memory else (None, None)
    chosen = settings(ctx)
    return Request(
        devices=names or None, per_device=words["per_device"], by_rank=words["by_rank"],
        keep_visible=words["keep_visible"], visible_by=words["visible_by"], cpus=words["cpus"],
        cpunodes=words["cpunodebind"], policy=policy, nodes=nodes, backend=chosen.backend, node=chosen.node,
    )  # fmt: skip


def _become(ctx: click.Context, command: tuple[str, ...], prepared: Prepared, strict: bool) -> None:
    from dieplace.binding.bind import carry_out
    from dieplace.binding.launch import become, find_program

    environ = {**os.environ, **prepared.added}
    find_program(command[0], environ.get("PATH"))
    for text in carry_out(prepared.binding, strict=strict).failures:
        if text not in prepared.planned.incomplete:  # told already
            render.warn(ctx, text)
    become(command, environ)


def _run_group(ctx: click.Context, command: tuple[str, ...], prepared: tuple[Prepared, ...], strict: bool) -> None:
    from dieplace.binding.group import Job, run_jobs

    jobs = [Job(item.label, {**os.environ, **item.added}, item.binding) for item in prepared]
    code, statuses = run_jobs(command, jobs, strict=strict)
    if code:
        told = ", ".join(f"{label} ended with status {status}" for label, status in statuses.items() if status)
        render.say(ctx, f"dieplace: {told}")
    ctx.exit(code)


def _verify(ctx: click.Context, prepared: tuple[Prepared, ...], command: tuple[str, ...], strict: bool) -> None:
    from dieplace.binding.verify import verify

    checks = [check for item in prepared for check in verify(item, os.environ, strict=strict)]
    wrong = [check for check in checks if check.ok is False]
    if command:
        for check in checks:
            if check.ok is None:
                render.say(ctx, f"dieplace: not verified, {check.what}: {check.seen}")
        if wrong:
            raise LaunchFailed(
                "; ".join(f"{c.label}: {c.what} should be {c.planned} and is {c.seen}" for c in wrong),
                hint="the program was not started", checks=[vars(check) for check in checks],
            )  # fmt: skip
        return
    rows = [vars(check) for check in checks]
    source = prepared[0].source
    render.answer(ctx, "exec-verify/1", {"checks": rows}, source=source, ok=not wrong, table=lambda: _checks(checks))
    if wrong:
        ctx.exit(1)


def _grouped(text: str) -> str:
    """A count of bytes in groups of digits; other texts, PCI addresses among them, as they are."""
    return f"{int(text):,}" if text.isdecimal() and not text.startswith("0") else text


def _checks(checks: list[Check]) -> list[Table | str]:
    columns = [Column("label", "for"), Column("what", "what"), Column("planned", "planned", show=_grouped),
               Column("seen", "seen", show=_grouped), Column("ok", "ok")]  # fmt: skip
    words = {True: "yes", False: "NO", None: "not asked"}
    return [Table(columns, [{**vars(check), "ok": words[check.ok]} for check in checks])]


def _print(ctx: click.Context, prepared: tuple[Prepared, ...], command: tuple[str, ...]) -> None:
    payload = {"command": list(command), "processes": [item.to_json() for item in prepared]}
    source = prepared[0].source
    render.answer(ctx, "exec-print/1", payload, source=source, table=lambda: [_text(item) for item in prepared],
                  csv_table=lambda: [_csv(prepared)])  # fmt: skip


def _csv(prepared: tuple[Prepared, ...]) -> Table:
    rows = [
        {"label": item.label, "devices": " ".join(d.id for d in item.devices), "cpus": item.to_json()["cpus"],
         "memory_policy": item.planned.policy, "memory_nodes": numberlist.show(item.planned.nodes), **item.added}
        for item in prepared
    ]  # fmt: skip
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return Table([Column(key, key) for key in keys], rows)


def _text(item: Prepared) -> str:
    lines = [f"for {item.label}:"]
    lines += [f"  device {index}: {device.id} ({device.bdf})" for index, device in enumerate(item.devices)]
    lines += [f"  {name}={value}" for name, value in item.added.items()]
    cpus = item.planned.cpus
    lines.append(f"  CPUs: {'left as they are' if cpus is None else numberlist.show(cpus)}")
    nodes = numberlist.show(item.planned.nodes)
    lines.append(f"  host memory: {f'{item.planned.policy} node {nodes}' if item.planned.policy else 'left as it is'}")
    return "\n".join([*lines, *(f"  note: {text}" for text in item.notes())])
