"""The rules of priority groups that are checked before anything is sent."""

from __future__ import annotations

from typing import Any, cast

import pytest

from keylane.errors import InvalidInput, PriorityGroupMissing, PullRefused
from keylane.jetstream import ConsumerConfig, PriorityPolicy
from keylane.jetstream.pull_loop import refusal
from keylane.priority.rules import (
    POLICIES,
    check_config,
    check_expiry,
    check_group,
    check_terms,
    check_update,
)


def config(**changes: Any) -> ConsumerConfig:
    terms: dict[str, Any] = {"durable_name": "w", "priority_groups": ("jobs",), "priority_policy": "overflow"}
    return ConsumerConfig(**{**terms, **changes})


@pytest.mark.parametrize("group", ["a", "A-z_0/9=", "x" * 16])
def test_good_groups(group: str) -> None:
    assert check_group(group) == group


@pytest.mark.parametrize("group", ["", "x" * 17, "a b", "a.b", "ä", "a*", "a\n", "jobs\n", ">"])
def test_bad_groups(group: str) -> None:
    with pytest.raises(InvalidInput, match="1 to 16 of the characters") as refused:
        check_group(group)
    assert repr(group) in str(refused.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_good_configuration_passes_unchanged(policy: PriorityPolicy) -> None:
    good = config(priority_policy=policy)
    assert check_config(good) is good


def test_a_timeout_is_for_pins() -> None:
    check_config(config(priority_policy="pinned_client", priority_timeout_s=2.5))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"priority_policy": None}, "use one of overflow, pinned_client, prioritized"),
        ({"priority_policy": "none"}, "use one of overflow, pinned_client, prioritized"),
        ({"priority_groups": None}, "exactly one priority group"),
        ({"priority_groups": ()}, "exactly one priority group"),
        ({"priority_groups": ("a", "b")}, "exactly one priority group"),
        ({"priority_groups": ("a.b",)}, "1 to 16 of the characters"),
        ({"ack_policy": "all"}, "needs explicit acks"),
        ({"ack_policy": "none"}, "needs explicit acks"),
        ({"deliver_subject": "there"}, "for pull consumers only"),
        ({"priority_timeout_s": 1.0}, "belongs to pinned_client, not to overflow"),
        ({"priority_policy": "prioritized", "priority_timeout_s": 1.0}, "belongs to pinned_client"),
        ({"priority_policy": "pinned_client", "priority_timeout_s": 0.0}, "must be positive"),
    ],
)
def test_each_broken_rule_has_its_words(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        check_config(config(**changes))


def test_what_an_update_may_change() -> None:
    pinned = config(priority_policy="pinned_client", priority_timeout_s=5)
    check_update(pinned, config(priority_policy="pinned_client", priority_timeout_s=9, ack_wait_s=3))
    with pytest.raises(InvalidInput, match=r"\['jobs'\] and cannot become \['other'\]"):
        check_update(pinned, config(priority_policy="pinned_client", priority_groups=("other",)))
    with pytest.raises(InvalidInput, match="pinned_client and cannot become overflow"):
        check_update(pinned, config())
    with pytest.raises(InvalidInput, match=r"\[\] and cannot become \['jobs'\]"):
        check_update(ConsumerConfig(durable_name="w"), pinned)


@pytest.mark.parametrize(("expires_s", "timeout_s"), [(1.0, 2.0), (0.5, 1.0), (2.5, 120.0)])
def test_pulls_that_keep_a_pin(expires_s: float, timeout_s: float) -> None:
    check_expiry(expires_s, timeout_s)


def test_pulls_that_would_let_it_flap_are_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidInput) as refused:
        check_expiry(1.2, 2.0)
    assert str(refused.value) == (
        "pulls that live 1.2 s with a priority_timeout of 2 s: the pin would move back and forth. "
        "Set expires_s to 1 or less, or raise priority_timeout to 2.4 s or more"
    )


TERMS: dict[str, Any] = {"min_pending": None, "min_ack_pending": None, "priority": None, "pin_options": []}


@pytest.mark.parametrize(
    ("policy", "terms"),
    [
        ("overflow", {}),
        ("overflow", {"min_pending": 1, "min_ack_pending": 1}),
        ("prioritized", {}),
        ("prioritized", {"priority": 0}),
        ("prioritized", {"priority": 9}),
        ("pinned_client", {"pin_options": ["on_pinned"]}),
    ],
)
def test_terms_that_fit(policy: PriorityPolicy, terms: dict[str, Any]) -> None:
    check_terms(policy, **{**TERMS, **terms})


@pytest.mark.parametrize(
    ("policy", "terms", "rule"),
    [
        (
            "prioritized",
            {"min_pending": 1},
            "min_pending belongs to the policy overflow; this consumer has prioritized",
        ),
        ("pinned_client", {"min_ack_pending": 1}, "min_ack_pending belongs to the policy overflow"),
        ("overflow", {"min_pending": 0}, "min_pending is 0: give 1 or more"),
        ("overflow", {"min_ack_pending": -3}, "min_ack_pending is -3: give 1 or more"),
        ("overflow", {"priority": 1}, "priority belongs to the policy prioritized; this consumer has overflow"),
        ("prioritized", {"priority": 10}, r"priority is 10: give 0 \(first\) to 9 \(last\)"),
        ("prioritized", {"priority": -1}, "priority is -1"),
        ("overflow", {"pin_options": ["on_unpinned"]}, "on_unpinned belongs to the policy pinned_client"),
    ],
)
def test_terms_that_do_not(policy: PriorityPolicy, terms: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        check_terms(policy, **{**TERMS, **terms})


def test_a_text_that_nobody_knows_is_a_plain_refusal() -> None:
    known = refusal("S", "c", 400, "Bad Request - Priority Group missing")
    assert type(known) is PriorityGroupMissing
    assert "keylane.priority" in str(known)
    unknown = refusal("S", "c", 400, "Bad Request - from the future")
    assert type(unknown) is PullRefused
    assert str(unknown) == "the server refuses to serve consumer 'c' of stream 'S': 400 Bad Request - from the future"


def test_policies_are_the_servers() -> None:
    assert cast("tuple[str, ...]", POLICIES) == ("overflow", "pinned_client", "prioritized")
