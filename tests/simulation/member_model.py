"""One instance of a member in simulated time: performs what `core/handoff` and `core/pin` decide, on `core/lanes`.

It stands for `groups/` and `jetstream/`, in their order of steps and without their details.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keylane.core import handoff, pin
from keylane.core.handoff import (
    AnyEvent,
    Close,
    Create,
    Delete,
    Drain,
    Finish,
    GiveBack,
    Handoff,
    HandoffEvent,
    Look,
    Looked,
    Narrow,
    Opened,
    PinReceived,
    Probe,
    Reset,
    Rewind,
    Role,
    Style,
    Surprised,
    Wait,
    Want,
    Widen,
)
from keylane.core.lanes import DONE, Entry, Lanes
from tests.simulation.server_model import ACK_WAIT, PIN_TIMEOUT, Clock, Delivery, Server

WAITS = {Wait.IN_DOUBT: 50, Wait.TAKEN: 60, Wait.STANDBY: 450}
TICK = 1500
OWED = 2000


class Instance:
    """A process: it may be killed, frozen and woken."""

    def __init__(  # noqa: PLR0917
        self,
        clock: Clock,
        server: Server,
        member: str,
        number: int,
        record: Callable[[], frozenset[int]],
        log: Evidence,
    ) -> None:
        self.clock, self.server, self.member, self.name = clock, server, member, f"{member}#{number}"
        self._record = record
        self._log = log
        self.state = Handoff()
        self.action: handoff.Action | None = None
        self._under_way = False
        self.poked = False
        self._round = 0
        self._pin = pin.Pin()
        self._pin_of_handoff = ""
        self._next_sequence = 0
        self._attempt = 0
        self._pulls = 0
        self._link_at = 0
        self._resetting = False
        self._lanes: Lanes[Delivery] = Lanes(max_tries=None, backoff=lambda tries: 50 * tries, remember=100)
        self._owed: dict[int, Delivery] = {}
        self._waiting_for_quiet: tuple[frozenset[int] | None, HandoffEvent] | None = None
        self._patient_until = 0
        self._asleep: list[Callable[[], None]] = []
        self._slept_at = 0
        self.is_dead = False
        self.is_frozen = False
        self.on_left: Callable[[], None] = lambda: None
        self.poke()
        self._beat()

    def __repr__(self) -> str:
        return f"<{self.name} {'dead ' if self.is_dead else ''}{self.action} {self._pin!r} {self.state}>"

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.is_frozen

    @property
    def pin_id(self) -> str | None:
        """What it sends with its pulls."""
        return self._pin.pin_id

    # ---- faults ----------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.is_dead = True

    def freeze(self) -> None:
        self.is_frozen, self._slept_at = True, self.clock.now

    def wake(self) -> None:
        if self.is_dead or not self.is_frozen:
            return
        self.is_frozen = False
        if self.clock.now - self._slept_at > PIN_TIMEOUT and self._pin.pin_id is not None:
            self._pin_event(pin.Event.STALLED)
        missed, self._asleep = self._asleep, []
        for do in missed:
            self._alive(do)()
        self.poke()

    def leave(self) -> None:
        self._tell(HandoffEvent.LEAVE)
        self.poke()

    # ---- time ------------------------------------------------------------------------------------------

    def _alive(self, do: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self.is_dead:
                return
            if self.is_frozen:
                self._asleep.append(do)
            else:
                do()

        return run

    def _after(self, delay: int, do: Callable[[], None]) -> None:
        self.clock.after(delay, self._alive(do))

    def _ask(self, question: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """A request: it takes effect later, and its answer comes later still; some never do."""

        def at_the_server() -> None:
            result = question()
            self._after(self.clock.random.randint(1, 30), lambda: answer(result))

        self.clock.after(self.clock.random.randint(1, 30), at_the_server)

    # ---- rounds ----------------------------------------------------------------------------------------

    def poke(self) -> None:
        self.poked = True
        self._after(1, self._begin_round)

    def _begin_round(self) -> None:
        if self._under_way or not self.poked:
            return
        self.poked = False
        self._under_way = True
        self._round += 1
        number = self._round
        self._after(TICK, lambda: self.poke() if number == self._round and not self._under_way else None)
        self._ask(self._record, lambda wanted: self._step(Want(wanted)))

    def _step(self, event: AnyEvent) -> None:
        self.state, self.action = handoff.step(self.state, event)
        match self.action:
            case None | Wait():
                self._under_way = False
                delay = WAITS[self.action] if isinstance(self.action, Wait) else 0
                if delay:
                    self._after(delay, self.poke)
                elif self.poked:
                    self.poke()
                if self.state.leaving and not self.state.reading:
                    self.on_left()
            case _:
                self._perform(self.action)

    def _tell(self, event: AnyEvent) -> None:
        """While an action may be under way."""
        self.state = handoff.changed(self.state, event)

    def _perform(self, action: handoff.Action) -> None:  # noqa: C901 - one case for each action
        name, server = self.member, self.server
        match action:
            case Create(partitions):
                self._ask(lambda: server.create(name, partitions), self._created)
            case Look():
                self._ask(lambda: server.consumers.get(name), self._looked)
            case Probe(partitions):
                self._ask(
                    lambda: server.overlaps(name, partitions),
                    lambda taken: self._step(HandoffEvent.TAKEN if taken else HandoffEvent.FREE),
                )
            case Drain(partitions):
                self._drain(partitions, HandoffEvent.DRAINED)
            case Finish():
                self._drain(None, HandoffEvent.FINISHED)
            case Narrow(partitions) | Widen(partitions):
                done = HandoffEvent.NARROWED if isinstance(action, Narrow) else HandoffEvent.WIDENED
                self._on_consumer(
                    lambda: server.update(name, partitions), lambda ok: self._step(done if ok else HandoffEvent.TAKEN)
                )
            case Reset():
                self._reset(None, lambda: self._step(HandoffEvent.RESET))
            case Rewind():
                self._reset(1, lambda: self._step(HandoffEvent.REWOUND))
            case Delete(surely):
                self._close()
                self._ask(lambda: self._delete(surely=surely), lambda _: self._step(HandoffEvent.DELETED))
            case GiveBack():
                ours = self._pin.pin_id
                self._close()
                self._ask(lambda: self._give_back(ours), lambda _: self._step(HandoffEvent.CLOSED))
            case Close():
                self._close()
                self._step(HandoffEvent.CLOSED)
            case _:
                raise AssertionError(action)

    def _created(self, consumer: Any) -> None:
        if consumer is None:
            self._step(HandoffEvent.TAKEN)
            return
        self._pin, self._pin_of_handoff, self._next_sequence = pin.Pin(), "", 0
        self._open_pulls()
        self._step(Opened(consumer.filters, Style.IN_PLACE))

    def _looked(self, consumer: Any) -> None:
        if consumer is None:
            self._gone()
        else:
            ours = consumer.pin_id in (None, self._pin.pin_id)
            self._step(Looked(consumer.filters, ours))

    def _on_consumer(self, question: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """A request about the consumer, which may have been deleted meanwhile."""

        def ask() -> tuple[bool, Any]:
            return (True, question()) if self.member in self.server.consumers else (False, None)

        self._ask(ask, lambda result: answer(result[1]) if result[0] else self._gone())

    def _gone(self) -> None:
        self._close()
        self._step(HandoffEvent.GONE)

    def consumer_deleted(self) -> None:
        """The server ends all pulls. An action that is under way finds out by itself."""
        if not self.state.reading:
            return
        if self._under_way:
            self._lanes.forget()
            self._tell(HandoffEvent.UNPINNED)
        else:
            self._under_way = True
            self._gone()

    def _delete(self, *, surely: bool) -> None:
        consumer = self.server.consumers.get(self.member)
        if consumer is not None and (surely or not (consumer.readers or consumer.pinned)):
            self.server.delete(self.member)

    def _give_back(self, pin_id: str | None) -> None:
        consumer = self.server.consumers.get(self.member)
        if consumer is not None and pin_id is not None and consumer.pin_id == pin_id:
            self.server.reset(self.member)
            self.server.unpin(self.member)

    # ---- the feed --------------------------------------------------------------------------------------

    def _open_pulls(self) -> None:
        self._pulls += 1
        number = self._pulls

        def arrive() -> None:
            if number == self._pulls and not self.is_dead:
                self.server.read(self.member, self)

        self.clock.after(self.clock.random.randint(1, 20), arrive)

    def _close_pulls(self) -> None:
        self._pulls += 1
        self.server.stop_reading(self.member, self)

    def _close(self) -> None:
        self._close_pulls()
        self._lanes.forget()
        self._owed.clear()
        self._pin = pin.Pin()
        self._attempt += 1

    def _reset(self, start: int | None, then: Callable[[], None]) -> None:
        """With closed pulls: nothing is delivered meanwhile. An ack that falls into it is owed."""
        self._close_pulls()
        self._resetting = True
        pulls = self._pulls

        def reset() -> tuple[int, int]:
            self.server.reset(self.member, start)
            consumer = self.server.consumers[self.member]
            return consumer.made, consumer.resets

        def done(_: object) -> None:
            self._resetting = False
            if self._pulls == pulls:
                self._open_pulls()
            then()

        self.clock.after(60, lambda: self._on_consumer(reset, done))

    def receive(self, delivery: Delivery) -> None:
        pulls = self._pulls
        self.hear_soon(lambda: self._arrived(delivery) if pulls == self._pulls else None)

    def hear_soon(self, what: Callable[[], None]) -> None:
        """What the server sends: a connection keeps the order."""
        self._link_at = max(self._link_at, self.clock.now + self.clock.random.choice((3, 5, 30)))
        self._after(self._link_at - self.clock.now, what)

    def _arrived(self, delivery: Delivery) -> None:
        follows = delivery.consumer_sequence == self._next_sequence
        self._next_sequence = delivery.consumer_sequence + 1
        seen = pin.Delivered(delivery.pin_id, delivery.consumer_sequence, follows)
        self._pin_event(pin.event_of(self._pin, seen, reset_on_takeover=True), seen, delivery)

    def _pin_event(self, event: pin.Event, seen: pin.Delivered | None = None, delivery: Delivery | None = None) -> None:
        before = self._pin
        self._pin, actions = pin.step(before, event, seen)
        if self._pin.phase is pin.Phase.DOUBTING and before.phase is not pin.Phase.DOUBTING:
            self._tell(HandoffEvent.DOUBTED)
        if before.phase is pin.Phase.DOUBTING and self._pin.phase is pin.Phase.PINNED:
            self._tell(HandoffEvent.CONFIRMED)
        for action in actions:
            self._pin_action(action, delivery)

    def _pin_action(self, action: pin.Action, delivery: Delivery | None) -> None:
        match action:
            case pin.Action.TELL_PINNED:
                assert self._pin.pin_id is not None
                anew = self._pin.pin_id != self._pin_of_handoff
                self._pin_of_handoff = self._pin.pin_id
                self._tell(PinReceived(anew))
                self.poke()
            case pin.Action.TELL_UNPINNED:
                self._lanes.forget()
                self._owed.clear()
                self._tell(HandoffEvent.UNPINNED)
                self._quiet()
            case pin.Action.DELIVER:
                assert delivery is not None
                self._take(delivery)
            case pin.Action.RESET:
                self._attempt += 1
                attempt = self._attempt
                self._reset(None, lambda: self._pin_event(pin.Event.RESET_DONE) if attempt == self._attempt else None)
            case pin.Action.VERIFY:
                self._attempt += 1
                self._verify(self._attempt)
            case pin.Action.FORGET:
                self._lanes.forget()
            case _:  # HOLD is a DROP here: the consumer's next gap makes a reset
                pass

    def _verify(self, attempt: int) -> None:
        def answer(consumer: Any) -> None:
            if attempt == self._attempt:
                ours = consumer is not None and consumer.pin_id == self._pin.pin_id
                self._pin_event(pin.Event.CONFIRMED if ours else pin.Event.DENIED)
                self._next_sequence = 0
                self.poke()

        self._ask(lambda: self.server.consumers.get(self.member), answer)

    # ---- handlers --------------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        if delivery.partition not in self.state.admitted:
            if delivery.partition in self.state.unexpected({delivery.partition}):
                self._tell(Surprised(frozenset({delivery.partition})))
                self.poke()
            if self._lanes.is_done(delivery.sequence):
                self._ack(delivery)
            return
        if self._lanes.arrive(delivery.sequence, delivery.key, delivery) is DONE:
            self._ack(delivery)
        self._start()

    def _start(self) -> None:
        if self.state.role is Role.DOUBTFUL:
            return
        while (entry := self._lanes.take()) is not None:
            self._run(entry)

    def _run(self, entry: Entry[Delivery]) -> None:
        self._log.began(self, entry.item)
        duration = self.clock.random.choice((0, 0, 5, 40, 200))
        self._after(duration, lambda: self._ended(entry))

    def _ended(self, entry: Entry[Delivery]) -> None:
        if self.clock.random.random() < 0.03:
            self._log.failed(self, entry.item)
            retry_at = self._lanes.failed(entry, self.clock.now)
            assert retry_at is not None
            self._after(int(retry_at) - self.clock.now, self._retry)
        else:
            self._log.did(self, entry.item)
            self._lanes.finished(entry)
            self._ack(entry.item)
        self._quiet()
        self._start()

    def _retry(self) -> None:
        self._lanes.due(self.clock.now)
        self._start()

    def _ack(self, delivery: Delivery) -> None:
        consumer = self.server.consumers.get(self.member)
        current = consumer is not None and (consumer.made, consumer.resets) == delivery.generation
        if self._resetting or not current:
            self._owed[delivery.sequence] = delivery
            return
        self._owed.pop(delivery.sequence, None)
        self.clock.after(5, lambda: self.server.ack(self.member, delivery))

    def _beat(self) -> None:
        """Tells the server that messages are in progress."""
        for entry in self._lanes:
            self.server.keep_alive(self.member, entry.sequence)
        self._start()
        if self.state.reading and not self._resetting and not self._under_way:
            if self.member in self.server.consumers:
                self.server.read(self.member, self)
            else:  # the next pull is refused
                self.consumer_deleted()
        self._after(ACK_WAIT // 3, self._beat)

    def _drain(self, partitions: frozenset[int] | None, then: HandoffEvent) -> None:
        self._waiting_for_quiet = partitions, then
        self._patient_until = self.clock.now + OWED
        self._quiet()

    def _quiet(self) -> None:
        """Reports once nothing of the partitions runs and no ack of them is owed."""
        if self._waiting_for_quiet is None:
            return
        partitions, then = self._waiting_for_quiet

        def concerns(delivery: Delivery) -> bool:
            return partitions is None or delivery.partition in partitions

        self._lanes.forget(concerns)
        if self._lanes.running(concerns):
            return
        is_owed = any(concerns(one) for one in self._owed.values()) and self.state.role is Role.ACTIVE
        if is_owed and self.clock.now < self._patient_until:  # it may be gone, and never come again
            self._after(20, self._quiet)
            return
        self._waiting_for_quiet = None
        self._after(40, lambda: self._step(then))  # the acks are confirmed


class Evidence:
    """What handlers did, and whether that is right. Knows nothing of the machines."""

    def __init__(self) -> None:
        self.effects: list[tuple[int, str]] = []
        self.problems: list[str] = []
        self.repeated: list[int] = []
        self._seen: set[int] = set()
        self._last: dict[str, int] = {}
        self._at_work: dict[str, dict[Instance, int]] = {}

    def began(self, instance: Instance, delivery: Delivery) -> None:
        others = self._at_work.setdefault(delivery.key, {})
        for other, sequence in list(others.items()):
            if other.is_dead or other.is_frozen or other.state.role is not Role.ACTIVE:
                continue
            self.problems.append(f"{instance.name} began {delivery} while {other.name} is at {sequence}")
        others[instance] = delivery.sequence

    def failed(self, instance: Instance, delivery: Delivery) -> None:
        self._at_work[delivery.key].pop(instance, None)

    def did(self, instance: Instance, delivery: Delivery) -> None:
        self._at_work[delivery.key].pop(instance, None)
        self.effects.append((delivery.sequence, instance.name))
        if delivery.sequence in self._seen:
            self.repeated.append(delivery.sequence)
            return
        self._seen.add(delivery.sequence)
        if self._last.get(delivery.key, 0) > delivery.sequence:
            self.problems.append(f"{delivery} was done after {self._last[delivery.key]} by {instance.name}")
        self._last[delivery.key] = max(self._last.get(delivery.key, 0), delivery.sequence)

    def missing(self, published: dict[int, tuple[int, str]]) -> list[int]:
        return sorted(published.keys() - self._seen)
