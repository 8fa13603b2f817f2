"""Payloads: from the bytes of a message to the value that a handler's annotation names, and back.

`bytes` are passed on, `str` is UTF-8, everything else is JSON: models of pydantic and msgspec by their own libraries,
the rest by `json_values`.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from keylane.app.json_values import fit_for, is_msgspec, is_pydantic, to_json, type_name
from keylane.errors import InvalidInput

Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]

_PLAIN_RESULTS = (dict, list, tuple)


def decoder_for(annotation: Any) -> Decode:
    """How a payload becomes a value of this type. Raises `InvalidInput` for a type that none can be read as.

    >>> decoder_for(dict)(b'{"cents": 5}')
    {'cents': 5}
    """
    if annotation is bytes:
        return bytes  # of bytes: the same object
    if annotation is str:
        return bytes.decode
    if isinstance(annotation, type) and not get_args(annotation):
        if is_pydantic(annotation):
            return annotation.__pydantic_validator__.validate_json  # type: ignore[attr-defined,no-any-return]
        if is_msgspec(annotation):
            return sys.modules["msgspec"].json.Decoder(annotation).decode  # type: ignore[no-any-return]
    fit = fit_for(annotation)
    loads = json.loads

    def decode(data: bytes) -> Any:
        return fit(loads(data))

    return decode


_encoders: dict[type, Encode] = {}


def encode(value: Any) -> bytes:
    """The payload of what a handler returned. Raises `TypeError` for a value that cannot be published."""
    kind = type(value)
    found = _encoders.get(kind)
    if found is None:
        found = _encoders[kind] = _encoder_for(kind)
    return found(value)


def _encoder_for(kind: type) -> Encode:
    if issubclass(kind, bytes | bytearray):
        return bytes
    if issubclass(kind, str):
        return lambda text: text.encode()
    if is_pydantic(kind) and hasattr(kind, "model_dump_json"):
        return lambda model: model.model_dump_json().encode()
    if is_msgspec(kind):
        return sys.modules["msgspec"].json.encode  # type: ignore[no-any-return]
    return to_json


def check_result(annotation: Any) -> None:
    """Refuse the annotation of a result that could never be published. `X | None` publishes an X."""
    if get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            check_result(one)
        return
    kind = get_origin(annotation) or annotation
    if annotation in (None, type(None), Any) or not isinstance(kind, type):
        return
    is_model = is_dataclass(kind) or is_pydantic(kind) or is_msgspec(kind)
    if not is_model and not issubclass(kind, (bytes, str, *_PLAIN_RESULTS)):
        raise InvalidInput(
            f"it returns {type_name(annotation)}, which cannot be published: return bytes, str, dict, list, a "
            "dataclass, or a pydantic or msgspec model"
        )
