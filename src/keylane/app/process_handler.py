"""A plain handler of an app in another process: the payload is decoded and the result encoded there.

Only the message goes there, and the bytes of the result come back; they are published here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keylane.app.payloads import encode
from keylane.app.publishing import Results
from keylane.app.signatures import payload_call, read_signature
from keylane.processing.message import GroupMessage


class ProcessHandler:
    """What `join` gets with `executor="process"`. It is sent as the function alone, which must be importable there."""

    def __init__(
        self, function: Callable[..., Any], call: Callable[[GroupMessage], Any], results: Results | None
    ) -> None:
        """`call`: from a message to what the function returns. `results`: publishes that."""
        self._function = function
        self._call = call
        self._results = results

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce__(self) -> tuple[object, ...]:
        return _in_process, (self._function, self._results is not None)

    def __call__(self, message: GroupMessage) -> bytes | None:
        result = self._call(message)
        return None if result is None else encode(result)

    async def returned(self, message: GroupMessage, result: bytes) -> None:
        """Take what came back from the other process."""
        assert self._results is not None
        await self._results.publish(message, result)


def _in_process(function: Callable[..., Any], publishes: bool) -> ProcessHandler:
    return ProcessHandler(function, payload_call(function, read_signature(function, publishes=publishes)), None)
