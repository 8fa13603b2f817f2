"""`keylane consumer info|unpin|watch`: one consumer, or all of a stream, and who is pinned.

Owns the words of the commands and how they end. How things look is in `consumer_view`, the live part in
`consumer_watch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.connecting import ConnectionOptions, takes_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from keylane.jetstream.consumers import ConsumerInfo, PriorityGroupState
    from keylane.priority import Pinned, Unpinned

app = typer.Typer(help="Consumers and who is pinned.", no_args_is_help=True, rich_markup_mode=None)

_NEW_PIN_S = 1.0

_Stream = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]
_Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
@takes_connection
def info(stream: _Stream, consumer: _Consumer, as_json: _Json = False, *, link: ConnectionOptions) -> None:
    """Show where a consumer stands."""
    import asyncio
    import json
    from datetime import UTC, datetime

    from keylane.cli.consumer_told import as_object

    _check_names(stream, consumer)
    found = asyncio.run(_look(stream, consumer, link))
    if as_json:
        typer.echo(json.dumps(as_object(found), indent=2))
    else:
        from rich.console import Console

        from keylane.cli import consumer_view

        Console().print(consumer_view.panel(found, datetime.now(UTC)))


@app.command()
@takes_connection
def unpin(stream: _Stream, consumer: _Consumer, as_json: _Json = False, *, link: ConnectionOptions) -> None:
    """Take the pin from the reader that has it.

    With the next message the server pins the reader that waits longest, which may be the same one again. No
    message is lost: what the old reader has not acknowledged is delivered again.
    """
    import asyncio

    _check_names(stream, consumer)
    asyncio.run(_unpin(stream, consumer, link, as_json=as_json))


@app.command()
@takes_connection
def watch(
    stream: _Stream,
    consumer: Annotated[
        str | None, typer.Argument(metavar="CONSUMER", help="Only this one. Default: all of the stream.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each change.")] = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Show live who is pinned and what is pending, until Ctrl-C.

    On a terminal a table with a log of events; in a pipe one line for each change.
    """
    from rich.console import Console

    from keylane.cli.consumer_watch import JsonLines, PlainLines, Screen, Watch

    _check_names(stream, consumer)
    console = Console()
    if as_json:
        _until_signal(Watch(stream, consumer, JsonLines()).run(link))
    elif console.is_terminal and not console.is_dumb_terminal:
        with Screen(console) as screen:
            _until_signal(Watch(stream, consumer, screen).run(link))
    else:
        _until_signal(Watch(stream, consumer, PlainLines()).run(link))


async def _look(stream: str, consumer: str, link: ConnectionOptions) -> ConsumerInfo:
    from keylane.cli.not_found import explained
    from keylane.errors import NotFound
    from keylane.jetstream import consumers

    async with await link.connect() as connection:
        try:
            return await consumers.info(connection, stream, consumer)
        except NotFound as error:
            raise await explained(connection, error, stream, consumer) from error


async def _unpin(stream: str, consumer: str, link: ConnectionOptions, *, as_json: bool) -> None:
    import json

    from keylane import priority
    from keylane.cli.consumer_told import as_utc
    from keylane.cli.not_found import explained
    from keylane.errors import NotFound

    async with (
        await link.connect() as connection,
        priority.advisories(connection, stream, consumer) as events,
    ):
        try:
            before = await priority.group_state(connection, stream, consumer)
            await priority.unpin(connection, stream, consumer)
        except NotFound as error:
            raise await explained(connection, error, stream, consumer) from error
        if not as_json:
            typer.echo(_unpinned_words(before))
        after = await _next_pin(events)
    if as_json:
        told = {
            "stream": stream,
            "consumer": consumer,
            "unpinned_id": before.pinned_client_id,
            "pinned_since": as_utc(before.pinned_since) if before.pinned_since else None,
            "pinned_id": after,
        }
        typer.echo(json.dumps(told, indent=2))
    elif after is not None:
        typer.echo(f"pinned now: {after}")
    else:
        typer.echo("nobody is pinned yet: a reader is pinned with the next message that it is given")


def _unpinned_words(before: PriorityGroupState) -> str:
    from datetime import UTC, datetime

    from keylane.cli.consumer_view import age

    if before.pinned_client_id is None or before.pinned_since is None:
        return "nobody was pinned"
    return f"unpinned {before.pinned_client_id}, which was pinned for {age(before.pinned_since, datetime.now(UTC))}"


async def _next_pin(events: AsyncIterator[Pinned | Unpinned]) -> str | None:
    """Who is pinned next, if that is soon."""
    import asyncio

    from keylane import priority

    try:
        async with asyncio.timeout(_NEW_PIN_S):
            async for event in events:
                if isinstance(event, priority.Pinned):
                    return event.pin_id
    except TimeoutError:
        return None
    return None


def _check_names(stream: str, consumer: str | None) -> None:
    """Before anything is sent."""
    from keylane.core.names import check_consumer_name, check_stream_name

    check_stream_name(stream)
    if consumer is not None:
        check_consumer_name(consumer)


def _until_signal(work: Coroutine[object, object, None]) -> None:
    """Run until it ends by itself, or by Ctrl-C or SIGTERM, which are no failure."""
    import asyncio
    import signal

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return
