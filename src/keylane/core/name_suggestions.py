"""What an error says about a name that does not exist: the name that was probably meant, and those that are there.

Owns the words. Never asks a server which names there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LISTED = 10
_SIMILAR = 0.6


def name_missing(problem: str, name: str, existing: Iterable[str]) -> str:
    """The text of an error about a missing name.

    >>> name_missing("there is no stream 'ORDRES'", "ORDRES", ["REFUNDS", "ORDERS"])
    "there is no stream 'ORDRES'; did you mean 'ORDERS'? There is: ORDERS, REFUNDS"
    """
    names = sorted(set(existing))
    listed = ", ".join(names[:_LISTED]) or "none"
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    meant = similar_name(name, names)
    between = "there is" if meant is None else f"did you mean {meant!r}? There is"
    return f"{problem}; {between}: {listed}{more}"


def similar_name(name: str, existing: Iterable[str]) -> str | None:
    """The name that was probably meant. Upper and lower case count as the same.

    >>> similar_name("orders", ["ORDERS", "REFUNDS"]), similar_name("X", ["ORDERS"])
    ('ORDERS', None)
    """
    folded = {one.casefold(): one for one in sorted(existing, reverse=True)}
    found = get_close_matches(name.casefold(), folded, n=1, cutoff=_SIMILAR)
    return folded[found[0]] if found else None
