"""`dieplace completion`: the script that makes the shell complete commands and options."""

from __future__ import annotations

import click

from dieplace.cli import render

SHELLS = ("bash", "zsh", "fish")
HOW = {
    "bash": 'eval "$(dieplace completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(dieplace completion zsh)" in ~/.zshrc',
    "fish": "dieplace completion fish > ~/.config/fish/completions/dieplace.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash: eval "$(dieplace completion bash)"   (in ~/.bashrc)
    zsh:  eval "$(dieplace completion zsh)"    (in ~/.zshrc)
    fish: dieplace completion fish > ~/.config/fish/completions/dieplace.fish
    """
    from click.shell_completion import get_completion_class

    from dieplace.cli.main import COMPLETE_VARIABLE

    kind = get_completion_class(shell)
    assert kind is not None  # the three shells are click's own
    script = kind(ctx.find_root().command, {}, "dieplace", COMPLETE_VARIABLE).source()
    payload = {"shell": shell, "script": script, "install": HOW[shell]}
    render.answer(ctx, "completion/1", payload, table=lambda: [script.rstrip("\n")])
