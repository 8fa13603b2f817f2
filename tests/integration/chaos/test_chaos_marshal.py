"""Consumers in processes of their own, killed: nothing lost, nothing twice, and the judge notices if it were so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos import marshal
from chaos.marshal_judge import Findings, Handled, Trouble, findings, read_evidence
from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import ClaimingMessages, ClaimingPartition, Heartbeat, Message, encode
from keylane.marshal.claiming import Mode

_NS = 1_000_000_000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_a_short_run_with_kills_is_clean(mode: Mode) -> None:
    settings = marshal.Settings(
        seconds=8, seed=2, consumers=3, partitions=6, every_s=2.5, rate=200, mode=mode, batch=20, work_s=0.002
    )
    outcome = await marshal.run(settings, lambda _: None)
    assert outcome.kills >= 2
    assert outcome.clean, marshal.as_text(outcome)
    assert outcome.sent > 1000
    assert outcome.found.lost == 0
    if mode == "at_most_once":
        assert outcome.found.repeated == 0
    assert json.dumps(outcome.as_json())


# ---- the judge itself: planted faults -----------------------------------------------------------------


def run(
    offset: int, begun_s: float, *, token: int = 1, process: str = "a", ended: bool = True, key: str = "k"
) -> Handled:
    begun = int(begun_s * _NS)
    return Handled(0, offset, token, key, begun, begun + 1000 if ended else None, process)


def log_of(*messages: tuple[int, Message]) -> list[LogRecord]:
    return [LogRecord(0, number, time_ms, encode(message)) for number, (time_ms, message) in enumerate(messages)]


def judged(
    handled: list[Handled],
    *,
    troubles: list[Trouble] | None = None,
    records: list[LogRecord] | None = None,
    at_most_once: bool = False,
) -> Findings:
    if records is None:
        records = log_of((0, ClaimingPartition("ia", "a", "g", "t", 0, 1)))
    sent = {(0, offset): "k" for offset in range(3)}
    return findings(
        sent=sent,
        handled=handled,
        troubles=troubles or [],
        instances={"a": "ia", "b": "ib"},
        records=records,
        interval_s=1.0,
        log_partitions=1,
        first_offset=0,
        at_most_once=at_most_once,
    )


def killed_at(seconds: float, process: str = "a") -> Trouble:
    return Trouble(process, "kill", int(seconds * _NS), 0, int(seconds * _NS))


def test_a_clean_run() -> None:
    found = judged([run(0, 1), run(1, 2), run(2, 3)])
    assert found.clean


def test_a_lost_message_is_found() -> None:
    found = judged([run(0, 1), run(2, 3), run(1, 2, ended=False)])
    assert found.lost == 1


@pytest.mark.parametrize(("kill_s", "unexplained"), [(2.5, 0), (4.0, 1)])
def test_a_repeat_needs_a_death_soon_after(kill_s: float, unexplained: int) -> None:
    handled = [run(0, 1), run(1, 2), run(1, 5, token=2, process="b"), run(2, 6, token=2, process="b")]
    found = judged(handled, troubles=[killed_at(kill_s)])
    assert (found.repeated, found.unexplained_repeats) == (1, unexplained)


def test_two_owners_are_found() -> None:
    found = judged([run(0, 1), run(1, 2, token=2, process="b"), run(2, 3)])
    assert found.two_owners == 1


def test_order_is_judged_per_key() -> None:
    found = judged([run(1, 1), run(0, 2), run(2, 3)])
    assert found.out_of_order == 1


@pytest.mark.parametrize(("killed", "lost"), [(True, 0), (False, 1)])
def test_at_most_once_may_lose_the_last_batch_of_a_killed_consumer_only(killed: bool, lost: int) -> None:
    records = log_of(
        (0, ClaimingPartition("ia", "a", "g", "t", 0, 1)),
        (1, Heartbeat("ia", "a", "g", "t", 0, 0, 1)),
        (2, ClaimingMessages("ia", "a", "g", "t", 0, 2, 1)),
        (3, Heartbeat("ia", "a", "g", "t", 0, 2, 1)),
        (4, ClaimingMessages("ia", "a", "g", "t", 0, 3, 1)),
    )
    found = judged(
        [run(0, 1), run(1, 2)], troubles=[killed_at(3)] if killed else [], at_most_once=True, records=records
    )
    assert found.lost == lost


def test_evidence_that_ends_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a#0.evidence"
    path.write_text("instance ia 5\nready\nclaimed 0 7 6\nb 0 1 7 10 k\ne 0 1 7 12 k\nb 0 2 7 13 k\ne 0 2 ")
    instance, found = read_evidence(path)
    assert instance == "ia"
    assert found == [Handled(0, 1, 7, "k", 10, 12, "a#0"), Handled(0, 2, 7, "k", 13, None, "a#0")]
