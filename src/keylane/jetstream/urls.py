"""Server URLs: what they may look like, and how they are shown.

Owns the rules of a URL and the split of a login from it. Never resolves a host name. What it shows of a URL
never includes a user, a password or a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from keylane.core.name_suggestions import name_missing
from keylane.errors import InvalidInput
from keylane.jetstream.credentials import Auth, Token, UserPassword

DEFAULT_PORT = 4222
SCHEMES = ("nats", "tls", "ws", "wss")
_WEB_PORTS = {"ws": 80, "wss": 443}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_AFTER_HOST = re.compile(r"[/?#]")
_EXAMPLE = "write it as nats://host:4222"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """One server, without any secret in it."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def web(self) -> bool:
        return self.scheme in _WEB_PORTS

    @property
    def secure(self) -> bool:
        return self.scheme in ("tls", "wss")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse_servers(given: str | Sequence[str]) -> tuple[tuple[ServerUrl, ...], Auth | None]:
    """The servers of a URL, of several joined by commas, or of a list, and the login they carry.

    One login is used for all servers, also for those that the cluster makes known later.
    """
    texts = _split(given)
    with_login = any("@" in text for text in texts)
    servers: list[ServerUrl] = []
    logins: list[Auth] = []
    for text in texts:
        # A comma inside a password cuts it in two, so a piece without '@' may be a part of one.
        shown = "***" if with_login and "@" not in text else redacted(text)
        server, login = _parse(text, shown)
        if server not in servers:
            servers.append(server)
        if login is not None and login not in logins:
            logins.append(login)
    if len(logins) > 1:
        raise InvalidInput(
            f"the server URLs {', '.join(map(str, servers))} carry different logins; "
            "all servers of one connection share one login, so write it once"
        )
    if len({server.web for server in servers}) > 1:
        raise InvalidInput(
            f"the server URLs {', '.join(map(str, servers))} mix websocket (ws, wss) with plain NATS "
            "(nats, tls); use one kind for one connection"
        )
    return tuple(servers), logins[0] if logins else None


def redacted(url: str) -> str:
    """The text of a URL with everything before its last `@` hidden."""
    if "@" not in url:
        return url
    scheme = _SCHEME.match(url)
    return f"{scheme[0] if scheme else ''}***@{url.rpartition('@')[2]}"


def _split(given: str | Sequence[str]) -> list[str]:
    if isinstance(given, str):
        texts = given.split(",")
    elif all(isinstance(text, str) for text in given):
        texts = list(given)
    else:
        raise InvalidInput("server URLs must be a string or a list of strings")
    texts = [text.strip() for text in texts]
    if not texts or not all(texts):
        raise InvalidInput(f"an empty server URL was given; {_EXAMPLE}")
    return texts


def _parse(text: str, shown: str) -> tuple[ServerUrl, Auth | None]:
    if re.search(r"[\s\x00-\x20\x7f]", text):
        raise InvalidInput(f"server URL {shown!r}: a URL holds no blanks or control characters; {_EXAMPLE}")
    with_scheme = text if _SCHEME.match(text) else f"nats://{text}"
    if "@" in text and "@" not in _AFTER_HOST.split(with_scheme.partition("://")[2], maxsplit=1)[0]:
        raise InvalidInput(
            f"server URL {shown!r}: in a user, password or token write / as %2F, ? as %3F and # as %23, or give it as "
            "an argument of its own"
        )
    split = _pieces(with_scheme)
    if split is None:
        rule = "the port must be a number from 1 to 65535, and an IPv6 address stands in [brackets]"
        raise InvalidInput(f"server URL {shown!r}: {rule}; {_EXAMPLE}")
    parts, host, port = split
    if parts.scheme not in SCHEMES:
        problem = f"server URL {shown!r}: unknown scheme {parts.scheme!r}"
        raise InvalidInput(name_missing(problem, parts.scheme, SCHEMES))
    if not host:
        raise InvalidInput(f"server URL {shown!r}: the host is missing; {_EXAMPLE}")
    if port == 0 or parts.netloc.endswith(":"):
        raise InvalidInput(f"server URL {shown!r}: the port must be a number from 1 to 65535")
    path = "" if parts.path == "/" else parts.path
    if parts.query or parts.fragment or (path and parts.scheme not in _WEB_PORTS):
        raise InvalidInput(f"server URL {shown!r}: nothing may follow the port; {_EXAMPLE}")
    port = port or _WEB_PORTS.get(parts.scheme, DEFAULT_PORT)
    return ServerUrl(parts.scheme, host, port, path), _login(parts, shown)


def _pieces(url: str) -> tuple[SplitResult, str | None, int | None] | None:
    """The URL with its host and port; None where it has no such form. Python's own error shows a part of the text."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return parts, host, port


def _login(parts: SplitResult, shown: str) -> Auth | None:
    if parts.username is None:
        return None
    user = unquote(parts.username)
    if parts.password is None:
        if not user:
            raise InvalidInput(f"server URL {shown!r}: the login before the '@' is empty; drop the '@'")
        return Token(user, "the token in the URL")
    if not user:
        raise InvalidInput(f"server URL {shown!r}: the user before the ':' is empty")
    return UserPassword(user, unquote(parts.password), "the user and password in the URL")
