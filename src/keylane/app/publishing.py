"""What handlers return, published: on a subject made from the message, with an id made from it too.

The id is the same whenever the same message is handled again, so the server stores the result once, as long as the
stream that takes it remembers ids (its `duplicate_window`).
"""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple

from keylane.app.payloads import encode
from keylane.core.partitions import PartitionBy
from keylane.core.subjects import check_filter, check_subject, overlaps
from keylane.errors import InvalidInput
from keylane.jetstream import Publisher
from keylane.processing.message import GroupMessage
from keylane.retrying import Backoff

_PARTS = ("key", "subject", "partition")
_LONGEST_S = 30.0

Publish = Callable[[str, bytes, str], Awaitable[object]]
"""Subject, data, message id. Returns when it is stored."""


class SubjectTemplate:
    """The subject of a result: `mailed.{key}`; also `{subject}` and `{partition}` of the message.

    >>> SubjectTemplate("mailed.{key}").pattern(PartitionBy("billed.*"))
    'mailed.*'
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidInput(f"publish is {text!r}: give a subject, such as 'mailed.{{key}}'")
        try:
            named = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise InvalidInput(f"publish is {text!r}: {error}") from None
        if unknown := [name for name in named if name not in _PARTS]:
            raise InvalidInput(
                f"publish is {text!r}, and a message has no {{{unknown[0]}}}: use {{key}}, {{subject}} or {{partition}}"
            )
        check_subject(text.format(key="k", subject="s", partition=0))
        self.text = text

    def __repr__(self) -> str:
        return f"SubjectTemplate({self.text!r})"

    def of(self, message: GroupMessage) -> str:
        place = message.place
        return self.text.format(key=place.key, subject=place.subject, partition=place.partition)

    def pattern(self, partition_by: PartitionBy | None) -> str:
        """A filter that selects every subject that it can make, as narrow as it is known."""
        known = partition_by is not None
        key = ".".join("*" for _ in partition_by.key) if partition_by is not None else ""
        whole = partition_by.filter if partition_by is not None else ">"
        filled = self.text.format(key=key or whole if known else ">", subject=whole, partition="*")
        words = ["*" if "*" in word else word for word in filled.split(".")]  # `a*` is no wildcard
        end = next((at for at, word in enumerate(words) if ">" in word), None)
        return check_filter(".".join(words if end is None else [*words[:end], ">"]))

    def check_against(self, partition_by: PartitionBy) -> None:
        """Refuse a handler that would get its own results."""
        if overlaps(self.pattern(partition_by), partition_by.filter):
            raise InvalidInput(
                f"publish is {self.text!r}, which partition_by {partition_by.filter!r} selects: the handler would get "
                "what it publishes, for ever"
            )


class PublishedResult(NamedTuple):
    """What is left to do when a handler has returned: await it. A plain handler makes it in its thread."""

    results: Results
    message: GroupMessage
    data: bytes

    def __await__(self) -> Generator[Any, Any, None]:
        return self.results.publish(self.message, self.data).__await__()


class Results:
    """Publishes what one handler returns."""

    def __init__(self, template: SubjectTemplate, publish: Publish, stream_created: str) -> None:
        """`stream_created`: when the stream of the messages was made, for ids of messages that come through a copy."""
        self._template = template
        self._publish = publish
        self._created = stream_created

    def prepared(self, message: GroupMessage, result: Any) -> PublishedResult:
        return PublishedResult(self, message, encode(result))

    async def publish(self, message: GroupMessage, data: bytes) -> None:
        await self._publish(self._template.of(message), data, message_id(message, self._created))


def message_id(message: GroupMessage, stream_created: str) -> str:
    """The same for every delivery of a message to a group, and of no other message.

    A stream that was made again counts from 1 again: the time tells its messages apart. Through a copy that is the
    time of the stream, because the copy has times of its own, and may be made again too.
    """
    origin = message.origin
    time = stream_created if origin.from_queue else message.original.delivery.timestamp_ns
    return f"{origin.stream} {origin.group} {message.sequence} {time}"


def publish_with(publisher: Publisher) -> Publish:
    """Publishes, and again for 30 s if that fails for a reason that may pass: the handler need not run again for it."""

    async def publish(subject: str, data: bytes, identity: str) -> None:
        headers = {"Nats-Msg-Id": identity}

        async def once() -> None:
            await (await publisher.send(subject, data, headers))

        await Backoff(f"publishing to {subject}", _LONGEST_S).call(once)

    return publish
