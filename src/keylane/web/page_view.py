"""What the page shows, as JSON objects: one for the account, one for each group that somebody looks at. Pure.

What is unknown is left out, so that differences can be merge patches and nobody takes it for 0. Ages are rounded as
they are shown: what looks the same is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from keylane.overview import AccountOverview, GroupOverview, MemberOverview, PartitionOverview
from keylane.processing.dead_letters import DeadLetter
from keylane.web.given_up import ParkedKey
from keylane.web.move_texts import names_in_short
from keylane.web.timeline import TimelineEntry

Json = dict[str, Any]

_INTERNAL = ("KV_", "OBJ_", "$")


def group_id(group: GroupOverview) -> str:
    """Its place in the page: names have no slash."""
    return f"{group.kind}/{group.stream}/{group.name}"


def account_view(found: AccountOverview, *, server: str, trouble: str | None = None) -> Json:
    """Every stream and group of an account, a sentence for each."""
    queues = {one.queue.stream for one in found.groups if one.queue is not None}
    with_groups = {one.stream for one in found.groups}
    return _known(
        server=server,
        trouble=trouble,
        streams={
            one.name: {"messages": one.messages, "bytes": one.bytes, "consumers": one.consumers}
            for one in found.streams
            if one.name in with_groups
            or not (one.name.startswith(_INTERNAL) or one.name.endswith("@dlq") or one.name in queues)
        },
        groups={group_id(one): _line(one) for one in found.groups},
    )


def _line(group: GroupOverview) -> Json:
    owned = Counter(one.owner for one in group.partitions)
    return _known(
        kind=group.kind,
        stream=group.stream,
        name=group.name,
        summary=group.summary,
        standing=group.standing,
        needs_look=bool(group.unowned or group.dead_letters or group.parked_keys),
        shares=[owned[one.name] for one in group.members],
        unowned=len(group.unowned),
    )


def group_view(
    group: GroupOverview,
    *,
    timeline: Iterable[TimelineEntry] = (),
    dead_letters: Iterable[DeadLetter] = (),
    parked: Iterable[ParkedKey] = (),
) -> Json:
    """A group in full."""
    queue = group.queue
    return _known(
        kind=group.kind,
        stream=group.stream,
        name=group.name,
        summary=group.summary,
        standing=group.standing,
        problem=group.problem,
        change=group.change,
        is_paused=group.is_paused,
        lag=group.lag,
        age=_age(group.lag_s),
        in_flight=group.in_flight,
        redelivered=group.redelivered,
        dead_letter_count=group.dead_letters,
        parked_key_count=group.parked_keys,
        parked_message_count=group.parked_messages,
        queue=None
        if queue is None
        else _known(
            stream=queue.stream,
            messages=queue.messages,
            bytes=queue.bytes,
            source_lag=queue.source_lag,
            fill=None if queue.fill is None else round(queue.fill, 3),
        ),
        members={one.name: _member(place, one) for place, one in enumerate(group.members)},
        partitions={one.id: _partition(place, one) for place, one in enumerate(group.partitions)},
        timeline=[_entry(one) for one in timeline],
        dead_letters={str(one.sequence): _letter(one) for one in dead_letters},
        parked={
            _readable(one.first.key): {
                **_letter(one.first),
                "messages": one.messages,
                "is_releasing": one.is_releasing,
            }
            for one in parked
        },
    )


def _member(place: int, one: MemberOverview) -> Json:
    return _known(
        place=place,
        state=one.state,
        is_active=one.is_active,
        partitions=names_in_short(one.partitions),
        count=len(one.partitions),
        host=one.host,
        pid=one.pid,
        pin=one.pin,
        since=None if one.pinned_since is None else round(one.pinned_since.timestamp()),
        standbys=one.standbys,
        lag=one.lag,
        age=_age(one.lag_s),
        in_flight=one.in_flight,
        max_in_flight=one.max_in_flight,
        redelivered=one.redelivered,
        is_paused=one.is_paused,
        is_leader=one.is_leader,
        is_drained=one.is_drained,
        labels=list(one.labels),
    )


def _partition(place: int, one: PartitionOverview) -> Json:
    return _known(
        place=place,
        owner=one.owner,
        assigned=one.assigned if one.assigned != one.owner else None,
        lag=one.lag,
        age=_age(one.lag_s),
        in_flight=one.in_flight,
        token=one.token,
    )


def _entry(one: TimelineEntry) -> Json:
    return {"at": round(one.at.timestamp()), "cause": one.cause, "text": one.text, "moves": list(one.moves)}


def _letter(one: DeadLetter) -> Json:
    return {
        "at": round(one.time.timestamp()),
        "sequence": one.sequence,
        "subject": _readable(one.subject),
        "source_sequence": one.source_sequence,
        "partition": one.partition,
        "key": _readable(one.key),
        "member": _readable(one.member),
        "tries": one.tries,
        "error": _readable(one.error),
        "traceback": _readable(one.traceback),
        "size": len(one.data),
    }


def _age(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return round(seconds, 1) if seconds < 10 else float(round(seconds))


def _readable(text: str) -> str:
    """Without lone surrogates, which stand for bytes that are no UTF-8 and which JSON cannot carry."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _known(**values: Any) -> Json:
    return {name: value for name, value in values.items() if value is not None}
