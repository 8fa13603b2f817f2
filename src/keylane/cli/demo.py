"""`keylane demo`: the command. What it does is in `demo_play`."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    seconds: Annotated[float, typer.Option(min=8, max=300, help="How long to publish.")] = 16.0,
    rate: Annotated[int, typer.Option(min=10, max=10_000, help="Orders per second.")] = 1000,
) -> None:
    """Orders, ten partitions, three members: one is killed, one added, one dropped. Ends with a verdict."""
    import asyncio

    from keylane.cli.demo_play import play

    verdict = asyncio.run(play(seconds, rate))
    raise typer.Exit(0 if verdict.clean else 1)
