"""The rolling restart of README's program: a short one is clean, and its judge sees what it should."""

from __future__ import annotations

import json

import pytest

from chaos import rolling
from chaos.evidence import Handled
from chaos.rolling import Gap, Restart, Settings, gaps
from keylane.testing import judge


@pytest.mark.long("restarts a program under load")
@pytest.mark.alone("measures gaps")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["app", "elastic", "static"])
async def test_a_short_rolling_restart_is_clean(kind: rolling.Kind) -> None:
    outcome = await rolling.run(Settings(seconds=4, seed=4, rate=500, every_s=1.0, kind=kind), lambda _: None)
    told = outcome.as_json()
    assert json.dumps(told)
    assert outcome.spotless, rolling.as_text(outcome)
    assert (told["lost"], told["duplicated"], told["out_of_order"], told["unknown"]) == (0, 0, 0, 0)
    assert told["complaints"] == [], "exit code 0 and nothing on standard error"
    assert told["handovers"] >= 2, "each instance is restarted at least once, and two of the four are at work"
    assert told["sent"] > 1000
    assert told["gap_ms"]["p95"] < 2000, "a pin's timeout is longer; half a second holds where the machine is idle"


def handled(*lines: tuple[float, str, str]) -> list[Handled]:
    return [Handled(at_s, key, 0, number, by) for number, (at_s, key, by) in enumerate(lines)]


def test_a_gap_is_from_the_last_message_of_a_stopped_instance_to_the_next() -> None:
    lines = handled((1.0, "k", "a1-0"), (1.1, "l", "a1-0"), (1.2, "k", "a2-1"), (1.5, "l", "a2-1"), (9.0, "k", "a2-1"))
    found = gaps([Restart(1.15, "a1-0", 0.1)], lines)
    assert list(found) == ["a1-0"]
    assert [(one.key, round(one.seconds, 3)) for one in found["a1-0"]] == [("k", 0.2), ("l", 0.4)]


def test_a_standby_that_is_stopped_makes_no_gap() -> None:
    lines = handled((1.0, "k", "a1-0"), (1.2, "k", "a1-0"))
    assert gaps([Restart(1.1, "a2-1", 0.1)], lines) == {"a2-1": []}


@pytest.mark.parametrize(("seconds", "quick"), [([0.2] * 99 + [3.0], True), ([0.2] * 9 + [0.6], False), ([], False)])
def test_the_limit_is_on_95_of_100(seconds: list[float], quick: bool) -> None:
    outcome = rolling.Outcome(
        Settings(), judge([], []), [], [], [], 1, [Gap("k", one) for one in seconds], publisher_gap_s=0.0
    )
    assert outcome.quick is quick
    assert outcome.spotless
