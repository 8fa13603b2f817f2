"""`keylane completion`: the script that lets a shell complete commands, options and the names of streams."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from keylane.cli.command import COMPLETION_VARIABLE, single_command


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell.

    \b
      bash  eval "$(keylane completion bash)" in ~/.bashrc
      zsh   eval "$(keylane completion zsh)" in ~/.zshrc, after compinit
      fish  keylane completion fish > ~/.config/fish/completions/keylane.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it has no other home

    typer.echo(get_completion_script(prog_name="keylane", complete_var=COMPLETION_VARIABLE, shell=shell))


app = single_command(completion)
