"""The arithmetic of a fault run: the seed decides all faults, and made-up evidence gets the causes that it deserves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import __main__ as command
from chaos import causes, groups, memory
from chaos.causes import Causes, Pair, Trouble
from chaos.evidence import Failed, Fails, Handled, Log
from chaos.faults import FEWEST_MEMBERS, KINDS, Fault, Kind
from chaos.groups import INSTANCES, MAX_TRIES, MEMBERS, PRESENT, Outcome, Settings
from chaos.memory import MOST_GROWTH_BYTES, Sample
from chaos.worker import is_poison
from keylane.core.partitions import partition_number
from keylane.testing import Effect, judge


def plan(seed: int, *kinds: Kind, seconds: float = 180.0) -> list[Fault]:
    return groups.planned(Settings(seed=seed, seconds=seconds, faults=kinds or KINDS))


def effect(at_s: float, by: str, sequence: int = 7) -> Handled:
    return Handled(at_s, "k1", 3, sequence, by)


# ---- the plan -------------------------------------------------------------------------------------------


def test_the_seed_decides_every_fault() -> None:
    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


def test_there_is_one_fault_every_second_and_every_kind_strikes() -> None:
    made = plan(1)
    assert [one.at_s for one in made] == [float(second) for second in range(1, 180)]
    assert set(Counter(one.kind for one in made)) == set(KINDS)
    assert {one.how for one in made if one.kind == "server"} == {"SIGKILL", "SIGTERM"}
    assert {one.target for one in made if one.kind in {"kill", "freeze", "stop"}} == set(INSTANCES)


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone_can_be_chosen(kind: Kind) -> None:
    assert {one.kind for one in plan(1, kind)} == {kind}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_away_is_let_alone_until_it_is_back(seed: int) -> None:
    for target in (*INSTANCES, "server"):
        mine = [one for one in plan(seed) if one.target == target and one.kind != "membership"]
        assert len(mine) > 1
        for earlier, later in pairwise(mine):
            assert earlier.at_s + earlier.lasts_s <= later.at_s


@pytest.mark.parametrize("seed", range(20))
def test_changes_of_membership_are_possible_and_leave_enough_members(seed: int) -> None:
    here, changes = set(PRESENT), plan(seed, "membership")
    assert changes
    for one in changes:
        assert (one.target in here) is (one.how == "drop")
        here ^= {one.target}
        assert FEWEST_MEMBERS <= len(here) <= len(MEMBERS)


def test_freezes_last_three_to_eight_seconds() -> None:
    lasting = [one.lasts_s for one in plan(1, "freeze")]
    assert 3.0 <= min(lasting) < 4.0
    assert 7.0 < max(lasting) <= 8.0


# ---- causes ---------------------------------------------------------------------------------------------

KILL = Trouble("kill", "a1#0", 10.0, 10.1)
FREEZE = Trouble("freeze", "a1#0", 10.0, 15.0)
SERVER = Trouble("server", "a1#0", 10.0, 12.0)


@pytest.mark.parametrize(
    ("trouble", "first", "second", "explains"),
    [
        (KILL, effect(9.9, "a1#0"), effect(15.0, "a2#0"), True),
        (KILL, effect(8.5, "a1#0"), effect(15.0, "a2#0"), False),  # its ack had time enough
        (KILL, effect(9.8, "a1#0"), effect(9.9, "a2#0"), False),  # both before it
        (KILL, effect(9.9, "a2#0"), effect(15.0, "b1#0"), False),  # somebody else was killed
        (KILL, effect(9.9, "a1#1"), effect(15.0, "a2#0"), False),  # another life of that instance
        (FREEZE, effect(9.9, "a1#0"), effect(14.0, "a2#0"), True),
        (FREEZE, effect(14.0, "a2#0"), effect(15.1, "a1#0"), True),  # it was in the midst of it
        (FREEZE, effect(14.0, "a2#0"), effect(18.0, "a1#0"), False),  # it knew by then
        (FREEZE, effect(9.0, "a2#0"), effect(15.1, "a1#0"), False),  # done before it stood still
        (FREEZE, effect(15.2, "a1#0"), effect(16.0, "a2#0"), True),
        (SERVER, effect(9.5, "a1#0"), effect(13.0, "a2#0"), True),
        (SERVER, effect(11.9, "a1#0"), effect(13.0, "a1#0"), True),
        (SERVER, effect(13.0, "a1#0"), effect(14.0, "a2#0"), False),  # it had its link again
        (SERVER, effect(11.0, "a2#0"), effect(14.0, "a1#0"), False),
    ],
)
def test_a_trouble_explains_what_it_can_have_caused(
    trouble: Trouble, first: Handled, second: Handled, explains: bool
) -> None:
    assert causes.explains(trouble, Pair(first, second)) is explains


def test_every_repeat_of_a_message_needs_a_cause() -> None:
    effects = [effect(9.9, "a1#0"), effect(15.0, "a2#0"), effect(16.0, "b1#0"), effect(9.95, "a1#0", 8)]
    found = causes.find([7], effects, [KILL])
    assert found.explained == [(Pair(effects[0], effects[1]), KILL)]
    assert found.unexplained == [Pair(effects[1], effects[2])]
    assert (found.sequences_explained, found.sequences_unexplained) == (set(), {7})


def test_the_nearest_of_several_causes_is_named() -> None:
    early = Trouble("server", "a1#0", 9.0, 9.4)
    found = causes.find([7], [effect(9.8, "a1#0"), effect(15.0, "a2#0")], [early, KILL])
    assert found.by_kind() == {"kill": 1}


def test_a_restart_is_felt_until_the_link_is_there_again() -> None:
    restart = Trouble("server", "server", 10.0, 10.5)
    felt = causes.felt(restart, {"a1#0": [3.0, 11.2, 40.0], "a2#0": [3.0]})
    assert [(one.by, one.until_s) for one in felt] == [("a1#0", 11.2), ("a2#0", 10.5)]


# ---- evidence -------------------------------------------------------------------------------------------


def test_a_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "evidence"
    file.write_bytes(
        b"ready\n1000000000 orders.k7 3 a 5 1\nfailed 2000000000 orders.k7 4 2 0 6 1\nlinked 2500000000\n30"
    )
    log = Log(file, "a1#0", 10)
    log.read_on()
    place = partition_number("k7", 10)
    assert log.handled == [Handled(1.0, "k7", place, 3, "a1#0", 5, 1)]
    assert log.failed == [Failed(2.0, "k7", place, 4, "a1#0", 2, False, 6, 1)]
    assert log.linked == [2.5]
    with file.open("ab") as more:
        more.write(b"00000000 orders.k7 4 a 6 1\n")
    log.read_on()
    assert log.handled[1:] == [Handled(3.0, "k7", place, 4, "a1#0", 6, 1)]


def test_a_message_that_was_given_up_has_its_place_in_the_queue(tmp_path: Path) -> None:
    """Else nobody could tell that the server had copied it again."""
    file = tmp_path / "evidence"
    file.write_bytes(b"failed 2000000000 orders.k7 4 %d 1 6 1\n" % MAX_TRIES)
    running: Any = SimpleNamespace(started=[SimpleNamespace(name="a1#0", member="a", evidence=file)])
    logs = groups.Logs(running)
    logs.read_on()
    assert logs.effects({4}, None) == [Handled(2.0, "k7", partition_number("k7", groups.PARTITIONS), 4, "a1#0", 6, 1)]


def test_poison_is_the_same_for_every_process_and_about_as_rare_as_asked() -> None:
    poison = [sequence for sequence in range(1, 100_001) if is_poison(3, sequence, 1000)]
    assert 60 < len(poison) < 140
    assert poison != [sequence for sequence in range(1, 100_001) if is_poison(4, sequence, 1000)]
    assert not any(is_poison(3, sequence, 0) for sequence in range(1, 1000))
    assert MAX_TRIES > 1


# ---- the verdict ----------------------------------------------------------------------------------------


def outcome(
    handled: Sequence[int], troubles: Sequence[Trouble] = (), *, settings: Settings | None = None, **more: Any
) -> Outcome:
    effects = [effect(9.0 + number / 10, f"a{number % 2 + 1}#0", one) for number, one in enumerate(handled)]
    found = judge([1, 2, 3], [Effect(one.key, one.sequence, one.by) for one in effects])
    facts: dict[str, Any] = {
        "dead_letters": 0,
        "undeserved": [],
        "failed_tries": 0,
        "crashes": 0,
        "uncounted": [],
        "faults": [{"kind": "kill"}],
        "findings": [],
        "surprises": [],
        "store": {"stored_twice": 0},
        "left_in_queue": 0,
        "drain_s": 1.0,
    }
    why = causes.find(found.duplicated, effects, troubles)
    return Outcome(settings=settings or Settings(), verdict=found, causes=why, **(facts | more))


KILLED = [Trouble("kill", "a1#0", 9.0, 9.3), Trouble("kill", "a2#0", 9.0, 9.3)]


@pytest.mark.parametrize(
    ("made", "clean"),
    [
        (outcome([1, 2, 3]), True),
        (outcome([1, 3]), False),
        (outcome([1, 3, 2]), False),
        (outcome([1, 2, 3, 4]), False),
        (outcome([1, 2, 2, 3]), False),
        (outcome([1, 2, 2, 3], KILLED), True),
        (outcome([1, 2, 2, 3], KILLED, settings=Settings(sink="postgres"), rows_twice=1), False),
        (outcome([1, 2, 2, 3], KILLED, settings=Settings(sink="postgres"), rows_of_dead_letters=1), False),
        (outcome([1, 2, 3], surprises=["a1#0 ended by itself"]), False),
        (outcome([1, 2, 3], store={"stored_twice": 1}), False),
        (outcome([1, 2, 3], left_in_queue=1), False),
        (outcome([1, 2, 3], undeserved=[2]), False),
        (outcome([1, 2, 3], crashes=3), True),
        (outcome([1, 2, 3], uncounted=[Fails(9.0, 2, "a1#0")]), False),
    ],
)
def test_only_what_is_clean_passes(
    made: Outcome, clean: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def made_up(settings: Settings, say: object) -> Outcome:
        return made

    monkeypatch.setattr(groups, "run", made_up)
    assert command.main(["groups", "--json"]) == (0 if clean else 1)
    told = json.loads(capsys.readouterr().out)
    assert told["clean"] is clean
    assert told["duplicated"] == told["explained"] + told["unexplained"]
    assert command.main(["groups"]) == (0 if clean else 1)
    assert ("NOT CLEAN" in capsys.readouterr().out) is not clean


def test_every_failure_on_purpose_must_be_told(tmp_path: Path) -> None:
    file = tmp_path / "evidence"
    file.write_text(
        "ready\n"
        "fails 1000000000 s.k1 1\nfailed 1000000001 s.k1 1 1 1 5 1\n"
        "fails 2000000000 s.k1 1\nfailed 2000000001 s.k1 1 2 1 5 1\n"
        "fails 3000000000 s.k2 2\ncrashed 3000000001 s.k2 2\n"
        "fails 4000000000 s.k3 3\n"
        "fails 8000000000 s.k4 4\nlost 8100000000\n"
    )
    log = Log(file, "a1#0", 4)
    log.read_on()
    assert (len(log.fails), len(log.failed), len(log.crashed), log.lost) == (5, 2, 1, [8.1])
    assert causes.uncounted([log], []) == [Fails(4.0, 3, "a1#0")]
    assert causes.uncounted([log], [Trouble("kill", "a1#0", 4.5, 4.6)]) == []
    assert causes.uncounted([log], [Trouble("kill", "a2#0", 4.5, 4.6)]) == [Fails(4.0, 3, "a1#0")]


def test_causes_count_messages_once() -> None:
    pair = Pair(effect(1.0, "a"), effect(2.0, "b"))
    both = Causes(explained=[(pair, KILL), (pair, KILL)])
    assert both.sequences_explained == {7}


@pytest.mark.parametrize(
    "arguments",
    [
        ("groups", "--rate", "0"),
        ("groups", "--faults", "fire"),
        ("groups", "--storage", "memory"),
        ("groups", "--failing", "1"),
        ("groups", "--sink", "oracle"),
        ("memory", "--messages", "5"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(list(arguments))
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


# ---- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "clean"),
    [
        ([1, 50, 50, 50, 50], True),
        ([1, 50, 50, 50, 50 + MOST_GROWTH_BYTES], False),
        ([1, 50, 50 + MOST_GROWTH_BYTES, 50, 50], False),  # a peak counts, too
        ([1, 50 + MOST_GROWTH_BYTES, 50, 50, 50], True),  # less than before is no growth
    ],
)
def test_memory_is_judged_after_the_warm_up(sizes: list[int], clean: bool) -> None:
    samples = [Sample(25 * number, size) for number, size in enumerate(sizes)]
    made = memory.Outcome(100, 1.0, samples)
    assert made.clean is clean
    assert made.as_json()["first_bytes"] == sizes[1]


def copy(at_s: float, by: str, sequence: int, place: int) -> Handled:
    return effect(at_s, by, sequence)._replace(queue_sequence=place)


@pytest.mark.parametrize(
    ("place", "restart", "explained"),
    [
        (9, SERVER, True),
        (7, SERVER, False),  # the same copy
        (9, KILL, False),  # only the server makes copies
        (9, SERVER._replace(from_s=31.0, until_s=32.0), False),  # afterwards
    ],
)
def test_what_the_server_copied_again_after_a_restart_is_told_by_its_place(
    place: int, restart: Trouble, explained: bool
) -> None:
    effects = [copy(5.0, "a1#0", 7, 7), copy(5.1, "a1#0", 8, 8), copy(30.0, "b1#0", 7, place)]
    found = causes.find([7], effects, [restart])
    assert found.by_kind() == ({"copied again": 1} if explained else {})
    assert bool(found.unexplained) is not explained
