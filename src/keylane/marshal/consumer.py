"""A Marshal consumer: one process that claims partitions, handles their messages, and gives them up.

Level-triggered: it reads the log again and again and does what follows from it: it claims free partitions, releases
those that it must not have, and serves those that it owns, each in its own task from the won claim to the release.
Transient errors are retried; any other error ends the consumer, and its claims expire.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from keylane.core.claim_balance import is_spoken_for, to_ask_for, to_give_up
from keylane.core.claim_choice import Appetite, PickOrder, Standing, TopicPartition, give_up, pick
from keylane.core.claim_facts import Claim, Key, Owner, Verdict
from keylane.core.claim_records import Placing, check_id
from keylane.core.run_state import RunState
from keylane.dispatch import Executor
from keylane.errors import InvalidInput, RequestTimeout
from keylane.hooks import call_hook
from keylane.jetstream import check_seconds
from keylane.marshal.claim_attempts import Claimer
from keylane.marshal.log import CoordinationLog
from keylane.marshal.log_view import ClientIdentity, LogView, first_error, new_instance, own_clock
from keylane.marshal.message import GiveUp, Handler
from keylane.marshal.message_dispatcher import MessageDispatcher
from keylane.marshal.options import ConsumerHooks, ConsumerOptions, Mode, Order, interval_of
from keylane.marshal.owned_partition import DeliveryMode, OwnedPartition
from keylane.marshal.partition_claim import PartitionClaim
from keylane.marshal.source import Source
from keylane.processing.joined import STOP_TIMEOUT_S, Joined
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.marshal")

_READ_EVERY = 0.3
"""Of an interval: how often the log is read. A partition whose owner died is free after two intervals."""
_READ_EVERY_ASKED = 0.05
"""The same while this consumer has asked for a partition: nobody serves it between its release and the next claim."""
_LONGEST_BETWEEN_REQUESTS = 32
"""Intervals between two requests to an owner that gives nothing up."""
_BETWEEN_CLAIMS = 0.02
_COUNT_TOPICS_EVERY = 10
_COOL_DOWN = 2
"""Intervals in which a consumer leaves to others what it could not keep up with."""
_LAST_WRITES_S = 10.0


class Consumer(Joined):
    """Claims partitions of topics for a group, and runs the handler on their messages.

    `log` decides who owns what, `source` has the messages. `client_id` is this consumer's name in the group: a consumer
    that restarts with the same one takes its partitions back at once. `mode`: `at_least_once`, or `at_most_once` with
    at most `batch_size` messages taken and not done.

    `pick`: `random`, `round_robin`, or an `Appetite` with more options; `max_claims`: own at most this many partitions.
    `placing` must be the same for all consumers on the log, and so must the heartbeat interval, which is the log's;
    `heartbeat_interval_s` is for a log that does not know its own. `rebalance`: ask consumers that own more for
    partitions, and give some up to those that own less. `release_when_behind`: give up a partition that this consumer
    cannot keep up with. `order`: one message at a time per `key`, or per `partition`.
    `max_in_flight`: messages of one partition that are read and not done. A failed message is retried, for ever or
    `max_tries` times; then `give_up` is awaited and the message counts as done. When a partition is given up, running
    handlers have `grace_s` to end; when the block is left, `stop_timeout_s`. If the log or the source fails for longer
    than `patience_s`, the consumer ends.

    >>> async with Consumer(log, source, "billing", "worker-1", ["orders"], handler) as consumer:
    ...     await consumer.wait()
    """

    def __init__(  # noqa: PLR0917 - the required ones; the rest are keywords
        self,
        log: CoordinationLog,
        source: Source,
        group: str,
        client_id: str,
        topics: Sequence[str],
        handler: Handler,
        *,
        mode: Mode = "at_least_once",
        pick: PickOrder | Appetite = "random",
        max_claims: int | None = None,
        heartbeat_interval_s: float | None = None,
        placing: Placing = "topic_partition",
        batch_size: int = 100,
        max_in_flight: int = 1000,
        concurrency: int = 64,
        executor: Executor = "thread",
        order: Order = "key",
        release_when_behind: bool = False,
        rebalance: bool = True,
        max_tries: int | None = None,
        give_up: GiveUp | None = None,
        grace_s: float = 5.0,
        patience_s: float = 600.0,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        hooks: ConsumerHooks | None = None,
        instance_id: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(stop_timeout_s, _log)
        self._options = ConsumerOptions(
            mode=mode,
            appetite=_appetite(pick, max_claims),
            heartbeat_interval_s=interval_of(log, heartbeat_interval_s),
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            concurrency=concurrency,
            executor=executor,
            order=order,
            release_when_behind=release_when_behind,
            rebalance=rebalance,
            max_tries=max_tries,
            give_up=give_up,
            grace_s=grace_s,
            patience_s=patience_s,
        )
        self._topics = _checked_topics(topics)
        self._identity = ClientIdentity(client_id, group, instance_id or new_instance(), wall_clock)
        self._handler = handler
        self._source = source
        self._hooks = hooks or ConsumerHooks()
        self._view = LogView(
            log,
            self._identity,
            self._options.heartbeat_interval_s,
            lambda: self._backoff("the coordination log"),
            placing=placing,
        )
        self._claimer = Claimer(self._view, source, mode, self._backoff("the source"), batch_size=batch_size)
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0
        self._owned: dict[TopicPartition, OwnedPartition] = {}
        self._cooling: dict[TopicPartition, float] = {}
        self._unanswered: dict[Owner, tuple[int, float]] = {}
        """Owners that this consumer asked for a partition: how often in vain, and when it may ask again."""
        self._has_asked = False
        self._after: TopicPartition | None = None
        self._stop = asyncio.Event()
        self._one_ended = asyncio.Event()
        self._release = True
        self._longest_s: float | None = None
        """How long handlers may go on when it is stopped."""
        self._late: RequestTimeout | None = None
        self._running: asyncio.Task[None] | None = None
        self._state = RunState.NEW
        self._shown_partitions: tuple[TopicPartition, ...] = ()

    def __repr__(self) -> str:
        who = f"{self._identity.client} of {self._identity.group}"
        return f"<Consumer {who} {self.state}, {len(self._owned)} partitions>"

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def waiting_for(self) -> str | None:
        """What it waits for, as the end of a sentence; None: for nothing but messages and partitions."""
        return "handlers that are at work, and the release of its partitions" if self._is_stopping else None

    @property
    def _is_stopping(self) -> bool:
        return self._state is RunState.STOPPING

    @property
    def instance_id(self) -> str:
        return self._identity.instance

    @property
    def client_id(self) -> str:
        return self._identity.client

    @property
    def group(self) -> str:
        return self._identity.group

    @property
    def in_flight(self) -> int:
        """How many messages of its partitions are read and not done."""
        return sum(one.delivery.in_flight for one in self._owned.values())

    @property
    def max_in_flight(self) -> int:
        """How many may be, at most: those of each of its partitions."""
        return self._options.max_in_flight * len(self._owned)

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The partitions that are handled here now."""
        return tuple(sorted(self._owned))

    # ---- start and end ------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Check the topics, read the log, and begin. Raises if a topic or the log is not as it must be."""
        if self._running is not None:
            raise InvalidInput("this consumer was started before: make a new one")
        await self._count_topics()
        await self._view.read()
        dispatcher = MessageDispatcher(
            self._handler,
            concurrency=self._options.concurrency,
            name=f"consumer {self._identity.client!r} of group {self._identity.group!r}",
            executor=self._options.executor,
            order=self._options.order,
            max_tries=self._options.max_tries,
            give_up=self._options.give_up,
            hooks=self._hooks,
        )
        await dispatcher.start()
        # Not in a task group: it lives until `stop`, which is another call.
        self._running = asyncio.create_task(self._main(dispatcher), name=f"marshal {self._identity.client}")
        self._show_state(RunState.RUNNING)
        return self

    async def wait(self) -> str:
        """Wait for the end and return its reason; raises the error if one ended it."""
        if self._running is None:
            raise InvalidInput("this consumer was not started: call start, or use it with `async with`")
        return await super().wait()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S, *, release: bool = True) -> None:
        """Finish what is at work, release every partition, and end. What has not started goes to the next.

        Handlers that are still at work after `timeout_s` are cancelled; their messages go to the next as well. Without
        `release` the claims stay in the log until they expire: a restart with the same client id takes the partitions
        back at once.
        """
        check_seconds(timeout_s, "timeout_s")
        if self._running is None:
            return
        self._release, self._longest_s = release, timeout_s
        if not self._ended.done():
            self._show_state(RunState.STOPPING)
        self._stop.set()
        done, _ = await asyncio.wait({self._running}, timeout=timeout_s + _LAST_WRITES_S)
        if not done:
            self._late = RequestTimeout(
                f"consumer {self._identity.client!r} gave up after {timeout_s + _LAST_WRITES_S:g} s trying to release "
                f"{len(self._owned)} partitions; its claims expire by themselves"
            )
            self._running.cancel()
            await asyncio.wait({self._running})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def _main(self, dispatcher: MessageDispatcher) -> None:
        failure: Exception | None = None
        try:
            await self._run(dispatcher)
        except asyncio.CancelledError:
            if self._late is None:  # the program ends
                self._ended.cancel()
                raise
            failure = self._late
        except Exception as error:  # noqa: BLE001 - whoever waits for it is told
            failure = error
        self._show_partitions()
        self._show_state(RunState.ENDED)
        if failure is None:
            self._ended.set_result("stopped")
        else:
            self._ended.set_exception(failure)
            self._ended.exception()  # seen: whoever waits gets it, and nobody has to
        self._call_hook(self._hooks.on_ended, "stopped" if failure is None else str(failure))

    def _show_state(self, state: RunState) -> None:
        if state is not self._state:
            self._state = state
            self._call_hook(self._hooks.on_state, state, self.waiting_for)

    def _show_partitions(self) -> None:
        before, self._shown_partitions = self._shown_partitions, self.partitions
        if before != self._shown_partitions:
            self._call_hook(self._hooks.on_partitions, before, self._shown_partitions)

    def _call_hook(self, hook: Callable[..., None] | None, *about: object) -> None:
        call_hook(hook, *about, log=_log, who=self)

    async def _run(self, dispatcher: MessageDispatcher) -> None:
        try:
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self._watch(dispatcher))
                    await self._reclaim(tasks, dispatcher)
                    await self._claim_and_release(tasks, dispatcher)
                    for owned in self._owned.values():
                        owned.ask_to_end("the consumer ends", release=self._release, grace_s=self._longest_s)
                    await self._nothing_served()
                    watching.cancel()
        finally:
            await dispatcher.close()

    async def _watch(self, dispatcher: MessageDispatcher) -> None:
        """A handler that crashed ends the consumer."""
        raise await dispatcher.failure

    async def _nothing_served(self) -> None:
        while self._owned:
            self._one_ended.clear()
            await self._one_ended.wait()

    # ---- assignment ---------------------------------------------------------------------------------

    async def _claim_and_release(self, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher) -> None:
        """Read the whole log periodically; in between, while there is something to claim, only the parts needed."""
        interval_s = self._options.heartbeat_interval_s
        read_at = 0.0
        while not self._stop.is_set():
            if own_clock() > self._counted_at + _COUNT_TOPICS_EVERY * interval_s:
                await self._count_topics()
            if own_clock() >= read_at:
                await self._view.read(self._log_partitions())
                await self._rebalance(tasks, dispatcher)
                read_at = own_clock() + (_READ_EVERY_ASKED if self._has_asked else _READ_EVERY) * interval_s
            self._release_excess()
            for stray in self._claimer.strays(set(self._owned)):
                await self._claimer.release_stray(stray)
            tried = await self._claim_some(tasks, dispatcher)
            # Consumers that start together and claim one partition at a time get equal shares.
            spread_s = _BETWEEN_CLAIMS * interval_s * random.random()  # noqa: S311 - guards nothing
            pause_s = spread_s if tried else max(read_at - own_clock(), 0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()

    def _log_partitions(self) -> set[int]:
        """Those partitions of the log that coordinate our topics."""
        return {self._view.world.where(*one) for one in self._all()}

    def _all(self) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for topic, count in self._counts.items() for number in range(count)]

    def _release_excess(self) -> None:
        """Give up what this consumer must not have, by the log or by its own options."""
        for pause in self._view.world.pauses(self._identity.group):
            if pause.by != self._identity.owner:
                for owned in self._owned.values():
                    if self._view.world.where(*owned.where) == pause.log_partition:
                        owned.ask_to_end("the group is paused")
        for where in give_up(self._options.appetite, self._counts, self._standing):
            self._owned[where].ask_to_end("partition 0 of its topic is not ours")

    def _standing(self, where: TopicPartition) -> Standing:
        if where in self._owned:
            return Standing.OURS
        if self._cooling.get(where, 0.0) > own_clock() or self._view.foresee(where) is not Verdict.WON:
            return Standing.TAKEN
        return Standing.TAKEN if self._is_spoken_for(where) else Standing.FREE

    def _is_spoken_for(self, where: TopicPartition) -> bool:
        world = self._view.world
        claim = world.claim_of(self._identity.group, *where)
        if claim is None:
            return False
        now_ms = self._view.expected_ms(claim.log_partition)
        return is_spoken_for(claim, self._identity.owner, now_ms, world.interval_ms)

    async def _rebalance(self, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher) -> None:
        """Give partitions up to consumers that asked and own less; ask consumers that own more."""
        self._has_asked = False
        if not self._options.rebalance or self._options.appetite.whole_topic:
            return
        view, me = self._view.group_view(), self._identity.owner
        leaving = {owned.key for owned in self._owned.values() if owned.end_request is not None}
        for key, who in to_give_up(view, me, leaving).items():
            if (owned := self._owned.get(_where(key))) is not None:
                owned.ask_to_end(f"for an even share: {who.client} asked for it and owns less")
        wanted = to_ask_for(
            view, me, may_ask=self._may_ask, choose=random.randrange, most=self._options.appetite.max_claims
        )
        owners = {claim.owner for claim in view.claims if claim.key in wanted and claim.owner is not None}
        for owner in owners:
            tries = self._unanswered.get(owner, (0, 0.0))[0] + 1
            wait_s = min(2 ** (tries + 1), _LONGEST_BETWEEN_REQUESTS) * self._options.heartbeat_interval_s
            self._unanswered[owner] = tries, own_clock() + wait_s
        for key in wanted:
            await self._claim(_where(key), tasks, dispatcher)
        self._has_asked = self._view.group_view().has_asked(me)

    def _may_ask(self, claim: Claim) -> bool:
        """A partition of our topics whose owner may answer."""
        where = _where(claim.key)
        assert claim.owner is not None, claim
        return (
            where.partition < self._counts.get(where.topic, 0)
            and where not in self._claimer.trying
            and self._cooling.get(where, 0.0) <= own_clock()
            and self._unanswered.get(claim.owner, (0, 0.0))[1] <= own_clock()
            and self._view.foresee(where) is Verdict.LOST
        )

    async def _claim_some(self, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher) -> bool:
        """Claim the partitions that were picked; returns whether there were any."""
        picked = pick(self._options.appetite, self._counts, self._standing, choose=random.randrange, after=self._after)
        if not picked:
            return False
        self._after = picked[-1]
        await self._view.read(self._view.world.where(*one) for one in picked)
        picked = [one for one in picked if self._standing(one) is Standing.FREE]
        with first_error():
            async with asyncio.TaskGroup() as claims:
                for where in picked:
                    claims.create_task(self._claim(where, tasks, dispatcher))
        return True

    async def _claim(self, where: TopicPartition, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher) -> None:
        self._begin(await self._claimer.claim(where), tasks, dispatcher)

    async def _reclaim(self, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher) -> None:
        """Take back what an earlier instance of this client owned when it stopped, as far as its claims hold."""
        ours = set(self._all())
        held = [
            claim
            for claim in self._view.world.owned_by(self._identity.group, self._identity.client)
            if TopicPartition(claim.key.topic, claim.key.partition) in ours
        ]
        for claim in held[: _most(self._options.appetite, len(held))]:
            self._begin(await self._claimer.reclaim(claim), tasks, dispatcher)

    async def _count_topics(self) -> None:
        backoff = self._backoff("the source")
        for topic in self._topics:
            count = await backoff.call(partial(self._source.partitions, topic))
            if count < self._counts.get(topic, 0):
                raise InvalidInput(
                    f"topic {topic!r} had {self._counts[topic]} partitions and has {count} now: it was recreated; "
                    "stop all consumers of the group and start them again"
                )
            self._counts[topic] = count
        self._counted_at = own_clock()

    # ---- partitions ---------------------------------------------------------------------------------

    def _begin(
        self, won: tuple[PartitionClaim, DeliveryMode] | None, tasks: asyncio.TaskGroup, dispatcher: MessageDispatcher
    ) -> None:
        if won is None:
            return
        claim, delivery = won
        backoff = self._backoff(f"{claim.where.topic}/{claim.where.partition}")
        owned = OwnedPartition(claim, delivery, self._source, dispatcher, backoff, self._options)
        self._owned[owned.where] = owned
        known = self._view.world.claim_of(*owned.key)
        if known is not None and known.released is not None:
            self._unanswered.pop(known.released.owner, None)
        self._call_hook(self._hooks.on_claimed, owned.where, owned.token)
        self._show_partitions()
        tasks.create_task(self._serve(owned))

    async def _serve(self, owned: OwnedPartition) -> None:
        why = "the consumer failed"
        try:
            why = await owned.serve()
        finally:
            del self._owned[owned.where]
            self._one_ended.set()
            if owned.end_request is not None and owned.end_request.cool_down:
                self._cooling[owned.where] = own_clock() + _COOL_DOWN * self._options.heartbeat_interval_s
            self._call_hook(self._hooks.on_released, owned.where, why)
            self._show_partitions()

    def _backoff(self, what: str) -> Backoff:
        told = partial(self._call_hook, self._hooks.on_trouble)
        return Backoff(what, self._options.patience_s, told, log=_log)


def _where(key: Key) -> TopicPartition:
    return TopicPartition(key.topic, key.partition)


def _appetite(pick: PickOrder | Appetite, max_claims: int | None) -> Appetite:
    if not isinstance(pick, Appetite):
        return Appetite(pick, max_claims=max_claims)
    if max_claims is not None:
        raise InvalidInput("max_claims is given beside an Appetite: set it in the Appetite")
    return pick


def _checked_topics(topics: Sequence[str]) -> tuple[str, ...]:
    if isinstance(topics, str) or not topics:
        raise InvalidInput(f"topics is {topics!r}: give a list of topics, such as ['orders']")
    for topic in topics:
        check_id(topic, "topic")
    return tuple(dict.fromkeys(topics))


def _most(appetite: Appetite, held: int) -> int:
    """How many partitions a restarted consumer takes back. Whole topics are corrected by the next read."""
    return held if appetite.max_claims is None or appetite.whole_topic else min(appetite.max_claims, held)
