"""Whatever a configuration says, it survives its JSON; whatever a record says, reading it fails in one way only."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan, balanced
from keylane.core.subjects import matches
from keylane.errors import BrokenGroupRecord
from keylane.groups.config import Dialect, ElasticConfig, StaticConfig
from keylane.groups.consumer_spec import asking_for, covers

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
    return StaticConfig(partitions=partitions, filters=filters, dialect=dialect, **draw(owners(partitions)))


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
        partitions=partitions,
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
        assert {int(one.split(".")[0]) for one in asked} == set(range(config.partitions))
        assert len(asked) % config.partitions == 0


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


def json_values(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | floats | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4)
        ),
        max_leaves=8,
    )


JSON = json_values(st.floats())
FINITE = json_values(st.floats(allow_nan=False, allow_infinity=False))
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


@st.composite
def odd_records(draw: st.DrawFn) -> dict[str, Any]:
    """Valid elastic records with values in every form that other libraries give them, and with fields of their own."""
    wire: dict[str, Any] = json.loads(draw(elastic_configs()).to_json())
    for name in ("max_buffered_msg", "max_buffered_bytes"):
        wire |= draw(st.sampled_from([{}, {name: -1}, {name: 0}, {name: None}]))
    if "filter" not in wire:
        wire["partitioning_filters"] = wire["partitioning_filters"] or draw(st.sampled_from([[], None]))
        for one in wire["partitioning_filters"] or ():
            one.update(draw(st.sampled_from([{}, {"partitioning_wildcards": []}, {"partitioning_wildcards": None}])))
            one.update(draw(st.dictionaries(st.text("xyz", min_size=1), FINITE, max_size=1)))
    for name in ("members", "member_mappings"):
        if name not in wire:
            wire |= draw(st.sampled_from([{}, {name: []}, {name: None}]))
    return wire | draw(st.dictionaries(st.text("xyz", min_size=1), FINITE, max_size=2))


@given(odd_records(), st.lists(NAMES, max_size=5))
def test_new_owners_change_nothing_else_in_a_record(record: dict[str, Any], members: list[str]) -> None:
    config = ElasticConfig.from_json(json.dumps(record).encode(), "here")
    assert json.loads(config.to_json()) == record
    changed = json.loads(config.with_owners(members=members).to_json())
    owners_of = ("members", "member_mappings")
    assert [one for one in changed.items() if one[0] not in owners_of] == [
        one for one in record.items() if one[0] not in owners_of
    ]
    assert list(changed.get("members") or ()) == members
    assert not changed.get("member_mappings")


FILTERS = st.builds(
    lambda first, last: ".".join([*first, last]),
    st.lists(st.sampled_from("*ab"), max_size=2),
    st.sampled_from("*>ab"),
)
PARTITION_FILTERS = st.lists(st.builds("{}.{}".format, st.integers(0, 2), FILTERS), min_size=1, max_size=5)
SUBJECTS = [
    f"{partition}.{'.'.join(tokens)}"
    for partition in range(3)
    for length in (1, 2, 3, 4)
    for tokens in itertools.product("abc", repeat=length)
]


@given(PARTITION_FILTERS, PARTITION_FILTERS)
def test_a_consumer_that_covers_another_delivers_all_of_it(there: list[str], wanted: list[str]) -> None:
    """Against a dumb version: every subject of three partitions, up to four tokens."""
    is_asked_for = asking_for(wanted)
    asked = {subject for subject in SUBJECTS if any(matches(one, subject) for one in wanted)}
    assert {subject for subject in SUBJECTS if is_asked_for(subject.encode())} == asked
    if covers(there, wanted):
        delivered = {subject for subject in SUBJECTS if any(matches(one, subject) for one in there)}
        assert asked <= delivered
        assert {one[0] for one in there} == {one[0] for one in wanted}


@given(elastic_configs(), st.lists(NAMES, max_size=5))
def test_new_owners_leave_the_rest_alone(config: ElasticConfig, members: list[str]) -> None:
    changed = config.with_owners(members=members)
    assert changed.same_but_owners(config)
    assert changed.members == tuple(members)
    assert changed.mappings is None


@given(st.integers(1, 16_384), st.integers(0, 8))
def test_the_members_that_are_needed_are_enough_and_none_too_many(partitions: int, filters: int) -> None:
    partitioning = tuple(Partitioning(f"f{number}.*", (1,), partitions) for number in range(filters))
    config = ElasticConfig(partitions=partitions, partitioning=partitioning)
    names = [f"m{number}" for number in range(config.members_needed)]
    config.with_owners(members=names).check_consumers()
    if len(names) > 1:
        fewer = replace(config, members=tuple(names[1:]))
        assert any(fewer.too_many_filters(name) for name in fewer.members)
