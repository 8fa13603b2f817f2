"""Judges evidence: compares the messages sent with what handlers did, in the order in which they did it.

Knows nothing about readers, pins or lanes. Evidence comes from the handlers themselves (a file, a table, a pipe).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Effect(NamedTuple):
    """One handled message: its key, its sequence in the stream, and who handled it."""

    key: str
    sequence: int
    by: str = ""


@dataclass(frozen=True, slots=True)
class DeliveryVerdict:
    """What the evidence shows. Sequences are listed, so that each finding can be looked at."""

    sent: int
    handled: int
    lost: tuple[int, ...]
    duplicated: tuple[int, ...]
    out_of_order: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def clean(self) -> bool:
        """Nothing is lost, out of order or unknown. Repeats may be allowed: check `duplicated`."""
        return not (self.lost or self.out_of_order or self.unknown)

    def __str__(self) -> str:
        return (
            f"sent {self.sent:,}, lost {len(self.lost):,}, duplicated {len(self.duplicated):,}, "
            f"out of order {len(self.out_of_order):,}"
        )


class Evidence:
    """What was sent and what was handled, collected while a test runs; then judged.

    >>> evidence = Evidence()
    >>> evidence.sent(1, 2)
    >>> evidence.handled("a", 2)
    >>> evidence.lost
    (1,)
    """

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._effects: list[Effect] = []

    def sent(self, *sequences: int) -> None:
        self._sent += sequences

    def handled(self, key: str, sequence: int, by: str = "") -> None:
        """To be called by handlers, with `message.key` and `message.sequence`."""
        self._effects.append(Effect(key, sequence, by))

    def verdict(self) -> DeliveryVerdict:
        return judge(self._sent, self._effects)

    @property
    def lost(self) -> tuple[int, ...]:
        return self.verdict().lost

    @property
    def duplicated(self) -> tuple[int, ...]:
        return self.verdict().duplicated

    @property
    def out_of_order(self) -> tuple[int, ...]:
        return self.verdict().out_of_order


def judge(sent: Iterable[int], effects: Iterable[Effect]) -> DeliveryVerdict:
    """Compare the sequences sent with the effects, oldest effect first.

    A message is out of order if a later message of its key had its first effect before it.

    >>> str(judge([1, 2, 3], [Effect("a", 1), Effect("a", 3), Effect("a", 2), Effect("a", 3)]))
    'sent 3, lost 0, duplicated 1, out of order 1'
    """
    expected = set(sent)
    times: Counter[int] = Counter()
    newest: dict[str, int] = {}
    out_of_order: list[int] = []
    for key, sequence, _ in effects:
        times[sequence] += 1
        if times[sequence] > 1:
            continue
        if sequence < newest.get(key, 0):
            out_of_order.append(sequence)
        newest[key] = max(sequence, newest.get(key, 0))
    return DeliveryVerdict(
        sent=len(expected),
        handled=len(times),
        lost=tuple(sorted(expected - times.keys())),
        duplicated=tuple(sorted(sequence for sequence, count in times.items() if count > 1)),
        out_of_order=tuple(out_of_order),
        unknown=tuple(sorted(times.keys() - expected)),
    )
