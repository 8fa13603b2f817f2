"""The connection: opened by `connect`, reconnected for as long as it is open, closed once.

Owns what happens between the first login and the end: hooks, log lines, giving up on refused credentials,
closing. Where settings come from is in `settings`, the first login in `login`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Self

import nats.errors
from nats.js import JetStreamContext

from keylane.awaitable_context import awaitable_context
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    AuthenticationFailed,
    Disconnected,
    JetStreamDisabled,
    KeylaneError,
    PermissionDenied,
    ProtocolViolation,
    RequestTimeout,
    ServerTooOld,
    ServerUnreachable,
)
from keylane.jetstream.api import JetStreamApi
from keylane.jetstream.client import Client
from keylane.jetstream.features import SINCE, Feature, Version, supports
from keylane.jetstream.hooks import ConnectionHooks, HookList
from keylane.jetstream.login import LoginClient, LoginRefused, Watch, dial, is_auth_refusal
from keylane.jetstream.permissions import Denial, Purposes, denied, parse_denial
from keylane.jetstream.settings import ConnectionSettings, Given, StrPath, check_seconds, resolve

_log = logging.getLogger("keylane.connection")

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 30.0
REFUSALS_PER_SERVER = 2
"""Refused logins in a row, for each known server, after which a lost connection is given up."""
VIOLATIONS_PER_SERVER = 3
"""Links in a row, for each known server, that end because the server does not speak NATS, before it is given up."""
_TRUST_AFTER_S = 60.0
"""After a link that was good for this long, earlier violations no longer count."""

_TEMPORARILY_UNAVAILABLE = 10008
_ELECTION_POLL_S = 0.05
_MOST_DENIALS = 100


@awaitable_context
async def connect(
    url: str | Sequence[str] | None = None,
    *,
    context: str | None = None,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    nkey_seed: str | None = None,
    nkey_seed_file: StrPath | None = None,
    creds_file: StrPath | None = None,
    tls_ca: StrPath | None = None,
    tls_cert: StrPath | None = None,
    tls_key: StrPath | None = None,
    tls_hostname: str | None = None,
    tls_first: bool | None = None,
    domain: str | None = None,
    api_prefix: str | None = None,
    event_prefix: str | None = None,
    inbox_prefix: str | None = None,
    name: str = "keylane",
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    hooks: ConnectionHooks | None = None,
) -> Connection:
    """Connect to NATS and make sure that JetStream answers.

        async with keylane.connect("nats://127.0.0.1:4222") as connection:
            ...

    `connection = await keylane.connect(...)` leaves it to you to close it.

    What is not given comes from `context`, else from NATS_URL and its like, else from the context selected
    in the `nats` tool, else from the default. docs/connection.md has every way and every error.
    """
    settings = resolve(
        Given(
            source="the arguments of connect()",
            url=url,
            user=user,
            password=password,
            token=token,
            nkey_seed=nkey_seed,
            nkey_seed_file=nkey_seed_file,
            creds_file=creds_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_hostname=tls_hostname,
            tls_first=tls_first,
            domain=domain,
            api_prefix=api_prefix,
            event_prefix=event_prefix,
            inbox_prefix=inbox_prefix,
        ),
        context,
    )
    check_seconds(connect_timeout_s, "connect_timeout_s")
    check_seconds(request_timeout_s, "request_timeout_s")
    deadline = asyncio.get_running_loop().time() + connect_timeout_s
    client, watch = await dial(settings, name, connect_timeout_s)
    connection = Connection(client, watch, settings, request_timeout_s)
    try:
        await connection._check_jetstream(deadline)
    except BaseException:
        await connection.close()
        raise
    if hooks is not None:
        connection.observe(hooks)
    _log.info("connected to %s (from %s)", connection.server, settings.servers_from)
    return connection


class Connection:
    """A connection to NATS with JetStream. Made by `connect`; use it with `async with`."""

    def __init__(
        self, client: LoginClient, watch: Watch, settings: ConnectionSettings, request_timeout_s: float
    ) -> None:
        self._client = client
        self._settings = settings
        self._hooks = HookList()
        self._refusals = 0
        self._violations = 0
        self._last_violation = 0.0
        self._last_logged = ""
        self._drain_late = False
        self._end_reason: str | None = None
        self._ended = asyncio.Event()
        self._giving_up: asyncio.Task[None] | None = None
        self.closed_reason: str | None = None
        """Why the connection is closed; None while it is open."""
        self.request_timeout_s = request_timeout_s
        self.api = JetStreamApi(client, prefix=settings.api_prefix, timeout_s=request_timeout_s)
        self._purposes = Purposes(settings.api_prefix, settings.event_prefix, settings.inbox_prefix)
        self._denied: set[tuple[str, str]] = set()
        watch.listener = self

    def __repr__(self) -> str:
        version = ".".join(map(str, self.server_version))
        return f"<Connection {self.server} {self._state()}, nats-server {version}>"

    # ---- facts --------------------------------------------------------------------------------------

    @property
    def nats(self) -> Client:
        """The NATS client: nats-py's, with keylane's bulk message path."""
        return self._client

    @cached_property
    def jetstream(self) -> JetStreamContext:
        """nats-py's JetStream context, for KV buckets and the management of streams."""
        return self._client.jetstream(prefix=self._settings.api_prefix, timeout=self.request_timeout_s)

    @property
    def server(self) -> str:
        """The server of the present link, or of the last one; without any secret."""
        return self._client.server

    @property
    def server_version(self) -> Version:
        return self._client.version

    def supports(self, feature: Feature) -> bool:
        """Whether the connected server has a feature; see `keylane.jetstream.features`."""
        return supports(self.server_version, feature)

    def require(self, feature: Feature) -> None:
        """Raise `ServerTooOld` where the connected server lacks a feature."""
        if not self.supports(feature):
            needed, found = (".".join(map(str, each)) for each in (SINCE[feature], self.server_version))
            raise ServerTooOld(
                f"{feature.replace('_', ' ')} needs nats-server {needed} or newer; {self.server} runs {found}"
            )

    @property
    def event_prefix(self) -> str:
        """Where JetStream's advisories are published: `$JS.EVENT`, unless an account import moved them."""
        return self._settings.event_prefix

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def is_closed(self) -> bool:
        return self._ended.is_set()

    def observe(self, hooks: ConnectionHooks) -> Callable[[], None]:
        """Add hooks; call the result to remove them."""
        return self._hooks.add(hooks)

    async def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until the server has read everything sent so far, and this client everything the server sent before."""
        check_seconds(timeout_s, "timeout_s")
        self._client.push()
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.flush()
        except TimeoutError as error:
            raise RequestTimeout(f"{self.server} did not answer a ping within {timeout_s:g} s") from error
        except (nats.errors.Error, OSError) as error:
            raise Disconnected(f"{self.server} could not be flushed: {self.closed_reason or error}") from error

    # ---- the end ------------------------------------------------------------------------------------

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is still to be sent, and close. Safe to repeat. After `timeout_s` the link is cut."""
        check_seconds(timeout_s, "timeout_s")
        if self.is_closed:
            return
        self._end_reason = self._end_reason or "closed by the program"
        if unsent := self._client.unsent_bytes_when_down:
            _log.warning("%s is closed while it is down: %d bytes were not sent", self.server, unsent)
        closing = asyncio.ensure_future(self._client.close())
        done, _ = await asyncio.wait({closing}, timeout=timeout_s)
        if not done:
            closing.cancel()
            self._client.abort()
            _log.warning("closing %s took longer than %g s; the link was cut", self.server, timeout_s)
        else:
            closing.result()
        self.saw_close()

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """End all subscriptions, let their messages be handled, send what is to be sent, and close.

        Raises `RequestTimeout` when that takes longer than `timeout_s`; the connection is closed then too.
        """
        check_seconds(timeout_s, "timeout_s")
        if self.is_closed:
            return
        self._end_reason = self._end_reason or "drained and closed by the program"
        self._client.options["drain_timeout"] = timeout_s
        draining = asyncio.ensure_future(self._client.drain())
        done, _ = await asyncio.wait({draining}, timeout=timeout_s + CLOSE_TIMEOUT_S)
        trouble = draining.exception() if done else None
        await self.close()
        if trouble is not None:
            raise Disconnected(f"{self.server} could not be drained; it is closed now: {trouble}") from trouble
        if self._drain_late or not done:
            raise RequestTimeout(f"draining {self.server} took longer than {timeout_s:g} s; it is closed now")

    async def wait_closed(self) -> str:
        """Wait until the connection is closed, and return the reason."""
        await self._ended.wait()
        return self.closed_reason or ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- what the link reports (LinkObserver) ---------------------------------------------------------

    def saw_error(self, error: Exception) -> None:
        """nats-py's error callback: log lines without repeats, hooks, and an end to hopeless logins."""
        if isinstance(error, nats.errors.StaleConnectionError):
            return  # the loss of the link says it
        if isinstance(error, nats.errors.DrainTimeoutError):
            self._drain_late = True
            return
        if isinstance(error, nats.errors.Error) and (denial := parse_denial(str(error))) is not None:
            self._saw_denial(denial)
            return
        told = self._understood(error)
        level = logging.DEBUG if str(told) == self._last_logged else logging.WARNING
        self._last_logged = str(told)
        _log.log(level, "%s: %s", self.server, told)
        self._hooks.error(told)
        if isinstance(told, AuthenticationFailed):
            self._refusals += 1
            if self._refusals >= REFUSALS_PER_SERVER * self._client.pool_size:
                self._give_up(str(told))
        elif isinstance(told, ProtocolViolation):
            now = asyncio.get_running_loop().time()
            self._violations = self._violations + 1 if now - self._last_violation < _TRUST_AFTER_S else 1
            self._last_violation = now
            if self._violations >= VIOLATIONS_PER_SERVER * self._client.pool_size:
                self._give_up(f"{told}; {self._violations} times in a row")

    def _saw_denial(self, denial: Denial) -> None:
        """End what needs the subject; log and hooks hear of each subject once."""
        error = denied(denial, self._purposes, self._settings.auth)
        if denial.operation == "subscribe" and denial.subject.startswith(f"{self._settings.inbox_prefix}."):
            self._client.outstanding.bar(PermissionDenied, str(error))
        self._client.deny(error)
        known = (denial.operation, denial.family)
        if known in self._denied or len(self._denied) >= _MOST_DENIALS:
            _log.debug("%s: %s", self.server, error)
            return
        self._denied.add(known)
        # The next request shows whether JetStream is enabled: this answer is not needed.
        needless = denial.subject == self.api.subject("INFO")
        _log.log(logging.DEBUG if needless else logging.WARNING, "%s: %s", self.server, error)
        if len(self._denied) == _MOST_DENIALS:
            _log.warning("%s: no more than %d denied subjects are logged", self.server, _MOST_DENIALS)
        self._hooks.error(error)

    def saw_loss(self) -> None:
        if self._client.is_closed:
            return
        cause = self._client.lost_because
        reason = str(cause).removeprefix("nats: ") if cause else "a reconnect was asked for"
        self._client.outstanding.unbar()
        self._client.outstanding.fail(Disconnected, f"the connection was lost ({reason})")
        _log.warning("lost %s (%s); reconnecting", self.server, reason)
        self._hooks.disconnected(reason)

    def saw_return(self) -> None:
        self._refusals = 0
        self._last_logged = ""
        self._client.lost_because = None
        _log.info("reconnected to %s", self.server)
        self._hooks.reconnected(self.server)

    def saw_close(self) -> None:
        if self.is_closed:
            return
        reason = self._end_reason or str(self._client.last_error or "the client ended")
        self.closed_reason = reason
        self._ended.set()
        self._client.outstanding.bar(Disconnected, f"the connection is closed ({reason})")
        _log.log(logging.DEBUG if self._giving_up is None else logging.ERROR, "closed: %s", reason)
        self._hooks.closed(reason)

    def _understood(self, error: Exception) -> Exception:
        """The error as a caller should see it."""
        if isinstance(error, LoginRefused):
            return error.error
        text = str(error).removeprefix("nats: ").strip("'")
        if is_auth_refusal(text):
            return AuthenticationFailed(f"{self.server} refused the login on a reconnect ({text})")
        if isinstance(error, OSError):
            return ServerUnreachable(f"the link failed ({text or type(error).__name__})")
        return error

    def _give_up(self, reason: str) -> None:
        if self._giving_up is None:
            self._end_reason = reason
            # A task of its own: nats-py's reconnect, which calls us, is what it cancels.
            self._giving_up = asyncio.get_running_loop().create_task(self.close())

    def _state(self) -> str:
        if self.is_closed:
            return f"closed ({self.closed_reason})"
        return "connected" if self.is_connected else "reconnecting"

    # ---- JetStream ----------------------------------------------------------------------------------

    async def _check_jetstream(self, deadline: float) -> None:
        """Make sure that JetStream answers; waits out an election of its leader until the deadline."""
        loop = asyncio.get_running_loop()
        while trouble := await self._passing_trouble(max(deadline - loop.time(), 0.1)):
            if loop.time() >= deadline:
                raise ApiUnavailable(
                    f"{self.server}: JetStream does not answer; a cluster may be without a leader ({trouble})"
                ) from trouble
            await asyncio.sleep(_ELECTION_POLL_S)

    async def _passing_trouble(self, left_s: float) -> KeylaneError | None:
        """Ask JetStream for its state once. Returns an error that may pass, raises one that will not."""
        try:
            await self.api.request("INFO", None, min(left_s, 1.0))
        except RequestTimeout as error:
            return error
        except ApiError as error:
            if error.err_code != _TEMPORARILY_UNAVAILABLE:
                raise
            return error
        except PermissionDenied as error:
            if self._client.outstanding.barred:
                raise
            _log.debug("not allowed to ask for JetStream's state, going on without: %s", error)
        except ApiUnavailable as error:
            raise JetStreamDisabled(f"{self.server}: {error}") from error
        except Disconnected as error:
            raise ServerUnreachable(f"{self.server}: {error}") from error
        return None
