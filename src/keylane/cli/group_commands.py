"""The commands that static and elastic groups share: ls, info, delete, member-info, step-down, consume, prompt.

Owns their words, arguments and endings, which are those of the `cg` tool. How things look is in `groups_shown`, what
is said as JSON in `groups_told`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from keylane.cli.connecting import ConnectionOptions, takes_connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from keylane.cli.group_sight import GroupSight, Kind
    from keylane.errors import NotAMember
    from keylane.jetstream.connection import Connection

Answer = TypeVar("Answer")

_NEW_PIN_S = 1.0
_INTERRUPTED = 130

Stream = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
MemberArgument = Annotated[str, typer.Argument(metavar="MEMBER", help="The member's name.")]
MaxMembers = Annotated[
    int, typer.Argument(metavar="MAX_MEMBERS", min=1, help="The number of partitions: no more members can work.")
]
Mappings = Annotated[
    list[str],
    typer.Argument(metavar="MAPPING...", help="A member and its partitions, such as worker-1:0-3,8."),
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="FILTER",
        help="Only these subjects, without a partition number; none: every subject. May be repeated.",
    ),
]
StopGoMembers = Annotated[
    bool,
    typer.Option(
        "--stop-go-members",
        help="Do not ask before a mapping on a group with several filters, which ends its members in Go.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Do not ask.")]
DialectOption = Annotated[
    Literal["present", "go-0.1"],
    typer.Option(help="How the group is written down. go-0.1: so that members of the Go library 0.1 can read it."),
]


def command(app: typer.Typer, name: str, *aliases: str) -> Callable[[Callable[..., None]], None]:
    """Add a command that connects, under its name and under the other words that the `cg` tool has for it."""

    def add(function: Callable[..., None]) -> None:
        connecting = takes_connection(function)
        app.command(name)(connecting)
        for alias in aliases:
            app.command(alias, hidden=True)(connecting)

    return add


def group_options(
    max_partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Allow groups of up to N partitions. Else KEYLANE_MAX_PARTITIONS, else 16384.",
        ),
    ] = None,
) -> None:
    """What stands before the name of any command."""
    if max_partitions is not None:
        from keylane.groups import partition_limit

        partition_limit(max_partitions)


def connected(link: ConnectionOptions, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Connect, do the work, close. What the library warns of goes to stderr."""
    import asyncio

    async def run() -> Answer:
        async with await link.connect() as connection:
            return await work(connection)

    with _warnings_on_stderr():
        return asyncio.run(run())


class _OnStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"keylane: warning: {record.getMessage()}", err=True)


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    log, handler = logging.getLogger("keylane.groups"), _OnStderr(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def sure_to_stop_go_members(group: str, filters: int, *, yes: bool, may_ask: bool = True) -> None:
    """Return if the first mapping of a group with so many filters is wanted, whatever it does to members in Go."""
    from keylane.cli.asking import make_sure
    from keylane.errors import InvalidInput

    if yes or filters < 2:
        return
    what = f"group {group!r} has {filters} filters: with a mapping its members in Go stop (the server's error 10138)"
    if not may_ask:
        raise InvalidInput(f"{what}; nothing was changed. Give --stop-go-members if it has none")
    make_sure(
        f"{what[0].upper()}{what[1:]}. Store the mapping?", otherwise="nothing was changed", option="--stop-go-members"
    )


def say(as_json: bool, told: Any, words: str) -> None:
    """The answer of a command: JSON for programs, words for people."""
    import json

    typer.echo(json.dumps(told, indent=2) if as_json else words)


def add_shared_commands(app: typer.Typer, kind: Kind) -> None:
    """Give `keylane static` or `keylane elastic` the commands that both have."""
    _add_looking(app, kind)
    _add_changing(app, kind)
    _add_consume(app, kind)

    @command(app, "prompt")
    def prompt(as_json: Json = False, *, link: ConnectionOptions) -> None:
        """Type commands one after the other.

        With history and completion; Ctrl-D ends.
        """
        from keylane.cli.prompt import Shell

        Shell(kind, link, as_json=as_json).run()


def _add_looking(app: typer.Typer, kind: Kind) -> None:
    @command(app, "ls", "list")
    def ls(stream: Stream, as_json: Json = False, *, link: ConnectionOptions) -> None:
        """List the groups of a stream."""
        from keylane.cli.group_sight import groups_of
        from keylane.cli.groups_told import list_object

        found = connected(link, lambda connection: groups_of(connection, kind, stream))
        if found and not as_json:
            from keylane.cli.groups_shown import console, group_table

            console().print(group_table(found))
            return
        told = [list_object(stream, group, config) for group, config in found.items()]
        say(as_json, {"stream": stream, "kind": kind, "groups": told}, f"stream {stream!r} has no {kind} groups")

    @command(app, "info")
    def info(stream: Stream, group: GroupArgument, as_json: Json = False, *, link: ConnectionOptions) -> None:
        """Show who owns what and who is behind.

        Partitions, pinned instance, pending and unacknowledged messages of each member; of an elastic group also how
        much its queue holds and may hold.
        """
        from datetime import UTC, datetime

        from keylane.cli.groups_told import sight_object

        sight = _look(kind, stream, group, link)
        if as_json:
            say(as_json, sight_object(sight), "")
        else:
            from keylane.cli.groups_shown import console, picture

            screen = console()
            screen.print(picture(sight, datetime.now(UTC), width=screen.width))

    @command(app, "member-info", "memberinfo", "minfo")
    def member_info(
        stream: Stream,
        group: GroupArgument,
        member: MemberArgument,
        as_json: Json = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Show one member and its consumer."""
        from datetime import UTC, datetime

        from keylane.cli.groups_told import member_object

        sight = _look(kind, stream, group, link)
        one = next((one for one in sight.members if one.member == member), None)
        if one is None:
            raise not_listed(group, member, sight.config.plan.members)
        if as_json:
            say(as_json, {"stream": stream, "group": group, "kind": kind, **member_object(one)}, "")
        else:
            from keylane.cli.groups_shown import console, member_panel

            console().print(member_panel(sight, one, datetime.now(UTC)))


def _add_changing(app: typer.Typer, kind: Kind) -> None:
    @command(app, "delete", "rm")
    def delete(
        stream: Stream,
        group: GroupArgument,
        force: Force = False,
        as_json: Json = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Delete a group. Asks first.

        Its members end, and where they were is forgotten. A group whose record cannot be read goes with --force.
        """
        from keylane.cli.asking import make_sure
        from keylane.errors import BrokenGroupRecord

        if not force:
            try:
                sight = _look(kind, stream, group, link)
            except BrokenGroupRecord as broken:
                raise BrokenGroupRecord(f"{broken}; --force deletes it") from broken
            queued = f" {sight.queue.messages:,} messages wait in its queue." if sight.queue else ""
            make_sure(
                f"Delete {kind} group {group!r} of stream {stream!r}? Its members end.{queued}",
                otherwise="nothing was deleted",
            )
        connected(link, lambda connection: _delete(connection, kind, stream, group, force=force))
        told = {"stream": stream, "group": group, "kind": kind, "deleted": True}
        say(as_json, told, f"deleted {kind} group {group!r} of stream {stream!r}")

    @command(app, "step-down", "stepdown", "sd")
    def step_down(
        stream: Stream,
        group: GroupArgument,
        member: MemberArgument,
        as_json: Json = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Let another instance of a member take over.

        With the next message the server pins the instance that waits longest. No message is lost.
        """
        before, after = connected(link, lambda connection: _step_down(connection, kind, stream, group, member))
        told = {"stream": stream, "group": group, "member": member, "unpinned_id": before, "pinned_id": after}
        words = f"unpinned {before}" if before else "nobody was pinned"
        now = f"pinned now: {after}" if after else "nobody is pinned yet: the next message pins an instance"
        say(as_json, told, f"{words}\n{now}")


def _add_consume(app: typer.Typer, kind: Kind) -> None:
    @command(app, "consume", "join")
    def consume(
        stream: Stream,
        group: GroupArgument,
        member: MemberArgument,
        *,
        sleep: Annotated[
            str, typer.Option(metavar="DURATION", help="Work on each message for this long: 20ms, 1.5s, 0.")
        ] = "20ms",
        order: Annotated[
            Literal["key", "partition", "strict", "none"],
            typer.Option(
                help="What is handled one after the other: messages of a key, of a partition, all, or nothing."
            ),
        ] = "key",
        concurrency: Annotated[
            int, typer.Option(metavar="N", min=1, help="How many messages are worked on at once.")
        ] = 64,
        max_ack_pending: Annotated[
            int,
            typer.Option(
                metavar="N",
                min=1,
                help="How many messages may be unacknowledged. All instances of a member need the same.",
            ),
        ] = 1000,
        ack_wait: Annotated[
            str | None,
            typer.Option(
                metavar="DURATION",
                help="How long the server waits for an acknowledgement, and for an instance that is gone; default 5s. "
                "All instances of a member need the same.",
            ),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")] = False,
        link: ConnectionOptions,
    ) -> None:
        """Join as a member and print every message.

        Ctrl-C finishes what is at work, hands over and ends; a second Ctrl-C ends at once. A message is acknowledged
        when it was printed.
        """
        import asyncio

        from keylane.cli.group_consume import Trial, consume
        from keylane.cli.group_words import seconds_from_word
        from keylane.errors import InvalidInput

        def seconds(word: str, option: str) -> float:
            try:
                return seconds_from_word(word)
            except InvalidInput as error:
                raise typer.BadParameter(str(error), param_hint=option) from error

        trial = Trial(
            kind=kind,
            stream=stream,
            group=group,
            member=member,
            sleep_s=seconds(sleep, "--sleep"),
            order=order,
            concurrency=concurrency,
            max_ack_pending=max_ack_pending,
            ack_wait_s=None if ack_wait is None else seconds(ack_wait, "--ack-wait"),
        )
        try:
            asyncio.run(consume(trial, link, as_json=as_json))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise typer.Exit(_INTERRUPTED) from None


def not_listed(group: str, member: str, members: Sequence[str]) -> NotAMember:
    from keylane.errors import NotAMember

    return NotAMember(f"group {group!r} does not list member {member!r}; it lists {', '.join(members) or 'nobody'}")


def _look(kind: Kind, stream: str, group: str, link: ConnectionOptions) -> GroupSight:
    from keylane.cli.group_sight import look

    return connected(link, lambda connection: look(connection, kind, stream, group))


async def _delete(connection: Connection, kind: Kind, stream: str, group: str, *, force: bool) -> None:
    from keylane import groups
    from keylane.cli.group_sight import config_of
    from keylane.errors import BrokenGroupRecord

    try:
        await config_of(connection, kind, stream, group)  # says what there is, if this is not
    except BrokenGroupRecord:
        if not force:
            raise
    await groups.delete(connection, stream, group, kind=kind, force=force)


async def _step_down(
    connection: Connection, kind: Kind, stream: str, group: str, member: str
) -> tuple[str | None, str | None]:
    """Who was pinned, and who is within a second."""
    import asyncio

    from keylane import groups, priority
    from keylane.cli.consumer_told import pin_of
    from keylane.cli.group_sight import config_of
    from keylane.errors import GroupError

    await config_of(connection, kind, stream, group)
    info = await groups.member_info(connection, stream, group, member, kind=kind)
    if info is None:
        raise GroupError(f"member {member!r} of group {group!r} has no running instance that could step down")
    pin = pin_of(info)
    async with priority.advisories(connection, info.stream, info.name) as events:
        await groups.step_down(connection, stream, group, member, kind=kind)
        after = None
        try:
            async with asyncio.timeout(_NEW_PIN_S):
                async for event in events:
                    if isinstance(event, priority.Pinned):
                        after = event.pin_id
                        break
        except TimeoutError:
            after = None
    return (pin.pinned_client_id if pin else None), after
