"""`keylane marshal world|watch|release-group|resume|consume`: consumers coordinated by nothing but a log.

Owns the words of the commands. The log is opened by `marshal_ground`, shown by `marshal_told` and `marshal_watch`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keylane.cli.connecting import ConnectionOptions
from keylane.cli.group_commands import Json, command, say

if TYPE_CHECKING:
    from datetime import datetime

    from keylane.cli.marshal_ground import Ground, Where
    from keylane.core.claim_facts import Claim, Key
    from keylane.core.claims import World

_INTERRUPTED = 130

app = typer.Typer(
    help="Consumers coordinated by nothing but a log.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_Log = Annotated[
    str | None,
    typer.Option("--log", metavar="NAME", help="The coordination log. Default: marshal, on Kafka __marshal."),
]
_Kafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="BROKERS", help="The log and the topics are in Kafka, here: host:port,host:port."),
]
_KafkaConfig = Annotated[
    Path | None,
    typer.Option("--kafka-config", metavar="FILE", help="A file of Kafka client properties: security, login, brokers."),
]
_Interval = Annotated[
    float | None,
    typer.Option(
        "--interval",
        metavar="SECONDS",
        min=0.1,
        help="The heartbeat interval of everybody on the log. Default: what the stream says; on Kafka 10.",
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Also if the log has no record of such a group.")]
_Placing = Annotated[
    Literal["topic_partition", "topic"],
    typer.Option("--placing", help="What is hashed to find a log partition. topic: as the Go library does."),
]
_Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
_OnlyGroup = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only this group.")]
_OnlyTopic = Annotated[str | None, typer.Option("--topic", metavar="NAME", help="Only this topic.")]


@command(app, "world")
def world(
    *,
    group: _OnlyGroup = None,
    topic: _OnlyTopic = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="As it was then: an ISO time, or how long ago, such as 10m or 2h."),
    ] = None,
    lag: Annotated[bool, typer.Option("--lag", help="Also count the messages that wait.")] = False,
    log: _Log = None,
    kafka: _Kafka = None,
    kafka_config: _KafkaConfig = None,
    interval: _Interval = None,
    placing: _Placing = "topic_partition",
    as_json: Json = False,
    link: ConnectionOptions,
) -> None:
    """Show who owns what, now or at an earlier time."""
    from keylane.cli.marshal_told import chosen, table_of, world_object

    where = _where(link, kafka, kafka_config, log, interval, placing)
    when = None if at is None else _time_of(at)

    async def look(ground: Ground) -> None:
        seen = await (ground.admin.world() if when is None else ground.admin.world_at(when))
        claims = chosen(seen, group, topic)
        at_ms = None if when is None else int(when.timestamp() * 1000)
        lags, unknown = await _lags(ground, claims) if lag else ({}, [])
        pauses = seen.pauses(group)
        if as_json:
            told = world_object(seen, claims, pauses, at_ms=at_ms, lags=lags if lag else None)
            say(True, told, "")
            return
        from keylane.cli.groups_shown import console

        if claims:
            console().print(table_of(seen, claims, at_ms=at_ms, lags=lags if lag else None))
        else:
            typer.echo("the log says nothing of any partition" + (" of these" if group or topic else ""))
            if group is not None and group not in seen.groups():
                typer.echo(_no_group(group, seen), err=True)
        for problem in unknown:
            typer.echo(f"lag unknown: {problem}", err=True)
        _warn(seen, [pause.group for pause in pauses])

    _on(where, look)


@command(app, "watch")
def watch(
    *,
    group: _OnlyGroup = None,
    topic: _OnlyTopic = None,
    log: _Log = None,
    kafka: _Kafka = None,
    kafka_config: _KafkaConfig = None,
    interval: _Interval = None,
    placing: _Placing = "topic_partition",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each change.")] = False,
    link: ConnectionOptions,
) -> None:
    """Show claims changing live, until Ctrl-C.

    On a terminal a table with a log of changes; in a pipe one line for each change.
    """
    from rich.console import Console

    from keylane.cli.marshal_watch import JsonLines, PlainLines, Screen, Watch

    where = _where(link, kafka, kafka_config, log, interval, placing)
    console = Console()
    if as_json:
        _on(where, Watch(group, topic, JsonLines()).run)
    elif console.is_terminal and not console.is_dumb_terminal:
        with Screen(console) as screen:
            _on(where, Watch(group, topic, screen).run)
    else:
        _on(where, Watch(group, topic, PlainLines()).run)


@command(app, "release-group")
def release_group(
    group: _Group,
    until: Annotated[
        str, typer.Argument(metavar="UNTIL", help="An ISO time with a zone, or how long, such as 90s, 10m or 2h.")
    ],
    *,
    force: _Force = False,
    log: _Log = None,
    kafka: _Kafka = None,
    kafka_config: _KafkaConfig = None,
    interval: _Interval = None,
    as_json: Json = False,
    link: ConnectionOptions,
) -> None:
    """Pause a group: its consumers release their partitions, and nobody claims until then."""
    when = _time_of(until, ahead=True)

    async def pause(ground: Ground) -> None:
        await _check_group(ground, group, force=force)
        await ground.admin.release_group(group, when)

    _on(_where(link, kafka, kafka_config, log, interval), pause)
    say(as_json, {"group": group, "until": when.isoformat()}, f"group {group!r} is paused until {when.isoformat()}")


@command(app, "resume")
def resume(
    group: _Group,
    *,
    force: _Force = False,
    log: _Log = None,
    kafka: _Kafka = None,
    kafka_config: _KafkaConfig = None,
    interval: _Interval = None,
    as_json: Json = False,
    link: ConnectionOptions,
) -> None:
    """End a pause now."""

    async def go_on(ground: Ground) -> None:
        await _check_group(ground, group, force=force)
        await ground.admin.resume(group)

    _on(_where(link, kafka, kafka_config, log, interval), go_on)
    say(as_json, {"group": group}, f"group {group!r} may claim again")


@command(app, "consume")
def consume(
    group: _Group,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="This consumer's name; keep it over restarts.")],
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="Streams, or topics of Kafka.")],
    *,
    mode: Annotated[Literal["at_least_once", "at_most_once"], typer.Option("--mode")] = "at_least_once",
    pick: Annotated[Literal["random", "round_robin"], typer.Option("--pick", help="What to claim next.")] = "random",
    greedy: Annotated[bool, typer.Option("--greedy", help="Claim all that is free at once.")] = False,
    whole_topic: Annotated[bool, typer.Option("--whole-topic", help="All partitions of a topic, or none.")] = False,
    max_claims: Annotated[int | None, typer.Option("--max-claims", metavar="N", min=1)] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Read, or take, so many at once.")] = 100,
    sleep: Annotated[float, typer.Option("--sleep", metavar="SECONDS", min=0, help="How long each takes.")] = 0.0,
    release_when_behind: Annotated[bool, typer.Option("--release-when-behind")] = False,
    rebalance: Annotated[
        bool,
        typer.Option("--rebalance/--no-rebalance", help="Share evenly: ask those with more, give to those with less."),
    ] = True,
    log: _Log = None,
    kafka: _Kafka = None,
    kafka_config: _KafkaConfig = None,
    interval: _Interval = None,
    placing: _Placing = "topic_partition",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")] = False,
    link: ConnectionOptions,
) -> None:
    """Take part in a group and print every message, until Ctrl-C or SIGTERM; a second one ends at once."""
    import asyncio

    from keylane.cli.marshal_consume import Trial
    from keylane.cli.marshal_consume import consume as take_part
    from keylane.core.picking import Appetite

    trial = Trial(
        group=group,
        client=client,
        topics=tuple(topics),
        mode=mode,
        appetite=Appetite(pick, greedy=greedy, whole_topic=whole_topic, max_claims=max_claims),
        batch_size=batch,
        sleep_s=sleep,
        release_when_behind=release_when_behind,
        rebalance=rebalance,
    )
    where = _where(link, kafka, kafka_config, log, interval, placing, may_make=True)
    try:
        asyncio.run(take_part(trial, where, as_json=as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(_INTERRUPTED) from None


def _where(  # noqa: PLR0917 - the options that all commands have, in their order
    link: ConnectionOptions,
    kafka: str | None,
    kafka_config: Path | None,
    log: str | None,
    interval: float | None,
    placing: Literal["topic_partition", "topic"] = "topic_partition",
    *,
    may_make: bool = False,
) -> Where:
    from keylane.cli.marshal_ground import Where

    return Where(
        link=link,
        kafka=kafka,
        kafka_config=kafka_config,
        log=log,
        interval_s=interval,
        placing=placing,
        may_make=may_make,
    )


def _on(where: Where, work: Any) -> None:
    """Open the log, do the work, close. A signal ends what goes on for ever, with success."""

    async def run() -> None:
        from keylane.cli.marshal_ground import open_ground

        async with open_ground(where) as ground:
            await work(ground)

    _until_signal(run())


def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    import asyncio
    import signal

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise

    asyncio.run(run())


async def _lags(ground: Ground, claims: Sequence[Claim]) -> tuple[dict[Key, int], list[str]]:
    """How many messages wait in each partition, and why that is not known of some topics."""
    from keylane.errors import InvalidInput, NoSuchTopic

    lags: dict[Key, int] = {}
    unknown: dict[str, str] = {}
    for claim in claims:
        topic, partition = claim.key.topic, claim.key.partition
        if topic in unknown:
            continue
        try:
            lags[claim.key] = await ground.source.backlog(topic, partition, claim.offset or 0)
        except (NoSuchTopic, InvalidInput) as error:  # the log outlives topics, and may be about some elsewhere
            unknown[topic] = str(error)
    return lags, list(unknown.values())


async def _check_group(ground: Ground, group: str, *, force: bool) -> None:
    from keylane.core.claim_records import check_id
    from keylane.errors import CoordinationLogError

    check_id(group, "group id")
    seen = await ground.admin.world()
    if not force and group not in seen.groups():
        raise CoordinationLogError(f"{_no_group(group, seen)}; --force does it all the same")


def _no_group(group: str, seen: World) -> str:
    known = ", ".join(map(repr, seen.groups()))
    return f"the log has no consumer and no record of group {group!r}: it has " + (known or "none of any group")


def _warn(seen: World, paused: list[str]) -> None:
    if seen.other_hash() is not None:
        typer.echo(
            f"{seen.misplaced} records are where another hash puts them: give everybody the same placing", err=True
        )
    elif seen.misplaced:
        typer.echo(f"{seen.misplaced} records are in a wrong partition of the log and were skipped", err=True)
    if seen.unreadable:
        first = seen.broken[0]
        typer.echo(
            f"{seen.unreadable} records cannot be read and were skipped, such as record {first.at} in partition "
            f"{first.log_partition}: {first.unreadable.reason}",
            err=True,
        )
    for group in sorted(set(paused)):
        typer.echo(f"group {group!r} is paused", err=True)


def _time_of(text: str, *, ahead: bool = False) -> datetime:
    """An ISO time with a zone, or a length of time from now on (or back)."""
    import re
    from datetime import UTC, datetime, timedelta

    from keylane.errors import InvalidInput

    if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
        length = timedelta(seconds=int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]])
        try:
            return datetime.now(UTC) + (length if ahead else -length)
        except OverflowError:
            raise InvalidInput(f"{text!r} is further away than any calendar goes: give less") from None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise InvalidInput(
            f"{text!r} is no time: give an ISO time with a zone (2030-01-31T12:00:00Z), or 90s, 10m, 2h, 1d"
        )
    return when
