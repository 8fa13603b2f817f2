"""Logging in: each given server once, within one deadline; the checks of a login, and what its failures mean.

nats-py retries most failures without an end, sends the login in the clear when a `tls://` server offers no
TLS, and takes a link that ended in the middle of a login for a good one. `LoginClient` closes these gaps
for the first login and for every reconnect, and `explain` turns each failure into one keylane error. `dial` owns the
order of attempts, their share of the deadline, the TLS context, and the options of nats-py. What happens after the
first login is in `connection`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from urllib.parse import urlparse

import nats.errors
from nats.aio.client import Srv

from keylane.errors import (
    AuthenticationFailed,
    ConnectError,
    InvalidInput,
    ProtocolViolation,
    ServerTooOld,
    ServerUnreachable,
    TlsFailed,
)
from keylane.jetstream.client import Client
from keylane.jetstream.credentials import read_text
from keylane.jetstream.features import MINIMUM_SERVER, Version, parse_version
from keylane.jetstream.protocol import BrokenProtocol, broken, check_info
from keylane.jetstream.settings import ConnectionSettings
from keylane.jetstream.transport import DirectTransport, PlainTextBeforeTls
from keylane.jetstream.urls import ServerUrl

PING_INTERVAL_S = 10
"""A silent link is found dead after two to three of these (nats-py's own default would take minutes)."""
RECONNECT_WAIT_S = (0.25, 1.0)
"""The pause before the same server is tried again is drawn once per connection from this range."""
RECONNECT_ATTEMPT_S = 2.0
FORCED_FLUSH_S = 10.0
_DISCARD_S = 1.0
_MOST_SERVERS = 10_000
_AUTH_REFUSALS = (
    "authorization violation",
    "user authentication expired",
    "user authentication revoked",
    "account authentication expired",
)
# OpenSSL's X509_V_ERR_ numbers.
_UNKNOWN_CA = (18, 19, 20, 21)
_WRONG_HOST = (62, 64)
_EXPIRED = (9, 10)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


class LoginRefused(nats.errors.Error):
    """A login that we ended ourselves; `error` says why. nats-py's kind of error, so that it survives it."""

    def __init__(self, error: ConnectError) -> None:
        super().__init__(str(error))
        self.error = error


class LoginClient(Client):
    """The client with the checks of a login, and with its reasons kept."""

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__()
        self.settings = settings
        self._auth_configured = settings.auth is not None
        self._reconnecting: asyncio.Task[Any] | None = None
        self.lost_because: Exception | None = None

    @property
    def version(self) -> Version:
        return parse_version(str(self._server_info.get("version", "")))

    @property
    def server(self) -> str:
        """The server of the present link, or of the last one. Pool entries carry no login."""
        return self._current_server.uri.geturl() if self._current_server else "no server"

    @property
    def pool_size(self) -> int:
        return len(self._server_pool)

    @property
    def greeted(self) -> bool:
        """Whether the server said anything at all."""
        return bool(self._server_info)

    @property
    def has_link(self) -> bool:
        """Whether a socket is open."""
        return self._transport is not None and not self._transport.at_eof()

    @property
    def unsent_bytes_when_down(self) -> int:
        """What waits for a link that is not there."""
        return 0 if self.is_connected else self._pending_data_size + sum(map(len, self.outbox))

    def add_servers(self, servers: Iterable[ServerUrl]) -> None:
        """Make these servers known for reconnects, beside those that the cluster named."""
        known = {each.uri.netloc for each in self._server_pool}
        for server in servers:
            uri = urlparse(str(server))
            if uri.netloc not in known:
                self._server_pool.append(Srv(uri))

    def abort(self) -> None:
        """Drop the link without a word to the server."""
        if isinstance(self._transport, DirectTransport):
            self._transport.abort()
        elif self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]  # nats-py's base class

    # ---- what nats-py calls -------------------------------------------------------------------------

    async def _connect_to_server(self, s: Any) -> None:
        # nats-py leaves the socket of a failed login open when it goes on to the next server.
        self.abort()
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection:
            check_info(info)
            self._check_version(info)
            self._check_tls(info)
        if len(self._server_pool) + len(info.get("connect_urls", ())) > _MOST_SERVERS:
            raise broken(f"INFO names more than {_MOST_SERVERS} servers", repr(info["connect_urls"]).encode())
        self._max_payload = info.get("max_payload", self._max_payload)
        self.scanner.allow_payload(self._max_payload)
        await super()._process_info(info, initial_connection)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except ConnectionError as error:
            if said := await self._last_words():
                raise nats.errors.Error(f"nats: {said}") from error
            raise
        except ssl.SSLError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            # nats-py reads the server's first lines without a look at their form.
            raise broken("the login is not answered as a NATS server does", self._last_line()) from error
        if self._status != Client.CONNECTED:
            self._check_answer()
            self._status = Client.CONNECTED

    def _check_answer(self) -> None:
        # nats-py goes on when the answer to its PING is neither PONG nor -ERR: the end of the link, an INFO that was
        # under way, or nonsense.
        assert self._transport is not None
        line = self._last_line()
        failure: nats.errors.Error | None = None
        if self._transport.at_eof():
            failure = LoginRefused(self._closed_in_login())
        elif line and not line.startswith((b"INFO ", b"PING")):
            failure = broken("the login is not answered as a NATS server does", line)
        if failure is not None:
            for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
                if task is not None:
                    task.cancel()
            raise failure

    def _last_line(self) -> bytes:
        return self._transport.last_line if isinstance(self._transport, DirectTransport) else b""

    async def _last_words(self) -> str:
        """What the server said before it ended the link, where our writing failed before our reading."""
        assert self._transport is not None
        while not self._transport.at_eof():
            line = await self._transport.readline()
            if line.startswith(b"-ERR"):
                return line[4:].decode(errors="replace").strip()
        return ""

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # nats-py stops half way when it cannot send what is still to be sent.
        if not self.is_connected:
            self._drop_unsent()
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            await self._error_cb(error)
            self._drop_unsent()
            self._status = Client.DISCONNECTED
            await super()._close(status, do_cbs)

    def _drop_unsent(self) -> None:
        self._pending, self._pending_data_size = [], 0

    async def _attempt_reconnect(self) -> None:
        """nats-py's reconnect, one at a time, and never ended by an error that nats-py does not expect."""
        await self._end_earlier_reconnect()
        while not self.is_closed:
            self._status = Client.RECONNECTING
            try:
                await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001 - reported; in silence the connection would hang for ever
                await self._error_cb(error)
                if self.is_connected:
                    return
                await asyncio.sleep(self.options["reconnect_time_wait"])
            else:
                return

    async def _end_earlier_reconnect(self) -> None:
        # A link that is lost in the midst of a reconnect starts a second one. nats-py cancels the first, but
        # parts of it swallow the cancellation, and the two would then fight over one socket.
        earlier, self._reconnecting = self._reconnecting, asyncio.current_task()
        while earlier is not None and not earlier.done():
            earlier.cancel()
            await asyncio.wait({earlier}, timeout=0.1)

    async def _process_op_err(self, e: Exception) -> None:
        self.lost_because = e
        await super()._process_op_err(e)

    async def _process_err(self, err_msg: str) -> None:
        said = err_msg.strip("'")
        if is_auth_refusal(said):
            # The link ends now; a reconnect reads the credentials again, and they may have been renewed.
            await self._process_op_err(nats.errors.Error(f"nats: {said}"))
        elif "stale connection" in said.lower():
            await self._process_op_err(nats.errors.StaleConnectionError())
        else:
            # nats-py would close for good. Where the error is fatal to the link, the server ends it.
            await self._error_cb(nats.errors.Error(f"nats: {said}"))

    # ---- checks -------------------------------------------------------------------------------------

    def _check_version(self, info: dict[str, Any]) -> None:
        found = str(info.get("version", "unknown"))
        if parse_version(found) < MINIMUM_SERVER:
            needed = ".".join(map(str, MINIMUM_SERVER))
            raise LoginRefused(
                ServerTooOld(
                    f"{self.server} runs nats-server {found}; keylane needs {needed} or newer "
                    "(priority groups). Upgrade the server"
                )
            )

    def _check_tls(self, info: dict[str, Any]) -> None:
        assert self._current_server is not None
        if self._current_server.uri.scheme in ("ws", "wss"):
            return
        if self.settings.tls_wanted and not info.get("tls_required"):
            if not info.get("tls_available") and not self.settings.tls_first:
                raise LoginRefused(
                    TlsFailed(
                        f"{self.server} does not offer TLS, and this connection asks for it; nothing secret "
                        "was sent. Turn TLS on in the server, or use nats:// without any tls_ setting"
                    )
                )
            info["tls_required"] = True
        if info.get("tls_required") and info.get("tls_verify") and self.settings.tls_identity is None:
            raise LoginRefused(TlsFailed(_no_client_certificate(self.server)))

    def _closed_in_login(self) -> ConnectError:
        if self._server_info.get("tls_verify"):
            return TlsFailed(
                f"{self.server} ended the link after the TLS handshake: it most likely does not trust the "
                "client certificate. Use a tls_cert that the server's CA has signed"
            )
        return ServerUnreachable(f"{self.server} ended the link in the middle of the login")


def is_auth_refusal(text: str) -> bool:
    """Whether the server's words mean that it does not accept the credentials."""
    lowered = text.lower()
    return any(refusal in lowered for refusal in _AUTH_REFUSALS)


def explain(error: BaseException, client: LoginClient, server: ServerUrl, waited_s: float) -> ConnectError:
    """The one keylane error for a failed login."""
    settings = client.settings
    if isinstance(error, LoginRefused):
        return error.error
    if isinstance(error, BrokenProtocol) and not isinstance(error, PlainTextBeforeTls):
        return ProtocolViolation(f"{server}: {error}")
    if isinstance(error, ssl.SSLError):
        return TlsFailed(f"{server}: {_tls_reason(error, settings)}")
    if isinstance(error, nats.errors.Error) and is_auth_refusal(str(error)):
        return AuthenticationFailed(_auth_reason(str(error), server, settings))
    return ServerUnreachable(f"{server}: {_link_reason(error, client, waited_s)}")


def _auth_reason(said: str, server: ServerUrl, settings: ConnectionSettings) -> str:
    words = said.removeprefix("nats: ").strip("'")
    if settings.auth is None:
        return (
            f"{server} wants a login and none was given ({words}). Give user and password, token, "
            "nkey_seed_file or creds_file, or name a context that has one"
        )
    return f"{server} refused {settings.auth.describe()} ({words}). Check that the server knows this login"


def _tls_reason(error: ssl.SSLError, settings: ConnectionSettings) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_reason(error, settings)
    reason = error.reason or str(error)
    if reason in _NOT_TLS:
        return (
            f"the server does not begin with TLS ({reason}). Drop tls_first, or set handshake_first in the "
            "server's tls block"
        )
    if settings.tls_identity is None and "CERTIFICATE" in reason:
        return _no_client_certificate("the server")
    return f"the TLS handshake failed ({reason})"


def _certificate_reason(error: ssl.SSLCertVerificationError, settings: ConnectionSettings) -> str:
    said = error.verify_message
    if error.verify_code in _UNKNOWN_CA:
        asked = f"the CA in {settings.tls_ca}" if settings.tls_ca else "the CAs of this machine"
        return f"the server's certificate is not signed by {asked} ({said}). Give its CA as tls_ca"
    if error.verify_code in _WRONG_HOST:
        return (
            f"the server's certificate is for another host ({said}). Use a host name that the certificate "
            "has, or give that name as tls_hostname"
        )
    if error.verify_code in _EXPIRED:
        return f"the server's certificate is not valid now ({said}). Renew it"
    return f"the server's certificate was refused ({said})"


def _no_client_certificate(server: str) -> str:
    return f"{server} wants a client certificate and none was given. Give tls_cert and tls_key"


def _link_reason(error: BaseException, client: LoginClient, waited_s: float) -> str:
    if isinstance(error, TimeoutError):
        return _silence_reason(client, waited_s)
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    if isinstance(error, ConnectionRefusedError | PlainTextBeforeTls):
        refused = isinstance(error, ConnectionRefusedError)
        return "connection refused; nothing listens there" if refused else str(error)
    if isinstance(error, nats.errors.Error) and not client.greeted:
        return "what answers there is not a NATS server"
    if isinstance(error, ConnectionError):
        return f"the link was cut in the middle of the login ({error})"
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__


def _silence_reason(client: LoginClient, waited_s: float) -> str:
    if client.greeted:
        return f"no answer to the login within {waited_s:.1f} s"
    if client.has_link:
        return (
            f"the port is open, but no NATS greeting came within {waited_s:.1f} s. Is this a NATS client "
            "port? If the server does TLS first, set tls_first"
        )
    return f"no answer within {waited_s:.1f} s"


# ---- finding a server ---------------------------------------------------------------------------------


class LinkObserver(Protocol):
    """What the link reports to, once the first login is done."""

    def saw_error(self, error: Exception) -> None: ...

    def saw_loss(self) -> None: ...

    def saw_return(self) -> None: ...

    def saw_close(self) -> None: ...


class Watch:
    """nats-py's callbacks. Until there is a listener, the first error ends the login."""

    def __init__(self) -> None:
        self.listener: LinkObserver | None = None
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
