"""Every error that keylane raises on purpose.

One class per decision a caller can make. Each message says what was wrong and what to do about it.
"""

from __future__ import annotations


class KeylaneError(Exception):
    """Base of all errors raised by keylane."""


class InvalidInput(KeylaneError, ValueError):
    """A value given by the caller breaks a rule; nothing was sent."""


# ---- the connection ---------------------------------------------------------------------------------


class ConnectError(KeylaneError):
    """No usable connection could be made."""


class ServerUnreachable(ConnectError):
    """None of the given servers answered."""


class AuthenticationFailed(ConnectError):
    """The server answered and refused the credentials."""


class ServerTooOld(ConnectError):
    """The server lacks something that keylane needs."""


class JetStreamDisabled(ConnectError):
    """The server or the account has no JetStream."""


class Disconnected(KeylaneError):
    """The connection was lost or closed while an answer was outstanding."""


# ---- JetStream --------------------------------------------------------------------------------------


class RequestTimeout(KeylaneError, TimeoutError):
    """The server did not answer a request within its deadline."""


class ApiError(KeylaneError):
    """The JetStream API answered with an error.

    `code` is the HTTP-like class, `err_code` the exact reason, `description` the server's own words.
    """

    def __init__(self, code: int, err_code: int, description: str, *, doing: str = "") -> None:
        self.code = code
        self.err_code = err_code
        self.description = description
        self.doing = doing
        prefix = f"{doing}: " if doing else ""
        super().__init__(f"{prefix}{description} (code {code}, error {err_code})")


class NotFound(ApiError):
    """The stream, consumer or message is not there."""
