"""From bytes to what an annotation names, and back; what does not fit is refused with the place."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pydantic
import pytest

from keylane.app.payloads import check_result, decoder_for, encode
from keylane.errors import InvalidInput


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    item: str
    cents: int


@dataclass
class Order:
    id: UUID
    lines: list[Line]
    at: datetime
    total: Decimal
    colour: Colour = Colour.RED
    kind: Literal["new", "changed"] = "new"
    note: str | None = None
    extra: dict[str, float] = field(default_factory=dict)
    parent: Order | None = None


class Model(pydantic.BaseModel):
    customer: str
    cents: int


ORDER = Order(
    UUID(int=5), [Line("tea", 300)], datetime(2026, 1, 2, tzinfo=UTC), Decimal("3.00"), note="é", extra={"vat": 0.2}
)


@pytest.mark.parametrize(
    ("annotation", "data", "value"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "é".encode(), "é"),
        (dict, b'{"a": 1}', {"a": 1}),
        (dict[str, Any], b'{"a": 1}', {"a": 1}),
        (list[int], b"[1, 2]", [1, 2]),
        (tuple[int, str], b'[1, "a"]', (1, "a")),
        (int | None, b"null", None),
        (float, b"1", 1.0),
        (Line, b'{"item": "tea", "cents": 5, "unknown": 1}', Line("tea", 5)),
        (Model, b'{"customer": "a", "cents": 5}', Model(customer="a", cents=5)),
        (list[Model], b'[{"customer": "a", "cents": 5}]', [Model(customer="a", cents=5)]),
        (Order, encode(ORDER), ORDER),
    ],
)
def test_what_fits(annotation: Any, data: bytes, value: Any) -> None:
    assert decoder_for(annotation)(data) == value


def test_a_dataclass_may_hold_itself() -> None:
    nested = Order(UUID(int=6), [], ORDER.at, Decimal(1), parent=ORDER)
    assert decoder_for(Order)(encode(nested)) == nested


@pytest.mark.parametrize(
    ("annotation", "data", "words"),
    [
        (str, b"\xff", "utf-8"),
        (dict, b"[]", "no dict"),
        (dict, b"{", "delimiter|property name"),
        (Line, b'{"item": "tea"}', "Line has no cents"),
        (Line, b'{"item": "tea", "cents": "5"}', "cents: '5' is no int"),
        (Line, b'{"item": "tea", "cents": true}', "cents: True is no int"),
        (Order, encode(ORDER).replace(b"tea", b"tea").replace(b"300", b"null"), "lines: cents: None is no int"),
        (Order, encode(ORDER).replace(b'"red"', b'"blue"'), "colour: 'blue'"),
        (Order, encode(ORDER).replace(b'"new"', b'"old"'), "kind: 'old' is none of 'new', 'changed'"),
        (Model, b'{"customer": "a"}', "cents"),
    ],
)
def test_what_does_not_fit_says_where(annotation: Any, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_for(annotation)(data)


class Odd:
    pass


@dataclass
class HasOdd:
    odd: Odd


@pytest.mark.parametrize("annotation", [Odd, HasOdd, list[Odd], dict[int, str], complex])
def test_a_type_that_json_cannot_be_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(InvalidInput, match="JSON"):
        decoder_for(annotation)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (b"\xff", b"\xff"),
        ("é", "é".encode()),
        ({"a": [1, None]}, b'{"a":[1,null]}'),
        (Line("tea", 5), b'{"item":"tea","cents":5}'),
        (Model(customer="a", cents=5), b'{"customer":"a","cents":5}'),
        ([Model(customer="a", cents=5)], b'[{"customer":"a","cents":5}]'),
    ],
)
def test_what_is_published(value: Any, data: bytes) -> None:
    assert encode(value) == data


def test_what_cannot_be_published() -> None:
    with pytest.raises(TypeError, match="type Odd cannot be written"):
        encode({"odd": Odd()})
    with pytest.raises(InvalidInput, match="it returns Odd, which cannot be published"):
        check_result(Odd)
    for good in (Line | None, dict[str, int], Model, bytes, Any):
        check_result(good)


def test_msgspec_models() -> None:
    msgspec = pytest.importorskip("msgspec")
    model: Any = msgspec.defstruct("Bill", [("customer", str), ("cents", int)])
    assert decoder_for(model)(b'{"customer": "a", "cents": 5}') == model("a", 5)
    assert encode(model("a", 5)) == b'{"customer":"a","cents":5}'
    assert decoder_for(list[model])(b'[{"customer": "a", "cents": 5}]') == [model("a", 5)]
    with pytest.raises(ValueError, match="cents"):
        decoder_for(model)(b'{"customer": "a"}')


def test_the_libraries_of_models_are_not_imported_for_others() -> None:
    program = (
        "import sys, dataclasses\n"
        "from keylane.app.payloads import decoder_for, encode\n"
        "Line = dataclasses.make_dataclass('Line', [('cents', int)])\n"
        "assert encode(decoder_for(Line)(b'{\"cents\": 5}')) == b'{\"cents\":5}'\n"
        "assert not {'pydantic', 'msgspec'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
