"""Why the server refuses a pull for good: from the text of its answer to the error that says what to do."""

from __future__ import annotations

from keylane.errors import (
    NotAnOverflowConsumer,
    NotAPinnedConsumer,
    PriorityGroupInvalid,
    PriorityGroupMissing,
    PriorityOutOfRange,
    PullRefused,
)

# The server's words after "Bad Request - ", and ours for what to do.
_REASONS: dict[str, tuple[type[PullRefused], str]] = {
    "Priority Group missing": (
        PriorityGroupMissing,
        "the consumer has a priority group: read it with keylane.priority",
    ),
    "Invalid Priority Group": (PriorityGroupInvalid, "look up the group's name in the consumer's configuration"),
    "Not a Overflow Priority consumer": (
        NotAnOverflowConsumer,
        "only the policy overflow knows min_pending and min_ack_pending",
    ),
    "Not a Pinned Client Priority consumer": (
        NotAPinnedConsumer,
        "the consumer was replaced by one without pins: open the feed again",
    ),
    "Priority must be between 0 and 9": (PriorityOutOfRange, "0 is served first, 9 last"),
}


def refusal(stream: str, consumer: str, code: int, text: str) -> PullRefused:
    """The error for a status that ends a feed because asking again cannot help."""
    kind, advice = _REASONS.get(text.removeprefix("Bad Request - "), (PullRefused, ""))
    what = f"the server refuses to serve consumer {consumer!r} of stream {stream!r}: {code} {text}"
    return kind(f"{what}; {advice}" if advice else what)
