"""The commands that static and elastic groups share: ls, info, delete, member-info, step-down, consume, prompt.

Their names, arguments and aliases are those of the `cg` tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keylane.cli.command import (
    ConnectionOptions,
    ForceOption,
    GroupArgument,
    JsonEventsOption,
    JsonOption,
    StreamArgument,
    command,
    confirm,
    connected,
    exit_on_invalid_input,
    next_pin,
    pin_of,
    print_answer,
)
from keylane.cli.metrics_port import MetricsOptions

if TYPE_CHECKING:
    from keylane.cli.groups.snapshot import GroupSnapshot
    from keylane.groups.config import Kind
    from keylane.jetstream import Connection

MemberArgument = Annotated[str, typer.Argument(metavar="MEMBER", help="The member's name.")]
MaxMembers = Annotated[
    int, typer.Argument(metavar="MAX_MEMBERS", min=1, help="The number of partitions: no more members can work.")
]
Mappings = Annotated[
    list[str], typer.Argument(metavar="MAPPING...", help="A member and its partitions, such as worker-1:0-3,8.")
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
DialectOption = Annotated[
    Literal["present", "go-0.1"],
    typer.Option(help="How the group is written down. go-0.1: so that members of the Go library 0.1 can read it."),
]


def group_options(
    max_partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Allow groups of up to N partitions. Else KEYLANE_MAX_PARTITIONS, else 16384."
        ),
    ] = None,
) -> None:
    """Options that come before the name of the command."""
    if max_partitions is not None:
        from keylane.groups import partition_limit

        partition_limit(max_partitions)


def confirm_stop_of_go_members(group: str, filters: int, *, yes: bool, may_ask: bool = True) -> None:
    """Ask before a group with several filters gets its first mapping, which stops its members in Go."""
    from keylane.errors import InvalidInput

    if yes or filters < 2:
        return
    what = f"group {group!r} has {filters} filters: with a mapping its members in Go stop (the server's error 10138)"
    if not may_ask:
        raise InvalidInput(f"{what}; nothing was changed. Give --stop-go-members if it has none")
    confirm(
        f"{what[0].upper()}{what[1:]}. Store the mapping?", otherwise="nothing was changed", option="--stop-go-members"
    )


def add_shared_commands(app: typer.Typer, kind: Kind) -> None:
    """Give `keylane static` or `keylane elastic` the commands that both have."""
    _add_read_commands(app, kind)
    _add_write_commands(app, kind)
    _add_consume(app, kind)

    @command(app, "prompt")
    def prompt(as_json: JsonOption = False, *, link: ConnectionOptions) -> None:
        """Type commands one after the other.

        With history and completion; Ctrl-D ends.
        """
        from keylane.cli.groups.prompt import Prompt

        Prompt(kind, link, as_json=as_json).run()


def _add_read_commands(app: typer.Typer, kind: Kind) -> None:
    @command(app, "ls", "list")
    def ls(
        stream: Annotated[
            str | None, typer.Argument(metavar="STREAM", show_default=False, help="Only groups of this stream.")
        ] = None,
        as_json: JsonOption = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """List the groups of a stream, or of all streams."""
        from keylane.cli.groups.snapshot import groups_of, list_object

        found = connected(link, lambda connection: groups_of(connection, kind, stream))
        if found and not as_json:
            from keylane.cli.display import console
            from keylane.cli.groups.render import group_table

            console().print(group_table(found, with_streams=stream is None))
            return
        answer = [list_object(one, group, config) for (one, group), config in found.items()]
        none = f"there are no {kind} groups" if stream is None else f"stream {stream!r} has no {kind} groups"
        print_answer(as_json, {"stream": stream, "kind": kind, "groups": answer}, none)

    @command(app, "info")
    def info(
        stream: StreamArgument, group: GroupArgument, as_json: JsonOption = False, *, link: ConnectionOptions
    ) -> None:
        """Show who owns what and who is behind.

        Partitions, pinned instance, pending and unacknowledged messages of each member; of an elastic group also how
        much its queue holds and may hold.
        """
        from datetime import UTC, datetime

        from keylane.cli.groups.snapshot import group_object

        snapshot = _snapshot(kind, stream, group, link)
        if as_json:
            print_answer(as_json, group_object(snapshot), "")
        else:
            from keylane.cli.display import console
            from keylane.cli.groups.render import render_group

            screen = console()
            screen.print(render_group(snapshot, datetime.now(UTC), width=screen.width))

    @command(app, "member-info", "memberinfo", "minfo")
    def member_info(
        stream: StreamArgument,
        group: GroupArgument,
        member: MemberArgument,
        as_json: JsonOption = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Show one member and its consumer."""
        from datetime import UTC, datetime

        from keylane.cli.groups.snapshot import member_object

        snapshot = _snapshot(kind, stream, group, link)
        one = next((one for one in snapshot.members if one.member == member), None)
        if one is None:
            from keylane.groups.admin import not_listed

            raise not_listed(group, member, snapshot.config.plan.members)
        if as_json:
            print_answer(as_json, {"stream": stream, "group": group, "kind": kind, **member_object(one)}, "")
        else:
            from keylane.cli.display import console
            from keylane.cli.groups.render import member_panel

            console().print(member_panel(snapshot, one, datetime.now(UTC)))


def _add_write_commands(app: typer.Typer, kind: Kind) -> None:
    @command(app, "delete", "rm")
    def delete(
        stream: StreamArgument,
        group: GroupArgument,
        force: ForceOption = False,
        as_json: JsonOption = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Delete a group. Asks first.

        Its members end, and where they were is forgotten. A group whose record cannot be read goes with --force.
        """
        from keylane.errors import BrokenGroupRecord

        if not force:
            try:
                snapshot = _snapshot(kind, stream, group, link)
            except BrokenGroupRecord as broken:
                raise BrokenGroupRecord(f"{broken}; --force deletes it") from broken
            queued = f" {snapshot.queue.messages:,} messages wait in its queue." if snapshot.queue else ""
            confirm(
                f"Delete {kind} group {group!r} of stream {stream!r}? Its members end.{queued}",
                otherwise="nothing was deleted",
            )
        connected(link, lambda connection: _delete(connection, kind, stream, group, force=force))
        answer = {"stream": stream, "group": group, "kind": kind, "deleted": True}
        print_answer(as_json, answer, f"deleted {kind} group {group!r} of stream {stream!r}")

    @command(app, "step-down", "stepdown", "sd")
    def step_down(
        stream: StreamArgument,
        group: GroupArgument,
        member: MemberArgument,
        as_json: JsonOption = False,
        *,
        link: ConnectionOptions,
    ) -> None:
        """Let another instance of a member take over.

        With the next message the server pins the instance that waits longest. No message is lost.
        """
        before, after = connected(link, lambda connection: _step_down(connection, kind, stream, group, member))
        answer = {"stream": stream, "group": group, "member": member, "unpinned_id": before, "pinned_id": after}
        was = f"unpinned {before}" if before else "nobody was pinned"
        now = f"pinned now: {after}" if after else "nobody is pinned yet: the next message pins an instance"
        print_answer(as_json, answer, f"{was}\n{now}")


def _add_consume(app: typer.Typer, kind: Kind) -> None:
    @command(app, "consume", "join")
    def consume(
        stream: StreamArgument,
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
        metrics: MetricsOptions,
        as_json: JsonEventsOption = False,
        link: ConnectionOptions,
    ) -> None:
        """Join as a member and print every message.

        Ctrl-C finishes what is at work, hands over and ends; a second Ctrl-C ends at once. A message is acknowledged
        when it was printed.
        """
        from keylane.cli.event_lines import run_consumer
        from keylane.cli.groups.consume import GroupConsumeOptions, consume
        from keylane.core.quantities import parse_duration_s
        from keylane.errors import InvalidInput

        def seconds(duration: str, option: str) -> float:
            try:
                return parse_duration_s(duration)
            except InvalidInput as error:
                raise typer.BadParameter(str(error), param_hint=option) from error

        with exit_on_invalid_input():
            metrics.check()
        options = GroupConsumeOptions(
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
        run_consumer(consume(options, metrics, link, as_json=as_json))


def _snapshot(kind: Kind, stream: str, group: str, link: ConnectionOptions) -> GroupSnapshot:
    from keylane.cli.groups.snapshot import read_snapshot

    return connected(link, lambda connection: read_snapshot(connection, kind, stream, group))


async def _delete(connection: Connection, kind: Kind, stream: str, group: str, *, force: bool) -> None:
    from keylane import groups
    from keylane.cli.groups.snapshot import config_of
    from keylane.errors import BrokenGroupRecord

    try:
        await config_of(
            connection, kind, stream, group
        )  # raises an error with the existing names if there is no such group
    except BrokenGroupRecord:
        if not force:
            raise
    await groups.delete(connection, stream, group, kind=kind, force=force)


async def _step_down(
    connection: Connection, kind: Kind, stream: str, group: str, member: str
) -> tuple[str | None, str | None]:
    """The id that was pinned, and the id that is pinned within a second."""
    from keylane import groups, priority
    from keylane.cli.groups.snapshot import config_of
    from keylane.errors import GroupError

    await config_of(connection, kind, stream, group)
    info = await groups.member_info(connection, stream, group, member, kind=kind)
    if info is None:
        raise GroupError(f"member {member!r} of group {group!r} has no running instance that could step down")
    pin = pin_of(info)
    async with priority.advisories(connection, info.stream, info.name) as events:
        await groups.step_down(connection, stream, group, member, kind=kind)
        return (pin.pinned_client_id if pin else None), await next_pin(events)
