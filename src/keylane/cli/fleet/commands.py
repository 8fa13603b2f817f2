"""`keylane fleet run|ls|status`: the fleets of an account, who works, who owns what, and how far behind it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import ConnectionOptions, JsonOption, StreamArgument, command, connected, family, print_answer
from keylane.cli.fleet import migrate
from keylane.cli.fleet.run import FleetRunOptions, PartitionOptions, run_fleet

if TYPE_CHECKING:
    from keylane.fleet import FleetStatus, PartitionStatus
    from keylane.jetstream import Connection

app = family("Fleets: workers that share the partitions of a stream by themselves.")

app.add_typer(migrate.app, name="migrate")

FleetArgument = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet's name.")]


@command(app, "run")
def run(
    handler: Annotated[str, typer.Argument(metavar="MODULE:HANDLER", help="The function that handles a message.")],
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Worker processes.")] = 1,
    name: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Begin the names of the workers with it; else the host's name.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Print one JSON object for each event.")] = False,
    partitions: PartitionOptions,
    options: FleetRunOptions,
    link: ConnectionOptions,
) -> None:
    """Run workers of a fleet until Ctrl-C or SIGTERM. SIGHUP replaces them one by one."""
    run_fleet(
        handler,
        stream,
        fleet,
        workers=workers,
        name=name,
        log_json=log_json,
        partitions=partitions,
        options=options,
        link=link,
    )


@command(app, "ls")
def ls(
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="Only fleets of this stream.")] = None,
    *,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """List the fleets of the account."""

    async def look(connection: Connection) -> list[tuple[str, str]]:
        from keylane.fleet import list_fleets

        return await list_fleets(connection, stream)

    found = connected(link, look)
    text = "\n".join(f"{one}  {fleet}" for one, fleet in found) or "there are no fleets"
    print_answer(as_json, [{"stream": one, "fleet": fleet} for one, fleet in found], text)


@command(app, "status")
def status(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    partitions: Annotated[bool, typer.Option("--partitions", help="Show every partition.")] = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Show who works, who owns what, and the lag in messages and in seconds."""

    async def look(connection: Connection) -> FleetStatus:
        from keylane import fleet as fleets

        return await fleets.status(connection, stream, fleet)

    found = connected(link, look)
    if as_json:
        print_answer(as_json, asdict(found) | {"lag": found.lag}, "")
    else:
        _show(found, with_partitions=partitions)


@command(app, "repartition")
def repartition(
    stream: StreamArgument,
    fleet: FleetArgument,
    partitions: Annotated[int, typer.Argument(metavar="PARTITIONS", help="The new number of partitions.")],
    *,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for the end.")] = 60.0,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Give a hashed fleet another number of partitions while it runs. Order per key is kept, nothing is lost."""

    async def change(connection: Connection) -> None:
        from keylane import fleet as fleets

        await fleets.repartition(
            connection,
            stream,
            fleet,
            partitions,
            wait_s=wait,
            on_progress=None if as_json else lambda where: typer.echo(where, err=True),
        )

    connected(link, change)
    print_answer(
        as_json,
        {"stream": stream, "fleet": fleet, "partitions": partitions},
        f"{stream} / {fleet} has {partitions:,} partitions",
    )


def _show(found: FleetStatus, *, with_partitions: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from keylane.cli.display import facts_panel

    owned = sum(one.owner is not None for one in found.partitions)
    console = Console()
    console.print(
        facts_panel(
            f"{found.stream} / {found.fleet}",
            [
                ("partitions", f"{len(found.partitions):,}, {owned:,} owned"),
                ("lag", _lag(found.lag, _oldest(found.partitions))),
                ("assignment", f"version {found.version}, epoch {found.epoch}: {found.reason}"),
                *([("change", found.change)] if found.change is not None else []),
            ],
        )
    )
    workers = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("worker", "state", "host", "owns", "lag"):
        workers.add_column(column, overflow="fold")
    for one in found.workers:
        mine = [each for each in found.partitions if each.id in one.partitions]
        workers.add_row(
            one.id,
            f"{one.state}, leader" if one.is_leader else one.state,
            one.name or one.host,
            _owns(one.partitions),
            _lag(_sum(mine), _oldest(mine)) if mine else "-",
        )
    console.print(workers)
    if with_partitions:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("partition", "owner", "assigned to", "in flight", "lag", "token"):
            table.add_column(column, overflow="fold")
        for each in found.partitions:
            table.add_row(
                each.id,
                each.owner or "nobody",
                each.assigned or "nobody",
                "unknown" if each.in_flight is None else f"{each.in_flight:,}",
                _lag(each.lag, each.oldest_s),
                str(each.token or "-"),
            )
        console.print(table)


def _owns(partitions: tuple[str, ...]) -> str:
    from keylane.core.plans import ranges

    if not partitions:
        return "-"
    if all(one.isdecimal() for one in partitions):
        return ranges(sorted(map(int, partitions)))
    return ", ".join(partitions)


def _sum(partitions: list[PartitionStatus]) -> int | None:
    lags = [one.lag for one in partitions]
    return None if None in lags else sum(lag for lag in lags if lag is not None)


def _oldest(partitions: tuple[PartitionStatus, ...] | list[PartitionStatus]) -> float | None:
    return max((one.oldest_s for one in partitions if one.oldest_s is not None), default=None)


def _lag(messages: int | None, oldest_s: float | None) -> str:
    if messages is None:
        return "unknown"
    return f"{messages:,}" if oldest_s is None else f"{messages:,}, oldest {oldest_s:.1f} s"
