"""The state of a running member of a group, as one word and one sentence. Pure: from facts to text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MemberState(StrEnum):
    """What a member is doing. `Member.waiting_for` says what it waits for, if it waits."""

    JOINING = "joining"
    """It has no consumer yet."""
    NOT_LISTED = "not listed"
    """The group does not name it: it gets nothing until it is added."""
    NO_PARTITIONS = "no partitions"
    """The group has more members than partitions, and this one got none."""
    READY = "ready"
    """No message has come yet: the first one makes one instance of the member active."""
    STANDBY = "standby"
    """Another instance of the member is active."""
    ACTIVE = "active"
    """The instance that gets the member's messages."""
    WAITING = "waiting"
    """Something must happen first."""
    UNREACHABLE = "unreachable"
    """The server does not answer. The member retries until it does."""
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """What an instance knows about itself. Texts complete the sentence "waiting for …"; None means no such wait."""

    stream: str
    group: str
    member: str
    is_ended: bool = False
    is_stopping: bool = False
    trouble: str | None = None
    """Why the server is not available now."""
    is_listed: bool = True
    has_partitions: bool = True
    members: int = 0
    partitions: int = 0
    handler_wait: str | None = None
    """Why the handler cannot handle any message."""
    consumer_wait: str | None = None
    """A step of the consumer: the partitions that it is to gain or give away."""
    message_wait: str | None = None
    """Why no message can arrive."""
    has_consumer: bool = False
    is_active: bool = False
    is_other_active: bool = False


def state_of(facts: MemberFacts) -> tuple[MemberState, str | None]:
    """The state, and what the member waits for: the first rule that applies, most final state first."""
    name = f"{facts.stream} {facts.group} {facts.member}"
    rules = (
        (facts.is_ended, MemberState.ENDED, None),
        (facts.is_stopping, MemberState.STOPPING, "handlers that are at work, and their acks"),
        (facts.trouble is not None, MemberState.UNREACHABLE, f"the server: {facts.trouble}"),
        (not facts.is_listed, MemberState.NOT_LISTED, f"the group to list it: keylane elastic add {name}"),
        (
            not facts.has_partitions,
            MemberState.NO_PARTITIONS,
            f"a partition: the group has {facts.partitions} for {facts.members} members; one of those must go first",
        ),
        (facts.handler_wait is not None, MemberState.WAITING, facts.handler_wait),
        (facts.is_active, MemberState.ACTIVE, facts.consumer_wait),
        (facts.consumer_wait is not None, MemberState.WAITING, facts.consumer_wait),
        (facts.message_wait is not None, MemberState.WAITING, facts.message_wait),
        (not facts.has_consumer, MemberState.JOINING, None),
        (facts.is_other_active, MemberState.STANDBY, f"the active instance of {facts.member} to end"),
    )
    return next(((state, waits) for holds, state, waits in rules if holds), (MemberState.READY, None))


def in_words(state: MemberState, waiting_for: str | None) -> str:
    """Both in one phrase, for logs and users.

    >>> in_words(MemberState.STANDBY, "the active instance of a to end")
    'standby, waiting for the active instance of a to end'
    """
    if waiting_for is None:
        return state.value
    return f"waiting for {waiting_for}" if state is MemberState.WAITING else f"{state.value}, waiting for {waiting_for}"
