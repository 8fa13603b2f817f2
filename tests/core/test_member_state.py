"""One word and one sentence for what a member is doing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keylane.core.member_state import MemberFacts, MemberState, state_of

CALM = MemberFacts(stream="S", group="g", member="a", has_consumer=True)


@pytest.mark.parametrize(
    ("facts", "state", "waiting_for"),
    [
        (replace(CALM, has_consumer=False), "joining", None),
        (replace(CALM, is_active=True), "active", None),
        (replace(CALM, is_active=True, consumer_wait="c"), "active", "c"),
        (CALM, "ready", None),
        (replace(CALM, is_other_active=True), "standby", "the active instance of a to end"),
        (replace(CALM, message_wait="m"), "waiting", "m"),
        (replace(CALM, message_wait="m", consumer_wait="c"), "waiting", "c"),
        (replace(CALM, is_active=True, handler_wait="h"), "waiting", "h"),
        (replace(CALM, is_listed=False), "not listed", "the group to list it: keylane elastic add S g a"),
        (
            replace(CALM, has_partitions=False, partitions=4, members=6),
            "no partitions",
            "a partition: the group has 4 for 6 members; one of those must go first",
        ),
        (replace(CALM, is_listed=False, trouble="t"), "unreachable", "the server: t"),
        (replace(CALM, is_stopping=True, trouble="t"), "stopping", "handlers that are at work, and their acks"),
        (replace(CALM, is_ended=True, is_stopping=True), "ended", None),
    ],
)
def test_the_state(facts: MemberFacts, state: str, waiting_for: str | None) -> None:
    assert state_of(facts) == (MemberState(state), waiting_for)
