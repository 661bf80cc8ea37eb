"""The dieplace command: lazily loaded groups, and one place that turns outcomes into exit codes.

Exit codes: 0 yes or done, 1 only "the check says no", 2 usage, 3 not possible here, 4 privilege, 5 busy,
6 changed but unverified, 7 declined, 70 a bug, 130 interrupted, 141 the reader of our output went away.
click's own `main` is not used: left alone it exits 1 for a closed pipe, a declined prompt, Ctrl-C and a bug
(click issues 712, 625; tried with click 8.5.1).
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dieplace import __version__
from dieplace.cli import render
from dieplace.cli.options import add_global_options, global_options
from dieplace.errors import DieplaceError, Unsupported, UsageError
from dieplace.whole_file import DISK_TROUBLE

COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("dieplace.cli.topology:list_devices", "List the logical devices: cards, dies, memory, domains."),
    "topo": ("dieplace.cli.topology:topo", "Show the node as a tree, a matrix or a drawing."),
    "partition": ("dieplace.cli.partition:partition", "Show, plan, switch and restore partition modes."),
    "place": ("dieplace.cli.place:place", "Plan where memory goes, and audit where it is."),
    "exec": ("dieplace.cli.exec:exec_command", "Run a program bound to a die."),
    "bench": ("dieplace.cli.bench:bench", "List, run, show and compare experiments."),
    "kernel": ("dieplace.cli.kernel:kernel", "List, build, check, trace and lint kernels."),
    "emulate": ("dieplace.cli.emulate:emulate", "Make and break emulated nodes."),
    "doctor": ("dieplace.cli.doctor:doctor", "Say what works on this host, what does not, and why."),
    "env": ("dieplace.cli.env:env", "Print or record what discovery sees, for a bug report."),
    "completion": ("dieplace.cli.completion:completion", "Print the shell completion script."),
}
# A path that a user gave and that the file system refuses, wherever a command meets it first.
PATH_TROUBLE = {errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EROFS}
COMPLETE_VARIABLE = "_DIEPLACE_COMPLETE"


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs or shows its own help.

    `table` maps a name to ("module:attribute", "one line of help"), so that `--help` imports none of them.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in table order, then those added in the usual click way."""
        return [*self.table, *(name for name in super().list_commands(ctx) if name not in self.table)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, with the global options added; None for an unknown name."""
        if cmd_name in self.table:
            return _load(cmd_name, self.table[cmd_name][0])
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _prepare(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest known name in the message."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(self.list_commands(ctx))}"
            raise UsageError(f"no command {args[0]!r} in {ctx.command_path}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a command, from the table: nothing is imported."""
        rows = [(name, text) for name, (_, text) in self.table.items()]
        for name, command in self.commands.items():
            if name not in self.table and not command.hidden:
                rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete command names from the table, without importing the commands."""
        from click.shell_completion import CompletionItem

        if not self.table or (incomplete and not incomplete[0].isalnum()):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(n, help=text) for n, (_, text) in self.table.items() if n.startswith(incomplete)]


def _load(name: str, target: str) -> click.Command:
    module_name, attribute = target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise Unsupported(
                f"`dieplace {name}` needs the Python module {error.name!r}, which is not installed",
                hint="run: dieplace doctor",
            ) from error
        raise Unsupported(
            f"`dieplace {name}` is not part of this installation: there is no module {module_name}",
            hint="install a version of dieplace that has it",
        ) from error
    command: click.Command = getattr(module, attribute)
    _prepare(command)
    return command


def _prepare(command: click.Command) -> None:
    """Add the global options to a command and, in a group, to everything below it."""
    add_global_options(command)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            # The whole first sentence in the group's list: click cuts it off where it needs a second line.
            child.short_help = child.short_help or child.get_short_help_str(limit=1000)
            _prepare(child)


def build() -> LazyGroup:
    """A fresh root group."""
    return LazyGroup(
        name="dieplace",
        table=COMMANDS,
        help="Partition multi-die accelerators, place memory on a die, and measure what misplacing it costs.",
        epilog="Options that follow here are also taken after a command's name. Answers go to stdout, the rest to "
        "stderr. Exit codes: 0 done, 1 the check says no, 2 usage, 3 not possible here, 4 privilege, 5 busy, "
        "6 changed but unverified, 7 declined, 70 a bug, 130 interrupted.",
        params=[*global_options(root=True), *_version_option()],
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )


def _version_option() -> list[click.Parameter]:
    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            render.emit(f"dieplace {__version__}\n")
            ctx.exit(0)

    return [
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=show,
            help="Show the version and exit.",
        )
    ]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (the console script passes it to sys.exit)."""
    words = list(sys.argv[1:] if args is None else args)
    render.prepare_streams()
    root = build()
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "dieplace", COMPLETE_VARIABLE, instruction)
    try:
        code = _run(root, words)
        render.flush()
    except BrokenPipeError:
        code = render.reader_went_away()
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # the last flush
        code = render.failure(_no_room(error), as_json=False, ctx=None)
        render.reader_went_away()
    return code


def _no_room(error: OSError) -> Unsupported:
    where = f"{str(error.filename)[:80]!r}" if error.filename else "the answer"
    return Unsupported(f"cannot write {where}: {error.strerror}", hint="make room, or write elsewhere")


def _run(root: click.Group, words: list[str]) -> int:
    """Parse and run; every outcome becomes an exit code here and nowhere else."""
    as_json = asks_for_json(words)
    ctx: click.Context | None = None
    try:
        with root.make_context("dieplace", list(words)) as ctx:
            as_json = as_json or root_format(ctx) == "json"
            root.invoke(ctx)
        return 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        return render.usage(error.format_message(), as_json=as_json)
    except click.UsageError as error:
        return render.failure(_usage(error), as_json=as_json and _tells(), ctx=ctx)
    except click.ClickException as error:
        return render.failure(UsageError(error.format_message()), as_json=as_json, ctx=ctx)
    except click.Abort as error:
        return _aborted(error, as_json=as_json, ctx=ctx)
    except DieplaceError as error:
        return render.failure(error, as_json=as_json, ctx=ctx)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            return render.failure(_no_room(error), as_json=False, ctx=ctx)
        if error.errno not in PATH_TROUBLE or error.filename is None:
            return render.bug(error, as_json=as_json, ctx=ctx)
        told = UsageError(f"cannot use {str(error.filename)[:80]!r}: {error.strerror}", hint="check the path")
        return render.failure(told, as_json=as_json, ctx=ctx)
    except Exception as error:
        return render.bug(error, as_json=as_json, ctx=ctx)


def _tells() -> bool:
    """Whether what is wrong with the words themselves is this process's to answer: of ranks under torchrun one is."""
    from dieplace.binding.ranks import torchrun

    try:
        launched = torchrun(os.environ)
    except UsageError:
        return True
    return launched is None or launched.rank == 0


def _aborted(error: click.Abort, *, as_json: bool, ctx: click.Context | None) -> int:
    """click raises Abort for Ctrl-C and for an ended stdin alike; the context tells them apart."""
    from dieplace.errors import Declined

    if isinstance(error.__context__, KeyboardInterrupt):
        return 130
    return render.failure(Declined("the question was not answered", hint="use -y"), as_json=as_json, ctx=ctx)


def _usage(error: click.UsageError) -> UsageError:
    path = error.ctx.command_path if error.ctx else "dieplace"
    told = " ".join(error.format_message().split())
    return UsageError(told.rstrip(".,"), hint=f"see: {path} --help")


def root_format(ctx: click.Context) -> str:
    """The output format as far as it has been parsed."""
    return str(getattr(ctx.find_root().obj, "output", "table"))


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether JSON was asked for, read from the raw words so that a usage error can answer in JSON too."""
    before = list(words[: words.index("--")] if "--" in words else words)
    pairs = zip(before, [*before, ""][1:], strict=True)
    return any(
        word in ("--json", "-ojson", "--output=json") or (word in ("-o", "--output") and following == "json")
        for word, following in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
