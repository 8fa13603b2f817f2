"""The rules of priority groups that the client checks before it sends anything.

The server leaves some of them to the client: it accepts any ack policy and ignores what it does not know.
"""

from __future__ import annotations

import re

from keylane.errors import InvalidInput
from keylane.jetstream import ConsumerConfig, PriorityPolicy

POLICIES: tuple[PriorityPolicy, ...] = ("overflow", "pinned_client", "prioritized")
MAX_PRIORITY = 9
SERVER_PIN_TIMEOUT_S = 120.0
"""The server's default for a pinned_client consumer without priority_timeout."""
_GROUP = re.compile(r"[A-Za-z0-9\-_/=]{1,16}")


def check_group(group: str) -> str:
    if not _GROUP.fullmatch(group):
        raise InvalidInput(f"priority group {group!r} is not valid: use 1 to 16 of the characters A-Z a-z 0-9 - _ / =")
    return group


def check_config(config: ConsumerConfig) -> ConsumerConfig:
    """Return the configuration of a consumer with a priority group, or raise for the first rule that it breaks."""
    groups = config.priority_groups or ()
    policy = config.priority_policy
    if policy not in POLICIES:
        raise InvalidInput(f"priority_policy is {policy!r}: use one of {', '.join(POLICIES)}")
    if len(groups) != 1:
        raise InvalidInput(f"priority_groups is {list(groups)}: today a consumer has exactly one priority group")
    check_group(groups[0])
    if config.ack_policy != "explicit":
        raise InvalidInput(f"ack_policy is {config.ack_policy!r}: a priority group needs explicit acks")
    if config.deliver_subject is not None:
        raise InvalidInput(
            f"deliver_subject is {config.deliver_subject!r}: priority groups are for pull consumers only"
        )
    if config.priority_timeout_s is not None:
        if policy != "pinned_client":
            raise InvalidInput(f"priority_timeout belongs to pinned_client, not to {policy}: leave it out")
        if config.priority_timeout_s <= 0:
            raise InvalidInput(f"priority_timeout is {config.priority_timeout_s} s: it must be positive")
    return config


def check_update(now: ConsumerConfig, wanted: ConsumerConfig) -> None:
    """Raise if an update changes the group or the policy, which can never change."""
    if now.priority_groups != wanted.priority_groups:
        raise InvalidInput(
            f"the priority group is {list(now.priority_groups or ())} and cannot become "
            f"{list(wanted.priority_groups or ())}: delete and create the consumer instead"
        )
    if now.priority_policy != wanted.priority_policy:
        raise InvalidInput(
            f"the priority policy is {now.priority_policy} and cannot become {wanted.priority_policy}: "
            "delete and create the consumer instead"
        )


def check_expiry(expires_s: float, timeout_s: float) -> None:
    """Raise if pulls are too rare to keep the pin: a lost or late one must leave time for the next."""
    if expires_s > timeout_s / 2:
        raise InvalidInput(
            f"pulls that live {expires_s:g} s with a priority_timeout of {timeout_s:g} s: the pin would move "
            f"back and forth. Set expires_s to {timeout_s / 2:g} or less, or raise priority_timeout to "
            f"{2 * expires_s:g} s or more"
        )


def check_terms(
    policy: PriorityPolicy | None,
    *,
    min_pending: int | None,
    min_ack_pending: int | None,
    priority: int | None,
    pin_options: list[str],
) -> None:
    """Raise if the options of a reader do not fit its consumer's policy."""
    for name, count in (("min_pending", min_pending), ("min_ack_pending", min_ack_pending)):
        if count is None:
            continue
        if policy != "overflow":
            raise InvalidInput(f"{name} belongs to the policy overflow; this consumer has {policy}")
        if count < 1:
            raise InvalidInput(f"{name} is {count}: give 1 or more, or leave it out to be served always")
    if priority is not None:
        if policy != "prioritized":
            raise InvalidInput(f"priority belongs to the policy prioritized; this consumer has {policy}")
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidInput(f"priority is {priority}: give 0 (first) to {MAX_PRIORITY} (last)")
    if pin_options and policy != "pinned_client":
        raise InvalidInput(f"{pin_options[0]} belongs to the policy pinned_client; this consumer has {policy}")
