"""Confirmation before a command deletes something. The question goes to stderr, so stdout holds only the answer."""

from __future__ import annotations

import sys

import typer


def confirm(question: str, *, otherwise: str, option: str = "--force") -> None:
    """Return if the answer is yes; else print `otherwise` and exit with code 1.

    No answer at all, as in a script, means no; a script gives `option` instead.
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
