"""Consumers in processes of their own, killed: nothing lost, nothing twice, and the judge notices if it were so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos import marshal
from chaos.log_check import two_fresh_owners
from chaos.marshal_judge import Findings, Handled, Trouble, findings, read_evidence
from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import ClaimingMessages, ClaimingPartition, Heartbeat, Message, encode
from keylane.marshal.options import Mode

_NS = 1_000_000_000


@pytest.mark.long("causes faults for tens of seconds")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_a_short_run_with_kills_is_clean(mode: Mode) -> None:
    settings = marshal.Settings(
        seconds=12, seed=2, consumers=3, partitions=6, interval_s=3.0, every_s=2.5, rate=200, mode=mode, batch=20,
        work_s=0.002,
    )  # fmt: skip
    outcome = await marshal.run(settings, lambda _: None)
    assert outcome.kills >= 2
    assert outcome.clean, marshal.as_text(outcome)
    assert outcome.sent > 1000
    assert outcome.found.lost == 0
    if mode == "at_most_once":
        assert outcome.found.repeated == 0
        assert outcome.found.most_lost_by_one <= settings.batch
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
    batch: int | None = None,
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
        batch=batch,
    )


def killed_at(seconds: float, process: str = "a") -> Trouble:
    return Trouble(process, "kill", int(seconds * _NS), 0, int(seconds * _NS))


def test_a_clean_run() -> None:
    found = judged([run(0, 1), run(1, 2), run(2, 3)])
    assert found.clean


def test_a_lost_message_is_found() -> None:
    found = judged([run(0, 1), run(2, 3), run(1, 2, ended=False)])
    assert found.lost == 1


@pytest.mark.parametrize(("kill_s", "unexplained"), [(2.5, 0), (0.5, 1), (None, 1)])
def test_a_repeat_needs_a_death_after_it(kill_s: float | None, unexplained: int) -> None:
    handled = [run(0, 1), run(1, 2), run(1, 5, token=2, process="b"), run(2, 6, token=2, process="b")]
    found = judged(handled, troubles=[] if kill_s is None else [killed_at(kill_s)])
    assert (found.repeated, found.unexplained_repeats) == (1, unexplained)


@pytest.mark.parametrize(("first_s", "unexplained"), [(1.2, 0), (0.9, 1)])
def test_repeats_of_one_death_were_begun_within_one_interval(first_s: float, unexplained: int) -> None:
    handled = [run(0, first_s), run(1, 2.0), run(2, 2.1, ended=False)]
    again = [run(offset, 5 + offset, token=2, process="b") for offset in range(3)]
    found = judged([*handled, *again], troubles=[killed_at(2.15)])
    assert (found.repeated, found.unexplained_repeats) == (3, 2 * unexplained)
    assert found.longest_window_s == pytest.approx(2.1 - first_s)
    assert found.most_repeated_of_one == 3


def test_two_owners_are_found() -> None:
    found = judged([run(0, 1), run(1, 2, token=2, process="b"), run(2, 3)])
    assert found.two_owners == 1


def test_order_is_judged_per_key() -> None:
    found = judged([run(1, 1), run(0, 2), run(2, 3)])
    assert found.out_of_order == 1


@pytest.mark.parametrize(("killed", "batch", "lost"), [(True, 2, 0), (True, 1, 1), (False, 2, 2)])
def test_at_most_once_may_lose_one_batch_with_a_killed_consumer(killed: bool, batch: int, lost: int) -> None:
    """Whatever it had taken, from however many batches: not more messages than one batch has."""
    records = log_of(
        (0, ClaimingPartition("ia", "a", "g", "t", 0, 1)),
        (1, Heartbeat("ia", "a", "g", "t", 0, 0, 1)),
        (2, ClaimingMessages("ia", "a", "g", "t", 0, 2, 1)),
        (3, Heartbeat("ia", "a", "g", "t", 0, 2, 1)),
        (4, ClaimingMessages("ia", "a", "g", "t", 0, 3, 1)),
    )
    found = judged([run(0, 1)], troubles=[killed_at(3)] if killed else [], batch=batch, records=records)
    assert found.lost == lost
    assert found.most_lost_by_one == 2


def test_at_most_once_allows_no_repeat() -> None:
    found = judged([run(0, 1), run(0, 3, token=2, process="b")], troubles=[killed_at(2)], batch=2)
    assert found.unexplained_repeats == 1


# ---- the log, read in another way ---------------------------------------------------------------------


def fresh_pairs(trace: str) -> list[int]:
    """Records with two fresh owners. Each line: seconds, who (client and instance), what."""
    words = {"claims": "ClaimingPartition", "beats": "Heartbeat", "releases": "ReleasingPartition"}
    records = []
    for number, line in enumerate(trace.strip().splitlines()):
        seconds, who, what = line.split()
        kind, offset = words[what], "" if what == "claims" else "/5"
        value = f"{kind}/1/0/{who}/{who[:-1]}/g/t/0{offset}".encode()
        records.append((0, number, int(float(seconds) * 1000), value))
    return [one.at for one in two_fresh_owners(records, 10.0)]


@pytest.mark.parametrize(
    ("trace", "found"),
    [
        ("0 a1 claims\n1 a1 beats\n8 a1 beats\n", []),
        ("0 a1 claims\n0 b1 claims\n1 a1 beats\n8 a1 beats\n9 b1 claims\n15 a1 beats", []),  # losers know it
        ("0 a1 claims\n1 a1 beats\n5 b1 claims\n6 b1 beats\n8 a1 beats\n13 b1 beats", [2, 3, 4, 5]),
        ("0 a1 claims\n1 a1 beats\n2 a1 releases\n3 b1 claims\n4 b1 beats", []),
        ("0 a1 claims\n1 a1 beats\n22 b1 claims\n23 b1 beats\n24 a1 beats\n30 b1 beats", []),  # a1 was frozen
        ("0 a1 claims\n1 a1 beats\n13 b1 claims\n14 b1 beats\n15 a1 beats", [4]),  # taken too soon
        ("0 a1 claims\n1 a1 beats\n3 a2 beats\n3 a2 beats\n9 a2 beats", []),  # a came back under its name
        ("0 a1 claims\n1 a1 beats\n26 a1 beats\n27 b1 claims\n33 a1 beats", []),  # nobody else was there
    ],
)
def test_two_fresh_owners_are_found_in_the_log(trace: str, found: list[int]) -> None:
    assert fresh_pairs(trace) == found


def test_evidence_that_ends_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a#0.evidence"
    path.write_text("instance ia 5\nready\nclaimed 0 7 6\nb 0 1 7 10 k\ne 0 1 7 12 k\nb 0 2 7 13 k\ne 0 2 ")
    instance, found = read_evidence(path)
    assert instance == "ia"
    assert found == [Handled(0, 1, 7, "k", 10, 12, "a#0"), Handled(0, 2, 7, "k", 13, None, "a#0")]
