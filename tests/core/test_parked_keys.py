"""The rules of parked keys: what runs, what is stored behind others, and when a key goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from keylane.core.parked_keys import KeyGate, ParkedKeys, check_after_tries, key_token, parked_subject
from keylane.core.subjects import check_subject
from keylane.errors import InvalidInput


def test_a_message_behind_a_parked_one_is_parked_and_others_run() -> None:
    keys = ParkedKeys(["a"])
    assert keys.gate("a", 7) is KeyGate.PARK
    assert keys.gate("b", 8) is KeyGate.RUN


def test_a_key_is_parked_with_its_first_stored_message() -> None:
    keys = ParkedKeys([])
    assert keys.is_plain
    keys.stored("a", 5, behind=False)
    assert keys.newest("a") == 5
    assert keys.gate("a", 6) is KeyGate.PARK


def test_what_was_handled_by_a_release_does_not_run_again() -> None:
    keys = ParkedKeys(["a"])
    keys.handled("a", 7)
    assert keys.found_empty("a", keys.stores("a"))
    assert keys.gate("a", 7) is KeyGate.SKIP
    assert keys.gate("a", 8) is KeyGate.RUN


def test_a_key_does_not_go_on_while_a_message_is_on_its_way_behind_it() -> None:
    keys = ParkedKeys(["a"])
    stores = keys.stores("a")
    assert keys.gate("a", 7) is KeyGate.PARK
    assert not keys.found_empty("a", stores)
    keys.stored("a", 7, behind=True)
    assert not keys.found_empty("a", stores)  # the look was before it was stored
    assert keys.found_empty("a", keys.stores("a"))
    assert "a" not in keys


def test_an_owner_that_has_just_begun_does_not_know_what_is_stored() -> None:
    keys = ParkedKeys(["a"])
    assert keys.newest("a") is None
    assert keys.newest("b") == 0


@given(some.text())
def test_any_key_is_one_token(key: str) -> None:
    subject = parked_subject("ORDERS", "billing", key_token(key))
    check_subject(subject)
    assert subject.count(".") == 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"after_tries": "drop"}, "after_tries is 'drop': use one of dead_letter, park"),
        ({"max_tries": None}, "after_tries='park' needs max_tries"),
        ({"order": "none"}, "needs order='key' and no manual_ack"),
        ({"manual_ack": True}, "needs order='key' and no manual_ack"),
    ],
)
def test_what_cannot_be_parked_is_refused(options: dict[str, object], problem: str) -> None:
    wanted = {"after_tries": "park", "max_tries": 3, "order": "key", "manual_ack": False, **options}
    with pytest.raises(InvalidInput, match=problem):
        check_after_tries(wanted.pop("after_tries"), **wanted)  # type: ignore[arg-type]
