"""What an operator may do from the page: each action first says what it would move, and is then done as it was said.

A preview is made twice, before the question and before the action. If the second one differs, the group has changed in
between, and nothing is done: the question is asked again.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from keylane import fleet, groups
from keylane.core.group_summary import counted
from keylane.core.plans import Plan, check_plan
from keylane.errors import GroupConflict, InvalidInput
from keylane.fleet.repartition import fleet_partitions
from keylane.groups import ElasticConfig
from keylane.groups.admin import mapped, planned, read_plan_file
from keylane.groups.presence import all_instances
from keylane.groups.store import change_elastic
from keylane.jetstream import Connection
from keylane.marshal import Admin, open_jetstream_log
from keylane.processing.dead_letters import read_dead_letter, replay
from keylane.processing.key_parking import parked_count, release
from keylane.web.move_texts import move_texts, names_in_short

_REPARTITION_S = 2.0
"""A change of the number of partitions goes on without the page, which shows how far it is."""
_MOST_PAUSE_MIN = 24 * 60


@dataclass(frozen=True, slots=True)
class ActionPreview:
    """What an action would do."""

    title: str
    """As a question: `Add carol to billing?`"""
    lines: tuple[str, ...]
    """What moves, and what to know."""
    button: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lines": list(self.lines)}


class ActionRequest(NamedTuple):
    """An action on a group, with its arguments as the page sent them."""

    action: str
    stream: str
    group: str
    arguments: Mapping[str, Any]

    @classmethod
    def from_json(cls, wire: Any) -> ActionRequest:
        """Raises `InvalidInput`."""
        if not isinstance(wire, dict):
            raise InvalidInput("an action is a JSON object")
        arguments = wire.get("arguments", {})
        if not isinstance(arguments, dict):
            raise InvalidInput("the arguments of an action are a JSON object")
        return cls(_text(wire, "action"), _text(wire, "stream"), _text(wire, "group"), arguments)


class Prepared(NamedTuple):
    """An action that can be done: what it would do, and the call that does it and says so."""

    preview: ActionPreview
    perform: Callable[[], Awaitable[str]]


async def prepare(connection: Connection, request: ActionRequest) -> Prepared:
    """Raises a `KeylaneError` if it cannot be done."""
    found = _ACTIONS.get(request.action)
    if found is None:
        raise InvalidInput(f"there is no action {request.action!r}: there are {', '.join(_ACTIONS)}")
    return await found(connection, request)


async def perform(connection: Connection, request: ActionRequest, confirmed: Any) -> str:
    """Do what was confirmed, which is the JSON of its preview; returns what was done, in a sentence.

    Raises `GroupConflict` if it would do something else by now.
    """
    prepared = await prepare(connection, request)
    if prepared.preview.to_json() != confirmed:
        raise GroupConflict(f"{request.group} has changed since you were asked: nothing was done; look, and ask again")
    return await prepared.perform()


# ---- elastic groups ---------------------------------------------------------------------------------------


async def _add(connection: Connection, request: ActionRequest) -> Prepared:
    config = await _elastic(connection, request)
    members = _names(request.arguments)
    new = [one for one in members if not config.has_member(one)]
    if not new:
        raise InvalidInput(f"{', '.join(members)}: already in group {request.group!r}")
    what = f"Add {', '.join(new)} to"
    return await _members(connection, request, config, [*_listed(config), *new], what)


async def _drop(connection: Connection, request: ActionRequest) -> Prepared:
    config = await _elastic(connection, request)
    gone = _names(request.arguments)
    if missing := [one for one in gone if not config.has_member(one)]:
        raise InvalidInput(f"group {request.group!r} has no member {missing[0]!r}")
    left = [one for one in _listed(config) if one not in gone]
    return await _members(connection, request, config, left, f"Drop {', '.join(gone)} from")


async def _members(
    connection: Connection, request: ActionRequest, seen: ElasticConfig, members: list[str], what: str
) -> Prepared:
    # A group with a mapping keeps one: the plan that moves the fewest partitions.
    is_mapped = seen.mappings is not None
    then = planned(seen, members, "sticky" if is_mapped else "balanced") if members else Plan({})
    idle = [f"{', '.join(then.idle)}: nothing is left for it"] if then.idle and not is_mapped else []
    if is_mapped and then.idle:
        raise InvalidInput(f"{', '.join(then.idle)} would own nothing, and a mapping lists only owners")
    preview = ActionPreview(f"{what} {request.group}?", (*_moves(seen, then), *idle), what.partition(" ")[0])

    def decide(config: ElasticConfig) -> ElasticConfig:
        _check_unchanged(config, seen, request.group)
        if is_mapped:
            return mapped(request.group, config, then if members else None, stop_go_members=True)
        return config.with_owners(members=tuple(members))

    decide(seen)  # raises what speaks against it before anybody is asked

    async def change() -> str:
        await change_elastic(connection, request.stream, request.group, decide)
        return f"done: {request.group} has {' '.join(counted(len(members), 'member'))}"

    return Prepared(preview, change)


async def _apply_plan(connection: Connection, request: ActionRequest) -> Prepared:
    seen = await _elastic(connection, request)
    read = read_plan_file(Path("-"), io.StringIO(_text(request.arguments, "plan")))
    for what, given, wanted in (("stream", read.stream, request.stream), ("group", read.group, request.group)):
        if given not in (None, wanted):
            raise InvalidInput(f"the plan was made for {what} {given!r}, not {wanted!r}")
    then = check_plan(read.plan, seen.partitions)

    def decide(config: ElasticConfig) -> ElasticConfig:
        _check_unchanged(config, seen, request.group)
        return mapped(request.group, config, then, stop_go_members=False)

    decide(seen)

    async def change() -> str:
        await change_elastic(connection, request.stream, request.group, decide)
        return f"done: {request.group} has the plan"

    return Prepared(ActionPreview(f"Apply this plan to {request.group}?", _moves(seen, then), "Apply"), change)


def _check_unchanged(config: ElasticConfig, seen: ElasticConfig, group: str) -> None:
    if config != seen:
        raise GroupConflict(f"group {group!r} was changed by somebody else meanwhile: nothing was done; ask again")


def _moves(seen: ElasticConfig, then: Plan) -> tuple[str, ...]:
    moved: dict[tuple[str | None, str | None], list[str]] = {}
    for one in then.moves_from(seen.plan):
        moved.setdefault((one.source, one.target), []).append(str(one.partition))
    count = sum(map(len, moved.values()))
    if not count:
        return ("No partition changes hands.",)
    verb = "changes" if count == 1 else "change"
    return (f"{count:,} of {seen.partitions:,} partitions {verb} hands:", *move_texts(moved))


def _listed(config: ElasticConfig) -> Sequence[str]:
    return config.plan.members if config.mappings is not None else config.members


async def _elastic(connection: Connection, request: ActionRequest) -> ElasticConfig:
    config = await groups.get_config(connection, request.stream, request.group, kind="elastic")
    assert isinstance(config, ElasticConfig)
    return config


# ---- members of both kinds of groups ------------------------------------------------------------------------


async def _step_down(connection: Connection, request: ActionRequest) -> Prepared:
    kind = request.arguments.get("kind")
    if kind not in ("static", "elastic"):
        raise InvalidInput(f"kind is {kind!r}: members of static and elastic groups can step down")
    member = _text(request.arguments, "member")
    config = await groups.get_config(connection, request.stream, request.group, kind=kind)
    info = await groups.member_info(connection, request.stream, request.group, member, kind=kind)
    pin = next((one.pinned_client_id for one in info.priority_groups if one.pinned_client_id), None) if info else None
    if pin is None:
        raise InvalidInput(f"no instance of {member!r} is active: there is none that could step down")
    running = await all_instances(connection, request.stream, request.group)
    active = next((one for one in running if one.pin_id == pin), None)
    others = [one for one in running if one.member == member and one.pin_id != pin]
    where = f" (host {active.host}, process {active.pid})" if active is not None else ""
    owned = names_in_short(map(str, config.plan.partitions_of(member))) or "none"
    if others:
        after = f"One of {' '.join(counted(len(others), 'standby instance'))} takes over partitions {owned}."
    else:
        after = f"No standby answered: the same instance may get partitions {owned} again."
    preview = ActionPreview(
        f"Let {member} of {request.group} step down?",
        (f"The active instance of {member}{where} gives up its place.", after),
        "Step down",
    )

    async def change() -> str:
        await groups.step_down(connection, request.stream, request.group, member, kind=kind)
        return f"done: the active instance of {member} has stepped down"

    return Prepared(preview, change)


# ---- fleets ------------------------------------------------------------------------------------------------


async def _drain(connection: Connection, request: ActionRequest) -> Prepared:
    worker = _text(request.arguments, "member")
    found = await fleet.status(connection, request.stream, request.group)
    mine = next((one for one in found.workers if one.id == worker), None)
    if mine is None:
        raise InvalidInput(f"fleet {request.group!r} has no worker {worker!r}")
    others = [one for one in found.workers if one.state == "live" and one.id != worker and not one.is_drained]
    count = " ".join(counted(len(mine.partitions), "partition"))
    if others:
        moves = f"{worker} hands {count} over ({names_in_short(mine.partitions) or 'none'})"
        lines = (f"{moves} to {' '.join(counted(len(others), 'other worker'))}, and stays without any until resumed.",)
    else:
        lines = (f"{worker} is the only worker: it keeps its {count} until another one comes.",)

    async def change() -> str:
        await fleet.drain(connection, request.stream, request.group, worker)
        return f"done: {worker} is paused"

    return Prepared(ActionPreview(f"Pause {worker} of {request.group}?", lines, "Pause"), change)


async def _resume(connection: Connection, request: ActionRequest) -> Prepared:
    worker = _text(request.arguments, "member")
    found = await fleet.status(connection, request.stream, request.group)
    live = [one for one in found.workers if one.state == "live" and (one.id == worker or not one.is_drained)]
    share = len(found.partitions) // max(1, len(live))
    lines = (f"{worker} gets partitions again, about {share:,} of {len(found.partitions):,}, from the other workers.",)

    async def change() -> str:
        await fleet.resume(connection, request.stream, request.group, worker)
        return f"done: {worker} may own partitions again"

    return Prepared(ActionPreview(f"Resume {worker} of {request.group}?", lines, "Resume"), change)


async def _repartition(connection: Connection, request: ActionRequest) -> Prepared:
    wanted = _whole(request.arguments, "partitions")
    if wanted < 1:
        raise InvalidInput(f"partitions is {wanted}: give at least 1")
    present = len((await fleet_partitions(connection, request.stream, request.group)).current)
    if wanted == present:
        raise InvalidInput(f"fleet {request.group!r} has {present:,} partitions already")
    preview = ActionPreview(
        f"Give {request.group} {wanted:,} partitions?",
        (
            f"{present:,} partitions become {wanted:,}. Most keys change their partition, and some their worker.",
            "What is stored keeps its number and is handled first; then the new partitions begin. The order of every "
            "key is kept.",
        ),
        "Repartition",
    )

    async def change() -> str:
        changing = asyncio.create_task(fleet.repartition(connection, request.stream, request.group, wanted))
        done, _ = await asyncio.wait({changing}, timeout=_REPARTITION_S)
        if done:
            await changing
            return f"done: {request.group} has {wanted:,} partitions"
        changing.cancel()
        with suppress(asyncio.CancelledError):
            await changing
        return f"begun: the workers of {request.group} go on by themselves"

    return Prepared(preview, change)


# ---- what was given up ---------------------------------------------------------------------------------------


async def _replay(connection: Connection, request: ActionRequest) -> Prepared:
    sequence = _whole(request.arguments, "sequence")
    letter = await read_dead_letter(connection, request.stream, sequence)
    if letter.group != request.group:
        raise InvalidInput(f"dead letter {sequence} is not of group {request.group!r}")
    subject = letter.subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    preview = ActionPreview(
        f"Replay dead letter {sequence}?",
        (
            f"{subject} (it was sequence {letter.source_sequence:,}) is published again, behind all messages of "
            f"{request.stream}.",
            f"Every group that takes this subject gets it, not only {request.group}. The dead letter is then deleted.",
        ),
        "Replay",
    )

    async def change() -> str:
        ack = await replay(connection, request.stream, sequence)
        return f"done: it is sequence {ack.sequence:,} of {request.stream}"

    return Prepared(preview, change)


async def _release(connection: Connection, request: ActionRequest) -> Prepared:
    key = _text(request.arguments, "key")
    waiting = await parked_count(connection, request.stream, request.group, key)
    if not waiting:
        raise InvalidInput(f"key {key!r} of {request.stream}/{request.group} is not parked")
    messages = " ".join(counted(waiting, "message"))
    preview = ActionPreview(
        f"Release key {key}?",
        (
            f"{messages} of {key}: handled in order by the owner of its partition, as soon as one runs.",
            "If the first one fails again, the key is parked again.",
        ),
        "Release",
    )

    async def change() -> str:
        await release(connection, request.stream, request.group, key)
        return f"asked for: {messages} of {key}"

    return Prepared(preview, change)


# ---- Marshal ---------------------------------------------------------------------------------------------------


async def _pause_group(connection: Connection, request: ActionRequest) -> Prepared:
    minutes = _whole(request.arguments, "minutes")
    if not 1 <= minutes <= _MOST_PAUSE_MIN:
        raise InvalidInput(f"minutes is {minutes}: give 1 to {_MOST_PAUSE_MIN}")
    preview = ActionPreview(
        f"Pause {request.group} for {' '.join(counted(minutes, 'minute'))}?",
        ("Its consumers finish what they handle and release all partitions. Nobody claims any until the pause ends.",),
        "Pause",
    )

    async def change() -> str:
        async with open_jetstream_log(connection, request.stream) as log:
            await Admin(log).release_group(request.group, datetime.now(UTC) + timedelta(minutes=minutes))
        return f"done: {request.group} is paused"

    return Prepared(preview, change)


async def _resume_group(connection: Connection, request: ActionRequest) -> Prepared:
    async def change() -> str:
        async with open_jetstream_log(connection, request.stream) as log:
            await Admin(log).resume(request.group)
        return f"done: {request.group} may go on"

    return Prepared(
        ActionPreview(f"Resume {request.group}?", ("Its consumers claim partitions again.",), "Resume"), change
    )


_ACTIONS: dict[str, Callable[[Connection, ActionRequest], Awaitable[Prepared]]] = {
    "add": _add,
    "drop": _drop,
    "step-down": _step_down,
    "apply-plan": _apply_plan,
    "pause": _drain,
    "resume": _resume,
    "repartition": _repartition,
    "replay": _replay,
    "release": _release,
    "pause-group": _pause_group,
    "resume-group": _resume_group,
}


# ---- arguments ------------------------------------------------------------------------------------------------


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name} is {value!r}: give a text")
    return value


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}: give a whole number")
    return value


def _names(values: Mapping[str, Any]) -> list[str]:
    found = values.get("members")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise InvalidInput(f"members is {found!r}: give the names of members")
    return list(dict.fromkeys(found))
