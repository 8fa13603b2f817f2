"""Who may read the page, and who may act. Pure.

Everybody who reaches the port may read, under a name that the page is served under: a name of somebody else's that
points here (DNS rebinding) is refused. Acting takes the token, which a page of another site does not know, in a header
that such a page cannot send, and an origin that is this page.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

TOKEN_HEADER = "X-Keylane-Token"  # noqa: S105 - the name of the header
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    text: str


def refuse_reading(headers: Mapping[str, str], *, host: str, names: Collection[str]) -> Refusal | None:
    """`host`: what the page is bound to; `names`: further names that it is served under."""
    given = headers.get("Host", "")
    if not _is_own_host(given, host, names):
        return Refusal(
            403, f"this page is not served as {given!r}: open it by its address, or start it with --allow-host"
        )
    if (
        headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        and headers.get("Sec-Fetch-Mode") != "navigate"
    ):
        return Refusal(403, "another site has asked for this: open the page itself")
    return None


def refuse_acting(headers: Mapping[str, str], *, token: str | None) -> Refusal | None:
    """To be asked after `refuse_reading`. `token` None: the page is read-only."""
    if token is None:
        return Refusal(403, "this page is read-only: start it with --allow-actions")
    origin = headers.get("Origin")
    if origin is None or origin.partition("://")[2] != headers.get("Host"):
        return Refusal(403, "another site, or none, has asked for this: use the page itself")
    if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        return Refusal(415, "an action is JSON")
    if not hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode(), token.encode()):
        return Refusal(401, "the token is missing or wrong: `keylane web` has printed it")
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_own_host(given: str, host: str, names: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return False
    if name in _LOCAL or name in (host, *names):
        return True
    # Nobody can make an address point elsewhere; only a name can.
    return not is_loopback(host) and _address(name) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
