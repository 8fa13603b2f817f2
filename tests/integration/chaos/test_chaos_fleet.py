"""The runs with a fleet: short ones are clean, the same seed makes the same run, and the judge sees what it should."""

from __future__ import annotations

import json

import pytest

from chaos import fleet
from chaos.causes import Trouble
from chaos.evidence import Handled
from chaos.fleet import Settings
from chaos.fleet_faults import SCENARIOS, Scenario, plan
from chaos.fleet_timing import Timeline, overlaps, stale_tokens

PROCESSES = ("w0", "w1", "w2", "w3")


@pytest.mark.long("a fleet under faults for 15 s, with its start and its end")
@pytest.mark.alone("measures how soon partitions flow again")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "settings",
    [
        Settings(seconds=15, every_s=2.0, seed=11, rate=1000),
        Settings(seconds=15, every_s=2.0, seed=12, rate=1000, retention="workqueue"),
        Settings(seconds=16, every_s=4.0, seed=3, rate=1000, scenario="planned"),
    ],
    ids=["mixed", "mixed on a work queue", "planned"],
)
async def test_a_short_run_is_clean(settings: Settings) -> None:
    outcome = await fleet.run(settings, lambda _: None)
    told = outcome.as_json()
    assert json.dumps(told)
    assert outcome.spotless, fleet.as_text(outcome)
    assert (told["lost"], told["out_of_order"], told["unknown"], told["stale_tokens"]) == (0, 0, 0, 0)
    assert told["sent"] > 5000
    assert told["moves"] > 0
    assert told["handled_under_faults"] > 0.5 * told["sent"], "what is handled later was not put to the test"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_seed_decides_what_happens(scenario: Scenario) -> None:
    def made(seed: int) -> list[str]:
        found = plan(scenario, seed, seconds=60, every_s=3, processes=PROCESSES)
        assert [one.at_s for one in found] == sorted(one.at_s for one in found)
        return [f"{one.at_s} {one}" for one in found]

    assert made(1) == made(1)
    assert made(1)
    if scenario not in ("moves", "leader", "partition"):
        assert made(1) != made(2)


def test_planned_changes_start_what_is_not_there_and_leave_two() -> None:
    for seed in range(50):
        here = set(PROCESSES)
        for step in plan("planned", seed, seconds=120, every_s=3, processes=PROCESSES):
            if step.action == "start":
                assert step.target not in here
                here.add(step.target)
            else:
                assert step.target in here
                here -= {step.target} if step.action == "stop" else set()
            assert len(here) >= 2


def line(at_s: float, by: str, sequence: int, *, token: int = 1, took_s: float = 0.0, key: str = "k") -> Handled:
    return Handled(at_s, key, 0, sequence, by, sequence, 1, token, round((at_s - took_s) * 1e9))


def test_a_token_that_is_older_than_one_in_use_is_seen() -> None:
    lines = [line(1.0, "a", 1, token=1), line(2.0, "b", 2, token=2), line(2.1, "a", 3, token=1)]
    [found] = stale_tokens(lines, [])
    assert (found.line.sequence, found.highest, found.by, found.is_late_start) == (3, 2, "b", False)


def test_a_handler_that_began_with_its_token_in_time_may_end_late() -> None:
    lines = [line(1.0, "a", 1, token=1), line(2.0, "b", 2, token=2), line(2.1, "a", 3, token=1, took_s=0.5)]
    assert stale_tokens(lines, []) == []


def test_a_handler_that_a_thawed_worker_was_about_to_start_is_told_apart() -> None:
    lines = [line(1.0, "a", 1, token=1), line(5.0, "b", 2, token=2), line(6.1, "a", 3, token=1)]
    [found] = stale_tokens(lines, [Trouble("freeze", "a", 1.1, 6.05)])
    assert found.is_late_start
    [found] = stale_tokens(lines, [Trouble("freeze", "b", 1.1, 6.05)])
    assert not found.is_late_start


def test_two_handlers_of_a_key_at_the_same_time_are_seen() -> None:
    lines = [line(1.0, "a", 1, took_s=0.5), line(1.2, "b", 2, took_s=0.5)]
    assert overlaps(lines, []) == [(lines[0], lines[1])]
    assert overlaps(lines, [Trouble("freeze", "a", 0.6, 0.9)]) == []
    assert overlaps([lines[0], line(1.2, "b", 2, took_s=0.1)], []) == []
    assert overlaps([lines[0], line(1.2, "b", 2, took_s=0.5, key="other")], []) == []


def test_a_pause_is_from_the_last_message_there_to_the_first_one_here() -> None:
    moves = Timeline([line(1.0, "a", 1), line(1.2, "a", 2), line(1.5, "b", 3), line(1.6, "b", 4)]).moves()
    assert [(one.before.by, one.after.by, round(one.pause_s, 3)) for one in moves] == [("a", "b", 0.3)]


def test_partitions_that_stay_are_looked_at_while_others_move() -> None:
    moved = [line(1.0, "a", 1), line(2.0, "b", 2)]
    stays = [one._replace(partition=1) for one in (line(0.9, "c", 3), line(1.2, "c", 4), line(2.1, "c", 5))]
    timeline = Timeline(sorted([*moved, *stays]))
    assert [round(one, 3) for one in timeline.gaps_of_others(timeline.moves())] == [0.9]


def test_a_partition_is_back_when_another_worker_handles_it() -> None:
    timeline = Timeline([line(1.0, "a#0", 1), line(1.4, "a#0", 2), line(4.5, "b#0", 2)])
    assert timeline.returns(1.1, {"a#0"}) == {0: pytest.approx(3.4)}
    assert timeline.returns(1.1, {"b#0"}) == {}
    assert timeline.returns(1.1, {"a#0", "b#0"}) == {0: None}


def test_many_workers_share_processes() -> None:
    assert Settings(workers=4).processes == {"w0": 1, "w1": 1, "w2": 1, "w3": 1}
    assert Settings(workers=25).processes == {"w0": 9, "w1": 8, "w2": 8}
