"""Which errors are worth another try, how long the pauses are, and what is logged meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from keylane import errors, retrying
from keylane.dispatch.dispatcher import RetryTimer
from keylane.errors import ApiError, Disconnected, InvalidInput, KeylaneError, NotFound, PublishRejected, RequestTimeout
from keylane.retrying import Backoff, backoff_s

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_retry_that_is_due_already_does_not_disturb_the_next(run: Runner) -> None:
    """A busy event loop sets a timer late: uvloop then gives a handle without a time."""

    async def main() -> None:
        rang: list[float] = []
        awake = asyncio.Event()
        timer = RetryTimer(rang.append, awake.set)
        now = asyncio.get_running_loop().time()
        timer.set(now - 1)
        timer.set(now - 2)
        timer.set(now + 60)
        assert "at" in repr(timer)
        async with asyncio.timeout(5):
            await awake.wait()
        assert len(rang) == 1

    run(main())


class Clock:
    """The time that `retrying` reads; a pause is over at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        monkeypatch.setattr(retrying, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


TRANSIENT = {
    "AckFailed", "ApiUnavailable", "BrokerUnavailable", "ConsumerUpdateUnconfirmed", "CopyMissing",
    "Disconnected", "JetStreamDisabled", "NotStored", "OutcomeUnknown", "ReadIncomplete", "RequestTimeout",
    "ServerUnreachable",
}  # fmt: skip


def test_these_classes_of_errors_are_transient() -> None:
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, KeylaneError)]
    assert {one.__name__ for one in classes if one.is_transient} == TRANSIENT


def test_an_answer_of_the_api_is_transient_if_the_service_is_unavailable() -> None:
    assert ApiError(503, 10008, "temporarily unavailable").is_transient
    assert PublishRejected(503, 10077, "maximum messages exceeded").is_transient
    assert not ApiError(500, 10049, "create failed").is_transient
    assert not NotFound(404, 10059, "stream not found").is_transient


def test_pauses_double_up_to_the_longest() -> None:
    assert [backoff_s(failures) for failures in (1, 2, 3, 9, 10, 5000)] == [0.1, 0.2, 0.4, 25.6, 30.0, 30.0]
    assert [backoff_s(failures, 0.05, 2.0) for failures in (1, 6, 7)] == [0.05, 1.6, 2.0]


async def test_the_error_is_raised_when_the_next_try_would_come_too_late(clock: Clock) -> None:
    heard: list[KeylaneError] = []
    backoff = Backoff("the log", 1.0, heard.append)
    error = Disconnected("away")
    for _ in range(4):
        await backoff.after(error)
    with pytest.raises(Disconnected, match="away"):
        await backoff.after(error)
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4]
    assert heard == [error] * 4


async def test_another_error_is_raised_at_once(clock: Clock) -> None:
    with pytest.raises(InvalidInput):
        await Backoff("the log").after(InvalidInput("no"))
    assert clock.pauses == []


async def test_success_begins_anew(clock: Clock) -> None:
    backoff = Backoff("the log", 1.0)
    for _ in range(10):
        await backoff.after(RequestTimeout("late"))
        await backoff.after(RequestTimeout("late"))
        backoff.succeeded()
    assert clock.pauses == [0.05, 0.1] * 10


async def test_it_counts_from_a_time_that_is_given(clock: Clock) -> None:
    backoff = Backoff("the log", 5.0, since=clock.now)
    clock.now += 5.0
    with pytest.raises(RequestTimeout):
        await backoff.after(RequestTimeout("late"))


async def test_failures_of_a_second_are_a_warning_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("keylane.marshal")
    backoff = Backoff("the log", log=log)
    with caplog.at_level(logging.INFO, "keylane.marshal"):
        while clock.now < 101.0:
            await backoff.after(Disconnected("away"))
        assert caplog.messages == []
        for _ in range(3):
            await backoff.after(Disconnected("away"))
        backoff.succeeded()
        backoff.succeeded()
    warning, over = caplog.messages
    assert warning == "the log: trying again in 1.6 s: away"
    assert over.startswith("the log: works again after 7.")


async def test_a_call_is_repeated_until_it_succeeds(clock: Clock) -> None:
    answers: Iterator[KeylaneError | int] = iter([Disconnected("away"), RequestTimeout("late"), 7])

    async def work() -> int:
        answer = next(answers)
        if isinstance(answer, KeylaneError):
            raise answer
        return answer

    assert await Backoff("the log", 1.0).call(work) == 7
    assert clock.pauses == [0.05, 0.1]


async def test_a_call_that_fails_for_good_raises(clock: Clock) -> None:
    async def work() -> int:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        await Backoff("the log").call(work)
    assert clock.pauses == []
