"""Balancing partitions over consumers: which one a consumer asks for, and which one its owner gives up.

A consumer that has fewer partitions than others asks: it claims a partition that somebody owns. The claim loses, and
everybody can read it in the log (`Claim.requests`); consumers without this feature ignore it. The owner gives the
partition up if it owns at least two more than the consumer that asks, so each move makes the shares more even, and they
end within one of each other.

Owns: both rules. They follow from the log alone, and do not decide who owns what: the first claim wins a released
partition, as usual. Other consumers merely refrain from claiming it (`is_spoken_for`).

What bounds the moves
1. A move goes from a larger share to one that is smaller by two or more, so the sum of the squares of all shares falls.
   A requested partition counts as already given, so nobody is given too much at once.
2. A partition stays with its owner for at least one interval.
3. A request may be met for two intervals; then its writer may have died. It counts for four, since the owner may take
   a while to release the partition.
4. A consumer asks for `MOST_REQUESTS` at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from keylane.core.claim_facts import Claim, Key, Owner, Request

MOST_REQUESTS = 8
_MAY_BE_MET = 2
_COUNTS = 4


class GroupView(NamedTuple):
    """The claims of one group, and the time in each partition of the log."""

    claims: Sequence[Claim]
    now_ms: Sequence[int]
    interval_ms: int

    def holds(self, claim: Claim) -> bool:
        return claim.holds(self.now_ms[claim.log_partition])

    def requests(self, claim: Claim) -> Iterator[Request]:
        """The requests that count: somebody owns the partition, or it was just released."""
        now_ms = self.now_ms[claim.log_partition]
        if self.holds(claim) or _is_just_released(claim, now_ms, self.interval_ms):
            yield from (one for one in claim.requests if now_ms <= one.time_ms + _COUNTS * self.interval_ms)

    def has_asked(self, owner: Owner) -> bool:
        """Whether a partition may be released for this consumer soon."""
        return any(one.owner == owner for claim in self.claims for one in self.requests(claim))

    def shares(self) -> Counter[Owner]:
        """How many partitions each consumer owns."""
        return Counter(one.owner for one in self.claims if one.owner is not None and self.holds(one))


def to_give_up(view: GroupView, me: Owner, leaving: Collection[Key] = ()) -> dict[Key, Owner]:
    """The partitions that `me` should release, and who asked for each. `leaving`: those it is already releasing.

    Requests are judged in their order. The share of a consumer that asks is what it owns plus its earlier requests.
    """
    shares, asked = view.shares(), Counter[Owner]()
    shares[me] -= sum(view.holds(one) and one.owner == me for one in view.claims if one.key in leaving)
    found: dict[Key, Owner] = {}
    for claim, request in _in_order(view):
        who = request.owner
        is_mine = claim.owner == me and claim.key not in leaving and claim.key not in found
        if is_mine and _may_move(view, claim, request) and shares[me] >= shares[who] + asked[who] + 2:
            found[claim.key] = who
            shares[me] -= 1
        asked[who] += 1
    return found


def to_ask_for(
    view: GroupView,
    me: Owner,
    *,
    may_ask: Callable[[Claim], bool],
    choose: Callable[[int], int],
    most: int | None = None,
) -> list[Key]:
    """The partitions that `me` should claim although somebody owns them. `most`: the maximum that it wants to own.

    `may_ask`: whether to ask for a partition: of a topic that `me` reads, and not recently refused. `choose(n)`: a
    number from 0 to n - 1. Takes from the largest shares first; earlier requests count.
    """
    shares = view.shares()
    asked = 0
    free_of_me: dict[Owner, list[Claim]] = {}
    for claim in view.claims:
        if claim.owner == me:
            continue
        if any(one.owner == me for one in view.requests(claim)):
            asked += 1
            if claim.owner is not None:
                shares[claim.owner] -= 1
        elif claim.owner is not None and view.holds(claim) and may_ask(claim):
            free_of_me.setdefault(claim.owner, []).append(claim)
    found: list[Key] = []
    while asked < MOST_REQUESTS and free_of_me:
        own = shares[me] + asked
        largest = max(free_of_me, key=lambda owner: (shares[owner], owner))
        if shares[largest] < own + 2 or (most is not None and own >= most):
            break
        theirs = free_of_me[largest]
        found.append(theirs.pop(choose(len(theirs))).key)
        if not theirs:
            del free_of_me[largest]
        shares[largest] -= 1
        asked += 1
    return found


def is_spoken_for(claim: Claim, me: Owner, now_ms: int, interval_ms: int) -> bool:
    """Whether a partition was released for another consumer, which has one interval to claim it."""
    released = claim.released
    if released is None or not _is_just_released(claim, now_ms, interval_ms):
        return False
    heirs = [one.owner for one in claim.requests if released.time_ms <= one.time_ms + _COUNTS * interval_ms]
    return bool(heirs) and me not in heirs


def _is_just_released(claim: Claim, now_ms: int, interval_ms: int) -> bool:
    return claim.owner is None and claim.released is not None and now_ms <= claim.released.time_ms + interval_ms


def _may_move(view: GroupView, claim: Claim, request: Request) -> bool:
    now_ms = view.now_ms[claim.log_partition]
    is_young = now_ms <= request.time_ms + _MAY_BE_MET * view.interval_ms
    return is_young and claim.since_ms is not None and now_ms > claim.since_ms + view.interval_ms


def _in_order(view: GroupView) -> Iterable[tuple[Claim, Request]]:
    """All requests that count, the oldest first."""
    found = [(claim, one) for claim in view.claims for one in view.requests(claim)]
    return sorted(found, key=lambda pair: (pair[1].time_ms, pair[0].log_partition, pair[1].at))
