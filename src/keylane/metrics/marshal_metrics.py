"""What a Marshal consumer does, counted by its hooks."""

from __future__ import annotations

from typing import Any

from keylane.marshal import Consumer, ConsumerHooks
from keylane.metrics.catalogue import Reading
from keylane.metrics.handler_counts import HandlerCounts


class MarshalMetrics:
    """The metrics of one consumer: give its `hooks` to the `Consumer`, and the consumer to `watch`.

    >>> metrics = MarshalMetrics()
    >>> consumer = Consumer(log, source, "billing", "worker-1", ["ORDERS"], handler, hooks=metrics.hooks())
    >>> metrics.watch(consumer)
    """

    def __init__(self) -> None:
        self._consumer: Consumer | None = None
        self._counts = HandlerCounts()
        self._claims = self._releases = self._troubles = 0

    def hooks(self, also: ConsumerHooks | None = None) -> ConsumerHooks:
        """The hooks that count; `also`: hooks of the program's own, which are called as well."""
        mine = ConsumerHooks(
            on_delivered=self._counts.arrived,
            on_returned=self._counts.returned,
            on_outcome=self._counts.tried,
            on_claimed=self._claimed,
            on_released=self._released,
            on_trouble=self._in_trouble,
        )
        return mine.and_also(also) if also is not None else mine

    def watch(self, consumer: Consumer) -> None:
        """This is the consumer that the hooks tell of."""
        self._consumer = consumer

    def _claimed(self, *_: object) -> None:
        self._claims += 1

    def _released(self, *_: object) -> None:
        self._releases += 1

    def _in_trouble(self, _: object) -> None:
        self._troubles += 1

    def readings(self) -> list[Reading]:
        """What is known now."""
        consumer, counts = self._consumer, self._counts
        if consumer is None:
            return []
        labels = {"group": consumer.group, "client": consumer.client_id}
        values: dict[str, Any] = {
            "marshal_handler_latency_seconds": counts.latencies(),
            "marshal_messages_total": counts.messages,
            "marshal_in_flight": consumer.in_flight,
            "marshal_max_in_flight": consumer.max_in_flight,
            "marshal_partitions": len(consumer.partitions),
            "marshal_claims_total": self._claims,
            "marshal_releases_total": self._releases,
            "marshal_troubles_total": self._troubles,
        }
        found = [Reading(name, labels, value) for name, value in values.items()]
        return found + list(counts.tries("marshal_handler_tries_total", labels))
