"""`keylane exporter`: the metrics of every group of an account, for Prometheus."""

from __future__ import annotations

from typing import Annotated

import typer

from keylane.cli.command import ConnectionOptions, exit_on_invalid_input, run_until_signal, single_command


def exporter(
    *,
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65_535, help="Where to serve; 0: any.")] = 9465,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="On which address.")] = "0.0.0.0",  # noqa: S104 - see docs
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="What the names of the metrics begin with.")] = "keylane_",
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Do not read the account again within this time.")
    ] = 5.0,
    link: ConnectionOptions,
) -> None:
    """Serve the metrics of every group and fleet of the account, until Ctrl-C.

    Lag in messages and seconds, owners, queues, dead letters and parked keys, as the server knows them: members are not
    asked, and those in other languages are shown too. /metrics, /healthz and /readyz are on one port.

    \b
      keylane exporter --port 9465
    """
    from keylane.metrics import check_prefix, require_client

    with exit_on_invalid_input():
        check_prefix(prefix)
        require_client()
    run_until_signal(_serve(link, port, host, prefix, interval))


async def _serve(link: ConnectionOptions, port: int, host: str, prefix: str, interval_s: float) -> None:
    import asyncio

    from keylane.metrics import AccountExporter, serve_metrics

    async with link.open() as connection:
        source = AccountExporter(connection, kept_s=interval_s)
        await source.readings()
        async with serve_metrics(source.readings, port=port, host=host, prefix=prefix, health=source.health) as chosen:
            typer.echo(f"metrics on http://{host}:{chosen}/metrics")
            await asyncio.Event().wait()


app = single_command(exporter)
