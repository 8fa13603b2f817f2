"""`keylane web`: the page of an account, until Ctrl-C or SIGTERM."""

from __future__ import annotations

from typing import Annotated

import typer

from keylane.cli.command import ConnectionOptions, exit_on_invalid_input, run_until_signal, single_command


def web(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 8230,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve on. By default this machine only.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name that the page is reached by, such as that of a proxy."),
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let those who know the token act. Else the page only shows.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            envvar="KEYLANE_WEB_TOKEN",
            help="The token for --allow-actions. By default a new one, which is printed.",
        ),
    ] = None,
    *,
    link: ConnectionOptions,
) -> None:
    """A page that shows every stream and group of the account, live.

    It reads while somebody looks, once for all browsers, and never touches a member. With --allow-actions it can also
    add and drop members, let one step down, apply a plan, pause and resume workers, repartition a fleet, replay dead
    letters and release parked keys; each after a question that says what will move.
    """
    import asyncio
    import secrets

    from keylane.errors import InvalidInput

    with exit_on_invalid_input():
        if token is not None and not allow_actions:
            raise InvalidInput("a token without --allow-actions has no use: give both, or neither")
        if token is not None and len(token) < 12:
            raise InvalidInput("the token is too short to keep anybody out: give at least 12 characters")
        secret = (token or secrets.token_urlsafe(18)) if allow_actions else None

        async def serve() -> None:
            from keylane.web.page_server import serve_page, warning_for

            async with (
                link.open() as connection,
                serve_page(connection, host=host, port=port, token=secret, names=allow_host or ()) as bound,
            ):
                shown = f"[{host}]" if ":" in host else host
                typer.echo(f"serving http://{shown}:{bound}   (Ctrl-C ends it)")
                if secret is not None and token is None:
                    typer.echo(f"token for actions: {secret}")
                if (warning := warning_for(host)) is not None:
                    typer.echo(f"keylane: warning: {warning}", err=True)
                await asyncio.Event().wait()

        run_until_signal(serve())


app = single_command(web)
