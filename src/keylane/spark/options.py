"""Options as Spark passes them, with names in lower case: the checks that reader and writer share. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from keylane.errors import InvalidInput
from keylane.spark.address import ADDRESS_NAMES, secret_refused
from keylane.spark.secrets import is_secret_name, looks_like_login, shows_secret


def given_options(options: Mapping[str, str], names: Sequence[str], *, whose: str) -> dict[str, str]:
    """The options by their names in lower case; refuses empty ones, and what is neither in `names` nor an address."""
    known = {name.lower(): name for name in (*names, *ADDRESS_NAMES)}
    given: dict[str, str] = {}
    for name, value in options.items():
        lowered = name.lower()
        if lowered not in known:
            raise _unknown(name, names, known, whose)
        is_address = known[lowered] in ADDRESS_NAMES
        if lowered != "url" and (shows_secret(value) or (is_address and looks_like_login(value))):
            raise secret_refused(known[lowered])  # `Address` has better words for a url
        if not value.strip():
            raise InvalidInput(f"option {known[lowered]!r} is empty: give a value, or leave the option out")
        given[lowered] = value.strip()
    return given


def _unknown(name: str, names: Sequence[str], known: Mapping[str, str], whose: str) -> InvalidInput:
    """The refusal of an option that does not exist. Its value is not repeated: nobody knows what is in it."""
    lowered = name.lower()
    if is_secret_name(lowered) and not lowered.endswith("file"):
        return secret_refused(name)
    near = difflib.get_close_matches(lowered, known, n=1)
    meant = f"did you mean {known[near[0]]!r}? " if near else ""
    return InvalidInput(
        f"option {name!r} is not one of the {whose}'s: {meant}It knows {', '.join(names)}, and for the connection "
        f"{', '.join(ADDRESS_NAMES)}"
    )


def checked(name: str, check: Callable[[str], str], value: str) -> str:
    """The value, if `check` lets it through; its refusal names the option."""
    try:
        return check(value)
    except InvalidInput as error:
        raise InvalidInput(f"option {name!r}: {error}") from error
