"""Pull consumer priority groups (ADR-42): overflow, pinned client and prioritized.

`rules` has the checks before a call, `consumers` creates and inspects, `readers` reads, `advisories` listens.
"""

from __future__ import annotations

from keylane.jetstream import ConsumerConfig, PriorityGroupState
from keylane.lazy import public_names
from keylane.priority.advisories import Pinned, Unpinned, advisories
from keylane.priority.consumers import create, group_state, unpin, update
from keylane.priority.readers import consume, fetch, open_fetcher

__all__ = [
    "ConsumerConfig",
    "Pinned",
    "PriorityGroupState",
    "Unpinned",
    "advisories",
    "consume",
    "create",
    "fetch",
    "group_state",
    "open_fetcher",
    "unpin",
    "update",
]

__dir__ = public_names(__all__)
