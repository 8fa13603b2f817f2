"""`keylane stream create|ls|info|rm`: what a beginner needs of streams. The `nats` tool has the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import (
    ConnectionOptions,
    JsonOption,
    StreamArgument,
    command,
    confirm,
    connected,
    family,
    print_answer,
)
from keylane.cli.stream.config import StreamOptions

if TYPE_CHECKING:
    from keylane.jetstream import Connection, StreamConfig, StreamInfo

app = family("Streams: create, list, show and remove them.")

_EXISTS_DIFFERENTLY = 10058
_SUBJECTS_OVERLAP = 10065


@command(app, "create", "add")
def create(
    stream: StreamArgument, *, options: StreamOptions, as_json: JsonOption = False, link: ConnectionOptions
) -> None:
    """Create a stream. One that exists with the same settings is left as it is.

    With --partition-by the server puts a partition number in front of each subject, which is what fleets and static
    groups share out:

    \b
      keylane stream create ORDERS --partition-by 'orders.*' --partitions 10
    """
    config = options.config(stream)
    info, is_new = connected(link, lambda connection: _create(connection, config))
    from keylane.cli.stream.render import settings_line

    done = "created stream" if is_new else "there already is, with these settings: stream"
    text = f"{done} {stream}: {settings_line(info.config)}"
    print_answer(as_json, {"stream": stream, "created": is_new, "config": _wire(info.config)}, text)


@command(app, "ls", "list")
def ls(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also the streams of buckets (KV_…, OBJ_…).")] = False,
    as_json: JsonOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """List the streams of the account."""

    async def look(connection: Connection) -> list[StreamInfo]:
        from keylane.jetstream import streams

        return [info async for info in streams.list_all(connection)]

    found = sorted(connected(link, look), key=lambda info: str(info.config.name))
    shown = [info for info in found if everything or not str(info.config.name).startswith(("KV_", "OBJ_"))]
    if as_json:
        print_answer(as_json, [_summary(info) for info in shown], "")
        return
    hidden = len(found) - len(shown)
    if shown:
        from keylane.cli.display import console
        from keylane.cli.stream.render import stream_table

        console().print(stream_table(shown))
    else:
        typer.echo("there are no streams yet: `keylane stream create ORDERS --subjects 'orders.>'` makes one")
    if hidden:
        typer.echo(f"{hidden} of buckets not shown: --all shows {'it' if hidden == 1 else 'them'}", err=True)


@command(app, "info")
def info(stream: StreamArgument, as_json: JsonOption = False, *, link: ConnectionOptions) -> None:
    """Show a stream: its settings, what it holds, and who reads it."""

    async def look(connection: Connection) -> tuple[dict[str, Any], StreamInfo, list[str]]:
        from keylane.jetstream import streams

        wire = await streams.info_json(connection, stream)
        return wire, await streams.info(connection, stream), await _readers(connection, stream)

    from keylane.core.names import check_stream_name

    check_stream_name(stream)
    wire, found, readers = connected(link, look)
    if as_json:
        print_answer(
            as_json,
            {name: wire[name] for name in ("config", "created", "state", "cluster") if name in wire}
            | {"readers": readers},
            "",
        )
        return
    from keylane.cli.display import console
    from keylane.cli.stream.render import stream_panel

    console().print(stream_panel(found, wire["created"], readers))


@command(app, "rm", "delete")
def rm(
    stream: StreamArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", "--force", "-f", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Remove a stream with everything in it. Asks first."""

    async def look(connection: Connection) -> tuple[int, list[str]]:
        from keylane.jetstream import streams

        state = await streams.state(connection, stream)
        return state.messages, await _readers(connection, stream)

    async def remove(connection: Connection) -> None:
        from keylane.jetstream import streams

        await streams.delete(connection, stream)

    if not yes:
        messages, readers = connected(link, look)
        lost = f"{messages:,} message{'' if messages == 1 else 's'}"
        also = f" It is read by {', '.join(readers)}." if readers else ""
        confirm(f"Remove stream {stream!r} and its {lost}?{also}", otherwise="nothing was removed", option="--yes")
    connected(link, remove)
    print_answer(as_json, {"stream": stream, "removed": True}, f"removed stream {stream}")


async def _create(connection: Connection, config: StreamConfig) -> tuple[StreamInfo, bool]:
    from keylane.core.subjects import overlaps
    from keylane.errors import ApiError, InvalidInput, NotFound
    from keylane.jetstream import streams

    assert config.name is not None
    try:
        await streams.info(connection, config.name)
        is_new = False
    except NotFound:
        is_new = True
    try:
        return await streams.create(connection, config), is_new
    except ApiError as error:
        if error.err_code == _EXISTS_DIFFERENTLY:
            raise InvalidInput(
                f"there already is a stream {config.name!r} with other settings: `keylane stream info {config.name}` "
                f"shows them, `keylane stream rm {config.name}` removes it"
            ) from error
        if error.err_code != _SUBJECTS_OVERLAP:
            raise
    others = [
        f"{other.config.name} ({', '.join(other.config.subjects or ())})"
        async for other in streams.list_all(connection)
        if any(overlaps(one, theirs) for one in config.subjects or () for theirs in other.config.subjects or ())
    ]
    raise InvalidInput(
        f"subjects {', '.join(config.subjects or ())} are stored by another stream already: {', '.join(others)}"
    )


async def _readers(connection: Connection, stream: str) -> list[str]:
    """The groups and fleets of a stream, in words."""
    from keylane.fleet import list_fleets
    from keylane.groups import list_groups

    groups = [f"{one.kind} group {one.group}" for one in await list_groups(connection, stream)]
    return groups + [f"fleet {fleet}" for _, fleet in await list_fleets(connection, stream)]


def _wire(config: StreamConfig) -> dict[str, Any]:
    return {name: value for name, value in config.as_dict().items() if value is not None}


def _summary(info: StreamInfo) -> dict[str, Any]:
    from keylane.cli.stream.render import partitions_of

    state, config = info.state, info.config
    return {
        "stream": config.name,
        "subjects": config.subjects or [],
        "partitions": partitions_of(config),
        "retention": config.retention,
        "storage": config.storage,
        "replicas": config.num_replicas,
        "messages": state.messages,
        "bytes": state.bytes,
        "first_sequence": state.first_seq,
        "last_sequence": state.last_seq,
        "consumers": state.consumer_count,
    }
