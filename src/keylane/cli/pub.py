"""`keylane pub`: publish messages and wait until a stream has stored them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import ConnectionOptions, JsonOption, connected, single_command
from keylane.errors import PublishFailed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from keylane.jetstream import Connection, PublishAck

_COUNT = re.compile(r"\{\{\s*Count(?:\s*%\s*([1-9]\d*))?\s*\}\}", re.IGNORECASE)
_FAILURES_BEFORE_IT_ENDS = 10
_PROGRESS_EVERY_S = 0.5


def pub(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Where to publish: orders.eu.42")],
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", show_default=False, help="The message. Else --file, else stdin.")
    ] = None,
    *,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, help="Publish this many.")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.01, help="At most this many a second. Default: as fast as it goes."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the message from this file.", dir_okay=False)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the file or of stdin is a message.")] = False,
    message_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Message id: the stream stores what has the same id only once."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME:VALUE", help="A header. May be repeated.")
    ] = None,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Publish messages; each must be stored by a stream.

    In SUBJECT, DATA, --id and headers {{Count}} is the number of the message, from 1, and {{Count % 10}} its
    remainder:

    \b
      keylane pub 'orders.customer-{{Count % 10}}' 'order {{Count}}' --count 1000 --rate 200
    """
    batch = Batch(subject, _payloads(data, file, lines=lines), count, message_id, _headers(header or []))
    batch.check()
    summary = connected(link, lambda connection: _publish(connection, batch, rate, quiet=as_json))
    summary.show(as_json=as_json)


@dataclass(frozen=True, slots=True)
class Batch:
    """What to publish: the payloads, `count` times over."""

    subject: str
    payloads: list[str | bytes]
    count: int
    message_id: str | None
    headers: dict[str, str]

    @property
    def total(self) -> int:
        return self.count * len(self.payloads)

    def check(self) -> None:
        from keylane.core.subjects import check_subject
        from keylane.errors import InvalidInput

        check_subject(fill_in(self.subject, 1))
        if self.total > 1 and self.message_id is not None and not _COUNT.search(self.message_id):
            raise InvalidInput(
                f"--id {self.message_id!r} is the same for all {self.total:,} messages, and only the first would be "
                f"stored: write --id '{self.message_id}-{{{{Count}}}}'"
            )

    def messages(self) -> Iterator[tuple[str, bytes, dict[str, str]]]:
        number = 0
        for _ in range(self.count):
            for payload in self.payloads:
                number += 1
                data = payload if isinstance(payload, bytes) else fill_in(payload, number).encode()
                headers = {name: fill_in(value, number) for name, value in self.headers.items()}
                if self.message_id is not None:
                    headers["Nats-Msg-Id"] = fill_in(self.message_id, number)
                yield fill_in(self.subject, number), data, headers


@dataclass(slots=True)
class Summary:
    """What became of the messages."""

    streams: dict[str, list[int]] = field(default_factory=dict)
    """For each stream: how many are new there, how many were there before, the lowest and the highest sequence."""
    failed: int = 0
    failure: PublishFailed | None = None
    """The first one."""
    why: str = ""
    """In words, where the failure does not say enough."""
    seconds: float = 0.0
    interrupted: bool = False

    def add(self, ack: PublishAck) -> None:
        found = self.streams.setdefault(ack.stream, [0, 0, ack.sequence, ack.sequence])
        found[ack.duplicate] += 1
        found[2:] = [min(found[2], ack.sequence), max(found[3], ack.sequence)]

    def settle(self, future: asyncio.Future[PublishAck]) -> None:
        failure = future.exception()
        if isinstance(failure, PublishFailed):
            self.fail(failure)
        else:
            self.add(future.result())

    def fail(self, failure: PublishFailed) -> None:
        self.failed += 1
        self.failure = self.failure or failure

    @property
    def acked(self) -> int:
        return sum(new + before for new, before, *_ in self.streams.values())

    def show(self, *, as_json: bool) -> None:
        """Print it and end with exit code 1 if a message was not stored, 130 if it was interrupted."""
        from keylane.cli.command import INTERRUPTED
        from keylane.cli.formatting import json_text

        if as_json:
            typer.echo(json_text(self._object(), indent=2))
        for line in () if as_json else self._lines():
            typer.echo(line)
        if self.failed:
            more = f"{self.failed:,} not stored: " if self.failed + self.acked > 1 else ""
            typer.echo(f"keylane: {more}{self.why or self.failure}", err=True)
            raise typer.Exit(1)
        if self.interrupted:
            raise typer.Exit(INTERRUPTED)

    def _lines(self) -> Iterator[str]:
        for stream, (new, before, first, last) in self.streams.items():
            where = f"sequence {first:,}" if first == last else f"sequences {first:,} to {last:,}"
            if self.acked == 1:
                yield f"stored in {stream}, {where}" if new else f"not stored again: {stream} has this id, {where}"
                continue
            known = f"; {before:,} were there already, by their ids" if before else ""
            yield f"stored {new:,} in {stream}, {where}{known}"
        if self.acked > 1 and self.seconds:
            yield f"{self.acked:,} in {self.seconds:.2f} s: {self.acked / self.seconds:,.0f} a second"

    def _object(self) -> dict[str, Any]:
        return {
            "stored": sum(new for new, *_ in self.streams.values()),
            "duplicates": sum(before for _, before, *_ in self.streams.values()),
            "failed": self.failed,
            "seconds": round(self.seconds, 3),
            "rate": round(self.acked / self.seconds, 1) if self.seconds else None,
            "streams": [
                {"stream": stream, "stored": new, "duplicates": before, "first_sequence": first, "last_sequence": last}
                for stream, (new, before, first, last) in self.streams.items()
            ],
        }


def fill_in(text: str, number: int) -> str:
    """The text with the number of the message in it.

    >>> fill_in("k{{Count % 3}} {{Count}}", 7)
    'k1 7'
    """
    return _COUNT.sub(lambda found: str(number % int(found[1]) if found[1] else number), text)


def _payloads(data: str | None, file: Path | None, *, lines: bool) -> list[str | bytes]:
    from keylane.errors import InvalidInput

    if data is not None:
        if file is not None or lines:
            raise InvalidInput("the message is given as DATA: --file and --lines read it from elsewhere")
        return [data]
    if file is None and sys.stdin.isatty():
        raise InvalidInput("no message: give DATA ('' is an empty one), or --file, or pipe it in")
    where = "standard input" if file is None else str(file)
    try:
        read = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from error
    found: list[str | bytes] = list(read.splitlines()) if lines else [read]
    if not read:
        raise InvalidInput(f"{where} is empty: DATA '' publishes an empty message")
    try:
        return [one.decode() if isinstance(one, bytes) and _COUNT.search(one.decode()) else one for one in found]
    except UnicodeDecodeError:
        return found


def _headers(given: list[str]) -> dict[str, str]:
    from keylane.errors import InvalidInput

    found = {}
    for one in given:
        name, colon, value = one.partition(":")
        if not colon or not name:
            raise InvalidInput(f"header {one!r} has no name: write NAME:VALUE")
        found[name.strip()] = value.strip()
    return found


async def _publish(connection: Connection, batch: Batch, rate: float | None, *, quiet: bool) -> Summary:
    import asyncio

    from keylane.errors import NotStored
    from keylane.jetstream import Publisher

    summary, clock = Summary(), asyncio.get_running_loop().time
    progress = _Progress(batch.total, is_shown=not quiet and sys.stderr.isatty())
    begun = clock()
    try:
        async with Publisher(connection, timeout_s=connection.api.timeout_s) as publisher:
            for number, (subject, data, headers) in enumerate(batch.messages()):
                if rate is not None and (ahead_s := begun + number / rate - clock()) > 0:
                    await asyncio.sleep(ahead_s)
                if summary.failed >= _FAILURES_BEFORE_IT_ENDS:
                    break
                (await publisher.send(subject, data, headers or None)).add_done_callback(summary.settle)
                progress.show(summary.acked, clock() - begun)
    except PublishFailed as failure:  # the connection is down
        summary.fail(failure)
    except asyncio.CancelledError:
        summary.interrupted = True
    progress.end()
    await asyncio.sleep(0)  # the callbacks of the last answers
    summary.seconds = clock() - begun
    if isinstance(summary.failure, NotStored):
        summary.why = await _in_words(connection, batch, summary.failure)
    return summary


class _Progress:
    """One line on the terminal that changes while it takes long."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._total = total
        self._is_shown = is_shown
        self._last_s = 0.0

    def show(self, stored: int, seconds: float) -> None:
        if self._is_shown and seconds > self._last_s + _PROGRESS_EVERY_S:
            self._last_s = seconds
            text = f"{stored:,} of {self._total:,} stored, {stored / seconds:,.0f} a second"
            typer.echo(f"\r\x1b[K{text}", err=True, nl=False)

    def end(self) -> None:
        if self._last_s:
            typer.echo("\r\x1b[K", err=True, nl=False)


async def _in_words(connection: Connection, batch: Batch, failure: PublishFailed) -> str:
    """What nobody stored may have a misspelt subject: name those that streams have."""
    from keylane.core.name_suggestions import name_missing
    from keylane.core.subjects import matches
    from keylane.errors import KeylaneError
    from keylane.jetstream import streams

    subject = fill_in(batch.subject, 1)
    try:
        known = [one async for info in streams.list_all(connection) for one in info.config.subjects or ()]
    except KeylaneError:
        return str(failure)
    known = [one for one in known if not one.startswith("$")]
    if any(matches(one, subject) for one in known):
        return str(failure)
    return name_missing(f"no stream stores subject {subject!r}", subject, known)


app = single_command(pub)
