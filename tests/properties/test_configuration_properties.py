"""Plans of configurations: done, they leave nothing to do; between equal states there is none."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.configuration_difference import ConfigurationPlan, PresentResource, difference
from keylane.core.configuration_file import ResourceKey, WantedResource

Present = dict[ResourceKey, PresentResource]
Wanted = dict[ResourceKey, WantedResource]

_names = st.sampled_from(["a", "b", "c", "d"])
_members = st.sets(_names).map(lambda names: tuple(sorted(names)))
_FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "stream": {
        "subjects": st.sampled_from([("x.*",), ("x.*", "y.*"), ("z.>",)]),
        "partitions": st.sampled_from([4, 8]),
        "storage": st.sampled_from(["file", "memory"]),
        "replicas": st.integers(1, 3),
        "max_messages": st.integers(0, 20),
        "max_age": st.sampled_from([0.0, 60.0, 3600.0]),
    },
    "dead letters": {"max_messages": st.integers(0, 20), "max_age": st.sampled_from([0.0, 60.0])},
    "static": {"partitions": st.just(4), "members": _members, "mapping": st.none()},
    "elastic": {
        "partitions": st.sampled_from([4, 8]),
        "members": _members,
        "mapping": st.none(),
        "max_buffered_messages": st.integers(0, 2),
    },
    "fleet": {
        "source": st.just("hashed"),
        "partitions": st.sampled_from([4, 8]),
        "lease_s": st.sampled_from([3.0, 5.0]),
    },
}
_KEYS = [
    ResourceKey(kind, stream, "" if kind in ("stream", "dead letters") else "g")  # type: ignore[arg-type]
    for stream in ("S", "T")
    for kind in _FIELDS
]


@st.composite
def presents(draw: st.DrawFn) -> Present:
    found = draw(st.sets(st.sampled_from(_KEYS)))
    return {
        key: PresentResource(
            key=key,
            fields=draw(st.fixed_dictionaries(_FIELDS[key.kind])),
            version=draw(st.sampled_from(["v1", "v2"])),
            messages=draw(st.integers(0, 10)),
            oldest_s=draw(st.sampled_from([0.0, 100.0])),
            workers=draw(st.integers(0, 1)) if key.kind == "fleet" else 0,
        )
        for key in sorted(found)
    }


@st.composite
def configurations(draw: st.DrawFn) -> Wanted:
    found = draw(st.sets(st.sampled_from(_KEYS)))
    wanted = {}
    for key in sorted(found):
        some = {name: value for name, value in _FIELDS[key.kind].items() if draw(st.booleans())}
        fields = None if draw(st.booleans()) and draw(st.booleans()) else draw(st.fixed_dictionaries(some))
        wanted[key] = WantedResource(key, fields)
    return wanted


def applied(present: Present, plan: ConfigurationPlan) -> Present:
    """A dumb server: does each step."""
    after = dict(present)
    for step in plan.steps:
        changes = {one.name: one.after for one in step.changes}
        if step.action == "delete":
            del after[step.key]
        elif step.action == "create":
            assert step.key not in after
            after[step.key] = PresentResource(key=step.key, fields=changes, version="new")
        else:
            there = after[step.key]
            assert step.version == there.version
            after[step.key] = PresentResource(
                key=step.key, fields={**there.fields, **changes}, version="new", messages=there.messages
            )
    return after


def as_wanted(present: Present) -> Wanted:
    return {key: WantedResource(key, one.fields) for key, one in present.items()}


@given(presents(), configurations())
def test_a_plan_that_is_done_leaves_nothing_but_what_was_refused(present: Present, wanted: Wanted) -> None:
    plan = difference(present, wanted)
    again = difference(applied(present, plan), wanted)
    assert again.steps == ()
    assert {one.key for one in again.refused} <= {one.key for one in plan.refused}


@given(presents(), presents())
def test_a_plan_to_another_state_gives_that_state(before: Present, after: Present) -> None:
    plan = difference(before, as_wanted(after))
    made = applied(before, plan)
    refused = {one.key for one in plan.refused}
    for key, one in after.items():
        if key not in refused:
            assert made[key].fields == one.fields


@given(presents())
def test_between_equal_states_there_is_no_plan(present: Present) -> None:
    assert difference(present, as_wanted(present)).is_empty


@given(presents(), configurations())
def test_nothing_is_touched_that_the_file_does_not_name_and_nothing_deleted_that_it_keeps(
    present: Present, wanted: Wanted
) -> None:
    plan = difference(present, wanted)
    assert {step.key for step in plan.steps} <= wanted.keys()
    assert all(wanted[step.key].fields is None for step in plan.deletes)
    assert not {step.key for step in plan.steps} & {one.key for one in plan.refused}


@given(presents(), configurations())
def test_streams_that_hold_more_than_a_new_limit_are_left_alone(present: Present, wanted: Wanted) -> None:
    for step in difference(present, wanted).steps:
        limits = {one.name: one.after for one in step.changes if step.action == "change"}
        if limits.get("max_messages"):
            assert present[step.key].messages <= limits["max_messages"]
