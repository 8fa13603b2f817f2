"""`consume`: take part in a group as a member and print every message, for trials and for a look inside.

Owns what is printed and how it ends: the first Ctrl-C or SIGTERM drains and ends with success, the second ends
at once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from keylane import groups
from keylane.cli.connecting import ConnectionOptions
from keylane.cli.consumer_told import as_utc
from keylane.cli.group_sight import Kind, config_of
from keylane.core.member_state import in_words
from keylane.core.plans import ranges
from keylane.groups.member import Order
from keylane.jetstream.consumers import ConsumerConfig

_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Who takes part, and how the messages are handled."""

    kind: Kind
    stream: str
    group: str
    member: str
    sleep_s: float
    order: Order
    concurrency: int
    max_ack_pending: int
    ack_wait_s: float | None


class Lines:
    """One line for each thing that happens, as words or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.stop = asyncio.Event()
        """Set when nobody reads the lines any more, and by a signal."""
        self.failure: OSError | None = None

    def tell(self, event: str, words: str, **facts: Any) -> None:
        now = datetime.now(UTC)
        line = (
            json.dumps({"time": as_utc(now), "event": event} | facts)
            if self._as_json
            else f"{now.astimezone():%H:%M:%S.%f}"[:-3] + f"  {words}"
        )
        try:
            print(line, flush=True)
        except OSError as error:  # the pipe was closed
            self.failure = self.failure or error
            self.stop.set()

    def state(self, state: groups.MemberState, waiting_for: str | None) -> None:
        """What the member waits for. For people on stderr: it is no message."""
        if waiting_for is None or state is groups.MemberState.STOPPING:
            return
        if self._as_json:
            self.tell("state", "", state=state.value, waiting_for=waiting_for)
        else:
            print(f"keylane: {printable(in_words(state, waiting_for))}", file=sys.stderr, flush=True)

    def message(self, message: groups.GroupMessage) -> None:
        where = f"partition {message.partition}  seq {message.source_sequence}"
        again = f"  delivery {message.delivered_count}" if message.delivered_count > 1 else ""
        self.tell(
            "message",
            f"{printable(message.subject)}  {where}{again}  {excerpt(message.data)}",
            subject=message.subject,
            partition=message.partition,
            key=message.key,
            sequence=message.sequence,
            source_sequence=message.source_sequence,
            delivered_count=message.delivered_count,
            pinned_id=message.headers.get("Nats-Pin-Id"),
            **payload_fields(message.data),
        )


async def consume(trial: Trial, link: ConnectionOptions, *, as_json: bool) -> None:
    """Until a signal, or until the group ends. Raises the error if one ended it."""
    lines = Lines(as_json=as_json)

    async def handler(message: groups.GroupMessage) -> None:
        if trial.sleep_s:
            await asyncio.sleep(trial.sleep_s)
        lines.message(message)
        if lines.failure is not None:
            raise lines.failure  # not acked: nobody saw it

    with _warnings_as(lines):
        async with await link.connect(
            on_disconnect=lambda why: lines.tell("disconnected", f"reconnecting ({why})", reason=why),
            on_reconnect=lambda server: lines.tell("connected", f"connected to {server}", server=server),
        ) as connection:
            config = await config_of(connection, trial.kind, trial.stream, trial.group)
            member = await groups.join(
                connection,
                trial.stream,
                trial.group,
                trial.member,
                handler,
                order=trial.order,
                concurrency=trial.concurrency,
                max_ack_pending=trial.max_ack_pending,
                settings=ConsumerConfig(ack_wait_s=trial.ack_wait_s),
                hooks=_hooks(lines, trial, config),
                kind=trial.kind,
            )
            with signals(lines.stop):
                await _until_the_end(member, lines)
    if lines.failure is not None:
        raise lines.failure


async def _until_the_end(member: groups.Member, lines: Lines) -> None:
    ended = asyncio.create_task(member.wait())
    asked = asyncio.create_task(lines.stop.wait())
    try:
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            lines.tell("stopping", "stopping: what is at work is finished first; Ctrl-C again ends at once")
            await member.stop()
        await ended
    finally:
        asked.cancel()
        ended.cancel()


def _hooks(lines: Lines, trial: Trial, config: groups.StaticConfig | groups.ElasticConfig) -> groups.MemberHooks:
    listed = config.has_member(trial.member)

    def joined() -> None:
        lines.tell("joined", f"joined {trial.group} as {trial.member}", member=trial.member, listed=listed)

    def rebalanced(before: tuple[int, ...], after: tuple[int, ...]) -> None:
        words = f"partitions {ranges(after)} (before: {ranges(before)})"
        lines.tell("rebalanced", words, before=list(before), after=list(after))

    return groups.MemberHooks(
        on_joined=joined,
        on_activated=lambda: lines.tell("active", "active: this instance is pinned"),
        on_deactivated=lambda: lines.tell("inactive", "inactive: this instance is not pinned any more"),
        on_rebalanced=rebalanced,
        on_state=lines.state,
        on_ended=lambda reason: lines.tell("ended", f"ended: {reason}", reason=reason),
        on_failure=lambda *_: None,  # only a closed pipe fails, and that ends the command
    )


class _AsLines(logging.Handler):
    """What the library warns of is for the person at the screen. States are told by their hook."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "keylane.groups.state":
            return
        self._lines.tell("warning", f"warning: {record.getMessage()}", text=record.getMessage())


@contextmanager
def _warnings_as(lines: Lines) -> Iterator[None]:
    log, handler = logging.getLogger("keylane.groups"), _AsLines(lines)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextmanager
def signals(stop: asyncio.Event) -> Iterator[None]:
    """The first signal asks for the end, the second cancels whatever still runs."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def ask() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def payload_fields(data: bytes) -> dict[str, str]:
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def excerpt(data: bytes) -> str:
    text = printable(data[: 2 * _SHOWN_CHARS].decode("utf-8", "backslashreplace"))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(data):,} bytes)"


def printable(text: str) -> str:
    """Nothing that a message carries may steer the terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
