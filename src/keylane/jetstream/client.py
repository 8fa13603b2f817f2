"""nats-py's client with a bulk message path.

nats-py keeps what it is good at: authentication, TLS, reconnecting, subscriptions, requests. This subclass
replaces how bytes come in and how small commands go out:

- in: `DirectTransport` gives whole socket buffers to `Scanner`, which hands messages to the `Route` of their
  subscription before the read callback returns. What has no route is served by nats-py as ever.
- out: `post` collects commands (acks, pulls, publishes) and writes all of one event-loop turn at once.

A subclass was chosen over a second connection for data, because both share one login, one reconnect and one
order of commands: a pull can never overtake the SUB that its answers need.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nats.aio.client
from nats import errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import WebSocketTransport

from keylane.errors import KeylaneError, PermissionDenied
from keylane.jetstream.protocol import BrokenProtocol, BulkRoute, Control, Event, Route, Scanner, Unrouted, parse_info
from keylane.jetstream.transport import DirectTransport

_log = logging.getLogger("keylane.connection")

_FLUSH_S = 10.0

LinkListener = Callable[[bool], None]
"""Called with False when the link to the server is lost and with True when it is there again."""
DenialListener = Callable[[PermissionDenied], None]
"""Called with every refusal of a publish or a subscription, repeated ones too."""


class _Parser:
    """What nats-py calls its parser: used as such only on websocket transports."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def reset(self) -> None:
        self._client.forget_input()

    async def parse(self, data: bytes = b"") -> None:
        # nats-py would drop the reason of a `ProtocolError`, and stop to read in silence for any other.
        try:
            try:
                self._client.scanner.scan(data)
            finally:
                await self._client.handle_events()
        except Exception as error:  # noqa: BLE001 - it ends the link and is reported
            await self._client.give_up_link(error)


class PendingRequests:
    """The requests that wait for an answer, so that what makes an answer impossible ends them at once."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Msg], str] = {}
        self._barred: tuple[type[KeylaneError], str] | None = None

    @contextmanager
    def waiting_on(self, subject: str) -> Iterator[asyncio.Future[Msg]]:
        """A future that fails when the answer cannot come any more."""
        if self._barred is not None:
            kind, text = self._barred
            raise kind(f"{subject} was not asked: {text}")
        trouble: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[trouble] = subject
        try:
            yield trouble
        finally:
            del self._waiting[trouble]
            _let_go(trouble)

    def fail(self, kind: type[KeylaneError], text: str) -> None:
        """End all requests."""
        for trouble, subject in self._waiting.items():
            if not trouble.done():
                trouble.set_exception(kind(f"no answer on {subject}: {text}"))

    def deny(self, denied: PermissionDenied) -> None:
        """End the requests that the server does not allow."""
        for trouble, subject in self._waiting.items():
            if subject == denied.subject and not trouble.done():
                trouble.set_exception(PermissionDenied(str(denied), operation=denied.operation, subject=denied.subject))

    def bar(self, kind: type[KeylaneError], text: str) -> None:
        """End all requests, and refuse new ones until `unbar`."""
        self._barred = (kind, text)
        self.fail(kind, text)

    @property
    def barred(self) -> bool:
        return self._barred is not None

    def unbar(self) -> None:
        self._barred = None


def _let_go(future: asyncio.Future[Msg]) -> None:
    """Cancel what nobody waits for any more, or take note of how it ended."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()


class Client(nats.aio.client.Client):
    """A nats-py client whose routed subscriptions bypass nats-py's message path."""

    def __init__(self) -> None:
        super().__init__()
        self.scanner = Scanner()
        self._ps = _Parser(self)  # type: ignore[assignment]  # stands in for nats-py's Parser
        self.outbox: list[bytes] = []
        self.push_handle: asyncio.Handle | None = None
        self._before_push: list[Callable[[], None]] = []
        self._flushes: set[asyncio.Future[bool]] = set()
        self._listeners: list[LinkListener] = []
        self._denial_listeners: list[DenialListener] = []
        self.outstanding = PendingRequests()
        self._wake: asyncio.Event = asyncio.Event()
        self._scan_error: Exception | None = None
        self._ended = False

    async def connect(self, servers: str | list[str], **options: Any) -> None:  # type: ignore[override]  # passed on
        """As nats-py's `connect`; link listeners hear of losses and recoveries before the callbacks do."""
        disconnected = options.pop("disconnected_cb", None)
        reconnected = options.pop("reconnected_cb", None)

        async def lost() -> None:
            self._tell(up=False)
            if disconnected is not None:
                await disconnected()

        async def back() -> None:
            self._tell(up=True)
            if reconnected is not None:
                await reconnected()

        await super().connect(servers, disconnected_cb=lost, reconnected_cb=back, **options)

    # ---- routes -------------------------------------------------------------------------------------

    async def route(self, subject: str, route: Route) -> Subscription:
        """Subscribe and let `route` have the messages. End it with `unroute`."""
        subscription = await self.subscribe(subject)
        self.scanner.routes[b"%d" % subscription._id] = route
        return subscription

    async def route_bulk(self, subject: str, route: BulkRoute) -> Subscription:
        """As `route`, for a reader of very many messages: it is given whole buffers, and larger ones."""
        subscription = await self.subscribe(subject)
        self.scanner.bulk_routes[b"%d" % subscription._id] = route
        if isinstance(self._transport, DirectTransport):
            self._transport.read_in_bulk()
        return subscription

    def move_route(self, subscription: Subscription, subject: str) -> None:
        """While the link is down: let the next one subscribe to another subject for the same route."""
        assert not self.is_connected
        subscription._subject = subject

    async def unroute(self, subscription: Subscription) -> None:
        """End a routed subscription. Messages that arrive from now on are dropped."""
        self.scanner.routes.pop(b"%d" % subscription._id, None)
        self.scanner.bulk_routes.pop(b"%d" % subscription._id, None)
        if not self.is_closed and not self.is_draining and subscription._id in self._subs:
            await subscription.unsubscribe()

    def listen(self, listener: LinkListener) -> None:
        self._listeners.append(listener)

    def unlisten(self, listener: LinkListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def listen_for_denials(self, listener: DenialListener) -> None:
        self._denial_listeners.append(listener)

    def unlisten_for_denials(self, listener: DenialListener) -> None:
        if listener in self._denial_listeners:
            self._denial_listeners.remove(listener)

    def deny(self, denied: PermissionDenied) -> None:
        """The server does not allow something: end what waits for it."""
        self.outstanding.deny(denied)
        for listener in list(self._denial_listeners):
            listener(denied)

    def _tell(self, *, up: bool) -> None:
        for answered in self._flushes:
            if not up and not answered.done():
                answered.set_exception(errors.ConnectionReconnectingError())
        for listener in list(self._listeners):
            listener(up)
        if up:
            self.push()

    # ---- out ----------------------------------------------------------------------------------------

    def post(self, command: bytes) -> None:
        """Send a command with everything else that this turn of the event loop sends.

        While the link is down commands are kept and leave after the reconnect.
        """
        self.outbox.append(command)
        if self.push_handle is None:
            self.schedule_push()

    def schedule_push(self) -> None:
        self.push_handle = asyncio.get_running_loop().call_soon(self.push)

    def before_push(self, callback: Callable[[], None]) -> None:
        """Call this once, after everything else of this turn of the event loop: what it posts leaves with the rest."""
        self._before_push.append(callback)
        if self.push_handle is None:
            self.schedule_push()

    def push(self) -> None:
        """Write what was posted now. nats-py's own pending commands go first, so order is kept."""
        if self._before_push:
            callbacks, self._before_push = self._before_push, []
            for callback in callbacks:
                callback()
        if self.push_handle is not None:
            self.push_handle.cancel()
            self.push_handle = None
        if not (self.outbox or self._pending) or not self.is_connected or self._transport is None:
            return
        if isinstance(self._transport, DirectTransport) and not self._transport.is_writable:
            return  # the link has just ended, and the reading task is about to notice
        commands = [*self._pending, *self.outbox]
        self._pending = []
        self._pending_data_size = 0
        self.outbox.clear()
        self._transport.writelines(commands)
        if isinstance(self._transport, WebSocketTransport):
            # A websocket sends only when drained: let nats-py's flusher do so.
            self._pending.append(b"")
            self._pending_data_size += 1
            assert self._flush_queue is not None
            if self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def flush(self, timeout: float = _FLUSH_S) -> None:
        """As nats-py's, behind everything posted so far, and ended at once by the loss of the link.

        nats-py's own is a `wait_for`, which in Python 3.11 loses a cancellation that meets the answer.
        """
        if self.is_closed:
            raise errors.ConnectionClosedError
        self.push()
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes.add(answered)
        try:
            await self._send_ping(answered)
            async with asyncio.timeout(timeout):
                await answered
        except TimeoutError:
            raise errors.FlushTimeoutError from None
        finally:
            self._flushes.discard(answered)

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """As `request`, but what makes an answer impossible ends it at once, with a `KeylaneError`.

        The deadline also covers the wait for a full send buffer, which nats-py's does not.
        """
        with self.outstanding.waiting_on(subject) as trouble:
            asked = asyncio.ensure_future(self.request(subject, payload, timeout=timeout_s + 1))
            try:
                await asyncio.wait({asked, trouble}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                if trouble.done():
                    return trouble.result()
            finally:
                _let_go(asked)
        raise errors.TimeoutError

    # ---- in -----------------------------------------------------------------------------------------

    async def _connect_to_server(self, s: Any) -> None:
        if s.uri.scheme not in ("ws", "wss") and not isinstance(self._transport, DirectTransport):
            self._transport = DirectTransport()
        await super()._connect_to_server(s)

    def forget_input(self) -> None:
        """Called when the link is given up: what it still sends is not read any more.

        The scanner forgets where it stood, so the rest of a payload would be taken for protocol.
        """
        if isinstance(self._transport, DirectTransport):
            self._transport.detach()
        self.scanner.reset()

    def _sink(self, data: bytes) -> None:
        if self._scan_error is not None:
            return
        if not data:
            self._ended = True
            self._wake.set()
            return
        try:
            self.scanner.scan(data)
        except Exception as error:  # noqa: BLE001 - carried to the reading task, which ends the link with it
            self._scan_error = error
        if self.scanner.events or self._scan_error is not None:
            self._wake.set()

    async def _read_loop(self) -> None:
        """Serve the link until it ends: nats-py runs this as a task after every handshake."""
        if not isinstance(self._transport, DirectTransport):
            await super()._read_loop()
            return
        self._wake.clear()
        self._scan_error, self._ended = None, False
        self.scanner.reset()
        try:
            self._transport.attach(self._sink)
            while not self.is_closed and not self.is_reconnecting:
                await self._wake.wait()
                self._wake.clear()
                await self.handle_events()
                end = self._scan_error or (errors.UnexpectedEOF() if self._ended else None)
                if end is not None:
                    await self.give_up_link(end)
                    return
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - it ends the link and is reported
            await self.give_up_link(error)

    async def give_up_link(self, why: Exception) -> None:
        """End the link for a reason, report it, and let nats-py reconnect."""
        if isinstance(why, BrokenProtocol):
            await self._error_cb(why)
        elif not isinstance(why, errors.ProtocolError | OSError):
            if not isinstance(why, errors.UnexpectedEOF):
                _log.error("reading from the server failed; reconnecting", exc_info=why)
            await self._error_cb(why)
        await self._process_op_err(why)

    async def handle_events(self) -> None:
        """Let nats-py handle everything that has no route."""
        events = self.scanner.events
        while events:
            batch: list[Event] = events[:]
            events.clear()
            for event in batch:
                if isinstance(event, Unrouted):
                    await self._process_msg(event.sid, event.subject, event.reply, event.data, event.headers)
                else:
                    await self._handle_control(event)

    async def _process_pong(self) -> None:
        # nats-py fails on the answer to a ping whose sender gave up, and the whole link with it.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _handle_control(self, line: Control) -> None:
        match line.verb:
            case b"PING":
                await self._process_ping()
            case b"PONG":
                await self._process_pong()
            case b"INFO":
                await self._process_info(parse_info(line.argument))
            case b"-ERR":
                # As the server wrote it. nats-py lowers it, but subjects have case.
                await self._process_err(line.argument.decode(errors="backslashreplace"))
