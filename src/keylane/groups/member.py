"""A member of a group: one running instance, from `join` to its end.

Level-triggered: whatever happened (a change of the configuration, a lost consumer, a new pin, a tick), the member reads
the group's record, and brings its consumer to that state. Transient errors (a lost connection, a server that starts)
are retried; any other error ends the member.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from keylane.awaitable_context import awaitable_context
from keylane.core.member_state import MemberFacts, MemberState, in_words, state_of
from keylane.core.names import check_group_name, check_member_name, check_stream_name
from keylane.core.parked_keys import AfterTries
from keylane.core.partitions import Partitioning, parse_transform
from keylane.core.plans import Plan, change_of
from keylane.dispatch import Executor, HandlerCall, HandlerSlots
from keylane.errors import GroupEnded, GroupError, InvalidInput, KeylaneError, NotAMember, PermissionDenied
from keylane.groups import consumer_spec
from keylane.groups.config import ElasticConfig, Kind, StaticConfig
from keylane.groups.instance import Origin
from keylane.groups.member_consumer import MemberConsumer, MemberConsumerHooks
from keylane.groups.presence import answering
from keylane.groups.store import StoredGroup, bucket_of, read_any, read_group, record_name
from keylane.hooks import call_hook
from keylane.jetstream import Connection, ConnectionHooks, ConsumerConfig, check_seconds, streams
from keylane.processing.dead_letters import DeadLetters
from keylane.processing.delayed_retries import DelayedRetries, with_delayed_retries
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.handler_options import Handler, HandlerOptions, MessageJournal, Order
from keylane.processing.joined import STOP_TIMEOUT_S, Joined
from keylane.processing.key_parking import KeyOwner, KeyParking, KeyRelease, with_parking
from keylane.processing.message import GroupMessage, KeyOf, placing_by
from keylane.processing.message_processor import MessageProcessor, handler_call
from keylane.processing.retry_reader import RetryReader
from keylane.retrying import backoff_s

__all__ = ["STOP_TIMEOUT_S", "Member", "MemberHooks", "Order", "join"]

_log = logging.getLogger("keylane.groups")
_state_log = logging.getLogger("keylane.groups.state")

_AFTER_A_HINT_S = (0.03, 0.2)
_LONGEST_PAUSE_S = 2.0
_SECOND_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHooks(HandlerHooks):
    """Called when something happens to a member. Plain functions; they must return at once."""

    on_state: Callable[[MemberState, str | None], None] | None = None
    """The state changed, or what the member waits for: `member.state` and `member.waiting_for`."""
    on_partitions: Callable[[tuple[int, ...], tuple[int, ...]], None] | None = None
    """The partitions that are handled here, before and after."""
    on_plan: Callable[[tuple[int, ...], str], None] | None = None
    """The group's plan gives this member other partitions than before: those, and why: start,
    join, leave or mapping."""
    on_joined: Callable[[], None] | None = None
    """It takes part in the group now."""
    on_activated: Callable[[], None] | None = None
    """This instance of the member gets its messages now."""
    on_deactivated: Callable[[], None] | None = None
    """Another instance may get them now."""


@awaitable_context
async def join(
    connection: Connection,
    stream: str,
    group: str,
    member: str,
    handler: Handler,
    *,
    order: Order = "key",
    key: KeyOf | None = None,
    concurrency: int = 64,
    max_ack_pending: int | None = None,
    manual_ack: bool = False,
    max_tries: int | None = None,
    retry_delays: Sequence[float] | None = None,
    after_tries: AfterTries = "dead_letter",
    time_limit_s: float | None = None,
    executor: Executor = "thread",
    grace_s: float = 1.0,
    stop_timeout_s: float = STOP_TIMEOUT_S,
    journal: MessageJournal | None = None,
    settings: ConsumerConfig | None = None,
    hooks: MemberHooks | None = None,
    kind: Kind | None = None,
) -> Member:
    """Take part in a static or elastic group as `member`; run several instances of one member for hot standby.

    The handler gets each message once it is this instance's turn. When it returns, the message is acked; when it
    raises, the message is tried again while later messages of its key wait. A plain function runs in one of
    `concurrency` threads or, with `executor="process"`, in a process of its own, one for each CPU at most: then it must
    be defined at the top level of a module. With `manual_ack` the handler acks before it returns; what it has not
    settled by then comes again.

    A message that failed `max_tries` times becomes a dead letter (`keylane dlq`), and its key goes on; without, it is
    tried for ever. With `after_tries="park"` the key stops there instead: its later messages are stored behind the
    failed one, in order, until `keylane dlq release`, and other keys go on (docs/dead-letters.md). All members of the
    group need the same `after_tries`.

    `retry_delays=(5, 60, 600)`: where the order of a key does not matter, a failed message leaves its lane and is tried
    again 5 s later, then 60 s, then 600 s; after that it is a dead letter (docs/retries.md). Needs nats-server 2.12.

    An async handler that takes longer than `time_limit_s` is cancelled, which counts
    as a failure. When another instance takes over while handlers are at work here, they have `grace_s` to end and are
    cancelled then. A `keylane.journal.Journal` writes down what became of every message.

    `key` is for static groups on streams whose subject transform does not show the key: from the subject to its key.
    `max_ack_pending` (1000) and `settings` shape the member's consumer: give every instance of a member the same.

    >>> async def handler(message): ...
    >>> async with join(connection, "ORDERS", "billing", "worker-1", handler) as member:
    ...     await member.wait()

    Leaving the block, also by an error or a cancellation, stops the member: what is at work has `stop_timeout_s` to
    end, then it is handed over (`Member.stop`). `member = await join(...)` leaves that to you.
    """
    hooks = hooks or MemberHooks()
    check_stream_name(stream)
    check_group_name(group)
    check_member_name(member)
    asked_order = order
    stored = await read_any(connection, stream, group, kind)
    wanted = _wanted(settings or ConsumerConfig(), max_ack_pending)
    consumer_spec.check_settings(stored.config, wanted)
    if isinstance(stored.config, ElasticConfig) and key is not None:
        raise InvalidInput("key is for static groups: what the key of an elastic group is, its configuration says")
    if isinstance(stored.config, StaticConfig) and not stored.config.has_member(member):
        raise NotAMember(
            f"group {group!r} of stream {stream!r} does not list member {member!r}: a static group never changes; "
            f"its members are {', '.join(stored.config.plan.members)}"
        )
    if reason := stored.config.too_many_filters(member):
        raise GroupError(f"group {group!r} of stream {stream!r}: {reason}")
    if order != "strict" and wanted.ack_policy != "none" and not connection.supports("consumer_reset"):
        _log.warning(
            "%s has no consumer reset, which keeps the order with several messages in flight: member %s falls back to "
            "one message at a time (order 'strict'). nats-server 2.14 has it",
            connection.server,
            member,
        )
        order = "strict"
    if getattr(handler, "needs_order", False) and (order == "none" or manual_ack):
        raise InvalidInput(
            "this handler needs each key's messages in order and acked after it: leave out order='none' and manual_ack"
        )
    if journal is not None and journal.stream != stream:
        raise InvalidInput(f"the journal is that of stream {journal.stream!r}: stream {stream!r} needs its own")
    if order == "strict":
        wanted = replace(wanted, max_ack_pending=1)
    one_by_one = order == "strict" or wanted.ack_policy == "all"
    options = HandlerOptions(
        order="strict" if one_by_one else order,
        concurrency=1 if one_by_one else concurrency,
        ack_wait_s=consumer_spec.ack_wait_s(stored.config, wanted),
        remember=2 * (wanted.max_ack_pending or consumer_spec.DEFAULT_MAX_ACK_PENDING),
        manual_ack=manual_ack,
        acks=wanted.ack_policy != "none",
        max_tries=max_tries,
        time_limit_s=time_limit_s,
        executor=executor,
        grace_s=grace_s,
        on_failure=hooks.on_failure,
        on_crowded=hooks.on_crowded,
        on_returned=hooks.on_returned,
        on_outcome=hooks.on_outcome,
        on_reset=hooks.on_reset,
        give_up=DeadLetters(connection, stream, group).give_up if wanted.ack_policy != "none" else None,
        journal=journal,
    )
    options.check()
    options, retries = await with_delayed_retries(
        connection,
        stream,
        group,
        options,
        retry_delays,
        after_tries=after_tries,
        order=asked_order,
        needs_order=getattr(handler, "needs_order", False),
    )
    options, parking = await with_parking(connection, stream, group, options, after_tries)
    one = Member(
        connection,
        (stream, group, member),
        stored,
        wanted,
        hooks,
        stop_timeout_s=stop_timeout_s,
        parking=parking,
        retries=retries,
    )
    await one.start(handler, options, key)
    return one


def _wanted(settings: ConsumerConfig, max_ack_pending: int | None) -> ConsumerConfig:
    if max_ack_pending is None:
        max_ack_pending = settings.max_ack_pending or consumer_spec.DEFAULT_MAX_ACK_PENDING
    elif settings.max_ack_pending not in (None, max_ack_pending):
        raise InvalidInput(
            f"max_ack_pending is {max_ack_pending}, and {settings.max_ack_pending} in the settings: give it once"
        )
    return replace(settings, max_ack_pending=max_ack_pending)


class Member(Joined):
    """The handle of a joined member."""

    def __init__(
        self,
        connection: Connection,
        names: tuple[str, str, str],
        stored: StoredGroup,
        wanted: ConsumerConfig,
        hooks: MemberHooks,
        *,
        stop_timeout_s: float,
        parking: KeyParking | None = None,
        retries: DelayedRetries | None = None,
    ) -> None:
        super().__init__(stop_timeout_s, _log)
        self.stream, self.group, self.member = names
        self._parking = parking
        self._retries = retries
        self._retry_reader: RetryReader | None = None
        self._retrying: asyncio.Task[None] | None = None
        self._releases: asyncio.Task[None] | None = None
        self._connection = connection
        self._stored = stored
        self._wanted = wanted
        self._hooks = hooks
        self._tick_s = consumer_spec.ack_wait_s(stored.config, wanted) + 0.5
        self._call: HandlerCall[GroupMessage] | None = None
        self._processor: MessageProcessor | None = None
        self._consumer: MemberConsumer | None = None
        self._origin: Origin | None = None
        self._wakeup = asyncio.Event()
        self._rereads: list[float] = []
        self._reported_overload: str | None = None
        self._failures = 0
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self._problem: str | None = None
        self._shown: tuple[MemberState, str | None] | None = None
        self._has_had_place = False
        self._shown_plan: Plan | None = None

    def __repr__(self) -> str:
        words = in_words(*state_of(self._facts()))
        return f"<Member {self.member} of {self.stream}/{self.group}, {words}, partitions {list(self.partitions)}>"

    @property
    def state(self) -> MemberState:
        """What this instance is doing now; compares equal to its text, such as "standby"."""
        return state_of(self._facts())[0]

    @property
    def waiting_for(self) -> str | None:
        """What this instance waits for, in words; None while it waits for nothing but messages."""
        return state_of(self._facts())[1]

    @property
    def is_active(self) -> bool:
        """Whether this instance is the one that gets messages."""
        return self._consumer is not None and self._consumer.is_active

    @property
    def partitions(self) -> tuple[int, ...]:
        """What this member's consumer covers now, as far as this instance knows."""
        return tuple(sorted(self._consumer.partitions)) if self._consumer is not None else ()

    @property
    def in_flight(self) -> int:
        """How many messages wait or run here."""
        return self._processor.in_flight if self._processor is not None else 0

    @property
    def max_in_flight(self) -> int:
        """How many may, at most: `max_ack_pending`."""
        return self._wanted.max_ack_pending or consumer_spec.DEFAULT_MAX_ACK_PENDING

    def _pin_id(self) -> str | None:
        return self._origin.pin_id if self._origin is not None else None

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self, handler: Handler, options: HandlerOptions, key_of: KeyOf | None) -> None:
        config = self._stored.config
        place = placing_by(
            await self._partitioning(config),
            whole_subject=isinstance(config, ElasticConfig) and not config.partitioning,
            key_of=key_of,
        )
        self._call = handler_call(handler, options)
        await self._call.start()
        name = f"member {self.member!r} of {self.stream}/{self.group}"
        slots = HandlerSlots(options.concurrency) if self._retries is not None else None
        self._processor = MessageProcessor(self._call, options, name, on_crash=self._wakeup.set, slots=slots)
        hooks = MemberConsumerHooks(
            wake=self._wake,
            activated=self._activated,
            deactivated=self._deactivated,
            rebalanced=self._rebalanced,
            wait_changed=self._show_state,
            is_current=self._is_current,
            delivered=self._hooks.on_delivered,
        )
        consumer = (
            consumer_spec.consumer_stream(config, self.stream, self.group),
            consumer_spec.consumer_name(config, self.group, self.member),
        )
        self._origin = Origin(
            self._connection,
            (self.stream, self.group, self.member),
            consumer,
            instance=secrets.token_hex(8),
            version=self._stored.version,
            behind=self._wake,
        )
        self._origin.wait_changed = self._show_state
        if self._retries is not None:
            assert slots is not None
            self._retry_reader = RetryReader(
                self._retries,
                self._call,
                options,
                slots=slots,
                member=lambda: self.member,
                from_queue=self._origin.from_queue,
                on_crash=self._wakeup.set,
            )
        self._consumer = MemberConsumer(
            self._connection,
            consumer,
            self._processor,
            place=place,
            origin=self._origin,
            max_held=self._wanted.max_ack_pending or consumer_spec.DEFAULT_MAX_ACK_PENDING,
            hooks=hooks,
        )
        self._show_state()
        self._main = asyncio.create_task(self._run(), name=f"member {self.member}")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Finish what is at work, ack it, hand over at once, and end. What has not started goes to the next.

        Handlers that are still at work after `timeout_s` are cancelled; their messages go to the next as well.
        """
        check_seconds(timeout_s, "timeout_s")
        self._stopping = True
        self._show_state()
        self._wakeup.set()
        done, _ = await asyncio.wait({self._ended}, timeout=timeout_s)
        if not done and self._processor is not None:
            _log.warning("member %s: handlers still at work after %g s are cancelled", self.member, timeout_s)
            if self._retry_reader is not None:
                await self._retry_reader.cut()
            await self._processor.close()
        await asyncio.wait({self._ended})

    async def _run(self) -> None:
        reason, failure = "", None
        unobserve = self._connection.observe(
            ConnectionHooks(on_disconnect=self._disconnected, on_reconnect=self._wake, on_close=self._wake)
        )
        try:
            reason = await self._run_until_end()
        except KeylaneError as error:
            failure = error
        except asyncio.CancelledError:  # the program ends
            self._ended.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it ends this member, and whoever waits for it is told
            _log.exception("member %s of %s/%s failed", self.member, self.stream, self.group)
            failure = GroupEnded(f"member {self.member!r} failed: {error!r}")
            failure.__cause__ = error
        finally:
            unobserve()
        await self._leave(failure)
        assert self._processor is not None
        self._end(reason, failure or self._processor.crash)

    async def _run_until_end(self) -> str:
        """Run until the end, and return the reason if it was not an error."""
        bucket = bucket_of(self._connection, self._stored.config.kind)
        if self._parking is not None:
            assert self._call is not None
            self._releases = asyncio.create_task(self._parking.watch(self._owner_of, self._call.handle))
        if self._retry_reader is not None:
            self._retrying = asyncio.create_task(self._retry_reader.run(), name=f"retries of {self.group}")
        async with (
            bucket.hints(consumer_spec.key_of_group(self.stream, self.group), self._hinted),
            answering(self._connection, self.stream, self.group, self.member, self._pin_id),
        ):
            self._call_hook(self._hooks.on_joined)
            while not self._stopping:
                self._wakeup.clear()
                self._check_handler()
                try:
                    delay_s = await self._reconcile()
                    self._failures, self._problem = 0, None
                    self._show_state()
                except _GroupDeleted as deleted:
                    return str(deleted)
                except KeylaneError as error:
                    if self._connection.is_closed:
                        raise GroupEnded(
                            f"member {self.member!r}: the connection is closed ({self._connection.closed_reason}); "
                            "connect again and join again"
                        ) from error
                    if not error.is_transient:
                        raise
                    delay_s = self._pause_after(error)
                await self._wait_for_change(delay_s)
        return "stopped"

    def _owner_of(self, wish: KeyRelease) -> KeyOwner | None:
        """This member, if it handles the key now."""
        assert self._processor is not None
        assert self._origin is not None
        if self._stopping or self._consumer is None or not self._consumer.handles(wish.partition):
            return None
        return KeyOwner(str(wish.partition), self._processor, self._origin)

    def _check_handler(self) -> None:
        assert self._processor is not None
        for one in (self._processor, self._retry_reader):
            if one is not None and one.crash is not None:
                raise one.crash
        if self._retrying is not None and self._retrying.done():
            self._retrying.result()
        if self._releases is not None and self._releases.done():
            self._releases.result()

    def _pause_after(self, error: KeylaneError) -> float:
        self._failures += 1
        delay_s = backoff_s(self._failures, longest_s=_LONGEST_PAUSE_S)
        _log.debug("member %s: %s; trying again in %g s", self.member, error, delay_s)
        self._problem = str(error)
        self._show_state()
        return delay_s

    async def _leave(self, failure: KeylaneError | None) -> None:
        assert self._consumer is not None
        assert self._processor is not None
        assert self._call is not None
        if self._releases is not None:
            self._releases.cancel()
        if self._retry_reader is not None:
            self._retry_reader.stop()
        try:
            await self._consumer.leave()
        except KeylaneError as error:
            if not self._stopping and await self._consumer.is_gone():
                # The group or its stream was deleted: nobody waits for the acks.
                _log.debug("member %s: left a deleted consumer: %s", self.member, error)
                return
            if not isinstance(error, PermissionDenied):  # the connection has told of it
                _log.warning("member %s: leaving was not clean: %s", self.member, error)
            if failure is not None:
                failure.add_note(f"and leaving was not clean: {error}")
        finally:
            if self._retrying is not None:
                await self._end_retries(failure)
            await self._processor.close()
            await self._call.close()

    async def _end_retries(self, failure: KeylaneError | None) -> None:
        assert self._retry_reader is not None
        assert self._retrying is not None
        if failure is not None:
            await self._retry_reader.cut()
        await asyncio.wait({self._retrying})

    def _end(self, reason: str, failure: KeylaneError | None) -> None:
        if failure is not None:
            self._ended.set_exception(failure)
            self._ended.exception()  # seen: whoever waits gets it, and nobody has to
        else:
            self._ended.set_result(reason)
        self._show_state()
        self._call_hook(self._hooks.on_ended, str(failure) if failure is not None else reason)

    def _wake(self, _reason: str = "") -> None:
        self._wakeup.set()

    def _hinted(self, _key: str, _value: bytes | None) -> None:
        # A hint may come before the record is readable: look again a little later too.
        now = asyncio.get_running_loop().time()
        self._rereads = [now + later_s for later_s in _AFTER_A_HINT_S]
        self._wakeup.set()

    async def _wait_for_change(self, delay_s: float | None) -> None:
        now = asyncio.get_running_loop().time()
        tick_s = self._tick_s
        while self._rereads and self._rereads[0] <= now:
            self._rereads.pop(0)
        if self._rereads:
            tick_s = min(tick_s, self._rereads[0] - now)
        if delay_s is not None:
            tick_s = min(tick_s, delay_s)
        try:
            async with asyncio.timeout(tick_s):
                await self._wakeup.wait()
        except TimeoutError:
            return

    # ---- the wanted state -----------------------------------------------------------------------------

    async def _reconcile(self) -> float | None:
        """Bring the consumer one step closer to the record; return when to try again, if that is soon."""
        assert self._consumer is not None
        await self._consumer.attend()
        config = await self._read_config()
        self._show_plan(config.plan)
        if not config.plan.partitions_of(self.member) or self._is_overloaded(config):
            return await self._consumer.approach(None)
        return await self._consumer.approach(
            consumer_spec.consumer_config(config, self.group, self.member, self._wanted)
        )

    def _show_plan(self, plan: Plan) -> None:
        before, self._shown_plan = self._shown_plan, plan
        mine = plan.partitions_of(self.member)
        if before is None or before.partitions_of(self.member) != mine:
            self._call_hook(self._hooks.on_plan, mine, change_of(before, plan))

    async def _read_config(self) -> StaticConfig | ElasticConfig:
        before = self._stored.config
        stored = await read_group(self._connection, before.kind, self.stream, self.group)
        if stored is None:
            # A bucket that is made anew or restored is gone for a moment.
            await asyncio.sleep(_SECOND_LOOK_S)
            stored = await read_group(self._connection, before.kind, self.stream, self.group)
        if stored is None:
            raise _GroupDeleted(
                f"group {self.group!r} of stream {self.stream!r} was deleted: "
                f"{record_name(before.kind, self.stream, self.group)} is gone"
            )
        if not _can_follow(before, stored.config):
            raise GroupEnded(
                f"the configuration of group {self.group!r} of stream {self.stream!r} was changed in a way that "
                f"running members cannot follow ({before} before, {stored.config} now): restart them"
            )
        self._stored = stored
        if self._origin is not None:
            self._origin.follow(stored.version)
        return stored.config

    def _is_overloaded(self, config: StaticConfig | ElasticConfig) -> bool:
        """Whether the plan gives this member too many filter subjects for one consumer: it waits for another plan."""
        reason = config.too_many_filters(self.member)
        if reason is not None and reason != self._reported_overload:
            _log.error("group %r of stream %r: %s; it reads nothing until then", self.group, self.stream, reason)
        self._reported_overload = reason
        return reason is not None

    async def _is_current(self) -> bool:
        """Whether the record has not changed since it was last read."""
        stored = await read_group(self._connection, self._stored.config.kind, self.stream, self.group)
        return stored is not None and stored.version == self._stored.version and stored.config == self._stored.config

    async def _partitioning(self, config: StaticConfig | ElasticConfig) -> list[Partitioning]:
        if isinstance(config, ElasticConfig):
            return list(config.partitioning)
        transform = (await streams.info(self._connection, self.stream)).config.subject_transform
        if transform is None or not transform.dest:
            return []
        known = parse_transform(transform.src or ">", transform.dest)
        return [known] if known is not None else []

    # ---- its own state ---------------------------------------------------------------------------

    def _facts(self) -> MemberFacts:
        config, consumer = self._stored.config, self._consumer
        trouble = self._problem
        if trouble is None and not self._connection.is_connected:
            trouble = "the connection is down"
        return MemberFacts(
            stream=self.stream,
            group=self.group,
            member=self.member,
            is_ended=self._ended.done(),
            is_stopping=self._stopping,
            trouble=trouble,
            is_listed=config.has_member(self.member),
            has_partitions=bool(config.plan.partitions_of(self.member)),
            members=len(config.plan.members),
            partitions=config.partitions,
            handler_wait=self._origin.waiting_for if self._origin is not None else None,
            consumer_wait=consumer.waiting_for if consumer is not None else None,
            message_wait=consumer.no_message_because if consumer is not None else None,
            has_consumer=consumer is not None and consumer.has_consumer,
            is_active=self.is_active,
            is_other_active=consumer is not None and consumer.is_other_active,
        )

    def _show_state(self) -> None:
        """Log a change of state and call its hook, once. It is a warning if somebody should look at it."""
        facts = self._facts()
        before, self._shown = self._shown, state_of(facts)
        if before == self._shown:
            return
        state, waiting_for = self._shown
        self._has_had_place |= state in (MemberState.READY, MemberState.STANDBY, MemberState.ACTIVE)
        needs_a_look = (
            (state is MemberState.UNREACHABLE and (before is None or before[0] is not state))
            or (state in (MemberState.NOT_LISTED, MemberState.NO_PARTITIONS) and not self._has_had_place)
            or (state is MemberState.WAITING and waiting_for in (facts.handler_wait, facts.message_wait))
        )
        _state_log.log(
            logging.WARNING if needs_a_look else logging.INFO,
            "member %s of %s/%s: %s",
            self.member,
            self.stream,
            self.group,
            in_words(state, waiting_for),
        )
        self._call_hook(self._hooks.on_state, state, waiting_for)

    def _disconnected(self, reason: str) -> None:
        self._problem = f"the connection is down ({reason})"
        self._show_state()

    def _activated(self) -> None:
        self._show_state()
        self._call_hook(self._hooks.on_activated)

    def _deactivated(self) -> None:
        if self._origin is not None:
            self._origin.wait(None)  # whoever is active now waits for it
        self._show_state()
        self._call_hook(self._hooks.on_deactivated)

    # ---- small things -------------------------------------------------------------------------------

    def _call_hook(self, hook: Callable[..., None] | None, *about: object) -> None:
        call_hook(hook, *about, log=_log, who=f"member {self.member}")

    def _rebalanced(self, before: frozenset[int], after: frozenset[int]) -> None:
        if self._origin is not None:
            self._origin.wait(None)  # perhaps for a partition that went away; else the next message says it again
        self._call_hook(self._hooks.on_partitions, tuple(sorted(before)), tuple(sorted(after)))


class _GroupDeleted(Exception):
    """The group's record was deleted or purged: a normal end."""


def _can_follow(before: StaticConfig | ElasticConfig, after: StaticConfig | ElasticConfig) -> bool:
    if isinstance(before, ElasticConfig) and isinstance(after, ElasticConfig):
        return before.same_but_owners(after)
    return before == after
