"""A keylane member in a process of its own, which writes down every message before it is acked.

Standard output gets `ready` once it has joined, then one line per message: the machine's monotonic clock in
nanoseconds, the subject, the sequence in the source stream, the member, the sequence in the queue, how often it was
delivered. `pcgroups-peer consume --evidence` writes the first four. A try that failed is a line `failed` with the
clock, the subject, the sequence, the number of the try, 1 if it was meant to fail, else 0, the sequence in the queue,
how often it was delivered. Before a handler fails on purpose it writes a line `fails` with the clock, the subject and
the sequence: a line `failed` must follow or, if what it raises ends the member, `crashed` with the same. A link that is
there again is a line `linked`, a pin that was lost a line `lost`, each with the clock. Standard error gets the log,
with the same clock.

A handler that fails on purpose does so in one of many ways: a plain exception, within task groups, timeouts and cancel
scopes, by cancelling itself. Some that succeed leave such things behind as well.

SIGTERM stops it cleanly. A server that is away when it starts is waited for, as a supervisor would.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import keylane
from keylane import groups
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    Disconnected,
    HandlerCrashed,
    JetStreamDisabled,
    RequestTimeout,
    ServerUnreachable,
)
from keylane.jetstream import Connection, ConnectionHooks, ConsumerConfig
from keylane.journal import Journal
from tests.integration.odd_handlers import FAILING, RETURNING

Handler = Callable[[groups.GroupMessage], Awaitable[None]]

_log = logging.getLogger("chaos.worker")
_START_TIMEOUT_S = 60.0
_TRY_AGAIN_S = 0.3
_OUT = sys.stdout.fileno()
CRASHED = 70
"""The exit code of a worker whose handler ended its member on purpose."""


class Failing(Exception):
    """What a handler raises on purpose."""


class Crashing(BaseException):
    """What a handler raises on purpose to end its member."""


def is_poison(seed: int, sequence: int, one_in: int) -> bool:
    """Whether the handler fails on this message every time: the seed decides, for all processes alike.

    >>> [sequence for sequence in range(1, 5000) if is_poison(1, sequence, 1000)]
    [1182, 1367, 2069, 3122, 3343, 4061, 4284, 4433]
    """
    return one_in > 0 and zlib.crc32(b"%d:%d" % (seed, sequence)) % one_in == 0


def write(line: bytes) -> None:
    """Straight to the kernel: what a killed process wrote is there."""
    os.write(_OUT, line)


def handler_of(options: argparse.Namespace) -> Handler:
    """The handler of a run: takes its time, fails as asked, and writes down what it did."""
    who = options.member.encode()
    chance = random.Random(f"{options.seed} {options.instance}")  # noqa: S311 - the same seed makes the same run

    def fails(sequence: int) -> bool:
        return is_poison(options.seed, sequence, options.poison) or chance.random() < options.failing

    fail = failure_of(options, chance)

    async def failing(message: groups.GroupMessage) -> None:
        if fails(message.sequence):
            await fail(message)

    do: Handler = failing
    if options.sink:
        from chaos.sink import writing_once  # noqa: PLC0415 - needs what only the run with a database has

        do = writing_once(options.sink, options.instance, chance, fails, fail)

    async def handler(message: groups.GroupMessage) -> None:
        if options.work:
            await asyncio.sleep(options.work)
        await do(message)
        write(
            b"%d %b %d %b %d %d\n"
            % (
                time.monotonic_ns(),
                message.subject.encode(),
                message.sequence,
                who,
                message.delivery_sequence,
                message.delivered_count,
            )
        )
        if chance.random() < options.failing:
            await chance.choice(list(RETURNING.values()))()

    return handler


def failure_of(options: argparse.Namespace, chance: random.Random) -> Handler:
    """Fails on a message, in some way."""
    ways = [None, *FAILING.values()]

    async def fail(message: groups.GroupMessage) -> None:
        write(b"fails %d %b %d\n" % (time.monotonic_ns(), message.subject.encode(), message.sequence))
        meant.add(message.sequence)
        if chance.random() < options.odd:
            raise Crashing(f"{message.sequence} ends its member on purpose")
        way = chance.choice(ways)
        if way is not None:
            await way()
        raise Failing(f"{message.sequence} fails on purpose")

    return fail


async def nothing(message: groups.GroupMessage) -> None:
    """The handler of a run that looks at the process only."""


meant: set[int] = set()
"""What fails on purpose just now."""


def failed(message: groups.GroupMessage, error: BaseException, tries: int) -> None:
    on_purpose = message.sequence in meant
    meant.discard(message.sequence)
    if isinstance(error, Crashing):
        write(b"crashed %d %b %d\n" % (time.monotonic_ns(), message.subject.encode(), message.sequence))
        return
    write(
        b"failed %d %b %d %d %d %d %d\n"
        % (
            time.monotonic_ns(),
            message.subject.encode(),
            message.sequence,
            tries,
            on_purpose,
            message.delivery_sequence,
            message.delivered_count,
        )
    )
    if not on_purpose:
        _log.error("%r failed by itself (try %d)", message, tries, exc_info=error)


def lost_the_pin() -> None:
    write(b"lost %d\n" % time.monotonic_ns())
    _log.info("not active any more")


def linked(_server: str) -> None:
    write(b"linked %d\n" % time.monotonic_ns())


async def work(options: argparse.Namespace) -> None:
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    joined = asyncio.Event()
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not asked_to_stop.is_set():
        try:
            async with await keylane.connect(
                options.url, name=f"chaos {options.instance}", hooks=ConnectionHooks(on_reconnect=linked)
            ) as connection:
                async with _journal(connection, options) as journal:
                    handle = await _join(connection, options, joined, journal)
                    await _take_part(handle, asked_to_stop)
                return
        except (ApiUnavailable, Disconnected, JetStreamDisabled, RequestTimeout, ServerUnreachable) as error:
            if joined.is_set() or time.monotonic() > deadline_s:
                raise
            _log.info("the server is away: %s", error)
        except ApiError as error:
            if joined.is_set() or error.code != 503 or time.monotonic() > deadline_s:
                raise
            _log.info("the server is starting: %s", error)
        await asyncio.sleep(_TRY_AGAIN_S)


@asynccontextmanager
async def _journal(connection: Connection, options: argparse.Namespace) -> AsyncIterator[Journal | None]:
    if not options.journal:
        yield None
        return
    async with Journal(connection, stream=options.stream) as journal:
        yield journal


async def _join(
    connection: Connection, options: argparse.Namespace, joined: asyncio.Event, journal: Journal | None
) -> groups.Member:
    def on_joined() -> None:
        joined.set()
        write(b"ready\n")

    more = {"max_tries": options.max_tries} if options.max_tries else {}
    return await groups.join(
        connection,
        options.stream,
        options.group,
        options.member,
        nothing if options.silent else handler_of(options),
        concurrency=options.concurrency,
        max_ack_pending=options.max_ack_pending,
        settings=ConsumerConfig(ack_wait_s=options.ack_wait) if options.ack_wait else None,
        hooks=groups.MemberHooks(
            on_joined=on_joined,
            on_activated=lambda: _log.info("active"),
            on_deactivated=lost_the_pin,
            on_partitions=lambda before, after: _log.info("partitions %s -> %s", list(before), list(after)),
            on_ended=lambda reason: _log.info("ended: %s", reason),
            on_failure=failed,
        ),
        journal=journal,
        **more,
    )


async def _take_part(handle: groups.Member, asked_to_stop: asyncio.Event) -> None:
    ended = asyncio.create_task(handle.wait())
    stopping = asyncio.create_task(asked_to_stop.wait())
    await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        _log.info("asked to stop")
        await handle.stop()
    stopping.cancel()
    await ended


def gives_up() -> bool:
    """Whether this keylane gives messages up after some tries."""
    return "max_tries" in inspect.signature(groups.join).parameters


class MachineClock(logging.Formatter):
    """The clock of the evidence, so that both can be laid side by side."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return f"{time.monotonic():.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.worker", description=__doc__)
    for name in ("url", "stream", "group", "member"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--instance", default="", help="what this process is called in logs")
    parser.add_argument("--ack-wait", type=float, default=0.0, help="seconds; 0 leaves keylane's default")
    parser.add_argument("--work", type=float, default=0.0, help="seconds that each message takes")
    parser.add_argument("--max-ack-pending", type=int, default=1000, help="unacknowledged messages allowed")
    parser.add_argument("--seed", type=int, default=0, help="decides what fails")
    parser.add_argument("--failing", type=float, default=0.0, help="share of tries that fail")
    parser.add_argument("--odd", type=float, default=0.0, help="share of failures that end the member")
    parser.add_argument("--poison", type=int, default=0, help="one message in so many fails always; 0: none")
    parser.add_argument("--max-tries", type=int, default=0, help="then it is a dead letter; 0: tried for ever")
    parser.add_argument("--silent", action="store_true", help="handle messages and write nothing down")
    parser.add_argument("--sink", default="", help="the database that effects are written to, exactly once")
    parser.add_argument("--journal", action="store_true", help="write a journal")
    parser.add_argument("--concurrency", type=int, default=64, help="handlers at once")
    options = parser.parse_args()
    told = logging.StreamHandler()
    told.setFormatter(MachineClock("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[told])
    try:
        keylane.run(work(options))
    except HandlerCrashed as crash:
        if not isinstance(crash.__cause__, Crashing):
            raise
        _log.info("ended on purpose: %s", crash)
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
