"""A KV bucket for shared configuration: read from the leader, write by compare-and-set, learn of changes.

nats-py's KV reads from any replica, which may lag, and its watcher is a consumer that a restart can end. Here every
read goes to the stream's leader, and a watch is only a hint to read again: a plain subscription on the key's subject.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from keylane.errors import ApiError, NotFound, PublishRejected, RevisionConflict
from keylane.jetstream import streams
from keylane.jetstream.consumers import parse_time
from keylane.jetstream.direct import StoredMessage, read_all, read_last
from keylane.jetstream.headers import parse_headers
from keylane.jetstream.publisher import Publisher, open_publisher

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.kv")

WRITE_TIMEOUT_S = 5.0

_WRONG_REVISION = (10071, 10164)
_NAME_TAKEN = 10058
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A key's newest record. `value` is None where the key was deleted or purged."""

    key: str
    value: bytes | None
    revision: int
    written: str = ""
    """When, by the server's clock, as the server writes it. A bucket that was created again reuses revisions."""


class Bucket:
    """One bucket. Creating this object asks the server nothing."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self.name = name
        self._stream = f"KV_{name}"

    def __repr__(self) -> str:
        return f"<Bucket {self.name}>"

    async def ensure(self, *, replicas: int) -> None:
        """Create the bucket if it is not there."""
        try:
            await streams.info_json(self._connection, self._stream)
        except NotFound:
            await self._create(replicas)

    async def _create(self, replicas: int) -> None:
        """As the KV libraries of every language create a bucket with a history of one."""
        config = {
            "name": self._stream,
            "subjects": [self._subject(">")],
            "storage": "file",
            "num_replicas": replicas,
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
        }
        try:
            await streams.create_json(self._connection, config)
        except ApiError as error:
            if error.err_code != _NAME_TAKEN:  # somebody else was quicker
                raise

    async def created(self) -> datetime | None:
        """When the bucket was created: tells two buckets of the same name apart. None if there is none."""
        try:
            answer = await streams.info_json(self._connection, self._stream)
        except NotFound:
            return None
        return parse_time(answer["created"])

    async def get(self, key: str) -> KvEntry | None:
        """The newest record of a key, as its leader has it; None if there never was one, or no bucket."""
        try:
            message = await streams.get_message(self._connection, self._stream, last_by_subject=self._subject(key))
        except NotFound:
            return None
        headers = parse_headers(base64.b64decode(message.get("hdrs", "")))
        value = None if is_deletion(headers) else base64.b64decode(message.get("data", ""))
        return KvEntry(key, value, message["seq"], message["time"])

    async def get_matching(self, pattern: str) -> list[KvEntry]:
        """The newest records of all keys that match, in one request. Any replica may answer, also one that lags."""
        subject = self._subject(pattern)
        try:
            found = [one async for one in read_all(self._connection, self._stream, subject_filter=subject)]
        except NotFound:
            return []
        return self._entries(found)

    async def get_many(self, patterns: Sequence[str], *, timeout_s: float) -> list[KvEntry]:
        """The newest records of all keys that match a pattern, at most 1,024. Any replica may answer, as above.

        Much cheaper than `get` for each: a tenth of the server's work, and one request.
        """
        try:
            found = await read_last(
                self._connection, self._stream, [self._subject(one) for one in patterns], timeout_s=timeout_s
            )
        except NotFound:
            return []
        return self._entries(found)

    def _entries(self, found: list[StoredMessage]) -> list[KvEntry]:
        cut = len(self._subject(""))
        return [
            KvEntry(
                one.subject[cut:],
                None if is_deletion(one.headers) else one.data,
                one.sequence,
                one.timestamp.isoformat(),
            )
            for one in found
        ]

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        revision: int,
        timeout_s: float = WRITE_TIMEOUT_S,
        publisher: Publisher | None = None,
    ) -> int:
        """Write if the key's newest revision is still this one (0: it never existed); returns the new revision.

        `publisher`: for who writes often; its own timeout counts.
        """
        return await self._write(key, value, {}, revision, timeout_s=timeout_s, publisher=publisher)

    async def delete(self, key: str, *, revision: int, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Put a delete marker if the key's newest revision is still this one."""
        await self._write(key, b"", {"KV-Operation": "DEL"}, revision, timeout_s=timeout_s)

    async def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix.`, which may be a pattern, and are not deleted."""
        return [one.key for one in await self.entries(prefix) if one.value is not None]

    async def entries(self, prefix: str) -> list[KvEntry]:
        """The newest records of the keys that begin with `prefix.`, as their leader has them."""
        try:
            answer = await streams.info_json(
                self._connection, self._stream, subjects_filter=self._subject(f"{prefix}.>")
            )
        except NotFound:
            return []
        cut = len(self._subject(""))
        found = sorted(subject[cut:] for subject in (answer["state"].get("subjects") or {}))
        return [entry for key in found if (entry := await self.get(key)) is not None]

    @asynccontextmanager
    async def hints(self, key: str, changed: Callable[[str, bytes | None], None]) -> AsyncIterator[None]:
        """Call `changed(key, value)` when somebody writes the key, which may be a pattern; None: it was deleted.

        A hint can come before the write is readable, announce a write that is refused, or be lost: read the key again
        then, and poll it too.
        """

        client = self._connection.nats
        subscription = await client.route(self._subject(key), _HintRoute(len(self._subject("")), changed))
        try:
            yield
        finally:
            await client.unroute(subscription)

    async def _write(
        self,
        key: str,
        value: bytes,
        headers: dict[str, str],
        revision: int,
        *,
        timeout_s: float,
        publisher: Publisher | None = None,
    ) -> int:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        if publisher is None:
            async with open_publisher(self._connection, timeout_s=timeout_s) as own:
                pending = await own.send(self._subject(key), value, headers)
        else:
            pending = await publisher.send(self._subject(key), value, headers)
        try:
            return (await pending).sequence
        except PublishRejected as rejected:
            if rejected.err_code in _WRONG_REVISION:
                raise RevisionConflict(
                    f"{self.name}/{key} was changed by somebody else after revision {revision}: read it again"
                ) from rejected
            raise

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"


class _HintRoute:
    """Takes hints off the socket: a fleet of thousands of partitions writes as many records at its start."""

    def __init__(self, cut: int, changed: Callable[[str, bytes | None], None]) -> None:
        self._cut = cut
        self._changed = changed

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        is_deleted = bool(headers) and is_deletion(parse_headers(headers))
        try:
            self._changed(subject[self._cut :].decode(errors="surrogateescape"), None if is_deleted else data)
        except Exception:  # noqa: BLE001 - it must not end the link, which others share
            _log.exception("a hint on %r was not taken", subject)

    def received(self) -> None:
        """Each hint is taken in `receive`."""


def is_deletion(headers: Mapping[str, str]) -> bool:
    """Whether a record of a bucket says that its key was deleted, purged, or has expired."""
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers


async def change(
    read: Callable[[], Awaitable[KvEntry | None]],
    write: Callable[[KvEntry | None], Awaitable[None]],
    *,
    deadline_s: float = 15.0,
) -> None:
    """Read, decide, write; again if somebody else wrote in between, until the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            await write(await read())
        except RevisionConflict:
            if loop.time() + pause_s > end:
                raise
        else:
            return
        await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311 - spreads writers, no secret
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
