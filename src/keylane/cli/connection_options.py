"""The connection options that every command shares, and the connection made from them.

The names are those of the `nats` tool. `keylane.connect` decides what replaces a missing option: the environment or a
context.

    @app.command()
    @takes_connection
    def info(stream: str, *, link: ConnectionOptions) -> None:
        ...
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from keylane import Connection


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # a repr would show the password
class ConnectionOptions:
    """Where to connect and as whom, as given on the command line. Each field is one option."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            metavar="URL",
            help="Server URL, or several with commas. Else NATS_URL, else the context, else 127.0.0.1:4222.",
        ),
    ] = None
    context: Annotated[str | None, typer.Option(metavar="NAME", help="Use this context of the `nats` tool.")] = None
    creds: Annotated[Path | None, typer.Option(metavar="FILE", help="Log in with a creds file.")] = None
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Log in as this user; without a password it is a token."),
    ] = None
    password: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Its password. Others can see it here; NATS_USER and NATS_PASSWORD hide it."),
    ] = None
    nkey: Annotated[Path | None, typer.Option(metavar="FILE", help="Log in with an nkey seed file.")] = None
    tlsca: Annotated[Path | None, typer.Option(metavar="FILE", help="Trust this certificate authority.")] = None
    tlscert: Annotated[Path | None, typer.Option(metavar="FILE", help="Client certificate.")] = None
    tlskey: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="JetStream domain.")] = None
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the server.")] = 5.0

    async def connect(self, **hooks: Callable[[str], None]) -> Connection:
        """Connect; `on_disconnect` and its like are handed on to `keylane.connect`."""
        import keylane

        # A command prints what happens to the connection itself; log lines would break its screen.
        logging.getLogger("keylane").addHandler(logging.NullHandler())
        is_token = self.user is not None and self.password is None  # as in the `nats` tool
        return await keylane.connect(
            self.server,
            context=self.context,
            user=None if is_token else self.user,
            password=self.password,
            token=self.user if is_token else None,
            creds_file=self.creds,
            nkey_seed_file=self.nkey,
            tls_ca=self.tlsca,
            tls_cert=self.tlscert,
            tls_key=self.tlskey,
            domain=self.domain,
            name="keylane cli",
            connect_timeout_s=self.timeout,
            request_timeout_s=self.timeout,
            **hooks,  # type: ignore[arg-type]
        )


@functools.cache
def _shared_options() -> tuple[inspect.Parameter, ...]:
    """Cached, because reading annotations takes time and every command has the same options."""
    hints = get_type_hints(ConnectionOptions, include_extras=True)
    return tuple(
        inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=hints[spec.name])
        for spec in fields(ConnectionOptions)
    )


def takes_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Show the fields of the command's `link` parameter as its last options, and pass them as one value."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "link"
    ]
    shared = _shared_options()
    names = [parameter.name for parameter in shared]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        link = ConnectionOptions(**{name: values.pop(name) for name in names})
        command(**values, link=link)

    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run
