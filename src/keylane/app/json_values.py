"""JSON and Python values: which types a payload may have, what fits them, and how they are written.

The tables are at the end.

Knows the types of the standard library. Models of pydantic and msgspec, also within dataclasses, are left to their
libraries, which are only used where the program itself has imported them.
"""

from __future__ import annotations

import enum
import json
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal, Union, get_args, get_origin
from uuid import UUID

from keylane.errors import InvalidInput

Fit = Callable[[Any], Any]
"""From what `json.loads` returns to a value of the type. Raises `ValueError` where it does not fit."""

_ISO = (datetime, date, time)
_COLLECTIONS: dict[Any, Callable[[Any], Any]] = {list: list, set: set, frozenset: frozenset}


def fit_for(annotation: Any, known: dict[Any, Fit] | None = None) -> Fit:
    """How JSON becomes a value of this type. Raises `InvalidInput` for a type that JSON cannot be read as.

    >>> fit_for(list[int])([1, 2])
    [1, 2]
    """
    known = {} if known is None else known
    if isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    make = _FORMS.get(get_origin(annotation) or annotation)
    if make is not None:
        return make(annotation, get_args(annotation), known)
    if isinstance(annotation, type):
        for is_kind, fit in _CLASSES:
            if is_kind(annotation):
                return fit(annotation, known)
    raise InvalidInput(
        f"JSON cannot be read as {type_name(annotation)}: use a dataclass, or a pydantic or msgspec model"
    )


def type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def is_pydantic(kind: type) -> bool:
    """Whether it is a model, or a dataclass, of pydantic."""
    return "pydantic" in sys.modules and hasattr(kind, "__pydantic_validator__")


def is_msgspec(kind: type) -> bool:
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and issubclass(kind, msgspec.Struct)


# ---- reading ------------------------------------------------------------------------------------------


def _of_dataclass(kind: type, known: dict[Any, Fit]) -> Fit:
    if kind in known:
        return lambda value: known[kind](value)  # noqa: PLW0108 - it refers to itself, and is not complete yet
    known[kind] = lambda value: value
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise InvalidInput(
            f"the fields of {kind.__name__} cannot be read: {error}; define it at the top of its module"
        ) from error
    wanted = [one for one in fields(kind) if one.init]
    fits = {one.name: fit_for(hints[one.name], known) for one in wanted}
    required = {one.name for one in wanted if one.default is MISSING and one.default_factory is MISSING}

    def fit(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, kind)
        if missing := required - value.keys():
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(missing))}")
        found = {}
        for name, one in fits.items():
            if name in value:
                try:
                    found[name] = one(value[name])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{name}: {error}") from error
        return kind(**found)

    known[kind] = fit
    return fit


def _exactly(kind: type) -> Fit:
    def fit(value: Any) -> Any:
        if type(value) is not kind:  # `True` is no int here
            raise _misfit(value, kind)
        return value

    return fit


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise _misfit(value, float)
    return float(value)


def _decimal(value: Any) -> Decimal:
    if type(value) not in (int, float, str):
        raise _misfit(value, Decimal)
    try:
        return Decimal(str(value))
    except ArithmeticError:
        raise _misfit(value, Decimal) from None


def _from_text(read: Fit, kind: type) -> Fit:
    def fit(value: Any) -> Any:
        if not isinstance(value, str):
            raise _misfit(value, kind)
        return read(value)

    return fit


def _one_of(values: tuple[Any, ...]) -> Fit:
    def fit(value: Any) -> Any:
        if not any(value == one and type(value) is type(one) for one in values):
            raise ValueError(f"{_shown(value)} is none of {', '.join(map(repr, values))}")
        return value

    return fit


def _first_that_fits(fits: list[Fit], annotation: Any) -> Fit:
    def fit(value: Any) -> Any:
        for one in fits:
            try:
                return one(value)
            except (ValueError, TypeError):
                continue
        raise _misfit(value, annotation)

    return fit


def _collection(kind: Any, fit_one: Fit | None) -> Fit:
    make = _COLLECTIONS[kind]

    def fit(value: Any) -> Any:
        if not isinstance(value, list):
            raise _misfit(value, kind)
        return make(map(fit_one, value)) if fit_one is not None else make(value)

    return fit


def _tuple(arguments: tuple[Any, ...], known: dict[Any, Fit]) -> Fit:
    if not arguments or arguments[-1] is Ellipsis:
        inner = _collection(list, fit_for(arguments[0], known) if arguments else None)
        return lambda value: tuple(inner(value))
    fits = [fit_for(one, known) for one in arguments]

    def fit(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(fits):
            raise _misfit(value, f"a tuple of {len(fits)}")
        return tuple(one(item) for one, item in zip(fits, value, strict=True))

    return fit


def _mapping(arguments: tuple[Any, ...], known: dict[Any, Fit]) -> Fit:
    if arguments and arguments[0] not in (str, Any):
        raise InvalidInput(f"JSON has text as keys: use dict[str, …], not dict[{type_name(arguments[0])}, …]")
    fit_one = fit_for(arguments[1], known) if arguments else None

    def fit(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, dict)
        return {key: fit_one(one) for key, one in value.items()} if fit_one is not None else value

    return fit


def _misfit(value: Any, wanted: Any) -> ValueError:
    return ValueError(f"{_shown(value)} is no {wanted if isinstance(wanted, str) else type_name(wanted)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


# ---- writing ------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """A value as JSON. Raises `TypeError` for one that JSON cannot hold."""
    return json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    """What `json` itself does not know."""
    for is_kind, written in _WRITTEN:
        if is_kind(type(value)):
            return written(value)
    raise TypeError(f"a value of type {type_name(type(value))} cannot be written as JSON")


def _is(*kinds: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, kinds)


_WRITTEN: tuple[tuple[Callable[[type], bool], Callable[[Any], Any]], ...] = (
    (lambda kind: is_pydantic(kind) and hasattr(kind, "model_dump"), lambda value: value.model_dump(mode="json")),
    (is_msgspec, lambda value: sys.modules["msgspec"].to_builtins(value)),  # noqa: PLW0108 - it may not be imported
    (is_dataclass, lambda value: {one.name: getattr(value, one.name) for one in fields(value)}),
    (_is(*_ISO), lambda value: value.isoformat()),
    (_is(enum.Enum), lambda value: value.value),
    (_is(Decimal, UUID), str),
    (_is(set, frozenset), list),
)

_FORMS: dict[Any, Callable[[Any, tuple[Any, ...], dict[Any, Fit]], Fit]] = {
    Any: lambda *_: lambda value: value,
    object: lambda *_: lambda value: value,
    typing.Annotated: lambda _, arguments, known: fit_for(arguments[0], known),
    Literal: lambda _, arguments, __: _one_of(arguments),
    Union: lambda whole, arguments, known: _first_that_fits([fit_for(one, known) for one in arguments], whole),
    tuple: lambda _, arguments, known: _tuple(arguments, known),
    dict: lambda _, arguments, known: _mapping(arguments, known),
    **{
        kind: lambda _, arguments, known, kind=kind: _collection(  # type: ignore[misc]
            kind, fit_for(arguments[0], known) if arguments else None
        )
        for kind in _COLLECTIONS
    },
}
_FORMS[types.UnionType] = _FORMS[Union]

_CLASSES: tuple[tuple[Callable[[type], bool], Callable[[Any, dict[Any, Fit]], Fit]], ...] = (
    (lambda kind: kind in (type(None), bool, str, int), lambda kind, _: _exactly(kind)),
    (lambda kind: kind is float, lambda *_: _float),
    (lambda kind: kind is Decimal, lambda *_: _decimal),
    (lambda kind: kind is UUID, lambda kind, _: _from_text(UUID, kind)),
    (lambda kind: kind in _ISO, lambda kind, _: _from_text(kind.fromisoformat, kind)),
    (_is(enum.Enum), lambda kind, _: kind),  # its constructor looks the value up, and raises ValueError
    (is_pydantic, lambda kind, _: kind.__pydantic_validator__.validate_python),
    (is_msgspec, lambda kind, _: lambda value: sys.modules["msgspec"].convert(value, kind)),
    (is_dataclass, _of_dataclass),
    (typing.is_typeddict, lambda _, known: _mapping((), known)),
)
