"""`keylane dlq ls|show|replay|drop|release`: the messages that groups gave up, and the keys that they parked.

Owns which dead letters a command selects. Storing, replaying and dropping are in `keylane.dead_letters`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import (
    ConnectionOptions,
    ForceOption,
    GroupArgument,
    JsonOption,
    StreamArgument,
    command,
    confirm,
    connected,
    family,
    print_answer,
)
from keylane.cli.formatting import retry_line

if TYPE_CHECKING:
    from datetime import datetime

    from rich.panel import Panel
    from rich.table import Table

    from keylane.dead_letters import DeadLetter
    from keylane.groups import RetryCounts
    from keylane.jetstream import Connection

_MAX_BYTES = 4_000

app = family("Dead letters: messages that groups gave up.")

_SEQUENCES = re.compile(r"(\d{1,19})(-(\d{1,19})?)?")

_SelectionArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GROUP] [SEQUENCE...]",
        help="Only of this group; only these sequences: 5, 5-9, or 5- for all from there.",
    ),
]
_Group = Annotated[
    str | None, typer.Option("--group", metavar="NAME", help="The group, where its name looks like a sequence.")
]
_All = Annotated[bool, typer.Option("--all", help="All that match the group, key and partition.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """Which dead letters, as given on the command line. Each field is one option."""

    group: _Group = None
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only messages of this key.")] = None
    partition: Annotated[
        int | None, typer.Option("--partition", metavar="N", min=0, help="Only messages of this partition.")
    ] = None


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which dead letters a command selects. A range without an end includes the newest; no ranges means all."""

    stream: str
    group: str | None
    ranges: tuple[tuple[int, int | None], ...]
    key: str | None = None
    partition: int | None = None

    @property
    def nothing(self) -> str:
        """The text for an empty selection."""
        if self.ranges or self.key is not None or self.partition is not None:
            return f"no dead letter of stream {self.stream!r} matches"
        of_group = f" of group {self.group!r}" if self.group is not None else ""
        return f"stream {self.stream!r} has no dead letters{of_group}"


# ---- read ---------------------------------------------------------------------------------------------


@command(app, "ls", "list")
def ls(
    stream: StreamArgument,
    words: _SelectionArguments = None,
    *,
    only: SelectionOptions,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Show at most this many.")] = 100,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """List dead letters, oldest first, and how many messages wait for a delayed retry."""
    selection = _parse_selection(stream, words, only)

    async def read(connection: Connection) -> tuple[list[DeadLetter], dict[str, RetryCounts]]:
        letters = await _read_letters(connection, selection, limit + 1)
        return letters, await _retries(connection, stream, selection.group)

    found, retries = connected(link, read)
    retry_text = "\n".join(f"group {group}: {retry_line(counts)}" for group, counts in sorted(retries.items()))
    following = found[limit].sequence if len(found) > limit else None
    found = found[:limit]
    if found and not as_json:
        from datetime import UTC, datetime

        from keylane.cli.display import console

        console().print(_dead_letter_table(found, datetime.now(UTC)))
        if following is not None:
            typer.echo(f"and more, from sequence {following} on: add {following}- to the command, or a higher --limit")
        if retry_text:
            typer.echo(retry_text)
        return
    answer = {
        "stream": stream,
        "dead_letters": [_dead_letter_object(one) for one in found],
        "next": following,
        "retries": {group: counts._asdict() for group, counts in retries.items()},
    }
    print_answer(as_json, answer, "\n".join(filter(None, (selection.nothing, retry_text))))


@command(app, "show")
def show(
    stream: StreamArgument,
    words: Annotated[list[str], typer.Argument(metavar="[GROUP] SEQUENCE...", help="The dead letters' own sequences.")],
    *,
    group: _Group = None,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Show dead letters in full: what happened, headers, data."""
    from keylane.errors import InvalidInput

    selection = _parse_selection(stream, words, SelectionOptions(group=group))
    if not selection.ranges or any(first != last for first, last in selection.ranges):
        raise InvalidInput("show takes single sequences, such as 5: `keylane dlq ls` lists them")

    async def read(connection: Connection) -> list[DeadLetter]:
        return await _read_letters(connection, selection, len(selection.ranges))

    found = connected(link, read)
    if as_json:
        answer = [_dead_letter_object(one, data=True) for one in found]
        print_answer(as_json, {"stream": stream, "dead_letters": answer}, "")
        return
    from datetime import UTC, datetime

    from keylane.cli.display import console

    screen = console()
    for one in found:
        screen.print(_dead_letter_panel(one, datetime.now(UTC)))


# ---- replay and drop ----------------------------------------------------------------------------------------------


@command(app, "replay")
def replay(
    stream: StreamArgument,
    words: _SelectionArguments = None,
    *,
    everything: _All = False,
    only: SelectionOptions,
    force: ForceOption = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Publish the originals again and delete the dead letters. Asks first.

    Each goes to its original subject, behind all other messages: every group of the stream that takes the subject gets
    it, not only the one that gave it up.
    """
    from keylane import dead_letters
    from keylane.groups import list_groups

    selection = _parse_selection(stream, words, only, everything=everything)

    async def ask(connection: Connection) -> str:
        readers = ", ".join(sorted({one.group for one in await list_groups(connection, stream)}))
        return (
            "Their originals are published again and reach every group of the stream that takes their subjects"
            + (f" ({readers})" if readers else "")
            + ", not only the one that gave them up."
        )

    async def act(connection: Connection, sequence: int) -> dict[str, Any]:
        ack = await dead_letters.replay(connection, stream, sequence, timeout_s=link.timeout)
        return {"sequence": sequence, "stored_sequence": ack.sequence}

    _apply(selection, link, ("replay", "replayed"), ask, act, force=force, as_json=as_json)


@command(app, "drop", "rm")
def drop(
    stream: StreamArgument,
    words: _SelectionArguments = None,
    *,
    everything: _All = False,
    only: SelectionOptions,
    force: ForceOption = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Delete dead letters for good. Asks first."""
    from keylane import dead_letters

    selection = _parse_selection(stream, words, only, everything=everything)

    async def ask(_: Connection) -> str:
        return "They are gone for good then."

    async def act(connection: Connection, sequence: int) -> dict[str, Any]:
        await dead_letters.drop(connection, stream, sequence)
        return {"sequence": sequence}

    _apply(selection, link, ("drop", "dropped"), ask, act, force=force, as_json=as_json)


@command(app, "release")
def release(
    stream: StreamArgument,
    group: GroupArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The parked key, as `keylane dlq ls` shows it.")],
    *,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait so long until its messages are handled.")
    ] = 30.0,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Release a parked key: its group handles what is parked for it, in order, and then what comes.

    The member or worker that owns the key's partition does it. A message that fails again parks the key again.
    """
    from keylane import dead_letters
    from keylane.errors import GroupError

    async def ask(connection: Connection) -> tuple[int, dead_letters.ReleaseResult]:
        waiting = await dead_letters.release(connection, stream, group, key)
        return waiting, await dead_letters.wait_for_release(connection, stream, group, key, wait_s)

    waiting, result = connected(link, ask)
    messages = f"{waiting:,} message{'' if waiting == 1 else 's'}"
    answer = {"stream": stream, "group": group, "key": key, "parked": waiting, "left": result.left}
    if not result.left:
        print_answer(as_json, answer, f"released key {key!r} of {stream}/{group}: {messages} handled in order")
        return
    if as_json:
        print_answer(as_json, answer, "")
    if result.is_wished:
        raise GroupError(
            f"key {key!r} is released as soon as somebody handles its partition: {result.left:,} of {messages} wait. "
            "Does a member or worker with after_tries='park' run?"
        )
    raise GroupError(
        f"key {key!r} is parked again, with {result.left:,} messages: one failed again. `keylane dlq show` has its "
        "error; `keylane dlq drop` skips it"
    )


def _apply(
    selection: _Selection,
    link: ConnectionOptions,
    verbs: tuple[str, str],
    ask: Callable[[Connection], Awaitable[str]],
    act: Callable[[Connection, int], Awaitable[dict[str, Any]]],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Find the dead letters, ask, and act on exactly those that were found, in order."""

    verb, past = verbs

    async def read(connection: Connection) -> tuple[list[int], str]:
        found = [one.sequence async for one in _letters(connection, selection)]
        if not found:
            await _check_stream(connection, selection.stream)
        return found, await ask(connection)

    found, warning = connected(link, read)
    if not found:
        print_answer(as_json, {"stream": selection.stream, past: [], "gone": []}, selection.nothing)
        return
    count = f"{len(found):,} dead letter{'' if len(found) == 1 else 's'}"
    if not force:
        confirm(
            f"{verb.capitalize()} {count} of stream {selection.stream!r}? {warning}", otherwise=f"nothing was {past}"
        )
    done, gone = connected(link, lambda connection: _each(connection, found, past, act))
    text = f"{past} {len(done):,} dead letter{'' if len(done) == 1 else 's'} of stream {selection.stream!r}"
    more = f"; {len(gone):,} more were gone already" if gone else ""
    print_answer(as_json, {"stream": selection.stream, past: done, "gone": gone}, text + more)


async def _each(
    connection: Connection, found: Sequence[int], past: str, act: Callable[[Connection, int], Awaitable[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[int]]:
    from keylane.errors import GroupError, KeylaneError, NotFound

    done: list[dict[str, Any]] = []
    gone: list[int] = []
    for sequence in found:
        try:
            done.append(await act(connection, sequence))
        except NotFound:  # somebody else deleted it first
            gone.append(sequence)
        except KeylaneError as error:
            raise GroupError(f"{len(done):,} of {len(found):,} {past}; stopped at {sequence}: {error}") from error
    return done, gone


# ---- selection --------------------------------------------------------------------------------------------


def _parse_selection(
    stream: str, words: list[str] | None, only: SelectionOptions, *, everything: bool | None = None
) -> _Selection:
    """Parse and check the arguments before the command connects. `everything`: --all, or else sequences are needed."""
    from keylane.core.names import check_group_name
    from keylane.core.subjects import shown
    from keylane.dead_letters import dead_letter_stream
    from keylane.errors import InvalidInput

    dead_letter_stream(stream)
    rest, group = list(words or ()), only.group
    if rest and not _SEQUENCES.fullmatch(rest[0]) and group is None:
        group = rest.pop(0)
    if group is not None:
        check_group_name(group)
    ranges: list[tuple[int, int | None]] = []
    for word in rest:
        match = _SEQUENCES.fullmatch(word)
        if match is None:
            raise InvalidInput(f"sequence {shown(word)} is not one: write 5, 5-9, or 5- for all from there")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else None
        if first < 1 or (last is not None and last < first):
            raise InvalidInput(f"sequence {shown(word)}: sequences start at 1, and the lower one comes first")
        ranges.append((first, last))
    if everything and ranges:
        raise InvalidInput("sequences and --all: give one of them")
    if everything is False and not ranges:
        raise InvalidInput("no dead letter named: give sequences, such as 5 or 5-9, or --all")
    return _Selection(stream, group, tuple(ranges), only.key, only.partition)


async def _read_letters(connection: Connection, selection: _Selection, limit: int) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    async with aclosing(_letters(connection, selection)) as letters:
        async for one in letters:
            found.append(one)
            if len(found) == limit:
                break
    if not found:
        await _check_stream(connection, selection.stream)
    return found


async def _retries(connection: Connection, stream: str, group: str | None) -> dict[str, RetryCounts]:
    """What waits for a delayed retry, as far as this user may know."""
    from keylane.errors import PermissionDenied
    from keylane.groups import retry_counts

    try:
        return await retry_counts(connection, stream, group or "*")
    except PermissionDenied:
        return {}


async def _letters(connection: Connection, selection: _Selection) -> AsyncGenerator[DeadLetter]:
    """Each dead letter once. Raises `NotFound` if a single sequence does not exist."""
    from keylane.dead_letters import list_dead_letters, read_dead_letter
    from keylane.errors import NotFound

    seen: set[int] = set()
    for first, last in selection.ranges or ((1, None),):
        if first == last:
            try:
                one = await read_dead_letter(connection, selection.stream, first)
            except NotFound:
                await _check_stream(connection, selection.stream)
                raise
            _check_match(one, selection)
            if first not in seen:
                yield one
            seen.add(first)
            continue
        async for one in list_dead_letters(
            connection,
            selection.stream,
            group=selection.group,
            partition=selection.partition,
            key=selection.key,
            first=first,
            last=last,
        ):
            if one.sequence not in seen:
                yield one
            seen.add(one.sequence)


def _check_match(one: DeadLetter, selection: _Selection) -> None:
    from keylane.errors import InvalidInput

    for name, wanted, has in (
        ("group", selection.group, one.group),
        ("key", selection.key, one.key),
        ("partition", selection.partition, one.partition),
    ):
        if wanted is not None and wanted != has:
            raise InvalidInput(f"dead letter {one.sequence} is of {name} {has!r}, not {wanted!r}")


async def _check_stream(connection: Connection, stream: str) -> None:
    """Raise `NotFound` if there is neither the stream nor its dead letters, which may outlive it."""
    from keylane.dead_letters import dead_letter_stream
    from keylane.errors import NotFound
    from keylane.jetstream import streams

    try:
        await streams.state(connection, dead_letter_stream(stream))
    except NotFound:
        await streams.state(connection, stream)


def _dead_letter_object(one: DeadLetter, *, data: bool = False) -> dict[str, Any]:
    """For JSON. With `data` also the traceback and the payload."""
    from dataclasses import asdict

    from keylane.cli.formatting import as_utc, payload_fields

    answer = asdict(one) | {"time": as_utc(one.time), "bytes": len(one.data)}
    del answer["data"], answer["stored_ns"]
    answer["parked"] = answer.pop("is_parked")
    if not data:
        del answer["traceback"]
        return answer
    return answer | payload_fields(one.data)


# ---- tables and panels ------------------------------------------------------------------------------------------


def _dead_letter_table(found: Sequence[DeadLetter], now: datetime) -> Table:
    """One row for each dead letter."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from keylane.cli.formatting import age, printable

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("sequence", justify="right", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("partition", justify="right")
    table.add_column("key", overflow="fold")
    table.add_column("tries", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("ago", no_wrap=True, justify="right")
    table.add_column("error", overflow="fold")
    for one in found:
        table.add_row(
            str(one.sequence),
            Text(printable(one.group)),
            str(one.partition),
            Text(printable(one.key)),
            str(one.tries),
            "parked" if one.is_parked else "dead",
            age(one.time, now),
            Text(printable(one.error)),
        )
    return table


def _dead_letter_panel(one: DeadLetter, now: datetime) -> Panel:
    """One dead letter in full, with the beginning of its data."""
    from keylane.cli.display import facts_panel
    from keylane.cli.formatting import age, as_utc, printable

    facts = [
        ("subject", one.subject),
        ("original", f"sequence {one.source_sequence:,} of stream {one.stream}"),
        ("group", f"{one.group}, member {one.member}"),
        ("key", f"{one.key}, partition {one.partition}"),
        ("tries", f"{one.tries:,}"),
        ("state", "parked, with later messages of its key behind it" if one.is_parked else "dead"),
        ("error", one.error),
        ("since", f"{as_utc(one.time)} ({age(one.time, now)} ago)"),
        *((f"header {name}", value) for name, value in one.headers.items()),
        ("bytes", f"{len(one.data):,}"),
    ]
    lines = [(printable(name), printable(value)) for name, value in facts]
    traceback = [("traceback", _lines(one.traceback))] if one.traceback else []
    return facts_panel(f"{one.stream} / dead letter {one.sequence}", [*lines, *traceback, ("data", _data(one.data))])


def _data(data: bytes) -> str:
    text = _lines(data[:_MAX_BYTES].decode("utf-8", "backslashreplace"))
    return text if len(data) <= _MAX_BYTES else f"{text}… (--json has all of it)"


def _lines(text: str) -> str:
    from keylane.cli.formatting import printable

    return "\n".join(printable(line) for line in text.split("\n"))
