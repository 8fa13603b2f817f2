"""The socket under the connection: a nats-py transport that can hand its bytes over without a queue.

nats-py reads through an asyncio stream, which costs a task switch and a copy for every read. During the
handshake this transport does the same; after it, `attach` gives every buffer straight to a sink from
inside the event loop's read callback. It reads into one buffer of its own: asyncio's default is a new 256 KiB
object for every read, which costs more than the handling of a single message.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from keylane.jetstream.protocol import MAX_CONTROL_LINE, BrokenProtocol, broken

_READ_SIZE = 64 * 1024  # larger reads make larger batches, and the server waits for their acks
_BULK_READ_SIZE = 512 * 1024  # no acks here, and each buffer is worked on as a whole
_CLOSE_TIMEOUT_S = 2.0
_QUICK_S = 0.0003
_SMALL_BYTES = 4096
_IN_A_ROW = 4


class PlainTextBeforeTls(BrokenProtocol):
    """The server sent plain text before the TLS handshake: it would count as part of the encrypted stream."""


class BusyPoll:
    """Keeps the event loop awake while the server answers quickly. Call `was_read` for every read.

    With one message in flight, each ack is answered within about 100 µs, and a good part of that is the machine putting
    the process to sleep and waking it again. After a row of small reads that follow each other quickly, the loop polls
    instead of sleeping: other tasks run as ever, and the rate rises by a third (bench/README.md, `max_ack_pending` 1).
    The first pause ends it, so that an idle or a slower reader costs nothing. Bulk traffic never starts it: there,
    sleeping makes larger reads.
    """

    __slots__ = ("_in_a_row", "_last", "_loop", "is_polling")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._in_a_row = 0
        self.is_polling = False

    def was_read(self, size: int) -> None:
        now = time.perf_counter()
        quick = now - self._last < _QUICK_S and size < _SMALL_BYTES
        self._last = now
        self._in_a_row = self._in_a_row + 1 if quick else 0
        if self._in_a_row >= _IN_A_ROW and not self.is_polling:
            self.is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self.is_polling = self._in_a_row >= _IN_A_ROW and time.perf_counter() - self._last < _QUICK_S
        if self.is_polling:
            self._loop.call_soon(self._poll)


class _Wire(asyncio.BufferedProtocol):
    """One TCP connection: handshake bytes are kept, later ones go to the sink."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_READ_SIZE))
        self._busy_poll = BusyPoll()
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.sink: Callable[[bytes], None] | None = None
        self.kept = bytearray()
        self.ended = False
        self.lost: Exception | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters: set[asyncio.Future[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # by kind, not by class: uvloop has its own

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self._busy_poll.was_read(nbytes)
        if self.sink is not None:
            self.sink(bytes(self._view[:nbytes]))
            if nbytes == len(self._view):
                self._let_others_run()
        else:
            self.kept += self._view[:nbytes]
            self._wake()

    def read_in_bulk(self) -> None:
        if len(self._view) < _BULK_READ_SIZE:
            self._view = memoryview(bytearray(_BULK_READ_SIZE))

    def _let_others_run(self) -> None:
        """Go on reading in the next turn of the loop.

        uvloop reads all that is there before anything else runs. Handlers would then work on the whole window at once,
        and while they do, the server has no acks and waits.
        """
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc
        self._end()
        self._writable.set()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drained(self) -> None:
        if self.ended:
            raise ConnectionResetError("connection lost") from self.lost
        await self._writable.wait()

    async def line(self) -> bytes:
        """The next line of the handshake, or what there was of it at the end of the stream."""
        while (end := self.kept.find(b"\n", 0, MAX_CONTROL_LINE)) < 0 and not self.ended:
            if len(self.kept) >= MAX_CONTROL_LINE:
                raise broken(f"a line of more than {MAX_CONTROL_LINE} bytes", bytes(self.kept))
            await self.changed()
        cut = end + 1 if end >= 0 else len(self.kept)
        line = bytes(self.kept[:cut])
        del self.kept[:cut]
        return line

    async def changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _end(self) -> None:
        self.ended = True
        if self.sink is not None:
            self.sink(b"")
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _drop(data: bytes) -> None:
    """The sink of a link that was given up."""


class DirectTransport(Transport):
    """TCP and TLS for nats-py's client, without an asyncio stream in between."""

    def __init__(self) -> None:
        self._wire: _Wire | None = None
        self.last_line = b""
        """The newest line of the handshake."""

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        loop = asyncio.get_running_loop()
        assert uri.hostname is not None
        assert uri.port is not None
        # Not `wait_for`: in Python 3.11 it can lose a connection that is made in the moment it gives up.
        async with asyncio.timeout(connect_timeout):
            _, self._wire = await loop.create_connection(_Wire, uri.hostname, uri.port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        wire = self._connected()
        assert wire.transport is not None
        if wire.kept:
            # A man in the middle could have sent it; after the handshake it would count as the server's.
            raise PlainTextBeforeTls("the server sent plain text where TLS had to begin; try without tls_first")
        async with asyncio.timeout(connect_timeout):
            secured = await asyncio.get_running_loop().start_tls(
                wire.transport,
                wire,
                ssl_context,
                server_hostname=uri if isinstance(uri, str) else uri.hostname,
            )
        if secured is None:
            raise ConnectionResetError("connection lost during the TLS handshake")
        wire.transport = secured

    def attach(self, sink: Callable[[bytes], None]) -> None:
        """From now on give every buffer to `sink`; an empty one means the end of the stream."""
        wire = self._connected()
        wire.sink = sink
        kept, wire.kept = bytes(wire.kept), bytearray()
        if kept:
            sink(kept)
        if wire.ended:
            sink(b"")

    def read_in_bulk(self) -> None:
        """Read larger buffers for as long as this connection lasts."""
        self._connected().read_in_bulk()

    def detach(self) -> None:
        """From now on drop what arrives after the handshake."""
        if self._wire is not None and self._wire.sink is not None:
            self._wire.sink = _drop

    @property
    def is_writable(self) -> bool:
        """Whether the link still takes bytes, as far as this side knows."""
        wire = self._wire
        return wire is not None and wire.transport is not None and not (wire.ended or wire.transport.is_closing())

    def write(self, payload: bytes) -> None:
        wire = self._connected()
        assert wire.transport is not None
        try:
            wire.transport.write(payload)
        except RuntimeError as error:  # uvloop's way to say that it is closed; asyncio's own drops the bytes
            raise ConnectionResetError("connection lost") from error

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        wire = self._connected()
        while not wire.kept and not wire.ended:
            await wire.changed()
        data = bytes(wire.kept[:buffer_size])
        del wire.kept[:buffer_size]
        return data

    async def readline(self) -> bytes:
        self.last_line = await self._connected().line()
        return self.last_line

    async def drain(self) -> None:
        await self._connected().drained()

    async def wait_closed(self) -> None:
        if self._wire is None:
            return
        # A link that is cut in its TLS handshake never reports its end, and a peer may never answer TLS's goodbye.
        done, _ = await asyncio.wait({self._wire.closed}, timeout=_CLOSE_TIMEOUT_S)
        if not done:
            self.abort()
            await asyncio.sleep(0)  # the socket is closed in the next turn

    def abort(self) -> None:
        """End the link at once, without a goodbye."""
        if self._wire is not None and self._wire.transport is not None:
            self._wire.sink = None
            self._wire.transport.abort()

    def close(self) -> None:
        if self._wire is not None and self._wire.transport is not None:
            self._wire.sink = None
            self._wire.transport.close()

    def at_eof(self) -> bool:
        return self._wire is None or (self._wire.ended and not self._wire.kept)

    def __bool__(self) -> bool:
        """True from the start: nats-py replaces a false transport by one of its own."""
        return True

    def _connected(self) -> _Wire:
        assert self._wire is not None, "connect must be called first"
        return self._wire
