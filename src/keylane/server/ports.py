"""Holds loopback ports so that nobody else gets them.

A reservation is a socket that is bound with SO_REUSEADDR and never listens. Linux lets the nats-server listen on the
same port beside it (the Go runtime sets SO_REUSEADDR too), and gives the port to no other program: neither as a free
port nor as the local end of an outgoing connection. So the port is known before the server starts, without a race, and
stays reserved between a kill and a restart.
"""

from __future__ import annotations

import socket

from keylane.errors import InvalidInput, ServerStartFailed

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """One loopback port, held until `release()`."""

    def __init__(self, wanted: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, wanted or 0))
        except OSError as error:
            self._socket.close()
            raise ServerStartFailed(
                f"port {wanted} on {LOOPBACK} cannot be used ({error.strerror}). "
                "Stop the program that has it, give another port, or give none to get a free one"
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def __repr__(self) -> str:
        return f"ReservedPort({self.number})"

    def release(self) -> None:
        self._socket.close()


def checked_port(port: int | None) -> int | None:
    """Return `port` if it is a usable number or None (a free port)."""
    if port is None or (isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535):
        return port
    raise InvalidInput(f"port {port!r} is not a whole number from 1 to 65535. Leave it out for a free port")
