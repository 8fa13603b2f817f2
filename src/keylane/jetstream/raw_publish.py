"""One confirmed publish of a subject and a header block that are bytes already.

For what a stream holds and text cannot carry: bytes that are not UTF-8, repeated header names. Checks only the size.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from keylane.errors import InvalidInput, NotStored, OutcomeUnknown, PermissionDenied, PublishFailed
from keylane.jetstream.publish import PublishAck, publish_command, publish_denied, read_answer

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection


class _Confirmation:
    """The server's answer to one publish."""

    def __init__(self, subject: str, inbox: str) -> None:
        self._subject = subject
        self._inbox = inbox
        self.answer: asyncio.Future[PublishAck] = asyncio.get_running_loop().create_future()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if self.answer.done():
            return
        try:
            self.answer.set_result(read_answer(self._subject, headers, data))
        except PublishFailed as failure:
            self.answer.set_exception(failure)

    def received(self) -> None:
        """The one answer is taken in `receive`."""

    def denied(self, denied: PermissionDenied) -> None:
        if self.answer.done():
            return
        if denied.subject == self._subject:
            self.answer.set_exception(publish_denied(self._subject, denied))
        elif denied.subject == self._inbox:
            self.answer.set_exception(
                OutcomeUnknown(
                    f"publish to {self._subject!r}: no answer can come: {denied}; it may or may not be stored"
                )
            )

    def link_changed(self, up: bool) -> None:
        if not up and not self.answer.done():
            self.answer.set_exception(
                OutcomeUnknown(f"publish to {self._subject!r}: the connection was lost; it may or may not be stored")
            )


async def publish_raw(connection: Connection, subject: bytes, head: bytes, data: bytes, timeout_s: float) -> PublishAck:
    """Publish and wait for the answer of the stream. The caller checks the subject and the header block."""
    client = connection.nats
    target = subject.decode("utf-8", "backslashreplace")
    if (size := len(head) + len(data)) > client.max_payload:
        raise InvalidInput(
            f"publish to {target!r}: with its headers it has {size} bytes, and the server takes {client.max_payload}: "
            "raise max_payload in the server"
        )
    if not client.is_connected:
        raise NotStored(f"publish to {target!r}: the connection to the server is down; nothing was sent")
    inbox = client.new_inbox()
    confirmation = _Confirmation(target, inbox)
    client.listen_for_denials(confirmation.denied)
    subscription = await client.route(inbox, confirmation)
    client.listen(confirmation.link_changed)
    try:
        client.post(publish_command(subject, inbox.encode(), head, data))
        client.push()
        await asyncio.wait({confirmation.answer}, timeout=timeout_s)
    finally:
        client.unlisten(confirmation.link_changed)
        client.unlisten_for_denials(confirmation.denied)
        await client.unroute(subscription)
    if not confirmation.answer.done():
        raise OutcomeUnknown(f"publish to {target!r}: no answer within {timeout_s:g} s; it may or may not be stored")
    return confirmation.answer.result()
