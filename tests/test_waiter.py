"""Waiting: what is good is returned as it was seen, and a deadline says what was waited for and seen last."""

from __future__ import annotations

import pytest

from tests.waiter import until, wait_until


async def test_until_returns_what_was_good() -> None:
    looks: list[int] = []

    def look() -> int:
        looks.append(1)
        return len(looks)

    async def ask() -> int:
        return look()

    assert await until(look, lambda seen: seen >= 3) == 3
    assert await until(ask, lambda seen: seen >= 5) == 5
    assert wait_until(look, lambda seen: seen >= 7) == 7


async def test_the_deadline_says_what_was_wanted_and_what_was_seen() -> None:
    few, wanted = ["a"], 2
    told = r"(?s)not within 0.05 s: .*len\(few\).*which should be: .*>= wanted.*last seen: 1\nwhere few=\['a'\]"
    with pytest.raises(AssertionError, match=told):
        await until(lambda: len(few), lambda seen: seen >= wanted, deadline_s=0.05)
    with pytest.raises(AssertionError, match=told):
        wait_until(lambda: len(few), lambda seen: seen >= wanted, deadline_s=0.05)


async def test_an_error_while_looking_is_not_waited_out() -> None:
    def look() -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await until(look)
    with pytest.raises(ValueError, match="broken"):
        wait_until(look)
