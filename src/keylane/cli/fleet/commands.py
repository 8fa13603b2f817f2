"""`keylane fleet …`: runs workers; shows who works, who owns what, the lag and what moved; drains, resumes workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import ConnectionOptions, JsonOption, StreamArgument, command, connected, family, print_answer
from keylane.cli.fleet import migrate
from keylane.cli.fleet.run import FleetRunOptions, PartitionOptions, run_fleet
from keylane.cli.metrics_port import MetricsOptions

if TYPE_CHECKING:
    from keylane.fleet import FleetStatus, PastAssignment
    from keylane.jetstream import Connection

app = family("Fleets: workers that share the partitions of a stream by themselves.")

app.add_typer(migrate.app, name="migrate")

FleetArgument = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet's name.")]
WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id, as `status` shows it.")]


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
    metrics: MetricsOptions,
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
        metrics=metrics,
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
        from keylane.jetstream import streams

        found = await list_fleets(connection, stream)
        if stream is not None and not found:
            await streams.info(connection, stream)  # raises if it is the stream that does not exist
        return found

    found = connected(link, look)
    none = "there are no fleets" if stream is None else f"stream {stream!r} has no fleets"
    text = "\n".join(f"{one}  {fleet}" for one, fleet in found) or none
    print_answer(as_json, [{"stream": one, "fleet": fleet} for one, fleet in found], text)


@command(app, "status")
def status(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    partitions: Annotated[bool, typer.Option("--partitions", help="Show every partition.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow it until Ctrl-C; in a pipe one line a change.")
    ] = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Show who works, who owns what, and the lag in messages and in seconds."""
    if watch:
        _watch(stream, fleet, link, as_json=as_json)
        return
    found = connected(link, lambda connection: _look(connection, stream, fleet))
    if as_json:
        print_answer(as_json, asdict(found) | {"lag": found.lag}, "")
        return
    from keylane.cli.display import console
    from keylane.cli.fleet.render import fleet_panel, partition_table, worker_table

    screen = console()
    screen.print(fleet_panel(found))
    screen.print(worker_table(found))
    if partitions:
        screen.print(partition_table(found))


@command(app, "assignments")
def assignments(
    stream: StreamArgument, fleet: FleetArgument, *, as_json: JsonOption = False, link: ConnectionOptions
) -> None:
    """Show the newest assignment: which worker is to own which partition, and which does."""
    found = connected(link, lambda connection: _look(connection, stream, fleet))
    given: dict[str | None, list[str]] = {}
    for one in found.partitions:
        given.setdefault(one.assigned, []).append(one.id)
    moving = [one for one in found.partitions if one.owner != one.assigned]
    told = {
        "version": found.version,
        "epoch": found.epoch,
        "reason": found.reason,
        "workers": {worker: ids for worker, ids in given.items() if worker is not None},
        "unassigned": given.get(None, []),
        "moving": [{"partition": one.id, "owner": one.owner, "assigned": one.assigned} for one in moving],
    }
    print_answer(as_json, told, "" if as_json else _assignment_text(told, given))


@command(app, "history")
def history(
    stream: StreamArgument, fleet: FleetArgument, *, as_json: JsonOption = False, link: ConnectionOptions
) -> None:
    """Show the last 100 assignments: when and why each was made, and what it moved."""

    async def look(connection: Connection) -> list[PastAssignment]:
        from keylane import fleet as fleets

        return await fleets.history(connection, stream, fleet)

    found = connected(link, look)
    if as_json:
        from keylane.cli.formatting import as_utc

        print_answer(as_json, [asdict(one) | {"at": as_utc(one.at)} for one in found], "")
        return
    from keylane.cli.display import console
    from keylane.cli.fleet.render import history_table

    console().print(history_table(found) if found else f"{stream} / {fleet} has had no assignment yet")


@command(app, "drain")
def drain(
    stream: StreamArgument,
    fleet: FleetArgument,
    worker: WorkerArgument,
    *,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Take all partitions away from a worker that goes on running, until it is resumed or started again."""

    async def change(connection: Connection) -> None:
        from keylane import fleet as fleets

        await fleets.drain(connection, stream, fleet, worker)

    connected(link, change)
    print_answer(
        as_json,
        {"stream": stream, "fleet": fleet, "worker": worker, "drained": True},
        f"{worker} hands its partitions over: `keylane fleet status {stream} {fleet}` shows how far it is",
    )


@command(app, "resume")
def resume(
    stream: StreamArgument,
    fleet: FleetArgument,
    worker: WorkerArgument,
    *,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Let a worker that was drained have partitions again."""

    async def change(connection: Connection) -> bool:
        from keylane import fleet as fleets

        return await fleets.resume(connection, stream, fleet, worker)

    was_drained = connected(link, change)
    print_answer(
        as_json,
        {"stream": stream, "fleet": fleet, "worker": worker, "drained": False, "was_drained": was_drained},
        f"{worker} may have partitions again" if was_drained else f"{worker} was not drained: nothing has changed",
    )


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


@app.command("alert-rules")
def alert_rules(
    prefix: Annotated[
        str, typer.Option("--metrics-prefix", metavar="TEXT", help="As given to `fleet run`.")
    ] = "keylane_",
) -> None:
    """Print alert rules for Prometheus."""
    from keylane.cli.command import exit_on_invalid_input
    from keylane.metrics.alert_rules import rules_file

    with exit_on_invalid_input():
        typer.echo(rules_file(prefix), nl=False)


async def _look(connection: Connection, stream: str, fleet: str) -> FleetStatus:
    from keylane import fleet as fleets

    return await fleets.status(connection, stream, fleet)


def _watch(stream: str, fleet: str, link: ConnectionOptions, *, as_json: bool) -> None:
    from keylane.cli.command import run_until_signal
    from keylane.cli.display import open_display
    from keylane.cli.fleet.watch import FleetWatch

    with open_display(as_json=as_json) as display:
        run_until_signal(FleetWatch(stream, fleet, display).run(link))


def _assignment_text(told: dict[str, Any], given: dict[str | None, list[str]]) -> str:
    from keylane.cli.fleet.worker_reports import owns

    lines = [f"version {told['version']}, epoch {told['epoch']}: {told['reason']}"]
    lines += [f"{worker or 'nobody'}  {owns(tuple(ids))}" for worker, ids in given.items()]
    for one in told["moving"]:
        lines.append(f"partition {one['partition']} moves: {one['owner'] or 'nobody'} has it now")
    return "\n".join(lines)
