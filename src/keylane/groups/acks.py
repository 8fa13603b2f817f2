"""Acks that count, though the consumer is reset while messages are at work.

A reset voids all deliveries before it: an ack of one of them that the server reads after the reset does nothing, and
the message is delivered again. So an ack that would fall into a reset, or belongs to a delivery from before it, is kept
back: it is owed until the message comes again, and goes with that delivery. Whoever gives a partition away first waits
until nothing of it is owed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from keylane.groups.message import GroupMessage


class Acks:
    """The acks of one member. Nothing to do with it unless `in_doubt`."""

    __slots__ = ("_owed", "_resetting", "_void", "in_doubt")

    def __init__(self) -> None:
        self._resetting = False
        self._void: set[int] = set()
        self._owed: dict[int, GroupMessage] = {}
        self.in_doubt = False
        """Some acks would not count: tell of every message that arrives or is done."""

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
        """New deliveries: their acks count again."""
        for message in messages:
            self._void.discard(message.sequence)
            self._owed.pop(message.sequence, None)
        self._look()

    def done(self, message: GroupMessage) -> None:
        """Ack it, now or with its next delivery."""
        if self._resetting or message.sequence in self._void:
            self._owed[message.sequence] = message
        elif not message.delivery.settled:
            message.delivery.ack()

    def owes(self, which: Callable[[GroupMessage], bool] | None = None) -> bool:
        return any(which is None or which(message) for message in self._owed.values())

    def forget(self) -> None:
        """Another instance has the messages, or the consumer is gone: nothing of it comes here again."""
        self._void.clear()
        self._owed.clear()
        self._look()

    def _look(self) -> None:
        self.in_doubt = self._resetting or bool(self._void or self._owed)
