"""A Marshal consumer: one process that claims partitions, works on their messages, and lets them go.

Level-triggered: again and again it reads the log, and does what follows from it: it claims what is free, releases what
it must not have, and serves what it owns. Each partition that it owns is served by a task of its own, from the win to
the release. What may pass is waited out; anything else ends the consumer with its reason, and its claims run out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from keylane.core.balance import is_spoken_for, to_ask_for, to_give_up
from keylane.core.claim_choice import Appetite, PickOrder, Standing, TopicPartition, give_up, pick
from keylane.core.claim_facts import Claim, Key, Owner, Verdict
from keylane.core.claim_records import Placing, check_id
from keylane.dispatch import Executor
from keylane.errors import InvalidInput, KeylaneError, RequestTimeout
from keylane.marshal.author import Author, new_instance
from keylane.marshal.claiming import Claimer, Mode, Work
from keylane.marshal.crew import Crew, Order
from keylane.marshal.log import CoordinationLog
from keylane.marshal.logbook import LogBook, own_clock
from keylane.marshal.message import GiveUp, Handler
from keylane.marshal.serving import serve
from keylane.marshal.source import Source
from keylane.marshal.tenure import Tenure
from keylane.marshal.terms import ConsumerHooks, Terms, interval_of
from keylane.marshal.trouble import Patience, first_error

_log = logging.getLogger("keylane.marshal")

_LOOK_EVERY = 0.3
"""Of an interval. A partition whose owner died is free two intervals after its last heartbeat."""
_LOOK_EVERY_ASKED = 0.05
"""While this consumer has asked for a partition, which is nobody's from its release until it is claimed."""
_MOST_PATIENT = 32
"""Intervals between two requests to an owner that gives nothing up."""
_BETWEEN_CLAIMS = 0.02
_COUNT_TOPICS_EVERY = 10
_COOL_DOWN = 2
"""Intervals in which a consumer leaves to others what it could not keep up with."""
_LAST_WRITES_S = 10.0


class Consumer:
    """Claims partitions of topics for a group, and runs the handler on their messages.

    `log` decides who owns what, `source` has the messages. `client_id` is this consumer's name in the group: one that
    stays the same over a restart takes its partitions back at once. `mode`: `at_least_once`, or `at_most_once` with
    no more than `batch_size` messages taken and not done.

    `pick`: `random`, `round_robin`, or an `Appetite` with more wishes; `max_claims`: own no more than this.
    `placing` must be the same for everybody on the log, and so must the heartbeat interval, which is the log's;
    `heartbeat_interval_s` is for a log that does not know its own. `rebalance`: ask those who own more for partitions,
    and give some up to those who own less. `release_when_behind`: give up a partition that this consumer cannot keep
    up with. `order`: one message at a time per `key`, or per `partition`.
    `max_in_flight`: messages of one partition that are read and not done. A message that failed is tried again, for
    ever or `max_tries` times; then `give_up` is awaited and it counts as done. When a partition is let go, handlers at
    work have `grace_s` to end. Trouble with the log or the source that lasts longer than `patience_s` ends it.

    >>> async with Consumer(log, source, "billing", "worker-1", ["orders"], handler) as consumer:
    ...     await consumer.wait()
    """

    def __init__(  # noqa: PLR0917 - what a consumer is made of; the rest is named
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
        hooks: ConsumerHooks | None = None,
        instance_id: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms = Terms(
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
        self._author = Author(client_id, group, instance_id or new_instance(), wall_clock)
        self._handler = handler
        self._source = source
        self._hooks = hooks or ConsumerHooks()
        self._book = LogBook(
            log,
            self._terms.heartbeat_interval_s,
            lambda: self._patience("the coordination log"),
            placing=placing,
            wall_s=wall_clock,
        )
        self._claimer = Claimer(
            self._book, self._author, source, mode, self._patience("the source"), batch_size=batch_size
        )
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0
        self._tenures: dict[TopicPartition, Tenure] = {}
        self._cooling: dict[TopicPartition, float] = {}
        self._unheard: dict[Owner, tuple[int, float]] = {}
        """Whom this consumer asked for a partition: how often in vain, and when it may ask again."""
        self._has_asked = False
        self._after: TopicPartition | None = None
        self._stop = asyncio.Event()
        self._let_one_go = asyncio.Event()
        self._release = True
        self._crew: Crew | None = None
        self._running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "new" if self._running is None else "ended" if self._running.done() else "running"
        return f"<Consumer {self._author.client} of {self._author.group} {state}, {len(self._tenures)} partitions>"

    @property
    def instance_id(self) -> str:
        return self._author.instance

    @property
    def owned(self) -> list[TopicPartition]:
        """The partitions that it serves now."""
        return sorted(self._tenures)

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Check the topics, read the log, and begin. Raises what is wrong with them."""
        if self._running is not None:
            raise InvalidInput("this consumer was started before: make a new one")
        await self._count_topics()
        await self._book.read()
        self._crew = Crew(
            self._handler,
            concurrency=self._terms.concurrency,
            name=f"consumer {self._author.client!r} of group {self._author.group!r}",
            executor=self._terms.executor,
            order=self._terms.order,
            max_tries=self._terms.max_tries,
            give_up=self._terms.give_up,
            on_failure=self._hooks.on_failure,
        )
        await self._crew.start()
        self._running = asyncio.create_task(self._run(self._crew), name=f"marshal {self._author.client}")
        return self

    async def wait(self) -> None:
        """Wait until it has ended; raises the error that ended it, if one did."""
        if self._running is None:
            raise InvalidInput("this consumer was not started: call start, or use it with `async with`")
        await asyncio.shield(self._running)

    async def terminate(self, release: bool = True) -> None:
        """End it: handlers at work may finish, then its partitions are released for others.

        Without `release` the claims stay in the log until they run out: a restart with the same client id takes them
        back at once. Raises the error that ended it before, if one did.
        """
        if self._running is None:
            return
        self._release = release
        self._stop.set()
        done, _ = await asyncio.wait({self._running}, timeout=self._terms.grace_s + _LAST_WRITES_S)
        if not done:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
            raise RequestTimeout(
                f"consumer {self._author.client!r} could not release {len(self._tenures)} partitions within "
                f"{self._terms.grace_s + _LAST_WRITES_S:g} s; its claims run out by themselves"
            )
        self._running.result()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.terminate()
        except KeylaneError as failure:
            if error is None:
                raise
            if failure is not error:
                _log.error("%r ended with %r while another error was on its way", self, failure)

    async def _run(self, crew: Crew) -> None:
        try:
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self._watch(crew))
                    await self._reclaim(tasks, crew)
                    await self._look_for_ever(tasks, crew)
                    for tenure in self._tenures.values():
                        tenure.ask_to_end("the consumer ends", release=self._release)
                    await self._nothing_served()
                    watching.cancel()
        finally:
            for tenure in self._tenures.values():
                tenure.end()
            await crew.close()

    async def _watch(self, crew: Crew) -> None:
        """A worker that broke ends the consumer."""
        raise await crew.failure

    async def _nothing_served(self) -> None:
        while self._tenures:
            self._let_one_go.clear()
            await self._let_one_go.wait()

    # ---- looking ------------------------------------------------------------------------------------

    async def _look_for_ever(self, tasks: asyncio.TaskGroup, crew: Crew) -> None:
        """Read the whole log now and then; between that, as long as there is something to claim, only what matters."""
        interval_s = self._terms.heartbeat_interval_s
        look_at = 0.0
        while not self._stop.is_set():
            if own_clock() > self._counted_at + _COUNT_TOPICS_EVERY * interval_s:
                await self._count_topics()
            if own_clock() >= look_at:
                await self._book.read(self._log_partitions())
                await self._rebalance(tasks, crew)
                look_at = own_clock() + (_LOOK_EVERY_ASKED if self._has_asked else _LOOK_EVERY) * interval_s
            self._obey()
            for stray in self._claimer.strays(set(self._tenures)):
                await self._claimer.release_stray(stray)
            tried = await self._claim_some(tasks, crew)
            # Consumers that start together and try one at a time share what there is.
            spread_s = _BETWEEN_CLAIMS * interval_s * random.random()  # noqa: S311 - guards nothing
            pause_s = spread_s if tried else max(look_at - own_clock(), 0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()

    def _log_partitions(self) -> set[int]:
        """Those that say something of our topics."""
        return {self._book.where(self._author.key(one)) for one in self._all()}

    def _all(self) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for topic, count in self._counts.items() for number in range(count)]

    def _obey(self) -> None:
        """Let go of what the log, or our own rules, say that we must not have."""
        for pause in self._book.world.pauses(self._author.group):
            if pause.by != self._author.owner:
                for tenure in self._tenures.values():
                    if self._book.where(tenure.key) == pause.log_partition:
                        tenure.ask_to_end("the group is paused")
        for where in give_up(self._terms.appetite, self._counts, self._standing):
            self._tenures[where].ask_to_end("partition 0 of its topic is not ours")

    def _standing(self, where: TopicPartition) -> Standing:
        if where in self._tenures:
            return Standing.OURS
        if self._cooling.get(where, 0.0) > own_clock() or self._claimer.foresee(where) is not Verdict.WON:
            return Standing.TAKEN
        return Standing.TAKEN if self._is_spoken_for(where) else Standing.FREE

    def _is_spoken_for(self, where: TopicPartition) -> bool:
        key = self._author.key(where)
        claim = self._book.claim_of(key)
        now_ms = self._book.now_ms(key) + self._book.elapsed_ms(self._book.where(key))
        return claim is not None and is_spoken_for(claim, self._author.owner, now_ms, self._book.world.interval_ms)

    async def _rebalance(self, tasks: asyncio.TaskGroup, crew: Crew) -> None:
        """Give up what others asked for and have less of; ask for what others have more of."""
        self._has_asked = False
        if not self._terms.rebalance or self._terms.appetite.whole_topic:
            return
        view, me = self._book.view(self._author.group), self._author.owner
        leaving = {tenure.key for tenure in self._tenures.values() if tenure.asked is not None}
        for key, who in to_give_up(view, me, leaving).items():
            if (tenure := self._tenures.get(_place_of(key))) is not None:
                tenure.ask_to_end(f"for an even share: {who.client} asked for it and owns less")
        wanted = to_ask_for(
            view, me, may_ask=self._may_ask, choose=random.randrange, most=self._terms.appetite.max_claims
        )
        owners = {claim.owner for claim in view.claims if claim.key in wanted and claim.owner is not None}
        for owner in owners:
            tries = self._unheard.get(owner, (0, 0.0))[0] + 1
            wait_s = min(2 ** (tries + 1), _MOST_PATIENT) * self._terms.heartbeat_interval_s
            self._unheard[owner] = tries, own_clock() + wait_s
        for key in wanted:
            await self._claim(_place_of(key), tasks, crew)
        self._has_asked = self._book.view(self._author.group).has_asked(me)

    def _may_ask(self, claim: Claim) -> bool:
        """A partition of our topics, whose owner may listen."""
        where = _place_of(claim.key)
        assert claim.owner is not None, claim
        return (
            where.partition < self._counts.get(where.topic, 0)
            and where not in self._claimer.trying
            and self._cooling.get(where, 0.0) <= own_clock()
            and self._unheard.get(claim.owner, (0, 0.0))[1] <= own_clock()
            and self._claimer.foresee(where) is Verdict.LOST
        )

    async def _claim_some(self, tasks: asyncio.TaskGroup, crew: Crew) -> bool:
        """Try what was picked; whether anything was."""
        picked = pick(self._terms.appetite, self._counts, self._standing, choose=random.randrange, after=self._after)
        if not picked:
            return False
        self._after = picked[-1]
        await self._book.read(self._book.where(self._author.key(one)) for one in picked)
        picked = [one for one in picked if self._standing(one) is Standing.FREE]
        with first_error():
            async with asyncio.TaskGroup() as claims:
                for where in picked:
                    claims.create_task(self._claim(where, tasks, crew))
        return True

    async def _claim(self, where: TopicPartition, tasks: asyncio.TaskGroup, crew: Crew) -> None:
        self._begin(await self._claimer.claim(where), tasks, crew)

    async def _reclaim(self, tasks: asyncio.TaskGroup, crew: Crew) -> None:
        """What an earlier instance of this client had when it stopped, as far as its claims hold."""
        ours = set(self._all())
        held = [
            claim
            for claim in self._book.world.owned_by(self._author.group, self._author.client)
            if TopicPartition(claim.key.topic, claim.key.partition) in ours
        ]
        for claim in held[: _most(self._terms.appetite, len(held))]:
            self._begin(await self._claimer.reclaim(claim), tasks, crew)

    async def _count_topics(self) -> None:
        patience = self._patience("the source")
        for topic in self._topics:
            while True:
                try:
                    count = await self._source.partitions(topic)
                except KeylaneError as error:
                    await patience.after(error)
                else:
                    break
            if count < self._counts.get(topic, 0):
                raise InvalidInput(
                    f"topic {topic!r} had {self._counts[topic]} partitions and has {count} now: it was made anew; "
                    "stop all consumers of the group and start them again"
                )
            self._counts[topic] = count
        self._counted_at = own_clock()

    # ---- serving ------------------------------------------------------------------------------------

    def _begin(self, won: tuple[Tenure, Work] | None, tasks: asyncio.TaskGroup, crew: Crew) -> None:
        if won is None:
            return
        tenure, work = won
        self._tenures[tenure.where] = tenure
        claim = self._book.claim_of(tenure.key)
        if claim is not None and claim.released is not None:
            self._unheard.pop(claim.released.owner, None)
        if self._hooks.on_claimed is not None:
            self._hooks.on_claimed(tenure.where, tenure.token)
        tasks.create_task(self._serve(tenure, work, crew))

    async def _serve(self, tenure: Tenure, work: Work, crew: Crew) -> None:
        patience = self._patience(f"{tenure.where.topic}/{tenure.where.partition}")
        why = "the consumer failed"
        try:
            why = await serve(tenure, work, self._source, crew, patience=patience, terms=self._terms)
        finally:
            del self._tenures[tenure.where]
            self._let_one_go.set()
            if tenure.asked is not None and tenure.asked.cool_down:
                self._cooling[tenure.where] = own_clock() + _COOL_DOWN * self._terms.heartbeat_interval_s
            if self._hooks.on_let_go is not None:
                self._hooks.on_let_go(tenure.where, why)

    def _patience(self, what: str) -> Patience:
        return Patience(what, self._terms.patience_s, self._hooks.on_trouble)


def _place_of(key: Key) -> TopicPartition:
    return TopicPartition(key.topic, key.partition)


def _appetite(pick: PickOrder | Appetite, max_claims: int | None) -> Appetite:
    if not isinstance(pick, Appetite):
        return Appetite(pick, max_claims=max_claims)
    if max_claims is not None:
        raise InvalidInput("max_claims is given beside an Appetite: say it in the Appetite")
    return pick


def _checked_topics(topics: Sequence[str]) -> tuple[str, ...]:
    if isinstance(topics, str) or not topics:
        raise InvalidInput(f"topics is {topics!r}: give a list of topics, such as ['orders']")
    for topic in topics:
        check_id(topic, "topic")
    return tuple(dict.fromkeys(topics))


def _most(appetite: Appetite, held: int) -> int:
    """How many partitions a restarted consumer takes back. Whole topics are put right by the next look."""
    return held if appetite.max_claims is None or appetite.whole_topic else min(appetite.max_claims, held)
