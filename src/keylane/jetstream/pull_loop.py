"""The server's side of a feed: its pulls, the answers to them, and what is done when something is wrong.

Pulls overlap, so that the server never waits for the next request. Rules about credit and statuses are in
`core/pulls.py`. `Feed` adds the buffer and the reader.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from nats.aio.subscription import Subscription

from keylane.core.pulls import Meaning, Pull, PullWindow, Status
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    ConsumerGone,
    Disconnected,
    FeedEnded,
    KeylaneError,
    MessageTooLarge,
    NotADelivery,
    NotFound,
    PermissionDenied,
    PullRefused,
)
from keylane.jetstream import consumers
from keylane.jetstream.feed_options import FeedOptions, Notice
from keylane.jetstream.headers import number_in, parse_headers, status_of
from keylane.jetstream.message import parse_ack_subject
from keylane.jetstream.pull_errors import refusal

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection
    from keylane.jetstream.pin_performer import Pinning

_log = logging.getLogger("keylane.feed")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_FIRST_DEADLINE_S = 1.0
_SHORTEST_WITH_HEARTBEAT_S = 0.2
_SIGN_OF_LIFE_S = 1.0


class Pulling:
    """The pulls of one reader. `Feed` says what is held, and is told when to wake or to end."""

    def __init__(self, connection: Connection, stream: str, consumer: str, options: FeedOptions) -> None:
        self.stream = stream
        self.consumer = consumer
        self.strays = 0
        """Messages in the inbox that no consumer sent: they are skipped."""
        self._connection = connection
        self._client = connection.nats
        self._options = options
        self._window = PullWindow(options.max_messages, options.max_bytes)
        self._loop = asyncio.get_running_loop()
        self._request = connection.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}").encode()
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._pinning: Pinning | None = None
        self._pulling = False
        self._held_back = 0
        self._linked = False
        self._taken = 0
        self._last_heard = self._last_moved = self._loop.time()
        self._all_here = asyncio.Event()
        self._trouble: Meaning | None = None
        self._attention = asyncio.Event()
        self._failures = 0
        self._finished = False

    def _held(self) -> tuple[int, int]:
        """Messages and bytes that wait for the reader."""
        raise NotImplementedError

    def _wake_reader(self) -> None:
        raise NotImplementedError

    def _finish(self, error: KeylaneError | None) -> None:
        raise NotImplementedError

    # ---- asking -------------------------------------------------------------------------------------

    def _refill(self) -> None:
        if not self._pulling or self._held_back or self._trouble is not None:
            return
        # Both: the status falls before we are told, and rises before the subscriptions are known to be there.
        if not self._linked or not self._client.is_connected:
            return
        if self._options.on_demand:
            self._wake_reader()
            return
        self._taken = 0
        if self._pinning is not None:
            self._pinning.check_for_standstill()
        pull = self._window.ask(*self._held())
        if pull is not None:
            self._send(pull, self._options.expires_s)

    def _send(self, pull: Pull, expires_s: float) -> None:
        expires_ns = round(expires_s * 1e9)
        request: dict[str, Any] = {
            "batch": pull.batch,
            "expires": expires_ns,
            "max_bytes": self._window.max_bytes,
        }
        if expires_s >= _SHORTEST_WITH_HEARTBEAT_S:
            # Whole nanoseconds, rounded down: the server refuses a heartbeat of more than half the life.
            request["idle_heartbeat"] = min(round(self._options.heartbeat_s * 1e9), expires_ns // 2)
        self._last_moved = self._loop.time()
        if self._window.asked == pull.batch:
            self._last_heard = self._last_moved  # until now there was nothing to hear
        self._post_pull(pull, request)

    def _send_sign_of_life(self) -> None:
        """A pull that can bring nothing, as no message has one byte: it only restarts the pin's timeout."""
        draining = self._subscription is None
        if not self._pulling and not draining:
            return
        if self._client.is_connected and self._trouble is not Meaning.UNAVAILABLE:
            request = {"batch": 1, "max_bytes": 1, "expires": round(_SIGN_OF_LIFE_S * 1e9)}
            self._post_pull(self._window.sign_of_life(), request)

    def _post_pull(self, pull: Pull, request: dict[str, Any]) -> None:
        request.update(self._options.pull_fields)
        if self._pinning is not None:
            if self._pinning.pin_id is not None:
                request["id"] = self._pinning.pin_id
            self._pinning.asked()
        payload = json.dumps(request, separators=(",", ":")).encode()
        reply = f"{self._inbox}.{pull.token}".encode()
        self._client.post(b"PUB %b %b %d\r\n%b\r\n" % (self._request, reply, len(payload), payload))

    # ---- answers ------------------------------------------------------------------------------------

    def _answered(self, subject: bytes, headers: bytes) -> None:
        code, text = status_of(headers)
        pull = Pull.from_token(subject[len(self._inbox) + 1 :].decode(errors="replace"))
        if not code or pull is None:
            self._note_stray(subject)
            return
        status = Status(code, text, number_in(parse_headers(headers).get("Nats-Pending-Messages")))
        match self._window.answered(pull, status):
            case None | Meaning.ALIVE | Meaning.ENDED | Meaning.OUT_OF_BYTES:
                pass
            case Meaning.PIN_LOST if self._pinning is not None:
                self._pinning.refused()
            case Meaning.DELETED:
                self._finish(ConsumerGone(f"consumer {self.consumer!r} of stream {self.stream!r} was deleted"))
            case Meaning.TOO_LARGE:
                self._finish(
                    MessageTooLarge(
                        f"the next message of consumer {self.consumer!r} is larger than the feed may hold "
                        f"(max_bytes {self._window.max_bytes}): raise max_bytes"
                    )
                )
            case Meaning.INVALID:
                self._finish(refusal(self.stream, self.consumer, code, text))
            case meaning:
                self._in_trouble(meaning, f"{code} {text}".strip())

    def _note_stray(self, subject: bytes) -> None:
        self.strays += 1
        if self.strays == 1:
            _log.warning(
                "feed %s/%s: skipping messages in its inbox that no consumer sent, the first on %r: give the program "
                "an inbox_prefix that only it may use",
                self.stream,
                self.consumer,
                subject[:200],
            )

    def _in_trouble(self, meaning: Meaning, text: str) -> None:
        self._trouble = meaning
        self._notify(meaning, text)
        self._attention.set()

    def _notify(self, meaning: Meaning | None, text: str) -> None:
        _log.info("feed %s/%s: %s", self.stream, self.consumer, text)
        if self._options.on_notice is not None:
            self._options.on_notice(Notice(meaning, text))

    def _fail(self, what: str, cause: Exception) -> None:
        failed = FeedEnded(f"feed on {self.stream}/{self.consumer}: {what}")
        failed.__cause__ = cause
        self._finish(failed)

    def _denied(self, denied: PermissionDenied) -> None:
        """Without pulls, acks or the inbox a feed cannot work."""
        if denied.operation == "publish":
            concerned = denied.subject == self._request.decode() or self._acks_on(denied.subject)
        else:
            concerned = denied.subject == f"{self._inbox}.>"
        if concerned:
            self._finish(denied)

    def _acks_on(self, subject: str) -> bool:
        try:
            acked = parse_ack_subject(subject.encode())
        except NotADelivery:
            return False
        return (acked.stream, acked.consumer) == (self.stream, self.consumer)

    # ---- the link -----------------------------------------------------------------------------------

    def _pull_anew(self) -> None:
        self._window.void()
        self._loop.call_soon(self._refill)

    def _link_changed(self, up: bool) -> None:
        self._linked = up
        self._window.void()
        self._last_heard = self._loop.time()
        self._all_here.set()
        if up:
            self._refill()
        else:
            self._disown_pulls()

    def _disown_pulls(self) -> None:
        """Let nothing come of the pulls of a lost link: they are not counted any more.

        The server keeps them open and would serve them again as soon as their inbox is subscribed to again.
        """
        outbox, beginning = self._client.outbox, b"PUB " + self._request + b" "
        outbox[:] = [command for command in outbox if not command.startswith(beginning)]
        if self._subscription is not None and not self._client.is_connected:
            self._inbox = self._client.new_inbox()
            self._client.move_route(self._subscription, f"{self._inbox}.>")

    # ---- when something is wrong --------------------------------------------------------------------

    async def _keep(self) -> None:
        """Watch for silence and for trouble, and get the feed going again or end it with a reason."""
        silence_s = 2 * self._options.heartbeat_s
        while not self._finished:
            try:
                try:
                    async with asyncio.timeout(self._options.heartbeat_s):
                        await self._attention.wait()
                except TimeoutError:
                    if not self._is_silent(silence_s):
                        continue
                    self._window.void()
                    self._in_trouble(Meaning.UNAVAILABLE, f"no heartbeat for {silence_s} s")
                self._attention.clear()
                await self._recover()
            except KeylaneError as error:
                self._finish(error)
            except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
                _log.exception("feed %s/%s failed", self.stream, self.consumer)
                self._fail(f"failed: {error!r}", error)

    def _is_silent(self, silence_s: float) -> bool:
        waiting = self._window.asked > 0 and self._client.is_connected
        return waiting and self._loop.time() - self._last_heard > silence_s

    async def _recover(self) -> None:
        trouble = self._trouble
        self._failures += 1
        failures = self._failures  # messages that arrive in the meantime set it to zero
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))
        if trouble in (Meaning.UNAVAILABLE, Meaning.LIMIT) and self._client.is_connected:
            try:
                # Without a leader nobody answers: ask again soon rather than wait long for one answer.
                deadline_s = min(self._connection.request_timeout_s, _FIRST_DEADLINE_S * failures)
                await self._read_limits(deadline_s)
            except NotFound as error:
                raise ConsumerGone(
                    f"consumer {self.consumer!r} of stream {self.stream!r} does not exist any more"
                ) from error
            except (ApiError, ApiUnavailable, Disconnected, TimeoutError) as error:
                self._in_trouble(Meaning.UNAVAILABLE, f"the JetStream API does not answer: {error}")
                return
        self._trouble = None
        self._last_heard = self._loop.time()
        self._refill()

    async def _read_limits(self, timeout_s: float | None = None) -> None:
        """Keep pulls within what the consumer's configuration allows."""
        info = await consumers.info(self._connection, self.stream, self.consumer, timeout_s=timeout_s)
        config = info.config
        if config.deliver_subject is not None:
            raise PullRefused(
                f"consumer {self.consumer!r} of stream {self.stream!r} pushes to {config.deliver_subject!r}: "
                "a feed needs a pull consumer"
            )
        most, bytes_ = self._options.max_messages, self._options.max_bytes
        self._window.max_messages = min(most, config.max_batch or most)
        self._window.max_bytes = min(bytes_, config.max_bytes or bytes_)
        self._window.overlapping = config.max_waiting != 1
        if config.max_waiting and info.num_waiting >= config.max_waiting:
            # A pull that asks for heartbeats gets no answer at all when there is no room for it.
            self._notify(
                Meaning.REFUSED,
                f"the consumer has {info.num_waiting} open pulls, as many as its max_waiting allows: "
                "raise it to twice the number of readers",
            )
        if config.max_expires_s and config.max_expires_s < self._options.expires_s:
            raise PullRefused(
                f"consumer {self.consumer!r} allows pulls of at most {config.max_expires_s} s and the feed "
                f"asks for {self._options.expires_s} s: lower expires_s"
            )
