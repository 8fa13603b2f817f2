"""`module:name` as the user writes it: the function that it names, or one sentence that says what is wrong."""

from __future__ import annotations

import difflib
import inspect
import os
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from keylane.errors import InvalidInput

_LISTED_NAMES = 10


def load_handler(path: str) -> Callable[[Any], Any]:
    """The function of one message that `path` names.

    >>> load_handler("math:sqrt")(4.0)
    2.0
    """
    found = load_named(path, "handler", "function", "shop:handle")
    if not callable(found):
        raise InvalidInput(f"handler {path!r} is {found!r}: name a function of one message")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise InvalidInput(f"handler {path!r} cannot be called with one message: {error}") from None
    except ValueError:
        pass  # it is not written in Python and does not say what it takes
    return found  # type: ignore[no-any-return]


def load_named(path: str, role: str, what: str, example: str) -> Any:
    """What `path` names. The others are for errors: as what it is given, what it should name, and how."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise InvalidInput(f"{role} {path!r} names no {what}: write module:{what}, such as {example}")
    found: Any = _module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidInput(f"module {module!r} has no {name!r}{_others(found, part)}")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"there is no module {name!r} in {os.getcwd()} or among the installed packages"
            ) from error
        raise InvalidInput(f"module {name!r} cannot be imported: {error}{_place(error)}") from error
    except Exception as error:  # a module may raise anything
        raise InvalidInput(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}{_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """Where in the user's code it was raised."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""


def _others(found: object, wanted: str) -> str:
    names = [name for name in vars(found) if not name.startswith("_") and callable(getattr(found, name, None))]
    close = difflib.get_close_matches(wanted, names, 1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f"; it has: {', '.join(sorted(names)[:_LISTED_NAMES])}" if names else ""
