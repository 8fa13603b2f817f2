"""Which server version has what, and the oldest one that keylane works with."""

from __future__ import annotations

import re
from typing import Literal, get_args

from keylane.errors import InvalidInput

Version = tuple[int, int, int]

Feature = Literal[
    "priority_groups",
    "direct_get_batch",
    "prioritized",
    "atomic_batch",
    "whole_subject_hash",
    "message_schedules",
    "consumer_reset",
    "fast_ingest",
]

MINIMUM_SERVER: Version = (2, 11, 0)
"""Older servers have no priority groups, which every group needs."""

SINCE: dict[Feature, Version] = {
    "priority_groups": (2, 11, 0),
    "direct_get_batch": (2, 11, 0),
    "prioritized": (2, 12, 0),
    "atomic_batch": (2, 12, 0),
    "whole_subject_hash": (2, 12, 0),
    "message_schedules": (2, 12, 0),
    "consumer_reset": (2, 14, 0),
    "fast_ingest": (2, 14, 0),
}

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def parse_version(text: str) -> Version:
    """The numbers of a version; `(0, 0, 0)` where there are none, which is older than anything.

    >>> parse_version("2.12.0-RC.3")
    (2, 12, 0)
    """
    found = _NUMBERS.match(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)


def supports(version: Version, feature: Feature) -> bool:
    """Whether a server of this version has the feature."""
    if feature not in SINCE:
        known = ", ".join(get_args(Feature))
        raise InvalidInput(f"feature {feature!r} is not in the table; known features: {known}")
    return version >= SINCE[feature]


def missing_features(version: Version) -> tuple[str, ...]:
    """What a server of this version lacks, in words.

    >>> missing_features((2, 12, 4))
    ('consumer reset', 'fast ingest')
    """
    return tuple(feature.replace("_", " ") for feature, since in SINCE.items() if version < since)
