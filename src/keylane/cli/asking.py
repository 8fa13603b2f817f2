"""Asking before something is lost. The question goes to stderr, so that stdout stays what it should be."""

from __future__ import annotations

import sys

import typer


def make_sure(question: str, *, otherwise: str, option: str = "--force") -> None:
    """Return if the answer is yes; else say `otherwise` and end the command with exit code 1.

    No answer at all, as in a script, is a no; `option` is what a script gives instead.
    """
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if answer.strip().lower() in ("y", "yes"):
        return
    if not answer.endswith("\n"):
        typer.echo(err=True)
        otherwise += f": nobody answered, and {option} does not ask"
    typer.echo(f"keylane: {otherwise}", err=True)
    raise typer.Exit(1)
