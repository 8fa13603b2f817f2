"""The first stored messages of many subject filters, asked for together: where each is, and how old.

Needs a stream with `allow_direct`. A thousand questions take a few hundredths of a second, for which single requests
would need most of a second. Any replica may answer, as in `direct.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from keylane.core.names import check_stream_name
from keylane.core.subjects import check_filter
from keylane.errors import ApiError, KeylaneError, NotFound, PermissionDenied, ReadIncomplete
from keylane.jetstream.consumers import parse_time
from keylane.jetstream.direct import OWN_HEADERS
from keylane.jetstream.headers import header_items, number_in, status_of
from keylane.jetstream.streams import direct_subject

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_AT_ONCE = 256


class FirstMessage(NamedTuple):
    """The first message of a filter from a sequence on."""

    sequence: int
    time: datetime
    more: int | None
    """How many come after it; None: that was not asked."""


class _Answers:
    """Collects the answers to numbered questions."""

    def __init__(self, stream: str, target: str, count: int) -> None:
        self._stream = stream
        self._target = target
        self._left = count
        self.found: list[FirstMessage | None] = [None] * count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if self.done.done():
            return
        number = int(subject.rpartition(b".")[2])
        code, text = status_of(headers)
        fields = {name: value for name, value in header_items(headers) if name in OWN_HEADERS}
        if code == 503:
            self._fail(
                NotFound(
                    404,
                    0,
                    f"nobody answers for stream {self._stream!r}: it does not exist or lacks allow_direct",
                    doing="direct get",
                )
            )
        elif code in (204, 404):
            self._end(number, fields)
        elif code:
            self._fail(ApiError(code, 0, text, doing="direct get"))
        else:
            self.found[number] = FirstMessage(
                number_in(fields.get("Nats-Sequence")) or 0, parse_time(fields["Nats-Time-Stamp"]), None
            )
            if "Nats-Num-Pending" not in fields:
                self._end(number, {})

    def _end(self, number: int, fields: dict[str, str]) -> None:
        found = self.found[number]
        if found is not None and "Nats-Num-Pending" in fields:
            self.found[number] = found._replace(more=number_in(fields["Nats-Num-Pending"]))
        self._left -= 1
        if not self._left:
            self.done.set_result(None)

    def _fail(self, error: KeylaneError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def received(self) -> None:
        """Each answer is taken in `receive`."""

    def link_changed(self, up: bool) -> None:
        if not up:
            self._fail(ReadIncomplete(f"direct get on stream {self._stream!r}: the connection was lost: read again"))

    def denied(self, denied: PermissionDenied) -> None:
        if denied.subject == self._target:
            self._fail(denied)


async def first_messages(
    connection: Connection,
    stream: str,
    questions: Sequence[tuple[str, int]],
    *,
    counted: bool = False,
    timeout_s: float = 5.0,
) -> list[FirstMessage | None]:
    """For each pair of a subject filter and a sequence the first message from there on; None: there is none.

    `counted`: with the number of those that come after it, which costs the server more. `timeout_s`: for a few hundred
    of them.
    """
    connection.require("direct_get_batch")
    check_stream_name(stream)
    found: list[FirstMessage | None] = []
    for begin in range(0, len(questions), _AT_ONCE):
        found += await _ask(connection, stream, questions[begin : begin + _AT_ONCE], counted, timeout_s)
    return found


async def _ask(
    connection: Connection, stream: str, questions: Sequence[tuple[str, int]], counted: bool, timeout_s: float
) -> list[FirstMessage | None]:
    client, inbox, target = connection.nats, connection.nats.new_inbox(), direct_subject(connection, stream)
    answers = _Answers(stream, target, len(questions))
    client.listen_for_denials(answers.denied)
    client.listen(answers.link_changed)
    subscription = await client.route(f"{inbox}.*", answers)
    try:
        for number, (subject_filter, sequence) in enumerate(questions):
            request: dict[str, object] = {"seq": max(sequence, 1), "next_by_subj": check_filter(subject_filter)}
            if counted:
                request["batch"] = 1
            payload = json.dumps(request).encode()
            client.post(b"PUB %b %b.%d %d\r\n%b\r\n" % (target.encode(), inbox.encode(), number, len(payload), payload))
        client.push()
        try:
            async with asyncio.timeout(timeout_s):
                await answers.done
        except TimeoutError:
            raise ReadIncomplete(f"direct get on stream {stream!r}: no answer within {timeout_s:g} s") from None
    finally:
        client.unlisten(answers.link_changed)
        client.unlisten_for_denials(answers.denied)
        await client.unroute(subscription)
    return answers.found
