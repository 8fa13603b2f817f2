"""Go and Python compute the same filters: the reference library answers thousands of random cases."""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

import pytest

from keylane.groups import ElasticConfig, StaticConfig
from tests.peers import go

pytestmark = pytest.mark.go

CASES = 4000
NAMES = [*"abcdefgh", "A", "Z", "a1", "a10", "a2", "worker-1", "worker_2", "9"]


def ask_go(cases: list[dict[str, Any]]) -> list[list[str]]:
    answer = subprocess.run(
        [str(go.program("pcgroups-peer")), "filters", "--cases"],
        input="\n".join(json.dumps(one) for one in cases),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def members_case(chance: random.Random) -> dict[str, Any]:
    """Any number of members, listed twice or in any order, more than partitions too; asked for one or a stranger."""
    members = [chance.choice(NAMES) for _ in range(chance.randint(1, 14))]
    member = chance.choice([*members, *members, "stranger"])
    return {"members": members, "max_members": chance.randint(1, 40), "member": member}


def mapping_case(chance: random.Random) -> dict[str, Any]:
    """Every partition has an owner, and owners list theirs in any order."""
    partitions = list(range(chance.randint(1, 40)))
    chance.shuffle(partitions)
    members = chance.sample(NAMES, min(len(partitions), chance.randint(1, 10)))
    owned: dict[str, list[int]] = {name: [] for name in members}
    for partition in partitions:
        owned[chance.choice(members)].append(partition)
    listed = [{"member": name, "partitions": held} for name, held in owned.items()]
    return {
        "max_members": len(partitions),
        "member_mappings": listed,
        "member": chance.choice([*members, "stranger"]),
    }


def stored(case: dict[str, Any]) -> tuple[ElasticConfig, StaticConfig]:
    """The case as Go would have stored it, in an elastic and in a static group."""
    owners = {name: case[name] for name in ("max_members", "members", "member_mappings") if name in case}
    elastic = owners | {"filter": "orders.*", "partitioning_wildcards": [1]}
    static = owners | {"filter": "orders.*"}
    return (
        ElasticConfig.from_json(json.dumps(elastic).encode(), "a record"),
        StaticConfig.from_json(json.dumps(static).encode(), "a record"),
    )


def ours(config: ElasticConfig | StaticConfig, member: str) -> list[str]:
    """A member that owns nothing has no consumer, so nobody asks for its filters."""
    return list(config.filters_of(member)) if config.plan.partitions_of(member) else []


@pytest.mark.parametrize("make", [members_case, mapping_case])
def test_filters_are_gos(make: Any) -> None:
    chance = random.Random(20)  # noqa: S311 - the same cases every time
    cases = [make(chance) for _ in range(CASES)]
    answers = ask_go(cases)
    assert len(answers) == CASES
    assert any(answers)
    for case, theirs in zip(cases, answers, strict=True):
        for config in stored(case):
            assert ours(config, case["member"]) == theirs, (config, case["member"])
