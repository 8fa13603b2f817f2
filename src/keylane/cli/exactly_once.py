"""`keylane exactly-once accept|forget`: an operator's decisions about the tables of exactly once.

Owns the connection to the database. The changes are in `keylane.exactly_once`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from keylane.cli.command import ForceOption, GroupArgument, JsonOption, StreamArgument, confirm, family, print_answer

if TYPE_CHECKING:
    from keylane.exactly_once import ExactlyOnce

Answer = TypeVar("Answer")

app = family("Exactly once into a database: decide about a bucket or stream that was restored or made anew.")

Database = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="KEYLANE_DATABASE",
        help="The database, as SQLAlchemy writes it: postgresql+psycopg://user@host/name, sqlite:///path.db.",
    ),
]


@app.command()
def accept(
    stream: StreamArgument,
    group: GroupArgument,
    database: Database,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take the group's bucket and stream as they are, and go on.

    For a bucket that was restored from a backup, or a stream that was copied with its sequences: what is done stays
    done, and fencing tokens go on above the highest that the database has seen. Members that wait for it go on by
    themselves. No instance may be left that works with the state from before.
    """
    if not force:
        confirm(
            f"Does no instance of group {group!r} of stream {stream!r} work with the state from before any more?",
            otherwise="nothing was accepted",
        )
    _with(database, lambda once: once.accept(stream, group))
    print_answer(as_json, {"stream": stream, "group": group, "accepted": True}, f"accepted: group {group!r} goes on")


@app.command()
def forget(
    stream: StreamArgument,
    group: GroupArgument,
    database: Database,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Forget what the group has done: all its messages count as new.

    For a stream that was deleted and made anew. If messages that were done are delivered again, they are done again.
    """
    if not force:
        confirm(
            f"Forget which messages group {group!r} of stream {stream!r} has done? If they come again, they are done "
            "again.",
            otherwise="nothing was forgotten",
        )
    keys = _with(database, lambda once: once.forget(stream, group))
    text = f"forgot {keys:,} key{'' if keys == 1 else 's'} of group {group!r} of stream {stream!r}"
    print_answer(as_json, {"stream": stream, "group": group, "keys": keys}, text)


def _with(url: str, work: Callable[[ExactlyOnce], Awaitable[Answer]]) -> Answer:
    """Connect to the database, do the work, disconnect."""
    import keylane.exactly_once  # noqa: F401 - first: its error says what to install if SQLAlchemy is missing

    return _work_on(url, work)


def _work_on(url: str, work: Callable[[ExactlyOnce], Awaitable[Answer]]) -> Answer:
    import asyncio
    from pathlib import Path

    from sqlalchemy import URL, create_engine, make_url
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import create_async_engine

    from keylane.errors import InvalidInput
    from keylane.exactly_once import ExactlyOnce

    async def run(target: URL) -> Answer:
        if target.get_dialect().is_async:
            engine = create_async_engine(target)
            try:
                return await work(ExactlyOnce(engine))
            finally:
                await engine.dispose()
        plain = create_engine(target)
        try:
            return await work(ExactlyOnce(plain))
        finally:
            plain.dispose()

    try:
        target = make_url(url)
        if target.get_backend_name() == "sqlite" and not Path(target.database or "").is_file():
            raise InvalidInput(f"--database: there is no file {target.database!r}")
        return asyncio.run(run(target))
    except ModuleNotFoundError as error:
        raise InvalidInput(f"--database needs the driver {error.name!r}, which is not installed: install it") from None
    except SQLAlchemyError as error:
        reason = getattr(error, "orig", None) or error
        raise InvalidInput(f"--database cannot be used: {reason}") from None
