"""`keylane marshal world|watch|release-group|resume|consume`: consumers coordinated by nothing but a log.

The log is opened by `log_access`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keylane.cli.command import (
    ConnectionOptions,
    JsonChangesOption,
    JsonEventsOption,
    JsonOption,
    command,
    exit_on_invalid_input,
    family,
    print_answer,
    run_until_signal,
)
from keylane.cli.metrics_port import MetricsOptions

if TYPE_CHECKING:
    from datetime import datetime

    from keylane.cli.marshal.log_access import OpenLog
    from keylane.core.claim_facts import Claim, Key
    from keylane.core.world import World

app = family("Consumers coordinated by nothing but a log.")

_Force = Annotated[bool, typer.Option("--force", help="Also if the log has no record of such a group.")]
_Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
_OnlyGroup = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only this group.")]
_OnlyTopic = Annotated[str | None, typer.Option("--topic", metavar="NAME", help="Only this topic.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Which log, as given on the command line. Each field is one option."""

    log: Annotated[
        str | None,
        typer.Option("--log", metavar="NAME", help="The coordination log. Default: marshal, on Kafka __marshal."),
    ] = None
    kafka: Annotated[
        str | None,
        typer.Option(
            "--kafka", metavar="BROKERS", help="The log and the topics are in Kafka, here: host:port,host:port."
        ),
    ] = None
    kafka_config: Annotated[
        Path | None,
        typer.Option(
            "--kafka-config", metavar="FILE", help="A file of Kafka client properties: security, login, brokers."
        ),
    ] = None
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help="The heartbeat interval of everybody on the log. Default: what the stream says; on Kafka 10.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLogOptions(LogOptions):
    """Which log, and where its records are."""

    placing: Annotated[
        Literal["topic_partition", "topic"],
        typer.Option("--placing", help="What is hashed to find a log partition. topic: as the Go library does."),
    ] = "topic_partition"


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
    log: PlacedLogOptions,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Show who owns what, now or at an earlier time."""
    from keylane.cli.marshal.render import select_claims, world_object

    when = None if at is None else _time_of(at)

    async def show(opened: OpenLog) -> None:
        seen = await (opened.admin.world() if when is None else opened.admin.world_at(when))
        claims = select_claims(seen, group, topic)
        at_ms = None if when is None else int(when.timestamp() * 1000)
        lags, unknown = await _lags(opened, claims) if lag else ({}, [])
        pauses = seen.pauses(group)
        if as_json:
            answer = world_object(seen, claims, pauses, at_ms=at_ms, lags=lags if lag else None)
            print_answer(True, answer, "")
            return
        from keylane.cli.display import console
        from keylane.cli.marshal.render import claim_table

        if claims:
            console().print(claim_table(seen, claims, at_ms=at_ms, lags=lags if lag else None))
        else:
            typer.echo("the log says nothing of any partition" + (" of these" if group or topic else ""))
            if group is not None and group not in seen.groups():
                typer.echo(_no_group(group, seen), err=True)
        for problem in unknown:
            typer.echo(f"lag unknown: {problem}", err=True)
        _warn(seen, [pause.group for pause in pauses])

    _with_log(log, link, show)


@command(app, "watch")
def watch(
    *,
    group: _OnlyGroup = None,
    topic: _OnlyTopic = None,
    log: PlacedLogOptions,
    as_json: JsonChangesOption = False,
    link: ConnectionOptions,
) -> None:
    """Show claims changing live, until Ctrl-C.

    On a terminal a table with a log of changes; in a pipe one line for each change.
    """
    from keylane.cli.display import open_display
    from keylane.cli.marshal.watch import MarshalWatch

    with open_display(as_json=as_json) as display:
        _with_log(log, link, MarshalWatch(group, topic, display).run)


@command(app, "release-group")
def release_group(
    group: _Group,
    until: Annotated[
        str, typer.Argument(metavar="UNTIL", help="An ISO time with a zone, or how long, such as 90s, 10m or 2h.")
    ],
    *,
    force: _Force = False,
    log: LogOptions,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Pause a group: its consumers release their partitions, and nobody claims until then."""
    when = _time_of(until, ahead=True)

    async def pause(opened: OpenLog) -> None:
        await _check_group(opened, group, force=force)
        await opened.admin.release_group(group, when)

    _with_log(log, link, pause)
    print_answer(
        as_json, {"group": group, "until": when.isoformat()}, f"group {group!r} is paused until {when.isoformat()}"
    )


@command(app, "resume")
def resume(
    group: _Group, *, force: _Force = False, log: LogOptions, as_json: JsonOption = False, link: ConnectionOptions
) -> None:
    """End a pause now."""

    async def end_pause(opened: OpenLog) -> None:
        await _check_group(opened, group, force=force)
        await opened.admin.resume(group)

    _with_log(log, link, end_pause)
    print_answer(as_json, {"group": group}, f"group {group!r} may claim again")


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
    log: PlacedLogOptions,
    metrics: MetricsOptions,
    as_json: JsonEventsOption = False,
    link: ConnectionOptions,
) -> None:
    """Take part in a group and print every message, until Ctrl-C or SIGTERM; a second one ends at once."""
    from keylane.cli.event_lines import run_consumer
    from keylane.cli.marshal.consume import MarshalConsumeOptions
    from keylane.cli.marshal.consume import consume as consume_messages
    from keylane.core.claim_choice import Appetite

    with exit_on_invalid_input():
        metrics.check()
    how = MarshalConsumeOptions(
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
    run_consumer(consume_messages(how, log, metrics, link, as_json=as_json))


def _with_log(log: LogOptions, link: ConnectionOptions, work: Any) -> None:
    """Open the log, do the work, close. A signal cancels the work, which is no failure."""

    async def run() -> None:
        from keylane.cli.marshal.log_access import open_log

        async with open_log(log, link) as opened:
            await work(opened)

    run_until_signal(run())


async def _lags(opened: OpenLog, claims: Sequence[Claim]) -> tuple[dict[Key, int], list[str]]:
    """How many messages wait in each partition, and for which topics that is unknown, and why."""
    from keylane.errors import InvalidInput, NoSuchTopic

    lags: dict[Key, int] = {}
    unknown: dict[str, str] = {}
    for claim in claims:
        topic, partition = claim.key.topic, claim.key.partition
        if topic in unknown:
            continue
        try:
            lags[claim.key] = await opened.source.backlog(topic, partition, claim.offset or 0)
        except (NoSuchTopic, InvalidInput) as error:  # the log outlives topics, and may cover topics of other servers
            unknown[topic] = str(error)
    return lags, list(unknown.values())


async def _check_group(opened: OpenLog, group: str, *, force: bool) -> None:
    from keylane.core.claim_records import check_id
    from keylane.errors import CoordinationLogError

    check_id(group, "group id")
    seen = await opened.admin.world()
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
