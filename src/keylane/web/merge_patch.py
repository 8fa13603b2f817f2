"""Differences of JSON objects as merge patches (RFC 7396). Pure.

Values are never None, which a merge patch uses for what is gone: what is unknown is left out of a view. Lists are
replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What makes `after` out of `before`; empty: they are the same.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}})
    {'b': {'d': None, 'c': 4}}
    """
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


def patched(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """What a page makes of a patch.

    >>> patched({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": None, "c": 4}})
    {'a': 1, 'b': {'c': 4}}
    """
    after = {name: value for name, value in before.items() if name not in patch or patch[name] is not None}
    for name, value in patch.items():
        if isinstance(value, dict):
            old = after.get(name)
            after[name] = patched(old if isinstance(old, dict) else {}, value)
        elif value is not None:
            after[name] = value
    return after
