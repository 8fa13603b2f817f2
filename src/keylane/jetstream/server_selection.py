"""Finding a server that takes us: each given server once, within one deadline.

Owns the order of attempts, their share of the deadline, the TLS context, and what nats-py is told. What a
single failure means is in `login`; what happens after the first login is in `connection`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import ssl
from collections.abc import Sequence
from typing import Any, Protocol

from keylane.errors import (
    AuthenticationFailed,
    ConnectError,
    InvalidInput,
    ProtocolViolation,
    ServerTooOld,
    ServerUnreachable,
    TlsFailed,
)
from keylane.jetstream.credentials import read_text
from keylane.jetstream.login import LoginClient, explain
from keylane.jetstream.settings import ConnectionSettings
from keylane.jetstream.urls import ServerUrl

PING_INTERVAL_S = 10
"""A silent link is found dead after two to three of these (nats-py's own default would take minutes)."""
RECONNECT_WAIT_S = (0.25, 1.0)
"""The pause before the same server is tried again is drawn once per connection from this range."""
RECONNECT_ATTEMPT_S = 2.0
FORCED_FLUSH_S = 10.0
_DISCARD_S = 1.0


class LinkListener(Protocol):
    """Who hears of the link once the first login is done."""

    def saw_error(self, error: Exception) -> None: ...

    def saw_loss(self) -> None: ...

    def saw_return(self) -> None: ...

    def saw_close(self) -> None: ...


class Watch:
    """nats-py's callbacks. Until there is a listener, the first error ends the login."""

    def __init__(self) -> None:
        self.listener: LinkListener | None = None
        self.discarded = False

    async def error(self, error: Exception) -> None:
        if self.listener is not None:
            self.listener.saw_error(error)
        elif not self.discarded:
            raise _LoginEnded(error)

    async def disconnected(self) -> None:
        if self.listener is not None:
            self.listener.saw_loss()

    async def reconnected(self) -> None:
        if self.listener is not None:
            self.listener.saw_return()

    async def closed(self) -> None:
        if self.listener is not None:
            self.listener.saw_close()


class _LoginEnded(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def dial(settings: ConnectionSettings, name: str, timeout_s: float) -> tuple[LoginClient, Watch]:
    """Log in at one of the servers, tried in random order, or raise one `ConnectError`.

    Refused credentials end it at once; any other failure leaves the rest of the time to the other servers.
    """
    _check_web(settings.servers)
    tls = tls_context(settings) if settings.tls_wanted else None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    servers = random.sample(settings.servers, len(settings.servers))
    failures: list[ConnectError] = []
    for index, server in enumerate(servers):
        share_s = (deadline - loop.time()) / (len(servers) - index)
        client, watch = LoginClient(settings), Watch()
        failure = await _log_in(client, watch, server, _options(settings, name, tls, watch, share_s), share_s)
        if failure is None:
            client.options["connect_timeout"] = RECONNECT_ATTEMPT_S
            client.add_servers(settings.servers)
            return client, watch
        failures.append(failure)
        if isinstance(failure, AuthenticationFailed):
            break
    raise _verdict(failures, settings)


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """The TLS context of the settings; raises `InvalidInput` that names the file which is at fault."""
    if settings.tls_ca:
        read_text(settings.tls_ca, "TLS CA file")
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
    except (ssl.SSLError, OSError) as error:
        raise InvalidInput(f"{settings.tls_ca}: no CA certificate in PEM form in this file") from error
    if settings.tls_identity:
        cert, key = settings.tls_identity
        read_text(cert, "TLS certificate")
        read_text(key, "TLS key")
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or "unreadable"
            raise InvalidInput(
                f"{cert} and {key}: not a TLS certificate with its own key, in PEM form and without a "
                f"password ({reason})"
            ) from error
    return context


async def _log_in(
    client: LoginClient, watch: Watch, server: ServerUrl, options: dict[str, Any], share_s: float
) -> ConnectError | None:
    failed: Exception
    try:
        async with asyncio.timeout(share_s):
            await client.connect([str(server)], **options)
    except _LoginEnded as ended:
        failed = ended.error
    except TimeoutError as error:
        failed = error
    except BaseException:
        await _discard(client, watch)
        raise
    else:
        return None
    failure = explain(failed, client, server, share_s)
    failure.__cause__ = failed
    await _discard(client, watch)
    return failure


async def _discard(client: LoginClient, watch: Watch) -> None:
    watch.discarded = True
    client.abort()
    # A transport that was cut in the midst of a handshake may never report its end, hence the deadline.
    closing = asyncio.ensure_future(client.close())
    done, _ = await asyncio.wait({closing}, timeout=_DISCARD_S)
    if not done:
        closing.cancel()


def _options(
    settings: ConnectionSettings, name: str, tls: ssl.SSLContext | None, watch: Watch, share_s: float
) -> dict[str, Any]:
    return {
        "name": name,
        "error_cb": watch.error,
        "disconnected_cb": watch.disconnected,
        "reconnected_cb": watch.reconnected,
        "closed_cb": watch.closed,
        "connect_timeout": share_s,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": random.uniform(*RECONNECT_WAIT_S),  # noqa: S311 - spreads load, guards nothing
        "ping_interval": PING_INTERVAL_S,
        "flush_timeout": FORCED_FLUSH_S,
        "tls": tls,
        "tls_hostname": settings.tls_hostname,
        "tls_handshake_first": settings.tls_first,
        "inbox_prefix": settings.inbox_prefix,
        **(settings.auth.nats_options() if settings.auth else {}),
    }


def _verdict(failures: Sequence[ConnectError], settings: ConnectionSettings) -> ConnectError:
    """One error for all attempts: the most telling kind, with the reason of every server."""
    last = failures[-1]
    if isinstance(last, AuthenticationFailed):
        return last
    reasons = "; ".join(map(str, failures))
    for kind in (TlsFailed, ServerTooOld, ProtocolViolation):
        telling = next((failure for failure in failures if isinstance(failure, kind)), None)
        if telling is not None:
            verdict: ConnectError = kind(reasons)
            verdict.__cause__ = telling.__cause__
            return verdict
    verdict = ServerUnreachable(f"no server could be reached (from {settings.servers_from}): {reasons}")
    verdict.__cause__ = last.__cause__
    return verdict


def _check_web(servers: Sequence[ServerUrl]) -> None:
    if servers[0].web and importlib.util.find_spec("aiohttp") is None:
        raise InvalidInput(f"{servers[0]}: websocket needs the package aiohttp; install it, or use nats://")


def _no_password() -> str:
    """Keeps OpenSSL from asking at the terminal for the password of an encrypted key."""
    return ""
