"""What the scaling rule needs to know of a group, from an overview."""

from __future__ import annotations

from keylane.core.scaling import LoadObservation
from keylane.overview import AccountOverview, GroupOverview


def load_of(account: AccountOverview, group: GroupOverview, at_s: float) -> LoadObservation:
    """`at_s`: the time of the overview by a clock that never goes back."""
    listed = [one for one in group.members if one.state != "leaving"]
    return LoadObservation(
        at_s=at_s,
        workers=len(listed),
        active=sum(1 for one in listed if one.is_active),
        partitions=len(group.partitions),
        lagging=sum(1 for one in group.partitions if one.lag != 0),
        lag=group.lag,
        lag_s=group.lag_s,
        arrived=_arrived(account, group),
        problem=group.problem or ("it is paused" if group.is_paused else group.change),
    )


def _arrived(account: AccountOverview, group: GroupOverview) -> int | None:
    """All that ever came to the queue of an elastic group, or to the stream of a fleet.

    A fleet that reads only some subjects of its stream handles fewer. That does not change whether more come than it
    handles, and makes the first steps smaller.
    """
    name = group.queue.stream if group.queue is not None else group.stream
    stream = next((one for one in account.streams if one.name == name), None)
    if stream is None:
        return None
    return stream.last_sequence + (group.queue.source_lag if group.queue is not None else 0)
