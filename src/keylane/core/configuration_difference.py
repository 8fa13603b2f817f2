"""What differs between a server and a configuration file, and what may be done about it.

Owns: which fields may change, which changes would lose messages or order, and the order of the steps. Never asks a
server. A field that the file leaves out is no difference; a resource that the file does not name is left alone.

`difference(present, wanted)` is empty once its steps are done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from keylane.core.configuration_file import ResourceKey, WantedResource
from keylane.core.plans import Plan, balanced, ranges

Action = Literal["create", "change", "delete"]

_NUMBERING = ("partition_by", "key", "partitions")
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentResource:
    """A resource as the server has it."""

    key: ResourceKey
    fields: Mapping[str, Any]
    """All of them, in the form of `configuration_file`."""
    version: str
    """Another one after every change."""
    messages: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    """The age of the oldest message."""
    most_per_subject: int | None = None
    """Messages of the fullest subject; None: unknown."""
    numbered_readers: tuple[str, ...] = ()
    """Who reads a stream by its partition numbers: `static group billing`."""
    fleets: tuple[str, ...] = ()
    """Fleets that can change the number of partitions of a stream."""
    workers: int = 0
    """Of a fleet, that run now."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a plan."""

    action: Action
    key: ResourceKey
    changes: tuple[FieldChange, ...] = ()
    notes: tuple[str, ...] = ()
    """What will move, or be lost."""
    version: str = ""
    """The step holds for this version alone; empty: the resource does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedChange:
    """A change that would lose messages or their order, and the command that does it safely."""

    key: ResourceKey
    changes: tuple[FieldChange, ...]
    reason: str
    command: str


@dataclass(frozen=True, slots=True)
class ConfigurationPlan:
    """All that is to be done, in this order."""

    steps: tuple[PlannedStep, ...] = ()
    refused: tuple[RefusedChange, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.refused

    @property
    def deletes(self) -> tuple[PlannedStep, ...]:
        return tuple(step for step in self.steps if step.action == "delete")

    @property
    def digest(self) -> str:
        """The same steps on the same versions, the same digest."""
        lines = [
            [step.action, step.key, step.version, [[one.name, one.after] for one in step.changes]]
            for step in self.steps
        ]
        return sha256(json.dumps(lines, default=str).encode()).hexdigest()[:12]


def difference(
    present: Mapping[ResourceKey, PresentResource], wanted: Mapping[ResourceKey, WantedResource]
) -> ConfigurationPlan:
    """The plan from what is there to what is wanted."""
    found = [one for key in wanted for one in _of_one(present.get(key), wanted[key], present, wanted)]
    steps = sorted((one for one in found if isinstance(one, PlannedStep)), key=_order)
    return ConfigurationPlan(tuple(steps), tuple(one for one in found if isinstance(one, RefusedChange)))


def _order(step: PlannedStep) -> tuple[int, int, str, str]:
    """Streams before what reads them; what is deleted last, and streams after their readers."""
    is_stream = step.key.kind == "stream"
    if step.action == "delete":
        return (2, int(is_stream), step.key.stream, step.key.name)
    return (0, int(not is_stream), step.key.stream, step.key.name)


def _of_one(
    there: PresentResource | None,
    wanted: WantedResource,
    present: Mapping[ResourceKey, PresentResource],
    all_wanted: Mapping[ResourceKey, WantedResource],
) -> Iterator[PlannedStep | RefusedChange]:
    if wanted.fields is None:
        if there is not None:
            yield _deletion(there, present, all_wanted)
    elif (stopped := _stopped_go_members(there, wanted)) is not None:
        yield stopped
    elif there is None:
        yield _creation(wanted.key, wanted.fields)
    else:
        changes = tuple(
            FieldChange(name, there.fields.get(name), value)
            for name, value in wanted.fields.items()
            if there.fields.get(name) != value
        )
        if changes:
            yield _RULES[there.key.kind](there, changes)


def _stopped_go_members(there: PresentResource | None, wanted: WantedResource) -> RefusedChange | None:
    """A first mapping beside several filters, which members in Go cannot have."""
    before = there.fields if there is not None else {}
    after = {**before, **(wanted.fields or {})}
    filters = after.get("filters") or after.get("partition_by") or ()
    is_first = after.get("mapping") is not None and before.get("mapping") is None
    if wanted.key.kind not in ("static", "elastic") or not is_first or len(filters) < 2 or wanted.stops_go_members:
        return None
    return RefusedChange(
        key=wanted.key,
        changes=(FieldChange("mapping", None, after["mapping"]),),
        reason=f"it has {len(filters)} filters: with a mapping its members in Go stop (server error 10138)",
        command="if it has none, write `stop_go_members = true` beside the mapping; else give members instead",
    )


def _creation(key: ResourceKey, fields: Mapping[str, Any]) -> PlannedStep | RefusedChange:
    changes = tuple(FieldChange(name, None, value) for name, value in fields.items())
    lacking = None
    if key.kind == "stream" and not fields.get("subjects"):
        lacking = "subjects, or partition_by"
    if key.kind == "elastic" and "partitions" not in fields:
        lacking = "partitions"
    if lacking is not None:
        what = f"it does not exist, and the file does not give its {lacking}"
        return RefusedChange(key=key, changes=changes, reason=what, command=f"add {lacking} to the file")
    return PlannedStep(action="create", key=key, changes=changes)


def _deletion(
    there: PresentResource,
    present: Mapping[ResourceKey, PresentResource],
    wanted: Mapping[ResourceKey, WantedResource],
) -> PlannedStep | RefusedChange:
    key = there.key
    if there.workers:
        return RefusedChange(
            key=key,
            changes=(),
            reason=f"{there.workers} of its workers run",
            command=f"stop them first; `keylane fleet status {key.stream} {key.name}` shows where they are",
        )
    if key.kind == "stream":
        kept = [
            str(one)
            for one in present
            if one.stream == key.stream and one != key and (one not in wanted or wanted[one].fields is not None)
        ]
        if kept:
            return RefusedChange(
                key=key,
                changes=(),
                reason=f"{', '.join(kept[:_SHOWN])} would remain without it",
                command="make these absent in the file too",
            )
    lost = f"{there.messages:,} messages are deleted with it" if there.messages else ""
    return PlannedStep(action="delete", key=key, notes=(lost,) if lost else (), version=there.version)


# ---- what may change, by kind ---------------------------------------------------------------------------------


def _refused(there: PresentResource, changes: Iterable[FieldChange], reason: str, command: str) -> RefusedChange:
    return RefusedChange(key=there.key, changes=tuple(changes), reason=reason, command=command)


def _changed(there: PresentResource, changes: tuple[FieldChange, ...], *notes: str) -> PlannedStep:
    return PlannedStep(action="change", key=there.key, changes=changes, notes=notes, version=there.version)


def _stream_change(there: PresentResource, changes: tuple[FieldChange, ...]) -> PlannedStep | RefusedChange:
    by_name = {one.name: one for one in changes}
    stream = there.key.stream
    for name in ("storage", "retention"):
        if name in by_name:
            reason = f"a server keeps the {name} of a stream as it was created"
            return _refused(there, changes, reason, f"keylane stream create {stream}2 …, and copy what is still needed")
    numbering = [by_name[name] for name in _NUMBERING if name in by_name]
    if numbering and (there.messages or there.numbered_readers):
        who = ", ".join(there.numbered_readers[:_SHOWN]) or f"{there.messages:,} messages with their numbers"
        is_alone = len(there.fleets) == len(there.numbered_readers) == 1
        can_repartition = is_alone and [one.name for one in numbering] == ["partitions"]
        return _refused(
            there,
            changes,
            f"other partition numbers take messages away from their owners and mix the order of keys; there are {who}",
            f"keylane fleet repartition {stream} {there.fleets[0]} {by_name['partitions'].after}"
            if can_repartition
            else f"keylane stream create {stream}2 --partition-by … --partitions …, and move publishers there",
        )
    if loss := _loss(there, by_name):
        keep = f"nats stream purge {stream} --keep N"
        return _refused(there, changes, loss, f"let them be handled first, or delete them yourself: `{keep}`")
    dropped = (
        sorted(set(by_name["subjects"].before or ()) - set(by_name["subjects"].after)) if "subjects" in by_name else ()
    )
    notes = [f"{', '.join(dropped)} is not stored any more: who publishes there gets an error"] if dropped else []
    return _changed(there, changes, *notes)


def _dead_letter_change(there: PresentResource, changes: tuple[FieldChange, ...]) -> PlannedStep | RefusedChange:
    if loss := _loss(there, {one.name: one for one in changes}):
        command = f"replay or drop them first: `keylane dlq ls {there.key.stream}`"
        return _refused(there, changes, loss, command)
    return _changed(there, changes)


def _loss(there: PresentResource, changes: Mapping[str, FieldChange]) -> str | None:
    """Why new limits would delete messages that are there; None: they would not."""
    held: dict[str, tuple[float | None, str]] = {
        "max_messages": (there.messages, f"it holds {there.messages:,} messages"),
        "max_bytes": (there.bytes, f"it holds {there.bytes:,} bytes"),
        "max_age": (there.oldest_s, f"its oldest message is {there.oldest_s:,.0f} s old"),
        "max_messages_per_subject": (
            there.most_per_subject if there.most_per_subject is not None else there.messages,
            f"a subject has up to {there.most_per_subject or there.messages:,} messages",
        ),
    }
    for name, (now, words) in held.items():
        change = changes.get(name)
        if change is not None and change.after and now is not None and now > change.after:
            return f"{words}, and {name} {change.after:g} would delete what is beyond"
    return None


def _static_change(there: PresentResource, changes: tuple[FieldChange, ...]) -> RefusedChange:
    stream, group = there.key.stream, there.key.name
    return _refused(
        there,
        changes,
        "a static group never changes: its members would begin elsewhere, with messages lost or handled twice",
        f"create a group of another name; or, if all is handled, `keylane static delete {stream} {group}` and apply",
    )


def _elastic_change(there: PresentResource, changes: tuple[FieldChange, ...]) -> PlannedStep | RefusedChange:
    fixed = [one for one in changes if one.name not in ("members", "mapping")]
    stream, group = there.key.stream, there.key.name
    if fixed:
        names = ", ".join(one.name for one in fixed)
        return _refused(
            there,
            changes,
            f"{names} of an elastic group is fixed when it is created: its queue holds messages with the old numbers",
            f"create a group of another name, and `keylane elastic delete {stream} {group}` when its queue is empty",
        )
    after = {**there.fields, **{one.name: one.after for one in changes}}
    return _changed(there, changes, moves_in_words(owners_of(there.fields), owners_of(after), after["partitions"]))


def owners_of(fields: Mapping[str, Any]) -> Plan:
    """Who owns what in a group with these fields."""
    if fields.get("mapping") is not None:
        return Plan.from_mappings(fields["mapping"])
    return balanced(list(fields.get("members") or ()), fields["partitions"])


def moves_in_words(before: Plan, after: Plan, partitions: int) -> str:
    """What moves, in a line."""
    moved: dict[tuple[str | None, str | None], list[int]] = {}
    for move in after.moves_from(before):
        moved.setdefault((move.source, move.target), []).append(move.partition)
    if not moved:
        return "no partition moves"
    parts = [
        f"{ranges(numbers)} {f'from {source} ' if source else ''}{f'to {target}' if target else 'to nobody'}"
        for (source, target), numbers in sorted(moved.items(), key=str)
    ]
    return f"moves {sum(map(len, moved.values()))} of {partitions} partitions: {'; '.join(parts)}"


def _fleet_change(there: PresentResource, changes: tuple[FieldChange, ...]) -> RefusedChange:
    stream, fleet = there.key.stream, there.key.name
    if [one.name for one in changes] == ["partitions"] and there.fields.get("layout") == "partition":
        return _refused(
            there,
            changes,
            "the number of partitions of a fleet changes while it runs, with a barrier that keeps the order of keys",
            f"keylane fleet repartition {stream} {fleet} {changes[0].after}, and apply again",
        )
    return _refused(
        there,
        changes,
        f"{', '.join(one.name for one in changes)} of a fleet is fixed when it is created: its workers agree on it",
        f"create a fleet of another name, and make {fleet} absent when it has handled all",
    )


_RULES: dict[str, Callable[[PresentResource, tuple[FieldChange, ...]], PlannedStep | RefusedChange]] = {
    "stream": _stream_change,
    "dead letters": _dead_letter_change,
    "static": _static_change,
    "elastic": _elastic_change,
    "fleet": _fleet_change,
}
