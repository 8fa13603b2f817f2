"""`keylane consumer info|unpin|watch`: one consumer, or all of a stream, and which client is pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import (
    ConnectionOptions,
    JsonChangesOption,
    JsonOption,
    StreamArgument,
    command,
    connected,
    family,
    next_pin,
    run_until_signal,
)

if TYPE_CHECKING:
    from keylane.jetstream import Connection, ConsumerInfo, PriorityGroupState

app = family("Consumers and who is pinned.")

_ConsumerArgument = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")]


@command(app, "info")
def info(
    stream: StreamArgument, consumer: _ConsumerArgument, as_json: JsonOption = False, *, link: ConnectionOptions
) -> None:
    """Show where a consumer stands."""
    from datetime import UTC, datetime

    from keylane.cli.consumer.json import consumer_object
    from keylane.cli.formatting import json_text

    _check_names(stream, consumer)
    found = connected(link, lambda connection: _info(connection, stream, consumer))
    if as_json:
        typer.echo(json_text(consumer_object(found), indent=2))
    else:
        from rich.console import Console

        from keylane.cli.consumer.render import consumer_panel

        Console().print(consumer_panel(found, datetime.now(UTC)))


@command(app, "unpin")
def unpin(
    stream: StreamArgument, consumer: _ConsumerArgument, as_json: JsonOption = False, *, link: ConnectionOptions
) -> None:
    """Take the pin from the reader that has it.

    With the next message the server pins the reader that waits longest, which may be the same one again. No
    message is lost: what the old reader has not acknowledged is delivered again.
    """
    _check_names(stream, consumer)
    connected(link, lambda connection: _unpin(connection, stream, consumer, as_json=as_json))


@command(app, "watch")
def watch(
    stream: StreamArgument,
    consumer: Annotated[
        str | None, typer.Argument(metavar="CONSUMER", help="Only this one. Default: all of the stream.")
    ] = None,
    as_json: JsonChangesOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Show live who is pinned and what is pending, until Ctrl-C.

    On a terminal a table with a log of events; in a pipe one line for each change.
    """
    from keylane.cli.consumer.watch import ConsumerWatch
    from keylane.cli.display import open_display

    _check_names(stream, consumer)
    with open_display(as_json=as_json) as display:
        run_until_signal(ConsumerWatch(stream, consumer, display).run(link))


async def _info(connection: Connection, stream: str, consumer: str) -> ConsumerInfo:
    from keylane.jetstream import consumers

    return await consumers.info(connection, stream, consumer)


async def _unpin(connection: Connection, stream: str, consumer: str, *, as_json: bool) -> None:
    from keylane import priority
    from keylane.cli.formatting import as_utc, json_text

    async with priority.advisories(connection, stream, consumer) as events:
        before = await priority.group_state(connection, stream, consumer)
        await priority.unpin(connection, stream, consumer)
        if not as_json:
            typer.echo(_unpinned_text(before))
        after = await next_pin(events)
    if as_json:
        answer = {
            "stream": stream,
            "consumer": consumer,
            "unpinned_id": before.pinned_client_id,
            "pinned_since": as_utc(before.pinned_since) if before.pinned_since else None,
            "pinned_id": after,
        }
        typer.echo(json_text(answer, indent=2))
    elif after is not None:
        typer.echo(f"pinned now: {after}")
    else:
        typer.echo("nobody is pinned yet: a reader is pinned with the next message that it is given")


def _unpinned_text(before: PriorityGroupState) -> str:
    from datetime import UTC, datetime

    from keylane.cli.formatting import age

    if before.pinned_client_id is None or before.pinned_since is None:
        return "nobody was pinned"
    return f"unpinned {before.pinned_client_id}, which was pinned for {age(before.pinned_since, datetime.now(UTC))}"


def _check_names(stream: str, consumer: str | None) -> None:
    """Raise `InvalidInput` before the command connects."""
    from keylane.core.names import check_consumer_name, check_stream_name

    check_stream_name(stream)
    if consumer is not None:
        check_consumer_name(consumer)
