"""`ExactlyOnce`: turns a user's effect on a database into a handler for `groups.join`.

Each message is one transaction: check that the partition is still ours, check that the message is not done yet, run the
effect, record that it is done, commit. The group acks afterwards as usual; the record identifies a redelivered message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from keylane.core.names import check_group_name, check_stream_name
from keylane.errors import Fenced, InvalidInput, LedgerMismatch, TokenWentBack
from keylane.exactly_once import ledger
from keylane.exactly_once.databases import Effect, Handler, database
from keylane.exactly_once.fencing import FenceClaim, InstanceClaims, LedgerEntry, View, check_pin, entry_of, origin_of
from keylane.exactly_once.ledger import DoneElsewhere, EpochChanged, Limits, Superseded
from keylane.exactly_once.tables import prepare
from keylane.groups import GroupMessage, Origin
from keylane.jetstream import check_seconds

T = TypeVar("T")

_log = logging.getLogger("keylane.exactly_once")

LOCK_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 10.0

_CLAIM_TRIES = 5


class ExactlyOnce:
    """Exactly once into the database of one SQLAlchemy engine: PostgreSQL or SQLite.

    An engine from `create_async_engine` takes effects written with `async def`; one from `create_engine` takes plain
    functions, which run in threads. Give its pool as many connections as handlers run at once (`concurrency`).

    `lock_timeout_s` and `idle_timeout_s` are PostgreSQL's, for these transactions only: how long one waits for a row
    that another holds, and how long one may be idle, as in a frozen process, before the server ends it. This also ends
    an effect that waits for something other than the database for longer than `idle_timeout_s`.

    >>> async def effect(message, connection):
    ...     await connection.execute(insert(orders).values(data=message.data))
    >>> once = ExactlyOnce(create_async_engine("postgresql+psycopg://…"))
    >>> await groups.join(connection, "ORDERS", "billing", "alice", once.handler(effect))
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._database = database(engine)
        ledger.check_dialect(self._database.dialect)
        self._limits = Limits(
            lock_s=check_seconds(lock_timeout_s, "lock_timeout_s"),
            idle_s=check_seconds(idle_timeout_s, "idle_timeout_s"),
        )
        self._standings: dict[tuple[str, str, str, str], InstanceClaims] = {}
        self._preparing = asyncio.Lock()
        self._prepared = False

    def __repr__(self) -> str:
        return f"<ExactlyOnce {self._database.dialect}, {len(self._standings)} instances seen>"

    @overload
    def handler(self, effect: Callable[[GroupMessage, AsyncConnection], Awaitable[None]]) -> Handler: ...

    @overload
    def handler(self, effect: Callable[[GroupMessage, Connection], None]) -> Handler: ...

    def handler(self, effect: Effect) -> Handler:
        """Return a handler that runs `effect(message, connection)`. The effect must not commit or settle."""
        self._database.check_effect(effect)
        return _Handler(partial(self._handle, effect=effect, session=False))

    @overload
    def session_handler(self, effect: Callable[[GroupMessage, AsyncSession], Awaitable[None]]) -> Handler: ...

    @overload
    def session_handler(self, effect: Callable[[GroupMessage, Session], None]) -> Handler: ...

    def session_handler(self, effect: Effect) -> Handler:
        """Like `handler`, for an effect that writes through an ORM session. The session is flushed after the effect."""
        self._database.check_effect(effect)
        return _Handler(partial(self._handle, effect=effect, session=True))

    async def create_tables(self) -> None:
        """Create keylane's tables if they are missing. The first message does so too, if it has the permission."""
        async with self._preparing:
            if not self._prepared:
                await self._in_transaction(prepare)
                self._prepared = True

    async def forget(self, stream: str, group: str) -> int:
        """Delete all records of a group; returns the number of keys. The group's messages then count as new.

        Use it for a stream that was deleted and created again: its messages reuse sequences that are done.
        """
        check_stream_name(stream)
        check_group_name(group)
        await self.create_tables()
        return await self._in_transaction(lambda connection: ledger.forget(connection, stream, group))

    async def accept(self, stream: str, group: str) -> None:
        """Accept the group's bucket and stream as they are: for a bucket or stream that was restored.

        Done messages stay done, and tokens continue above the highest one so far. Waiting members resume. First make
        sure that no instance works with the earlier state. For a recreated stream that is not a copy, use `forget`.
        """
        check_stream_name(stream)
        check_group_name(group)
        await self.create_tables()
        if not await self._in_transaction(lambda connection: ledger.accept(connection, stream, group)):
            raise InvalidInput(
                f"the database has no record of group {group!r} of stream {stream!r}: there is nothing to accept; "
                "check the names and the database's address"
            )

    async def _handle(self, message: GroupMessage, *, effect: Effect, session: bool) -> None:
        origin = origin_of(message)
        if not self._prepared:
            await self.create_tables()
        check_pin(message, origin)
        entry = entry_of(message, origin)
        standing = self._standing(origin)
        standing.check_mismatch(entry.partition)
        mine = standing.claim_on(entry.partition, origin.pin_id)
        if mine is not None:
            try:
                known = await self._perform(message, entry, mine, effect, session=session)
            except Superseded:
                pass  # the partition may have left and come back: ask again
            else:
                await self._check_known(entry, origin, standing, known)
                return
        async with standing.claiming(entry.partition):
            claimed = standing.claim_on(entry.partition, origin.pin_id)
            mine = claimed if claimed not in (None, mine) else await self._claim(message, entry, origin, standing)
        assert mine is not None
        try:
            known = await self._perform(message, entry, mine, effect, session=session)
        except Superseded as error:
            raise _fenced(entry, mine, error.stored) from None
        await self._check_known(entry, origin, standing, known)

    async def _check_known(self, entry: LedgerEntry, origin: Origin, standing: InstanceClaims, known: int) -> None:
        """Check that a done message is of the same stream: a recreated stream counts from 1 again."""
        if known < entry.sequence:
            return
        with standing.telling_mismatch(entry.partition, origin):
            view = await self._view(origin, standing, after=asyncio.get_running_loop().time())
            ledger.check_has_done((entry.stream, entry.group_name), known, view.source)

    async def _claim(
        self, message: GroupMessage, entry: LedgerEntry, origin: Origin, standing: InstanceClaims
    ) -> FenceClaim:
        """Claim the partition in a separate transaction, so that others of this instance do not wait for an effect."""
        pin_id = origin.pin_id
        with standing.telling_mismatch(entry.partition, origin):
            mine = await self._claimed(message, entry, origin, standing)
        standing.claimed(entry.partition, pin_id, mine)
        return mine

    async def _claimed(
        self, message: GroupMessage, entry: LedgerEntry, origin: Origin, standing: InstanceClaims
    ) -> FenceClaim:
        mine, refused_at, refusing = None, 0.0, None
        for _ in range(_CLAIM_TRIES):
            try:
                view = await self._view(origin, standing, after=refused_at)
            except LedgerMismatch:
                raise
            except Fenced:
                if mine is None or refusing is None:
                    raise
                raise _fenced(entry, mine, refusing) from None
            if refusing is not None and refusing.revision > view.revision:
                raise _went_back(entry, view, refusing)
            _, pinned_ns = await origin.fence(anew=refusing is not None)
            check_pin(message, origin)
            mine = FenceClaim(view.revision, pinned_ns, origin.member)
            step = partial(ledger.claim, entry=entry, mine=mine, number=view.epoch.number, instance=origin.instance)
            try:
                await self._in_transaction(step)
            except EpochChanged:
                standing.view = None
            except Superseded as error:
                if refusing is not None:
                    raise _fenced(entry, mine, error.stored) from None
                refused_at, refusing = asyncio.get_running_loop().time(), error.stored
            else:
                return mine
        raise Fenced(f"the epoch of {entry.stream}/{entry.group_name} keeps changing")

    async def _view(self, origin: Origin, standing: InstanceClaims, *, after: float) -> View:
        """The server's answer about the group, requested after this time, in the database's current epoch."""
        async with standing.viewing:
            view = standing.view
            if view is not None and view.version == origin.version and view.asked_at > after:
                return view
            names = (origin.stream, origin.group)
            for _ in range(_CLAIM_TRIES):
                epoch = await self._in_transaction(lambda connection: ledger.current_epoch(connection, *names))
                asked_at = asyncio.get_running_loop().time()
                source, version = await origin.source(), origin.version
                if epoch is not None and epoch.bucket == source.bucket:
                    ledger.check_same_stream(names, epoch, source)
                    standing.view = View(epoch, source, version, asked_at)
                    return standing.view
                done = await self._in_transaction(lambda connection: ledger.highest_sequence(connection, *names))
                source = await origin.source()
                begin = partial(ledger.begin_epoch, names=names, seen=epoch, done=done, source=source)
                if await self._in_transaction(begin) and epoch is not None:
                    _log.warning(
                        "the bucket of group %s of stream %s is not the same as before (created at %s): its fencing "
                        "tokens continue above the highest that the database has seen",
                        origin.group,
                        origin.stream,
                        source.bucket,
                    )
        raise Fenced(f"the bucket of {origin.stream}/{origin.group} keeps being recreated")

    async def _perform(
        self, message: GroupMessage, entry: LedgerEntry, mine: FenceClaim, effect: Effect, *, session: bool
    ) -> int:
        """Run the effect, unless the message is done; returns the newest sequence of its key that was done before."""
        known = 0

        def before(connection: Connection) -> bool:
            nonlocal known
            self._limits.begin(connection)
            known = ledger.newest_done(connection, entry, mine)
            return known < entry.sequence

        def after(connection: Connection) -> None:
            ledger.note(connection, entry)

        try:
            await self._database.perform(message, effect, session=session, before=before, after=after)
        except DoneElsewhere:
            _log.debug("sequence %d of %s was done by another transaction", entry.sequence, entry.stream)
        return known

    async def _in_transaction(self, step: Callable[[Connection], T]) -> T:
        def steps(connection: Connection) -> T:
            self._limits.begin(connection)
            return step(connection)

        return await self._database.run(steps)

    def _standing(self, origin: Origin) -> InstanceClaims:
        return self._standings.setdefault(
            (origin.stream, origin.group, origin.member, origin.instance), InstanceClaims()
        )


class _Handler:
    """The handler for `groups.join`. `needs_order`: without order per key, a later message hides an earlier one."""

    needs_order = True

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    async def __call__(self, message: GroupMessage) -> None:
        await self._handle(message)


def _went_back(entry: LedgerEntry, view: View, seen: FenceClaim) -> TokenWentBack:
    now, before = view.source.revision, seen.revision - view.epoch.base
    return TokenWentBack(
        f"the record of group {entry.group_name!r} of stream {entry.stream!r} has revision {now}, and {seen.member} "
        f"has worked with revision {before} of the same bucket: the bucket was restored to an older state. Make sure "
        f"that no instance works with the newer one, and accept it: keylane exactly-once accept {entry.stream} "
        f"{entry.group_name} --database URL"
    )


def _fenced(entry: LedgerEntry, mine: FenceClaim, stored: FenceClaim | None) -> Fenced:
    owner = f"{stored.member} (revision {stored.revision}, pinned {stored.pinned_ns})" if stored else "nobody"
    return Fenced(
        f"partition {entry.partition} of {entry.stream}/{entry.group_name} belongs to {owner}, not to "
        f"{mine.member} (revision {mine.revision}, pinned {mine.pinned_ns}): sequence {entry.sequence} was rolled "
        "back; its owner handles it"
    )
