"""`keylane demo`: the command. `scenario` runs it."""

from __future__ import annotations

from typing import Annotated

import typer

from keylane.cli.command import INTERRUPTED, single_command


def demo(
    seconds: Annotated[float, typer.Option(min=8, max=300, help="How long to publish.")] = 16.0,
    rate: Annotated[int, typer.Option(min=10, max=10_000, help="Orders per second.")] = 1000,
    spark: Annotated[
        bool,
        typer.Option("--with-spark/--without-spark", help="Afterwards pipelines on Spark, where it is installed."),
    ] = True,
) -> None:
    """Orders, ten partitions, three members: one is killed, one added, one dropped. Ends with a verdict.

    Then Spark looks at the same stream: an audit of every order, hot keys and the load of each member with a chart, and
    the orders as a table. The chart is written to keylane-demo.png in this directory.
    """
    from rich.console import Console

    from keylane.cli.demo.scenario import run_demo

    try:
        clean = run_demo(Console(), seconds, rate, pipelines=spark)
    except SystemExit:  # `keylane.run` was interrupted
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if clean else 1)


app = single_command(demo)
