"""Settles a member's messages when their handlers end: ack, retry, dead letter, or nothing if others have them.

The policy of a member's dispatcher. Runs no handler. Waits only for the storing of a dead letter or of a delayed retry,
in a separate task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from keylane.core.lanes import Entry, Lanes
from keylane.dispatch import Dispatcher, Settling, error_line, store_dead_letter
from keylane.errors import Fenced, InvalidPayload, LedgerMismatch
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import GroupMessage, Outcome
from keylane.retrying import backoff_s


class Acks:
    """The acks of one member, which count although its consumer is reset while messages are at work.

    A reset voids all deliveries before it: an ack of one of them that the server reads after the reset does nothing,
    and the message is delivered again. So an ack that would fall into a reset, or belongs to a delivery from before it,
    is owed until the message comes again, and goes with that delivery. Whoever gives a partition away first waits until
    nothing of it is owed. Nothing to do with it unless `in_doubt`.
    """

    __slots__ = ("_owed", "_resetting", "_void", "in_doubt")

    def __init__(self) -> None:
        self._resetting = False
        self._void: set[int] = set()
        self._owed: dict[int, GroupMessage] = {}
        self.in_doubt = False
        """Some acks would not count: report every message that arrives or is done."""

    @contextmanager
    def around_reset(self, here: Callable[[], Collection[int]]) -> Iterator[None]:
        """While the consumer is reset. `here`: the sequences whose deliveries the reset makes void."""
        self._resetting = self.in_doubt = True
        before = set(self._owed)
        try:
            yield
        except BaseException:
            # It may have happened or not: if so, these come again and are acked again.
            for sequence in self._owed.keys() - before:
                delivery = self._owed.pop(sequence).delivery
                if not delivery.settled:
                    delivery.ack()
            raise
        else:
            self._void = set(here())
        finally:
            self._resetting = False
            self._look()

    def arrived(self, messages: list[GroupMessage]) -> None:
        """Take new deliveries: their acks count."""
        for message in messages:
            self._void.discard(message.delivery_sequence)
            self._owed.pop(message.delivery_sequence, None)
        self._look()

    def done(self, message: GroupMessage) -> None:
        """Ack the message, now or with its next delivery."""
        if self._resetting or message.delivery_sequence in self._void:
            self._owed[message.delivery_sequence] = message
        elif not message.delivery.settled:
            message.delivery.ack()

    def owes(self, which: Callable[[GroupMessage], bool] | None = None) -> bool:
        return any(which is None or which(message) for message in self._owed.values())

    def forget(self) -> None:
        """Forget all: another instance has the messages, or the consumer is gone."""
        self._void.clear()
        self._owed.clear()
        self._look()

    def _look(self) -> None:
        self.in_doubt = self._resetting or bool(self._void or self._owed)


class KeyIsParked(Exception):
    """An earlier message of this key had all its tries: this one is stored behind it."""


_log = logging.getLogger("keylane.groups")

_DONE = "done"
_CANCELLED = "cancelled"
_SETTLED = (Outcome.DONE, Outcome.TERMINATED)


class Settlement:
    """Settles the messages of one member."""

    def __init__(self, options: HandlerOptions, acks: Acks, may_go_on: Callable[[], bool]) -> None:
        self._options = options
        self._acks = acks
        self._may_go_on = may_go_on
        self._is_acked = options.acks and options.commits == "message"
        self._plain = self._is_acked and not options.manual_ack and options.journal is None
        self._is_prefix = options.commits == "prefix" and options.journal is None
        self.dispatcher: Dispatcher[GroupMessage]
        """Set once it is made."""
        self.revoked: dict[Entry[GroupMessage], GroupMessage] = {}
        """What ran here when another instance took over."""
        self.fenced: set[int] = set()
        """The partitions whose refusal by the ledger was logged."""

    @property
    def _lanes(self) -> Lanes[GroupMessage]:
        return self.dispatcher.lanes

    def is_lost(self, entry: Entry[GroupMessage]) -> bool:
        """Whether another instance took the message, and it was not delivered here again since."""
        return self.revoked.get(entry) is entry.item

    # ---- the dispatcher asks ------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        return self._may_go_on()

    def returned(self, entry: Entry[GroupMessage], given: GroupMessage) -> str:
        if self._plain and not self._acks.in_doubt:
            # `_done` in the usual case, written out: it runs once for every message.
            delivery = entry.item.delivery
            if not delivery.settled:
                delivery.ack()
            self.dispatcher.lanes.finished(entry)
            return _DONE
        if self._is_prefix:
            self.dispatcher.lanes.finished(entry)
            return _DONE
        if not self._options.manual_ack or given.outcome in _SETTLED:
            return self._done(entry, given)
        self._again(entry, 0.0 if given.outcome is Outcome.AGAIN else None)
        return "returned"

    def failed(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> str | Settling:
        if given.outcome in _SETTLED:
            self._report(given, error, entry.tries + 1)
            return self._done(entry, given)
        if self.is_lost(entry):
            _log.info("%r failed after another instance took over: %s", given, error_line(error), exc_info=error)
            self._lanes.release(entry)
            return _CANCELLED
        if isinstance(error, KeyIsParked):
            return partial(self._give_up, entry, error, 0)
        if isinstance(error, Fenced):
            self._log_fenced(given, error)
            self.dispatcher.retry_at(self._lanes.postponed(entry, self.dispatcher.now(), backoff_s(1)))
            return "failed"
        return self._try_again(entry, given, error)

    def cancelled(self, entry: Entry[GroupMessage], given: GroupMessage) -> str:
        self._lanes.release(entry)
        if entry in self.revoked:
            _log.warning("%r: its handler was cancelled, as another instance has the message now", given)
        return _CANCELLED

    def crashed(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> None:
        self._call_on_failure(given, error, entry.tries + 1)

    # ---- outcomes -----------------------------------------------------------------------------------

    def _done(self, entry: Entry[GroupMessage], given: GroupMessage) -> str:
        self._ack(entry)
        return _DONE if given.outcome is not Outcome.TERMINATED else "terminated"

    def _ack(self, entry: Entry[GroupMessage]) -> None:
        # The newest delivery is the one to settle: a reset voids the earlier ones.
        delivery = entry.item.delivery
        if self._acks.in_doubt:
            self._acks.done(entry.item)
        elif self._is_acked and not delivery.settled:
            delivery.ack()
        self._lanes.finished(entry)

    def _again(self, entry: Entry[GroupMessage], delay_s: float | None) -> None:
        """Let the server deliver it again, after this delay or (None) after its ack wait. Its lane continues."""
        if delay_s is not None and not entry.item.delivery.settled:
            entry.item.delivery.nak(delay_s)
        self._lanes.release(entry)

    def _try_again(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> str | Settling:
        """Retry later, here or by the server; give it up after its last try, or where no try can help."""
        if isinstance(error, InvalidPayload) and self._options.give_up is not None:
            tries = given.earlier_tries + entry.tries + 1
            self._report(given, error, tries)
            return partial(self._give_up, entry, error, tries)
        if given.outcome is Outcome.AGAIN or self._options.server_retries:
            tries = given.delivered_count
            self._report(given, error, tries)
            if self._options.max_tries is not None and tries >= self._options.max_tries:
                return partial(self._give_up, entry, error, tries)
            self._again(entry, backoff_s(tries))
            return "failed"
        if self._options.delay is not None:
            return self._try_later(entry, given, error)
        retry_at = self._lanes.failed(entry, self.dispatcher.now())
        self._report(given, error, entry.tries)
        if retry_at is None:
            return partial(self._give_up, entry, error, entry.tries)
        self.dispatcher.retry_at(retry_at)
        return "failed"

    def _try_later(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> Settling:
        """Retry off the lane, after a delay; give it up after its last try."""
        tries = given.earlier_tries + 1
        self._report(given, error, tries)
        assert self._options.max_tries is not None
        return partial(self._give_up if tries >= self._options.max_tries else self._delay, entry, error, tries)

    async def _delay(self, entry: Entry[GroupMessage], error: BaseException, tries: int) -> str:
        """Store the message for its next try; then its lane continues."""
        assert self._options.delay is not None
        if not await store_dead_letter(
            self._options.delay,
            lambda: entry.item,
            error,
            tries,
            log=_log,
            until=lambda: self.is_lost(entry),
            purpose="for a delayed retry",
        ):
            self._lanes.release(entry)
            return _CANCELLED
        self._ack(entry)
        return "delayed"

    async def _give_up(self, entry: Entry[GroupMessage], error: BaseException, tries: int) -> str:
        """Store the message after its last try, or behind a parked one of its key; then its lane continues."""
        store = self._options.give_up
        if store is not None and not await store_dead_letter(
            store, lambda: entry.item, error, tries, log=_log, until=lambda: self.is_lost(entry)
        ):
            self._lanes.release(entry)
            return _CANCELLED
        if self._is_acked and not entry.item.delivery.settled:
            entry.item.delivery.term(
                "parked" if self._options.gate else f"given up after {tries} {'try' if tries == 1 else 'tries'}"
            )
        self._lanes.finished(entry)
        return "parked" if self._options.gate is not None else "dead"

    # ---- telling ------------------------------------------------------------------------------------

    def _log_fenced(self, given: GroupMessage, error: Fenced) -> None:
        """Log it once for each partition: all its messages are refused for the same reason, and retried."""
        is_news = given.partition not in self.fenced and not isinstance(error, LedgerMismatch)  # shown by the member
        self.fenced.add(given.partition)
        _log.log(logging.WARNING if is_news else logging.DEBUG, "%r: %s", given, error)

    def _report(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        origin = message.origin
        _log.log(
            logging.WARNING if self._options.on_failure is None else logging.DEBUG,
            "handler failed: stream %s, group %s, member %s, subject %s, partition %d, key %r, sequence %d (try %d): "
            "%s",
            origin.stream,
            origin.group,
            origin.member,
            message.subject,
            message.partition,
            message.key,
            message.sequence,
            tries,
            error_line(error),
            exc_info=error,
            extra={"context": message.context},
        )
        self._call_on_failure(message, error, tries)

    def _call_on_failure(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        if self._options.on_failure is None:
            return
        try:
            self._options.on_failure(message, error, tries)
        except Exception:  # noqa: BLE001 - a hook may raise anything, and the message must not wait for it
            _log.exception("the hook on_failure failed; the message is tried again all the same")
