"""Where the settings of a connection come from, and which source wins.

Owns the order of precedence: arguments, then a named context, then the environment, then the context that
is selected in the `nats` tool, then `nats://127.0.0.1:4222`. Everything is checked here, before a byte is
sent. Opens no connection.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from keylane.core.subjects import check_subject, shown
from keylane.errors import InvalidInput
from keylane.jetstream.contexts import NatsContext, expand, load_context, selected_context
from keylane.jetstream.credentials import (
    Auth,
    Nkey,
    Token,
    UserPassword,
    jwt_from_file,
    jwt_from_text,
    nkey_from_file,
)
from keylane.jetstream.urls import ServerUrl, parse_servers

DEFAULT_URL = "nats://127.0.0.1:4222"
DEFAULT_API_PREFIX = "$JS.API"
DEFAULT_EVENT_PREFIX = "$JS.EVENT"
DEFAULT_INBOX_PREFIX = "_INBOX"

StrPath = str | os.PathLike[str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one source says, as raw values: None or an empty string is unset."""

    source: str
    url: str | Sequence[str] | None = None
    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey_seed: str | None = None
    nkey_seed_file: StrPath | None = None
    creds_file: StrPath | None = None
    user_jwt: str | None = None
    user_seed: str | None = None
    tls_ca: StrPath | None = None
    tls_cert: StrPath | None = None
    tls_key: StrPath | None = None
    tls_hostname: str | None = None
    tls_first: bool | None = None
    domain: str | None = None
    api_prefix: str | None = None
    event_prefix: str | None = None
    inbox_prefix: str | None = None

    def __repr__(self) -> str:
        return f"<Given by {self.source}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSource:
    """What one source says, checked. What belongs together is one setting: a login, a key with its cert."""

    name: str
    servers: tuple[ServerUrl, ...] | None
    auth: Auth | None
    tls_ca: str | None
    tls_identity: tuple[str, str] | None
    tls_hostname: str | None
    tls_first: bool | None
    api_prefix: str | None
    event_prefix: str | None
    inbox_prefix: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """What a connection is made from."""

    servers: tuple[ServerUrl, ...]
    servers_from: str
    auth: Auth | None
    tls_ca: str | None
    tls_identity: tuple[str, str] | None
    tls_hostname: str | None
    tls_first: bool
    api_prefix: str
    event_prefix: str
    inbox_prefix: str

    @property
    def tls_wanted(self) -> bool:
        """Whether a link without TLS must be refused."""
        asked = (self.tls_ca, self.tls_identity, self.tls_hostname)
        return self.tls_first or any(asked) or any(server.secure for server in self.servers)


def resolve(arguments: Given, context: str | None, environ: Mapping[str, str] | None = None) -> ConnectionSettings:
    """Put the sources together; raises `InvalidInput` for anything that breaks a rule."""
    sources = list(_sources(arguments, context, os.environ if environ is None else environ))
    with_servers = next(source for source in sources if source.servers)
    assert with_servers.servers is not None
    auth: Auth | None = next((source.auth for source in sources if source.auth), None)
    return ConnectionSettings(
        servers=with_servers.servers,
        servers_from=with_servers.name,
        auth=auth,
        tls_ca=_first([source.tls_ca for source in sources]),
        tls_identity=_first([source.tls_identity for source in sources]),
        tls_hostname=_first([source.tls_hostname for source in sources]),
        tls_first=_first([source.tls_first for source in sources]) or False,
        api_prefix=_first([source.api_prefix for source in sources]) or DEFAULT_API_PREFIX,
        event_prefix=_first([source.event_prefix for source in sources]) or DEFAULT_EVENT_PREFIX,
        inbox_prefix=_first([source.inbox_prefix for source in sources]) or DEFAULT_INBOX_PREFIX,
    )


def check_seconds(value: float, name: str) -> float:
    """Return a duration unchanged, or raise `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name}={shown(value)}: give a number of seconds")
    if not math.isfinite(value) or value <= 0:
        raise InvalidInput(f"{name}={value!r}: every wait has a deadline; give a number above 0")
    return value


def _sources(arguments: Given, context: str | None, environ: Mapping[str, str]) -> Iterator[SettingsSource]:
    """The sources that count, the strongest first.

    A context named in the call is complete by itself, so the environment is not asked. NATS_CONTEXT is part
    of the environment and yields to NATS_URL and its like, as in the `nats` tool. The selected context
    counts only where nothing else names a server: its login must not reach a server it was not made for.
    """
    yield (first := _checked(arguments))
    if context is not None:
        yield _checked(_from_context(load_context(context)))
    else:
        yield (environment := _checked(_from_environment(environ)))
        named = environ.get("NATS_CONTEXT")
        if named:
            yield _checked(_from_context(load_context(named), " (named by NATS_CONTEXT)"))
        elif first.servers is None and environment.servers is None and (selected := selected_context()):
            yield _checked(_from_context(load_context(selected), " (selected in the nats tool)"))
    yield _checked(Given(source="the default", url=DEFAULT_URL))


def _from_environment(environ: Mapping[str, str]) -> Given:
    user, password = environ.get("NATS_USER"), environ.get("NATS_PASSWORD")
    # The `nats` tool reads a user without a password as a token.
    lone_token = user if user and not password else None
    return Given(
        source="the environment (NATS_URL and its like)",
        url=environ.get("NATS_URL"),
        user=None if lone_token else user,
        password=password,
        token=lone_token,
        creds_file=environ.get("NATS_CREDS"),
        nkey_seed_file=environ.get("NATS_NKEY"),
        tls_cert=environ.get("NATS_CERT"),
        tls_key=environ.get("NATS_KEY"),
        tls_ca=environ.get("NATS_CA"),
    )


def _from_context(context: NatsContext, how: str = "") -> Given:
    return Given(
        source=f"the nats context {context.name!r}{how}",
        url=context.url,
        user=context.user,
        password=context.password,
        token=context.token,
        creds_file=context.creds,
        nkey_seed_file=context.nkey,
        user_jwt=context.user_jwt,
        user_seed=context.user_seed,
        tls_ca=context.ca,
        tls_cert=context.cert,
        tls_key=context.key,
        tls_first=context.tls_first or None,
        domain=context.jetstream_domain,
        api_prefix=context.jetstream_api_prefix,
        event_prefix=context.jetstream_event_prefix,
        inbox_prefix=context.inbox_prefix,
    )


def _checked(given: Given) -> SettingsSource:
    servers, login = parse_servers(given.url) if given.url not in (None, "") else (None, None)
    return SettingsSource(
        name=given.source,
        servers=servers,
        auth=_only_auth(given, login),
        tls_ca=_path(given.tls_ca),
        tls_identity=_identity(given),
        tls_hostname=given.tls_hostname or None,
        tls_first=given.tls_first,
        api_prefix=_api_prefix(given),
        event_prefix=_prefix(given.event_prefix, "event_prefix"),
        inbox_prefix=_prefix(given.inbox_prefix, "inbox_prefix"),
    )


def _only_auth(given: Given, login: Auth | None) -> Auth | None:
    ways: list[Auth] = [login] if login is not None else []
    if given.user and given.password is not None:
        ways.append(UserPassword(given.user, given.password))
    elif given.user or given.password:
        there, missing = ("user", "password") if given.user else ("password", "user")
        raise InvalidInput(f"{given.source}: {there} is given without {missing}; give both, or a token alone")
    if given.token:
        ways.append(Token(given.token))
    if given.nkey_seed:
        ways.append(Nkey(given.nkey_seed.strip()))
    if path := _path(given.nkey_seed_file):
        ways.append(nkey_from_file(path))
    if path := _path(given.creds_file):
        ways.append(jwt_from_file(path))
    if given.user_jwt or given.user_seed:
        if not (given.user_jwt and given.user_seed):
            raise InvalidInput(f"{given.source}: user_jwt and user_seed only work together; give both")
        ways.append(jwt_from_text(given.user_jwt, given.user_seed, given.source))
    if len(ways) > 1:
        named = " and ".join(way.given for way in ways)
        raise InvalidInput(f"{given.source}: two ways to log in are given ({named}); give exactly one")
    return ways[0] if ways else None


def _identity(given: Given) -> tuple[str, str] | None:
    cert, key = _path(given.tls_cert), _path(given.tls_key)
    if cert and key:
        return cert, key
    if cert or key:
        there, missing = ("certificate", "key") if cert else ("key", "certificate")
        raise InvalidInput(f"{given.source}: a TLS {there} ({cert or key}) is given without its {missing}")
    return None


def _api_prefix(given: Given) -> str | None:
    if given.domain and given.api_prefix:
        raise InvalidInput(
            f"{given.source}: a JetStream domain ({shown(given.domain)}) and an API prefix "
            f"({shown(given.api_prefix)}) are given; a domain is a short form of a prefix, so give one"
        )
    if not given.domain:
        return _prefix(given.api_prefix, "api_prefix")
    if "." in check_subject(given.domain):
        raise InvalidInput(f"domain {shown(given.domain)}: a JetStream domain is one token without dots")
    return f"$JS.{given.domain}.API"


def _prefix(text: str | None, name: str) -> str | None:
    if not text:
        return None
    try:
        return check_subject(text.removesuffix("."))
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


def _path(path: StrPath | None) -> str | None:
    return expand(os.fspath(path)) if path else None


def _first(values: Sequence[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)
