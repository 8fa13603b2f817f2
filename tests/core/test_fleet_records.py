"""The records of a fleet: to JSON and back, what is refused, and which of two is the newer one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keylane.core.fleet_records import (
    FleetAssignment,
    FleetClaim,
    FleetRecord,
    FleetSpec,
    Generation,
    HandledBut,
    LeaderLease,
    LeaseState,
    PartitionTable,
    WorkerLease,
    WorkerPositions,
    check_partition,
    from_json,
    key_of,
    to_json,
)
from keylane.errors import BrokenFleetRecord, InvalidInput

SPEC = FleetSpec(source={"kind": "hashed", "partitions": 32})
LEASE = WorkerLease(worker=3, instance="a.1", taken=7, beat=2, state=LeaseState.LEAVING, labels=("gpu",), host="h")
LEADER = LeaderLease(worker=3, instance="a.1", epoch=4, beat=9, version=12)
OWNERS = {**{str(number): number // 8 for number in range(32)}, "tool-1.chamber-2": 3}
ASSIGNMENT = FleetAssignment(epoch=4, version=12, owners=OWNERS, workers={0: "b.1", 3: "a.1"}, reason="start")
TABLE = PartitionTable(version=7, entries=({"subject": "a.*"},), generations=(Generation(1, 16, 5, 9),), numbers=(10,))
CLAIM = FleetClaim(partition="tool-1.chamber-2", worker=3, instance="a.1", token=99, held=True)
POSITIONS = WorkerPositions(
    worker=3,
    instance="a.1",
    beat=8,
    stream_created="2026-01-01T00:00:00Z",
    positions={"0": 17, "tool-1.chamber-2": 0},
    gaps={"0": HandledBut(25, frozenset({18, 21}))},
)


@pytest.mark.parametrize("record", [SPEC, LEASE, LEADER, ASSIGNMENT, CLAIM, TABLE, POSITIONS])
def test_a_record_comes_back(record: FleetRecord) -> None:
    assert from_json(key_of(record), to_json(record)) == record


def test_fields_of_a_later_version_are_kept() -> None:
    content = {**json.loads(to_json(CLAIM)), "zone": {"name": "eu"}}
    record = from_json(key_of(CLAIM), json.dumps(content).encode())
    assert isinstance(record, FleetClaim)
    assert json.loads(to_json(replace(record, held=False)))["zone"] == {"name": "eu"}


def test_an_assignment_is_written_in_ranges() -> None:
    assert json.loads(to_json(ASSIGNMENT))["owners"] == {
        "0": [[0, 7]],
        "1": [[8, 15]],
        "2": [[16, 23]],
        "3": [[24, 31], "tool-1.chamber-2"],
    }


@pytest.mark.parametrize(
    ("record", "changes", "said"),
    [
        (POSITIONS, {"positions": {"0": -1}}, "must be a whole number"),
        (POSITIONS, {"positions": [1]}, "must be an object of sequences by partition"),
        (CLAIM, {"token": -1}, "token is -1, and must be a whole number"),
        (CLAIM, {"token": True}, "token is True"),
        (CLAIM, {"held": "yes"}, "must be true or false"),
        (LEASE, {"state": "gone"}, "must be one of live, leaving, left, expired"),
        (LEASE, {"instance": ""}, "at least one character"),
        (LEASE, {"labels": "gpu"}, "a list of texts"),
        (SPEC, {"lease_s": 0}, "seconds, more than 0"),
        (ASSIGNMENT, {"owners": {"0": [1], "1": [[0, 2]]}}, "1 has two"),
        (ASSIGNMENT, {"owners": {"0": [1]}}, "its digest is"),
        (ASSIGNMENT, {"workers": {"x": "a"}}, "instances by worker"),
    ],
)
def test_a_wrong_field_is_named(record: FleetRecord, changes: dict[str, object], said: str) -> None:
    value = json.dumps({**json.loads(to_json(record)), **changes}).encode()
    with pytest.raises(BrokenFleetRecord, match=said):
        from_json(key_of(record), value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("claim.1", b"{", "is not JSON"),
        ("claim.1", b"[]", "not a JSON object"),
        ("claim.1", b"{}", "lacks held, instance, token, worker"),
        ("other", b"{}", "there is no record of this name"),
    ],
)
def test_what_is_no_record_is_refused(key: str, value: bytes, said: str) -> None:
    with pytest.raises(BrokenFleetRecord, match=said):
        from_json(key, value)


def test_another_spec_names_the_difference() -> None:
    assert replace(SPEC, layout="worker").differences(SPEC) == ('layout is "partition" in the fleet and "worker" here',)


@pytest.mark.parametrize("partition", ["", "a b", ".a", "a..b", "a*"])
def test_a_partition_that_is_no_key_is_refused(partition: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be part of a KV key"):
        check_partition(partition)
