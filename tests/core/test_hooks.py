"""Hooks: one style, the same names for the same events, plain functions alone, and nothing that ends the caller."""

from __future__ import annotations

import logging
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from keylane.app import HandlerHooks
from keylane.errors import InvalidInput
from keylane.fleet import WorkerHooks
from keylane.groups import MemberHooks
from keylane.hooks import Hooks, call_hook
from keylane.jetstream import ConnectionHooks
from keylane.marshal import ConsumerHooks

ALL: list[type[Hooks]] = [ConnectionHooks, ConsumerHooks, HandlerHooks, MemberHooks, WorkerHooks]
EVERYWHERE = {"on_state", "on_partitions", "on_failure", "on_ended"}


def names(kind: type[Hooks]) -> list[str]:
    assert is_dataclass(kind)
    return [one.name for one in fields(kind)]


@pytest.mark.parametrize("kind", ALL)
def test_hooks_are_plain_functions_that_may_be_left_out(kind: type[Hooks]) -> None:
    async def never_awaited(*_: object) -> None: ...

    kind()
    for name in names(kind):
        assert name.startswith("on_")
        kind(**{name: print})
        for wrong in (never_awaited, "print"):
            with pytest.raises(InvalidInput, match=f"{name}=.*: a hook is a plain function"):
                kind(**{name: wrong})


@pytest.mark.parametrize("kind", [one for one in ALL if one is not ConnectionHooks])
def test_the_same_event_has_the_same_name(kind: type[Hooks]) -> None:
    assert set(names(kind)) >= EVERYWHERE


@pytest.mark.parametrize("kind", ALL)
def test_hooks_are_called_one_after_the_other(kind: type[Hooks]) -> None:
    told: list[Any] = []
    first, *_, last = names(kind)
    one = kind(**{first: lambda *about: told.append(("one", *about))})
    both = one.and_also(kind(**{name: lambda *about: told.append(("other", *about)) for name in (first, last)}))
    assert type(both) is kind
    getattr(both, first)(1, 2)
    getattr(both, last)(3)
    assert told == [("one", 1, 2), ("other", 1, 2), ("other", 3)]


def test_a_fault_in_a_hook_is_logged_and_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def faulty(about: str) -> None:
        raise RuntimeError(about)

    with caplog.at_level(logging.ERROR):
        call_hook(faulty, "cannot", log=logging.getLogger("keylane.test"), who="worker 7")
        call_hook(None, "nothing", log=logging.getLogger("keylane.test"), who="worker 7")
    [record] = caplog.records
    assert record.getMessage().startswith("worker 7: the hook <function")
    assert record.exc_info is not None
