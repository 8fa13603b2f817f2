"""The state of every group of an account at one time, read without touching the members.

`account` has `overview`. `member_groups` reads static and elastic groups, `fleets` reads fleets; `account_reader` asks
for what they share. `model` has the values. The exporter, the web page and autoscaling are built on it.
"""

from __future__ import annotations

from keylane.lazy import public_names
from keylane.overview.account import overview
from keylane.overview.model import (
    AccountOverview,
    GroupOverview,
    MemberOverview,
    PartitionOverview,
    QueueOverview,
    StreamOverview,
)

__all__ = [
    "AccountOverview",
    "GroupOverview",
    "MemberOverview",
    "PartitionOverview",
    "QueueOverview",
    "StreamOverview",
    "overview",
]

__dir__ = public_names(__all__)
