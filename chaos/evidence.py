"""What members wrote down, and what was sent: read, put in order, judged.

The verdict is `keylane.testing.judge`'s, which knows nothing of groups. This adds where each fault lies.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from keylane.core.partitions import partition_number
from keylane.testing import Effect, Verdict, judge

MOST_EXPLAINED = 20


class Handled(NamedTuple):
    """One line of evidence."""

    at_s: float
    key: str
    partition: int
    sequence: int
    by: str
    queue_sequence: int = 0
    """0 where the process does not write it."""
    delivered: int = 0
    token: int = 0
    """The fencing token of its partition, which workers of fleets write."""
    begun_ns: int = 0
    """When its handler began, where the process writes that."""


class Failed(NamedTuple):
    """One try that failed."""

    at_s: float
    key: str
    partition: int
    sequence: int
    by: str
    tries: int
    meant: bool = True
    """Whether the handler failed on purpose."""
    queue_sequence: int = 0
    delivered: int = 0


class Fails(NamedTuple):
    """A try that was about to fail on purpose."""

    at_s: float
    sequence: int
    by: str


class StateChange(NamedTuple):
    """A worker of a fleet has told its state."""

    at_s: float
    by: str
    state: str


class Happening(NamedTuple):
    """Something that was done to the group, for the explanation of a fault that followed."""

    at_s: float
    what: str


class Log:
    """The evidence of one process, which may still be writing it."""

    def __init__(self, file: Path, by: str | None, partitions: int) -> None:
        """`by` None: several work in this process, and each line says whose it is."""
        self.handled: list[Handled] = []
        self.failed: list[Failed] = []
        self.linked: list[float] = []
        """When a lost link to the server was there again."""
        self.fails: list[Fails] = []
        self.crashed: list[Fails] = []
        """What ended the member on purpose."""
        self.lost: list[float] = []
        """When the pin was lost."""
        self.states: list[StateChange] = []
        self._file = file
        self.by = by or ""
        self._each_says = by is None
        self._partitions = partitions
        self._offset = 0
        self._places: dict[bytes, tuple[str, int]] = {}

    def read_on(self) -> None:
        """Take what was written since the last time. A line that is not whole (yet) is left: it was not written."""
        with self._file.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            words = line.split(b" ")
            if words[0] == b"failed":
                at_ns, subject, sequence, tries, meant, *more = words[1:]
                who = (*self._place(subject), int(sequence), self.by)
                self.failed.append(Failed(int(at_ns) / 1e9, *who, int(tries), meant == b"1", *map(int, more)))
            elif words[0] in (b"fails", b"crashed"):
                at_ns, _, sequence = words[1:]
                one = Fails(int(at_ns) / 1e9, int(sequence), self.by)
                (self.fails if words[0] == b"fails" else self.crashed).append(one)
            elif words[0] == b"lost":
                self.lost.append(int(words[1]) / 1e9)
            elif words[0] == b"linked":
                self.linked.append(int(words[1]) / 1e9)
            elif words[0] == b"state":
                at_ns, worker, state = words[1:]
                self.states.append(StateChange(int(at_ns) / 1e9, worker.decode(), state.decode()))
            elif words[0] != b"ready":
                at_ns, subject, sequence, member, *more = words
                by = member.decode() if self._each_says else self.by
                self.handled.append(
                    Handled(int(at_ns) / 1e9, *self._place(subject), int(sequence), by, *map(int, more))
                )

    def _place(self, subject: bytes) -> tuple[str, int]:
        """The last token of a subject is the key."""
        place = self._places.get(subject)
        if place is None:
            key = subject.decode().rpartition(".")[2]
            place = self._places[subject] = key, partition_number(key, self._partitions)
        return place


def read(file: Path, by: str, partitions: int) -> list[Handled]:
    """What one process handled, oldest first."""
    log = Log(file, by, partitions)
    log.read_on()
    return log.handled


def merged(logs: Iterable[Sequence[Handled]]) -> list[Handled]:
    """All evidence in the order in which it happened."""
    return list(heapq.merge(*logs, key=attrgetter("at_s")))


def verdict(sent: Iterable[int], handled: Iterable[Handled]) -> Verdict:
    return judge(sent, (Effect(one.key, one.sequence, one.by) for one in handled))


def explained(
    found: Verdict,
    handled: Iterable[Handled],
    keys: Mapping[int, str],
    happenings: Sequence[Happening],
    start_s: float,
) -> list[str]:
    """One line for each of the first faults: who handled the message and when, and what had happened before."""
    faults = [
        (name, sequence)
        for name, sequences in (
            ("lost", found.lost),
            ("duplicated", found.duplicated),
            ("out of order", found.out_of_order),
            ("unknown", found.unknown),
        )
        for sequence in sequences
    ][:MOST_EXPLAINED]
    wanted = {sequence for _, sequence in faults}
    by_sequence: dict[int, list[Handled]] = defaultdict(list)
    for one in handled:
        if one.sequence in wanted:
            by_sequence[one.sequence].append(one)
    lines = []
    for name, sequence in faults:
        times = by_sequence[sequence]
        who = ", ".join(f"{one.by} at {one.at_s - start_s:.3f} s" for one in times) or "nobody"
        before = [one for one in happenings if times and one.at_s <= times[-1].at_s]
        after = f"; after {before[-1].what} at {before[-1].at_s - start_s:.3f} s" if before else ""
        lines.append(f"{name}: {sequence} of key {keys.get(sequence, '?')}: {who}{after}")
    return lines
