"""Options as Spark hands them over, in lower case, and what readers and writers refuse alike. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from keylane.core.subjects import shown
from keylane.errors import InvalidInput
from keylane.spark.address import ADDRESS_NAMES, SECRETS


def given_options(options: Mapping[str, str], names: Sequence[str], *, whose: str) -> dict[str, str]:
    """The options by their names in lower case; refuses empty ones, and what is neither in `names` nor an address."""
    known = {name.lower(): name for name in (*names, *ADDRESS_NAMES)}
    given: dict[str, str] = {}
    for name, value in options.items():
        lowered = name.lower()
        if lowered not in known and lowered not in SECRETS:
            near = difflib.get_close_matches(lowered, known, n=1)
            meant = f"did you mean {known[near[0]]!r}? " if near else ""
            raise InvalidInput(
                f"option {name!r} (value {shown(value)}) is not one of the {whose}'s: {meant}It knows "
                f"{', '.join(names)}, and for the connection {', '.join(ADDRESS_NAMES)}"
            )
        if not value.strip():
            raise InvalidInput(f"option {known.get(lowered, name)!r} is empty: give a value, or leave the option out")
        given[lowered] = value.strip()
    return given


def checked(name: str, check: Callable[[str], str], value: str) -> str:
    """The value, if `check` lets it through; its refusal names the option."""
    try:
        return check(value)
    except InvalidInput as error:
        raise InvalidInput(f"option {name!r}: {error}") from error
