"""`dieplace emulate`: make an emulated node, look at it, break it on purpose, put it back as it was.

Without a folder the node of the XDG state folder is meant, the one that `--backend emulated` uses by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dieplace.cli import render
from dieplace.cli.options import settings
from dieplace.cli.partition_options import finite
from dieplace.cli.table import Column, Table
from dieplace.errors import NoSuchDevice, UsageError
from dieplace.sysfs import errno_name

if TYPE_CHECKING:
    from dieplace.emulator.node import Fault, Node, NodeState

DIRECTORY = click.argument("directory", required=False, type=click.Path(path_type=Path))


@click.group()
def emulate() -> None:
    """Make and break emulated nodes.

    An emulated node is a folder of files that mirrors /sys, /proc and /dev of an MI300 or MI350 server, with the
    driver's own rules behind it. It needs no root, and nothing of the real machine is touched.
    """


@emulate.command("new")
@DIRECTORY
@click.option(
    "--part", default="MI355X", show_default=True, help="MI355X, MI350X, MI350P, MI325X, MI300X, MI308X, MI300A."
)
@click.option("--cards", type=int, default=8, show_default=True, help="Number of cards, 1 to 8.")
@click.option("--mode", default="SPX/NPS1", show_default=True, help="Mode that every card starts in.")
@click.option(
    "--style", "styles", multiple=True, metavar="NAME=WORD", help="How this kernel and host behave; repeatable."
)
@click.option("--uid", type=click.IntRange(0), default=0, show_default=True, help="Virtual user; 0 is root.")
@click.option("--replace", "replace_old", is_flag=True, help="Replace the emulated node that is there.")
@click.pass_context
def new(
    ctx: click.Context,
    directory: Path | None,
    part: str,
    cards: int,
    mode: str,
    styles: tuple[str, ...],
    uid: int,
    replace_old: bool,
) -> None:
    """Make an emulated node in DIRECTORY.

    Styles are those of real stacks that differ, for example unique_id=distinct, xcp_name=dot, partition_id=high,
    ast=yes, domains=two, slow_start_s=3; a wrong one lists them all.
    """
    from dieplace.emulator.node import create

    words = _styles(styles)
    node = create(_place(ctx, directory), part, cards, mode, uid=uid, replace_old=replace_old, **words)
    _answer(ctx, node, "emulate-new/1")


@emulate.command("show")
@DIRECTORY
@click.pass_context
def show(ctx: click.Context, directory: Path | None) -> None:
    """Show a node's cards, what is pending, who holds it, the faults that wait, and its kernel log."""
    _answer(ctx, _open(ctx, directory), "emulate-show/1")


@emulate.command("fault")
@click.argument("step", required=False)
@DIRECTORY
@click.option("--error", help="errno name, for example EBUSY.")
@click.option("--status", help="Library status name, for an smi:CALL step.")
@click.option("--card", help="Only this card: gpuN or its BDF.")
@click.option("--times", type=click.IntRange(1), default=1, show_default=True, help="How often.")
@click.option("--always", is_flag=True, help="Every time, until --clear.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=0.0, callback=finite, help="Take so long.")
@click.option("--path", help="The path that a read fault is for; * matches anything.")
@click.option("--clear", is_flag=True, help="Forget all faults and end all card resets.")
@click.pass_context
def fault(ctx: click.Context, step: str | None, directory: Path | None, clear: bool, **options: Any) -> None:
    """Make STEP fail the next time it happens.

    Steps: write_compute, write_memory, unload, load, nps_switch (the pending memory mode is dropped), kfd_init (a card
    comes back without logical devices), read, smi:CALL, and in-reset (the card answers EPERM until --clear).
    """
    if clear and directory is None and step is not None:
        directory, step = Path(step), None
    if (step is None) != clear:
        raise UsageError("name one step to fail, or --clear", hint="see: dieplace emulate fault -h")
    node = _open(ctx, directory)
    if clear:
        node.clear_faults()
        for bdf in node.bdfs():
            node.end_reset(bdf)
    elif step is not None:
        _inject(node, step, options)
    _answer(ctx, node, "emulate-fault/1")


@emulate.command("hold")
@DIRECTORY
@click.option("--name", default="python3", show_default=True, help="The process's name.")
@click.option("--device", "devices", multiple=True, metavar="gpuN/pM", help="A render node it has open; repeatable.")
@click.option("--no-kfd", is_flag=True, help="It does not open /dev/kfd (a display or video program).")
@click.option("--vram-bytes", type=click.IntRange(0), default=0, show_default=True, help="Device memory it holds.")
@click.option("--other-namespace", is_flag=True, help="It runs in a container whose processes are not seen here.")
@click.option("--uid", type=click.IntRange(0), default=0, show_default=True, help="Whose process it is.")
@click.pass_context
def hold(
    ctx: click.Context, directory: Path | None, name: str, devices: tuple[str, ...], no_kfd: bool, vram_bytes: int,
    other_namespace: bool, uid: int,
) -> None:  # fmt: skip
    """Start an emulated process that holds the node; it attaches to every card, as ROCm programs do."""
    node = _open(ctx, directory)
    try:
        node.start_process(name, kfd=not no_kfd, render=devices, vram_bytes=vram_bytes, uid=uid,
                           in_this_pid_namespace=not other_namespace)  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"cannot start a process: {error.strerror}: /dev/kfd", hint="the driver is unloaded"
        ) from error
    _answer(ctx, node, "emulate-hold/1")


@emulate.command("release")
@click.argument("pid", type=int)
@DIRECTORY
@click.option("--ghost", is_flag=True, help="Close its device files only: it stays attached until it exits.")
@click.pass_context
def release(ctx: click.Context, pid: int, directory: Path | None, ghost: bool) -> None:
    """End the emulated process PID."""
    node = _open(ctx, directory)
    known = [process.pid for process in node.state.processes]
    if pid not in known:
        raise UsageError(f"no emulated process {pid}", hint=f"there is {', '.join(map(str, known)) or 'none'}")
    (node.close_descriptors if ghost else node.end_process)(pid)
    _answer(ctx, node, "emulate-release/1")


@emulate.command("reboot")
@DIRECTORY
@click.pass_context
def reboot(ctx: click.Context, directory: Path | None) -> None:
    """Boot the node again: a pending memory mode and all processes are gone."""
    node = _open(ctx, directory)
    try:
        node.reboot()
    except OSError as error:
        render.warn(ctx, f"the driver did not load after the boot: {error.strerror}")
    _answer(ctx, node, "emulate-reboot/1")


@emulate.command("reset")
@DIRECTORY
@click.pass_context
def reset(ctx: click.Context, directory: Path | None) -> None:
    """Put a node back as it was made, but in SPX/NPS1: same part, cards and styles, nothing pending or broken."""
    from dieplace.emulator.node import reset as reset_node

    node = _open(ctx, directory)
    reset_node(node)
    _answer(ctx, node, "emulate-reset/1")


def _place(ctx: click.Context, directory: Path | None) -> Path:
    from dieplace.emulator.node import default_directory

    named = settings(ctx).node
    return directory or (Path(named) if named else default_directory())


def _open(ctx: click.Context, directory: Path | None) -> Node:
    from dieplace.emulator.node import open_node, open_or_create

    named = directory or settings(ctx).node
    return open_node(named) if named else open_or_create()


def _styles(pairs: tuple[str, ...]) -> dict[str, Any]:
    from dieplace.emulator.node import style_from_text

    words: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"cannot read the style {pair!r}", hint="write NAME=WORD, for example unique_id=distinct")
        words[name] = style_from_text(name, text)
    return words


def _card(node: Node, text: str | None) -> int | None:
    if text is None:
        return None
    names = {f"gpu{index}": index for index in range(len(node.bdfs()))} | {b: i for i, b in enumerate(node.bdfs())}
    if text not in names:
        raise NoSuchDevice(f"no card {text!r} on this node", hint=f"there is {', '.join(names)}", asked=text)
    return names[text]


def _inject(node: Node, step: str, options: dict[str, Any]) -> None:
    card = _card(node, options["card"])
    if step == "in-reset":
        for bdf in node.bdfs() if card is None else (node.bdfs()[card],):
            node.begin_reset(bdf)
        return
    times = None if options["always"] else options["times"]
    wanted = {name: options[name] for name in ("error", "status", "path", "seconds")}
    needs_error = step in ("write_compute", "write_memory", "unload", "load", "read")
    if needs_error and not wanted["error"] and not wanted["seconds"]:
        raise UsageError(f"{step} needs --error or --seconds", hint="for example --error EBUSY")
    node.inject(step, card=card, times=times, **wanted)


def _answer(ctx: click.Context, node: Node, schema: str) -> None:
    node.refresh()
    payload = _payload(node)
    render.answer(ctx, schema, payload, source="emulated", table=lambda: _body(node.state, payload))


def _payload(node: Node) -> dict[str, Any]:
    state = node.state
    return {
        "directory": str(node.directory), "part": state.part, "loaded": state.loaded, "uid": state.uid,
        "boot_id": state.boot_id, "generation_id": state.generation,
        "cards": [_card_row(state, index) for index in range(len(state.cards))],
        "processes": [
            {"pid": p.pid, "host_pid": p.host_pid, "name": p.name, "uid": p.uid, "open": p.kfd_open or bool(p.render),
             "cards": [f"gpu{c}" for c in p.attached], "vram_bytes": p.vram_bytes}
            for p in state.processes
        ],
        "faults": [_fault_row(fault) for fault in state.faults],
        "styles": state.style_differences(),
        "log": list(state.log),
    }  # fmt: skip


def _fault_row(fault: Fault) -> dict[str, Any]:
    return {
        "step": fault.step, "error": None if fault.error is None else errno_name(fault.error), "status": fault.status,
        "card": None if fault.card is None else f"gpu{fault.card}", "times": fault.times, "seconds": fault.seconds,
        "path": fault.path,
    }  # fmt: skip


def _card_row(state: NodeState, index: int) -> dict[str, Any]:
    card, hive = state.cards[index], state.hives[state.cards[index].hive]
    driver = "vfio-pci" if index in state.style.vfio_cards else "amdgpu" if state.shown(index) else None
    standing = "in reset" if card.in_reset else "starting" if state.loaded and card.appears_s else "ok"
    return {
        "id": f"gpu{index}", "bdf": card.bdf, "driver": driver, "compute": card.compute, "memory": hive.memory,
        "pending_memory": hive.wish, "state": standing if driver else "no driver",
    }  # fmt: skip


def _body(state: NodeState, payload: dict[str, Any]) -> list[Table | str]:
    cards = [Column("id", "card"), Column("bdf", "BDF"), Column("driver", "driver"), Column("compute", "compute"),
             Column("memory", "memory"), Column("pending_memory", "pending"), Column("state", "state")]  # fmt: skip
    title = f"emulated node: {len(state.cards)} x {state.part} in {payload['directory']}"
    notes = [] if state.loaded else ["the driver is not loaded"]
    if state.uid:
        notes.append(f"commands run as virtual user {state.uid}")
    notes += [f"style {name} = {value}" for name, value in payload["styles"].items()]
    body: list[Table | str] = [Table(cards, payload["cards"], title=title, notes=notes)]
    if payload["processes"]:
        columns = [Column("pid", "pid", right=True), Column("host_pid", "host pid", right=True), Column("name", "name"),
                   Column("open", "files open"),
                   Column("vram_bytes", "memory GB", right=True, show=render.gigabytes)]  # fmt: skip
        body.append(Table(columns, payload["processes"], title="processes"))
    if payload["faults"]:
        columns = [Column(name, name) for name in ("step", "card", "error", "status", "times", "seconds", "path")]
        body.append(Table(columns, payload["faults"], title="faults that wait"))
    return body + [f"log: {line}" for line in payload["log"][-10:]]
