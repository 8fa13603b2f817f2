"""When the event loop polls for the next answer instead of sleeping."""

from __future__ import annotations

import asyncio

import pytest

from keylane.jetstream.transport import BusyPoll

pytestmark = pytest.mark.alone("polls for milliseconds only")

ONE_MESSAGE = 200
BULK = 64 * 1024


def read_often(awake: BusyPoll, size: int) -> None:
    for _ in range(20):
        awake.was_read(size)


async def test_polls_while_small_answers_follow_each_other() -> None:
    awake = BusyPoll()
    read_often(awake, ONE_MESSAGE)
    assert awake.is_polling


async def test_a_pause_ends_it() -> None:
    awake = BusyPoll()
    read_often(awake, ONE_MESSAGE)
    await asyncio.sleep(0.01)
    assert not awake.is_polling
    awake.was_read(ONE_MESSAGE)
    assert not awake.is_polling


async def test_bulk_does_not_start_it_and_ends_it() -> None:
    awake = BusyPoll()
    read_often(awake, BULK)
    assert not awake.is_polling
    read_often(awake, ONE_MESSAGE)
    awake.was_read(BULK)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not awake.is_polling
