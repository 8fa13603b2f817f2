"""`keylane sub`: show messages, as they are published or as a stream holds them."""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keylane.cli.command import ConnectionOptions, JsonEventsOption, single_command

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from keylane.cli.event_lines import EventLines
    from keylane.core.partitions import Partitioning
    from keylane.jetstream import Connection, DeliverPolicy, StreamInfo

_GONE_AFTER_S = 30.0


def sub(
    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", show_default=False, help="What to show: orders.eu, 'orders.>'")
    ] = None,
    *,
    stream: Annotated[
        str | None, typer.Option("--stream", metavar="STREAM", help="Read from this stream, and show its sequences.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Begin with everything that the stream holds.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Begin with the last message that the stream holds.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", min=1, help="End after this many messages.")
    ] = None,
    end: Annotated[
        bool, typer.Option("--end", help="End after what the stream holds now, instead of waiting for more.")
    ] = False,
    as_json: JsonEventsOption = False,
    link: ConnectionOptions,
) -> None:
    """Show messages until Ctrl-C. Nobody else gets fewer for it, and nothing is acknowledged.

    A SUBJECT alone shows what is published from now on. With --stream, --all or --last the messages come from the
    stream, with their sequences and partitions:

    \b
      keylane sub 'orders.>'
      keylane sub --stream ORDERS --all --end
    """
    from keylane.cli.event_lines import run_consumer
    from keylane.core.names import check_stream_name
    from keylane.core.subjects import check_filter
    from keylane.errors import InvalidInput

    if subject is None and stream is None:
        raise InvalidInput("nothing to show: give a SUBJECT such as 'orders.>', or --stream")
    if everything and last:
        raise InvalidInput("--all begins with the first message and --last with the last: give one of the two")
    if subject is not None:
        check_filter(subject)
    if stream is not None:
        check_stream_name(stream)
    start: DeliverPolicy = "all" if everything or (end and not last) else "last" if last else "new"
    wanted = Wanted(subject, stream, start, count, ends=end)
    run_consumer(_show(wanted, link, as_json=as_json))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages to show."""

    subject: str | None
    stream: str | None
    start: DeliverPolicy
    count: int | None
    ends: bool

    @property
    def is_stored(self) -> bool:
        return self.stream is not None or self.start != "new"


@dataclass(frozen=True, slots=True)
class Shown:
    """One message for the screen. `left`: how many the stream has after it; None if nobody knows."""

    subject: str
    data: bytes
    headers: dict[str, str]
    sequence: int | None = None
    partition: int | None = None
    stored: datetime | None = None
    left: int | None = None


async def _show(wanted: Wanted, link: ConnectionOptions, *, as_json: bool) -> None:
    import asyncio

    from keylane.cli.event_lines import EventLines, stop_on_signals

    lines = EventLines(as_json=as_json)
    async with link.open() as connection:
        with stop_on_signals(lines.stop):
            showing = asyncio.create_task(_show_all(connection, wanted, lines))
            stopped = asyncio.create_task(lines.stop.wait())
            await asyncio.wait({showing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (showing, stopped):
                task.cancel()
            for result in await asyncio.gather(showing, stopped, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


async def _show_all(connection: Connection, wanted: Wanted, lines: EventLines) -> None:
    shown = 0
    async with aclosing(_stored(connection, wanted) if wanted.is_stored else _published(connection, wanted)) as found:
        async for message in found:
            _write(lines, message)
            shown += 1
            if shown == wanted.count or (wanted.ends and message.left == 0):
                return


def _write(lines: EventLines, message: Shown) -> None:
    from keylane.cli.formatting import as_utc, excerpt, payload_fields, printable

    facts: dict[str, Any] = {"subject": message.subject, **payload_fields(message.data)}
    if message.headers:
        facts["headers"] = message.headers
    place = ""
    if message.sequence is not None:
        facts |= {"sequence": message.sequence, "partition": message.partition}
        facts["stored"] = as_utc(message.stored) if message.stored else None
        place = f"{message.sequence:>6}  " + (f"p{message.partition}  " if message.partition is not None else "")
    heads = "".join(f"  {name}: {value}" for name, value in message.headers.items())
    lines.write("message", f"{place}{printable(message.subject)}  {excerpt(message.data)}{printable(heads)}", **facts)


# ---- from a stream ------------------------------------------------------------------------------------------


async def _stored(connection: Connection, wanted: Wanted) -> AsyncGenerator[Shown]:
    from keylane.cli.stream.render import partitioning_of
    from keylane.core.partitions import strip_partition
    from keylane.errors import KeylaneError
    from keylane.jetstream import ConsumerConfig, consumers, open_feed

    info = await _stream(connection, wanted)
    name = str(info.config.name)
    partitioning = partitioning_of(info.config)
    config = ConsumerConfig(
        description="keylane sub",
        deliver_policy=wanted.start,
        ack_policy="none",
        filter_subject=_filter(wanted.subject, partitioning),
        inactive_threshold_s=_GONE_AFTER_S,
        mem_storage=True,
        num_replicas=1,
    )
    consumer = await consumers.create(connection, name, config)
    _say(f"stream {name}" + (f", {wanted.subject}" if wanted.subject else "") + _how(wanted))
    if wanted.ends and not consumer.num_pending:
        return
    try:
        async with open_feed(connection, name, consumer.name) as feed:
            async for message in feed:
                subject, partition = message.subject, None
                if partitioning is not None and subject.partition(".")[0].isdecimal():
                    partition, subject = strip_partition(subject)
                yield Shown(
                    subject,
                    message.data,
                    message.headers,
                    message.sequence,
                    partition,
                    message.timestamp,
                    message.delivery.pending,
                )
    finally:
        with suppress(KeylaneError):  # the server removes it by itself later
            await consumers.delete(connection, name, consumer.name)


def _filter(subject: str | None, partitioning: Partitioning | None) -> str | None:
    """What is published as `orders.eu` a partitioned stream stores as `3.orders.eu`."""
    from keylane.core.subjects import overlaps

    if subject is None or partitioning is None or not overlaps(subject, partitioning.filter):
        return subject
    return f"*.{subject}"


async def _stream(connection: Connection, wanted: Wanted) -> StreamInfo:
    """The stream that is named, or the one that stores the subject."""
    from keylane.core.name_suggestions import name_missing
    from keylane.core.subjects import overlaps
    from keylane.errors import InvalidInput
    from keylane.jetstream import streams

    if wanted.stream is not None:
        return await streams.info(connection, wanted.stream)
    assert wanted.subject is not None
    known = [info async for info in streams.list_all(connection)]
    found = [info for info in known if any(overlaps(one, wanted.subject) for one in info.config.subjects or ())]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(str(info.config.name) for info in found)
        raise InvalidInput(f"several streams store {wanted.subject!r}: say which with --stream: {names}")
    subjects = [one for info in known for one in info.config.subjects or () if not one.startswith("$")]
    raise InvalidInput(name_missing(f"no stream stores subject {wanted.subject!r}", wanted.subject, subjects))


# ---- as they are published ----------------------------------------------------------------------------------


async def _published(connection: Connection, wanted: Wanted) -> AsyncGenerator[Shown]:
    assert wanted.subject is not None
    subscription = await connection.nats.subscribe(wanted.subject)
    await connection.flush()
    _say(f"{wanted.subject}{_how(wanted)}")
    try:
        async for message in subscription.messages:
            yield Shown(message.subject, message.data, dict(message.headers or {}))
    finally:
        await subscription.unsubscribe()


def _how(wanted: Wanted) -> str:
    starts: dict[str, Literal["everything", "from the last message on", "new messages"]] = {
        "all": "everything",
        "last": "from the last message on",
        "new": "new messages",
    }
    return f": {starts[wanted.start]}" + ("" if wanted.ends or wanted.count else "; Ctrl-C ends")


def _say(text: str) -> None:
    typer.echo(f"keylane: {text}", err=True)


app = single_command(sub)
