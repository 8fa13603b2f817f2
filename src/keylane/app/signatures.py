"""What a handler takes and returns, read from its signature when it is decorated, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keylane.app.json_values import type_name
from keylane.app.payloads import Decode, check_result, decoder_for
from keylane.dispatch import error_line, is_coroutine_function
from keylane.errors import InvalidInput, InvalidPayload
from keylane.processing.message import GroupMessage

_EMPTY = inspect.Parameter.empty
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class HandlerSignature:
    """How a handler is called."""

    name: str
    decode: Decode | None
    """None: it takes the message alone."""
    payload: Any
    """The annotation of its payload."""
    takes_message: bool
    is_async: bool


def read_signature(function: Callable[..., Any], *, publishes: bool) -> HandlerSignature:
    """Raises `InvalidInput` with all that is needed to mend the handler."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        return _read(function, name, publishes=publishes)
    except InvalidInput as error:
        raise InvalidInput(f"handler {name}{_place(function)}: {error}") from error


def payload_call(function: Callable[..., Any], signature: HandlerSignature) -> Callable[[GroupMessage], Any]:
    """From a message to what the function returns: a coroutine, or its value."""
    decode, takes_message = signature.decode, signature.takes_message
    if decode is None:
        return function
    if decode is bytes:
        if takes_message:
            return lambda message: function(message.delivery.data, message)
        return lambda message: function(message.delivery.data)

    def call(message: GroupMessage) -> Any:
        try:
            payload = decode(message.delivery.data)
        except Exception as error:  # a model's validators may raise anything
            raise InvalidPayload(f"no {type_name(signature.payload)}: {error_line(error)}") from error
        return function(payload, message) if takes_message else function(payload)

    return call


def _read(function: Callable[..., Any], name: str, *, publishes: bool) -> HandlerSignature:
    if not callable(function):
        raise InvalidInput(f"it is {function!r}: decorate a function")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidInput(
            "it is a generator: a handler returns one value, or none; return a list, or publish yourself"
        )
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise InvalidInput(
            f"its annotations cannot be read ({error}): import or define that name at the top of the module, not in a "
            "function or under TYPE_CHECKING"
        ) from error
    taken = _parameters(signature)
    _check_return(signature.return_annotation, publishes=publishes)
    is_async = is_coroutine_function(function)
    first = taken[0].annotation
    if _is_message(first):
        if len(taken) > 1:
            raise InvalidInput("the message is its first parameter: the payload comes first, then the message")
        return HandlerSignature(name, None, None, takes_message=True, is_async=is_async)
    if first is _EMPTY:
        raise InvalidInput(
            f"its parameter {taken[0].name!r} has no type: annotate it, such as `{taken[0].name}: bytes`, or with a "
            "dataclass"
        )
    if len(taken) > 1 and not _is_message(taken[1].annotation):
        raise InvalidInput(f"its second parameter {taken[1].name!r} gets the message: annotate it as keylane.Message")
    return HandlerSignature(name, decoder_for(first), first, takes_message=len(taken) > 1, is_async=is_async)


def _parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """Those that are filled: the first one or two."""
    every = list(signature.parameters.values())
    needed = [one for one in every if one.default is _EMPTY and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    by_position = [one for one in every if one.kind in _BY_POSITION]
    if not by_position:
        raise InvalidInput("it takes nothing: give it a parameter for the payload, such as `order: Order`")
    taken = by_position[:2] if len(by_position) > 1 and _is_taken(by_position[1]) else by_position[:1]
    if unfilled := [one.name for one in needed if one not in taken]:
        raise InvalidInput(
            f"it needs {', '.join(map(repr, unfilled))}, which nobody gives it: a handler takes the payload and, if it "
            "wants, the message; what else it needs comes from a closure, or has a default"
        )
    return taken


def _is_taken(second: inspect.Parameter) -> bool:
    return second.default is _EMPTY or _is_message(second.annotation)


def _is_message(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, GroupMessage)


def _check_return(annotation: Any, *, publishes: bool) -> None:
    if publishes:
        if annotation is None:
            raise InvalidInput("it returns None, so publish= has nothing to publish: leave one of them out")
        if annotation is not _EMPTY:
            check_result(annotation)
    elif annotation not in (_EMPTY, None, type(None), Any):
        raise InvalidInput(
            f"it returns {type_name(annotation)}, which goes nowhere: say where with publish=, or return None"
        )


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
