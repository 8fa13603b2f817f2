"""Whatever a configuration says, it survives its JSON; whatever a record says, reading it fails in one way only."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan, balanced
from keylane.errors import BrokenGroupRecord
from keylane.groups.config import Dialect, ElasticConfig, StaticConfig

NAMES = st.text("abcXYZ019-_=", min_size=1, max_size=16)
TOKENS = st.text("abc019-_", min_size=1, max_size=5)


@st.composite
def owners(draw: st.DrawFn, partitions: int) -> dict[str, Any]:
    members = draw(st.lists(NAMES, unique=True, max_size=8))
    if draw(st.booleans()):
        return {"members": tuple(members)}
    if not members:
        return {}
    owned = draw(st.lists(st.sampled_from(members), min_size=partitions, max_size=partitions))
    plan: dict[str, list[int]] = {}
    for partition, member in enumerate(owned):
        plan.setdefault(member, []).append(partition)
    return {"mappings": Plan(plan)}


@st.composite
def static_configs(draw: st.DrawFn) -> StaticConfig:
    partitions = draw(st.integers(1, 40))
    dialect: Dialect = draw(st.sampled_from(["present", "go-0.1"]))
    first = draw(st.lists(TOKENS, unique=True, max_size=1 if dialect == "go-0.1" else 4))
    filters = tuple(f"{token}.{draw(st.sampled_from(['*', '>', 'x', '*.y']))}" for token in first)
    return StaticConfig(max_members=partitions, filters=filters, dialect=dialect, **draw(owners(partitions)))


@st.composite
def elastic_configs(draw: st.DrawFn) -> ElasticConfig:
    partitions = draw(st.integers(1, 40))
    dialect: Dialect = draw(st.sampled_from(["present", "go-0.1"]))
    first = draw(st.lists(TOKENS, unique=True, min_size=dialect == "go-0.1", max_size=1 if dialect == "go-0.1" else 4))
    partitioning = []
    for token in first:
        stars = draw(st.integers(1, 3))
        chosen = draw(st.lists(st.integers(1, stars), unique=True, min_size=1))
        partitioning.append(Partitioning(".".join([token, *"*" * stars]), tuple(chosen), partitions))
    return ElasticConfig(
        max_members=partitions,
        partitioning=tuple(partitioning),
        max_buffered_messages=draw(st.integers(0, 10**9)),
        max_buffered_bytes=draw(st.integers(0, 10**12)),
        dialect=dialect,
        **draw(owners(partitions)),
    )


@given(static_configs())
def test_a_static_configuration_survives_its_json(config: StaticConfig) -> None:
    config.check()
    assert StaticConfig.from_json(config.to_json(), "here") == config


@given(elastic_configs())
def test_an_elastic_configuration_survives_its_json(config: ElasticConfig) -> None:
    config.check()
    assert ElasticConfig.from_json(config.to_json(), "here") == config


def escaped(data: bytes) -> bytes:
    """As Go writes it."""
    return data.replace(b">", b"\\u003e").replace(b"<", b"\\u003c").replace(b"&", b"\\u0026")


@given(static_configs())
def test_escapes_change_nothing(config: StaticConfig) -> None:
    assert StaticConfig.from_json(escaped(config.to_json()), "here") == config


@given(static_configs() | elastic_configs())
def test_every_partition_is_asked_for_by_one_member_under_every_filter(
    config: StaticConfig | ElasticConfig,
) -> None:
    asked: Counter[str] = Counter()
    for member in config.plan.members:
        if config.plan.partitions_of(member):
            asked.update(config.filters_of(member))
    assert not asked or max(asked.values()) == 1
    if config.plan.members:
        assert {int(one.split(".")[0]) for one in asked} == set(range(config.max_members))
        assert len(asked) % config.max_members == 0


@given(st.lists(NAMES, unique=True, min_size=1, max_size=8), st.integers(1, 40), st.randoms())
def test_filters_follow_the_order_of_the_record(members: list[str], partitions: int, chance: Any) -> None:
    plan = balanced(members, partitions)
    listed: list[dict[str, Any]] = []
    for member, owned in plan.mappings():
        shuffled = list(owned)
        chance.shuffle(shuffled)
        listed.append({"member": member, "partitions": shuffled})
    chance.shuffle(listed)
    record = json.dumps({"max_members": partitions, "member_mappings": listed}).encode()
    config = StaticConfig.from_json(record, "here")
    for one in listed:
        assert config.filters_of(one["member"]) == tuple(f"{partition}.>" for partition in one["partitions"])
    assert config.mappings == Plan(dict(plan.mappings()))


FIELDS = [
    "max_members", "filter", "filters", "members", "member_mappings", "member-mappings", "partitioning_filters",
    "partitioning_wildcards", "partitioning-wildcards", "max_buffered_msg", "msg-buffer-size", "max_buffered_bytes",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=8,
)
NEARLY = st.fixed_dictionaries(
    {"max_members": st.integers(-1, 3) | JSON}, optional={name: JSON for name in FIELDS if name != "max_members"}
)


@given(st.binary(max_size=60) | (JSON | NEARLY).map(lambda value: json.dumps(value).encode()))
def test_a_foreign_record_is_called_broken_and_nothing_else(data: bytes) -> None:
    for kind in (StaticConfig, ElasticConfig):
        config, words = None, ""
        try:
            config = kind.from_json(data, "the record")
        except BrokenGroupRecord as error:
            words = str(error)
        assert words.startswith("the record ") or config is not None
        if config is not None:
            config.check()
            assert kind.from_json(config.to_json(), "again") == config


@given(elastic_configs(), st.lists(NAMES, max_size=5))
def test_new_owners_leave_the_rest_alone(config: ElasticConfig, members: list[str]) -> None:
    changed = config.with_owners(members=members)
    assert changed.same_but_owners(config)
    assert changed.members == tuple(members)
    assert changed.mappings is None
