"""Where the commands of one publisher of rows leave and its answers arrive.

Owns an inbox and its subscription, and takes back what has not left when the link is lost: sent later, it would be
stored ahead of what is sent again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from nats.aio.subscription import Subscription

from keylane.errors import PermissionDenied
from keylane.jetstream.connection import Connection

Row = tuple[bytes, bytes, bytes]
"""Subject, header block with the message id, data: as they are sent."""


class Publisher(Protocol):
    """Who publishes through an outlet."""

    def confirmed(self, tokens: Sequence[bytes]) -> None:
        """The server gave the plain answer to the commands whose replies were the outlet's prefix and these tokens."""

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None:
        """The server gave another answer to a command."""

    def all_answered(self) -> None:
        """The buffer is used up: act on what was answered."""

    def link_changed(self, up: bool) -> None:
        """The link is lost, or there again."""

    def refused(self, error: PermissionDenied) -> None:
        """The server forbids this user a subject."""


class Outlet:
    """The way out and back of one publisher, for as long as it is open."""

    def __init__(self, connection: Connection, publisher: Publisher, plain: bytes | None = None) -> None:
        """`plain` is what most answers look like, as a regular expression: these come many at a time, and only their
        tokens, which are numbers."""
        self._client = connection.nats
        self._publisher = publisher
        self._inbox = self._client.new_inbox()
        self.prefix = f"{self._inbox}.".encode()
        if plain is not None:
            start = b"MSG " + re.escape(self.prefix)
            self._one = re.compile(start + rb"(\d+) \d+ \d+\r\n" + plain + b"\r\n")
            self._many = re.compile(b"(?:" + start + rb"\d+ \d+ \d+\r\n" + plain + b"\r\n)+")
        self._is_bulk = plain is not None
        self._subscription: Subscription | None = None

    def __repr__(self) -> str:
        return f"<Outlet {self._inbox} {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        return self._client.is_connected

    async def open(self) -> None:
        listen = self._client.route_bulk if self._is_bulk else self._client.route
        self._subscription = await listen(f"{self._inbox}.>", self)
        self._client.listen(self._link_changed)
        self._client.listen_for_denials(self._publisher.refused)

    async def close(self) -> None:
        self._withdraw()
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._publisher.refused)
        if self._subscription is not None:
            await self._client.unroute(self._subscription)

    def send(self, commands: bytes) -> None:
        """Send publishes, of which the first has a reply with the outlet's prefix, now."""
        self._client.post(commands)
        self._client.push()

    # ---- the server's side --------------------------------------------------------------------------

    def take(self, data: bytes, position: int) -> int:
        found = self._many.match(data, position)
        if found is None:
            return position
        self._publisher.confirmed(self._one.findall(data, position, found.end()))
        return found.end()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self._publisher.answered(subject[len(self.prefix) :], headers, data)

    def received(self) -> None:
        self._publisher.all_answered()

    def _link_changed(self, up: bool) -> None:
        if not up:
            self._withdraw()
        self._publisher.link_changed(up)

    def _withdraw(self) -> None:
        outbox = self._client.outbox
        outbox[:] = [command for command in outbox if not self._is_ours(command)]

    def _is_ours(self, command: bytes) -> bool:
        words = command[:8192].split(b" ", 3)
        return len(words) > 2 and words[2].startswith(self.prefix)


def publish(subject: bytes, reply: bytes, head: bytes, data: bytes) -> bytes:
    """A publish as the server reads it. Rows always have headers: their ids."""
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(data), head, data)
