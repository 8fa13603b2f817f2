"""Wrong input and what is not installed, as one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

WRONG = 2


@contextmanager
def refusals() -> Iterator[None]:
    """One line on stderr and exit code 2 for what cannot be started."""
    from keylane.errors import ExtraMissing, InvalidInput, JavaMissing

    try:
        yield
    except (InvalidInput, JavaMissing, ExtraMissing) as refused:
        typer.echo(f"keylane: {' '.join(str(refused).split())}", err=True)
        raise typer.Exit(WRONG) from None
