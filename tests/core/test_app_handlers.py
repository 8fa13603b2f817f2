"""What is wrong with a handler is one clear error when it is decorated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import keylane
from keylane.app import App, SubjectTemplate
from keylane.core.partitions import PartitionBy, Partitioning
from keylane.errors import InvalidInput

if TYPE_CHECKING:
    from decimal import Decimal as Unknown


@dataclass
class Order:
    cents: int


class Odd:
    pass


async def good(order: Order, message: keylane.Message) -> None: ...
async def only_payload(order: Order) -> None: ...
async def only_message(message: keylane.Message) -> None: ...
async def with_default(order: Order, retries: int = 3) -> None: ...
def plain(order: Order) -> None: ...
def returns(order: Order) -> Order: ...  # type: ignore[empty-body]
def maybe(order: Order) -> Order | None: ...
def returns_odd(order: Order) -> Odd: ...  # type: ignore[empty-body]
def nothing() -> None: ...
def without_type(order) -> None: ...  # type: ignore[no-untyped-def]
def too_many(order: Order, message: keylane.Message, more: int) -> None: ...
def wrong_second(order: Order, more: int) -> None: ...
def wrong_order(message: keylane.Message, order: Order) -> None: ...
def keyword_only(order: Order, *, more: int) -> None: ...
def odd(order: Odd) -> None: ...
def unknown(order: Unknown) -> None: ...
async def generator(order: Order) -> AsyncIterator[Order]:
    yield order


def decorated(function: Any, **options: Any) -> App:
    app = App()
    given: dict[str, Any] = {"group": "billing", "partition_by": "orders.*", "partitions": 4} | options
    assert app.handler("ORDERS", **given)(function) is function
    return app


@pytest.mark.parametrize("function", [good, only_payload, only_message, with_default, plain])
def test_good_handlers(function: Any) -> None:
    [handler] = decorated(function).handlers.values()
    assert handler.partition_by is not None
    assert handler.partition_by.over(4) == Partitioning("orders.*", (1,), 4)


@pytest.mark.parametrize("function", [returns, maybe])
def test_results_that_can_be_published(function: Any) -> None:
    decorated(function, publish="billed.{key}")


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (nothing, {}, "it takes nothing: give it a parameter for the payload"),
        (without_type, {}, "its parameter 'order' has no type: annotate it"),
        (too_many, {}, "it needs 'more', which nobody gives it"),
        (wrong_second, {}, "its second parameter 'more' gets the message: annotate it as keylane.Message"),
        (wrong_order, {}, "the payload comes first, then the message"),
        (keyword_only, {}, "it needs 'more', which nobody gives it"),
        (odd, {}, "JSON cannot be read as Odd"),
        (unknown, {}, "its annotations cannot be read .*'Unknown' is not defined"),
        (generator, {}, "it is a generator"),
        (returns, {}, "it returns Order, which goes nowhere: say where with publish="),
        (good, {"publish": "billed.{key}"}, "it returns None, so publish= has nothing to publish"),
        (returns_odd, {"publish": "billed.{key}"}, "it returns Odd, which cannot be published"),
        (returns, {"publish": "billed.{customer}"}, "a message has no {customer}: use {key}"),
        (returns, {"publish": "billed.{key"}, "publish is 'billed.{key'"),
        (returns, {"publish": "billed key"}, "subject"),
        (returns, {"publish": "orders.{key}"}, "the handler would get what it publishes, for ever"),
        (returns, {"publish": "{subject}"}, "the handler would get what it publishes, for ever"),
        (good, {"partition_by": "orders..*"}, "filter"),
        (good, {"partition_by": ("orders.*", [1])}, "PartitionBy"),
        (good, {"partitions": 0}, "number of partitions 0"),
        (good, {"partition_by": None}, "say of what with partition_by"),
        (good, {"member": "alice"}, "joins a static or elastic group, which has its partitions already"),
        (good, {"group": "bill ing"}, "bill ing"),
        (plain, {"time_limit_s": 1.0}, "time_limit_s needs an async handler"),
    ],
)
def test_what_is_wrong_is_said_at_once(function: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        decorated(function, **options)


def test_the_error_names_handler_file_and_line() -> None:
    with pytest.raises(
        InvalidInput, match=rf"handler nothing \(.*{__name__.rsplit('.', 1)[-1]}\.py, line \d+\): it takes"
    ):
        decorated(nothing)


def test_one_handler_for_each_group() -> None:
    app = decorated(good)
    app.handler("ORDERS", group="mail")(plain)
    app.handler("BILLS", group="billing")(plain)
    with pytest.raises(InvalidInput, match="group 'billing' of stream 'ORDERS' has a handler already, good"):
        app.handler("ORDERS", group="billing")(plain)
    with pytest.raises(InvalidInput, match="on_start is 5"):
        app.on_start(5)  # type: ignore[type-var]


def test_partition_by() -> None:
    assert PartitionBy("orders.*.*").key == (1, 2)
    assert PartitionBy("orders.*.*", key=[2]).over(3) == Partitioning("orders.*.*", (2,), 3)
    assert PartitionBy("orders.>").key == ()
    assert PartitionBy.of("a.*") == PartitionBy("a.*", key=[1])
    for wrong in ([3], [0], "1", 5):
        with pytest.raises(InvalidInput):
            PartitionBy("orders.*.*", key=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "partition_by", "pattern"),
    [
        ("mailed.{key}", PartitionBy("billed.*"), "mailed.*"),
        ("mailed.{key}.x", PartitionBy("billed.*.*"), "mailed.*.*.x"),
        ("mailed.k-{key}", PartitionBy("billed.*"), "mailed.*"),
        ("mailed.{subject}", PartitionBy("billed.*"), "mailed.billed.*"),
        ("mailed.{partition}", PartitionBy("billed.>"), "mailed.*"),
        ("mailed.{key}.x", PartitionBy("billed.>"), "mailed.billed.>"),
        ("mailed.{key}", None, "mailed.>"),
        ("mailed", None, "mailed"),
    ],
)
def test_the_pattern_of_a_template(template: str, partition_by: PartitionBy | None, pattern: str) -> None:
    assert SubjectTemplate(template).pattern(partition_by) == pattern
