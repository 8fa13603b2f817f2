"""`keylane fleet migrate …`: from consumers of another program, one for each partition, to a fleet and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import ConnectionOptions, JsonOption, StreamArgument, command, connected, family, print_answer
from keylane.cli.fleet.run import PartitionOptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from keylane.fleet import Migration
    from keylane.jetstream import Connection

app = family("Move partitions from the consumers of another program to a fleet, and back.")

FleetArgument = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet's name.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """How long a step waits for messages in flight."""

    drain: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for messages in flight.")
    ] = 60.0
    force: Annotated[bool, typer.Option("--force", help="Then go on; what is in flight is handled again.")] = False


@dataclass(frozen=True, slots=True)
class _Target:
    """Which fleet is migrated to, and how to reach it."""

    stream: str
    fleet: str
    partitions: PartitionOptions
    link: ConnectionOptions

    async def open(self, connection: Connection, drain: DrainOptions, say: Callable[[str], None]) -> Migration:
        from keylane.core.fleet_partitions import HashedPartitions, ListedPartitions, source_from_wire
        from keylane.errors import InvalidInput
        from keylane.fleet import Migration, stored_spec

        given = self.partitions.source()
        if given is None:
            spec = await stored_spec(connection, self.stream, self.fleet)
            if spec is None:
                raise InvalidInput(
                    f"stream {self.stream!r} has no fleet {self.fleet!r} yet: say which partitions it will have, such "
                    "as --partitions 32 --filter 'orders.*' --key 1, or --subjects FILE"
                )
            given = dict(spec.source)
        source = source_from_wire(given)
        if not isinstance(source, HashedPartitions | ListedPartitions):
            raise InvalidInput("a migration needs partitions by hash or a list of subjects")
        return await Migration.open(
            connection, self.stream, self.fleet, source, drain_s=drain.drain, force=drain.force, say=say
        )


@command(app, "plan")
def plan(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    link: ConnectionOptions,
) -> None:
    """Show which consumer each partition has now, and what stands in the way. Changes nothing."""
    found = _with(_Target(stream, fleet, partitions, link), _plan_of)
    lines = [f"state        {found['state']}", f"partitions   {len(found['old'])} with a consumer to replace"]
    lines += [f"  {partition}: {consumer}" for partition, consumer in found["old"].items()]
    lines += [f"obstacle     {one}" for one in found["obstacles"]]
    lines.append(
        "next         keylane fleet migrate switch (a work queue: no shadow, no dual mode)"
        if found["work_queue"]
        else "next         keylane fleet migrate shadow, parity, switch"
    )
    print_answer(as_json, found, "\n".join(lines))
    if found["obstacles"]:
        raise typer.Exit(3)


@command(app, "shadow")
def shadow(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    link: ConnectionOptions,
) -> None:
    """Create the fleet's consumers, paused: workers can join and are assigned partitions, and get no message."""
    _step(_Target(stream, fleet, partitions, link), lambda one: one.shadow(), as_json=as_json)


@command(app, "dual")
def dual(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    link: ConnectionOptions,
) -> None:
    """Let both deliver. Both programs must skip what the other has handled (`fleet.Deduplicator`)."""
    _step(_Target(stream, fleet, partitions, link), lambda one: one.dual(), as_json=as_json)


@command(app, "parity")
def parity(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    link: ConnectionOptions,
) -> None:
    """Compare what the old consumers and the fleet have left. Exit code 3: the fleet would miss messages."""

    async def look(migration: Migration) -> list[dict[str, Any]]:
        return [asdict(one) | {"holds": one.holds} for one in await migration.parity()]

    rows = _with(_Target(stream, fleet, partitions, link), look)
    wrong = [row for row in rows if not row["holds"]]
    old = sum(row["old_left"] for row in rows)
    mine = sum(row["fleet_left"] or 0 for row in rows)
    lines = [f"{len(rows)} partitions: the old consumers have {old:,} messages left, the fleet would get {mine:,}"]
    lines += [
        f"partition {row['partition']}: {row['old']} has {row['old_left']:,} left, the fleet "
        + ("has no consumer" if row["fleet_left"] is None else f"would get {row['fleet_left']:,}")
        for row in wrong
    ]
    print_answer(as_json, rows, "\n".join(lines))
    if wrong:
        raise typer.Exit(3)


@command(app, "switch")
def switch(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    burn_in: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Watch the fleet for so long; roll back if it is bad.")
    ] = 0.0,
    window: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Of one look at the figures.")] = 60.0,
    windows: Annotated[int, typer.Option(min=1, help="Bad windows in a row that are too many.")] = 3,
    max_redelivered: Annotated[float, typer.Option(min=0, help="Redeliveries by deliveries that are allowed.")] = 0.03,
    max_age: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How old a message that waits may become.")
    ] = 60.0,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    drain: DrainOptions,
    link: ConnectionOptions,
) -> None:
    """Hand every partition to the fleet: pause and drain the old consumer, begin where it ended."""
    from keylane.core.migration import ServiceLevel

    level = ServiceLevel(redelivered=max_redelivered, oldest_s=max_age, windows=windows)

    async def work(migration: Migration) -> str | None:
        await migration.switch()
        return await migration.watch(level, window_s=window, burn_in_s=burn_in) if burn_in else None

    why = _step(_Target(stream, fleet, partitions, link), work, drain=drain, as_json=as_json)
    if why is not None:
        raise typer.Exit(3)


@command(app, "rollback")
def rollback(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    drain: DrainOptions,
    link: ConnectionOptions,
) -> None:
    """Hand every partition back to the old consumers."""
    _step(_Target(stream, fleet, partitions, link), lambda one: one.rollback(), drain=drain, as_json=as_json)


@command(app, "finish")
def finish(
    stream: StreamArgument,
    fleet: FleetArgument,
    *,
    after: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="After the switch; else twice their inactive threshold."),
    ] = None,
    as_json: JsonOption = False,
    partitions: PartitionOptions,
    link: ConnectionOptions,
) -> None:
    """Delete the old consumers. There is no way back then."""
    _step(_Target(stream, fleet, partitions, link), lambda one: one.finish(after), as_json=as_json)


async def _plan_of(migration: Migration) -> dict[str, Any]:
    return {
        "state": migration.record.state,
        "work_queue": migration.is_queue,
        "old": {one: position.consumer for one, position in migration.record.old.items()} or dict(migration.match.old),
        "obstacles": list(migration.match.obstacles),
    }


def _step(
    target: _Target,
    work: Callable[[Migration], Awaitable[str | None]],
    *,
    as_json: bool,
    drain: DrainOptions | None = None,
) -> str | None:
    """Take a step; say what happens line by line, or at the end as JSON."""

    async def take(migration: Migration) -> tuple[str | None, dict[str, Any]]:
        why = await work(migration)
        return why, await _plan_of(migration) | {"rolled_back": why}

    why: str | None
    why, found = _with(target, take, drain=drain, say=(lambda line: None) if as_json else typer.echo)
    if as_json:
        print_answer(as_json, found, "")
    return why


def _with(
    target: _Target,
    work: Callable[[Migration], Awaitable[Any]],
    *,
    drain: DrainOptions | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Any:
    async def run(connection: Connection) -> Any:
        return await work(await target.open(connection, drain or DrainOptions(), say))

    from keylane.cli.command import exit_on_invalid_input

    with exit_on_invalid_input():
        return connected(target.link, run)
