"""What the server does not allow this user: from its words to an error that says what the subject is for.

Owns the reading of a refusal and the table of purposes. Who ends because of a refusal is decided where the subject is
used: a feed ends when it may not pull or ack, a request when it may not be asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from keylane.errors import NotADelivery, PermissionDenied
from keylane.jetstream.credentials import Auth
from keylane.jetstream.message import ACK_PREFIX, parse_ack_subject

_REFUSAL = re.compile(
    r'permissions violation for (publish|subscription) to "(.*?)"(?: using queue ".*")?', re.IGNORECASE | re.DOTALL
)
_ESCAPE = re.compile(r'\\(["\\])')

# What follows the prefix of the JetStream API, and what it is for. The first that fits counts.
_API = (
    ("CONSUMER.MSG.NEXT.", "to pull messages"),
    ("CONSUMER.CREATE.", "to create or change a consumer"),
    ("CONSUMER.DURABLE.CREATE.", "to create or change a consumer"),
    ("CONSUMER.INFO.", "to look at a consumer"),
    ("CONSUMER.DELETE.", "to delete a consumer"),
    (
        "CONSUMER.UNPIN.",
        "to hand over at once when a reader stops; without it the next one begins after the pin's timeout",
    ),
    ("CONSUMER.RESET.", "to keep each key's order when another reader takes over (consumer reset)"),
    ("CONSUMER.PAUSE.", "to pause a consumer"),
    ("CONSUMER.LIST.", "to list consumers"),
    ("CONSUMER.NAMES.", "to list consumers"),
    ("STREAM.MSG.GET.KV_static-consumer-groups", "to read the records of static groups"),
    ("STREAM.MSG.GET.KV_elastic-consumer-groups", "to read the records of elastic groups"),
    ("STREAM.INFO.KV_static-consumer-groups", "to look for the records of static groups"),
    ("STREAM.INFO.KV_elastic-consumer-groups", "to look for the records of elastic groups"),
    ("STREAM.MSG.GET.KV_", "to read a KV bucket"),
    ("STREAM.INFO.KV_", "to look at a KV bucket"),
    ("STREAM.MSG.GET.", "to read a stored message"),
    ("STREAM.MSG.DELETE.", "to delete a stored message"),
    ("DIRECT.GET.", "to read stored messages (direct get)"),
    ("STREAM.INFO.", "to look at a stream"),
    ("STREAM.CREATE.", "to create a stream"),
    ("STREAM.UPDATE.", "to change a stream"),
    ("STREAM.DELETE.", "to delete a stream"),
    ("STREAM.PURGE.", "to purge a stream"),
    ("STREAM.LIST", "to list streams"),
    ("STREAM.NAMES", "to list streams"),
    ("INFO", "to ask whether JetStream is on; keylane goes on without"),
    ("", "to use the JetStream API"),
)


@dataclass(frozen=True, slots=True)
class Denial:
    """One refusal of the server."""

    operation: Literal["publish", "subscribe"]
    subject: str

    @property
    def family(self) -> str:
        """The subject, or what stands for many like it: each message has an ack subject of its own."""
        try:
            acked = parse_ack_subject(self.subject.encode())
        except NotADelivery:
            return self.subject
        return f"$JS.ACK.{acked.stream}.{acked.consumer}.>"


def parse_denial(text: str) -> Denial | None:
    """The refusal in the server's words; None where they are about something else.

    >>> parse_denial('Permissions Violation for Publish to "Orders.eu"')
    Denial(operation='publish', subject='Orders.eu')
    """
    found = _REFUSAL.search(text)
    if found is None:
        return None
    operation: Literal["publish", "subscribe"] = "publish" if found[1].lower() == "publish" else "subscribe"
    return Denial(operation, _ESCAPE.sub(r"\1", found[2]))


@dataclass(frozen=True, slots=True)
class Purposes:
    """What a subject is for, on a connection with these prefixes."""

    api_prefix: str
    event_prefix: str
    inbox_prefix: str

    def of(self, denial: Denial) -> str:
        called = denial.subject.removeprefix(f"{self.api_prefix}.")
        if called != denial.subject:
            return next(purpose for beginning, purpose in _API if called.startswith(beginning))
        return next(
            purpose
            for beginning, operation, purpose in self._others()
            if denial.operation == operation and denial.subject.startswith(beginning)
        )

    def _others(self) -> tuple[tuple[str, str, str], ...]:
        return (
            (ACK_PREFIX.decode(), "publish", "to ack messages"),
            (f"{self.inbox_prefix}.", "subscribe", "to receive answers and messages"),
            (f"{self.inbox_prefix}.", "publish", "to answer"),
            ("$KV.", "publish", "to write a record"),
            ("$KV.", "subscribe", "to hear at once of a changed record; without it changes are seen late"),
            (f"{self.event_prefix}.", "subscribe", "to hear of advisories"),
            ("keylane.dlq.", "publish", "to put a dead letter away"),
            ("", "publish", "to publish messages"),
            ("", "subscribe", "to receive messages"),
        )


def denied(denial: Denial, purposes: Purposes, auth: Auth | None) -> PermissionDenied:
    """The error for a refusal: who, what, and what it is for."""
    who = auth.describe().removesuffix(" with a password") if auth is not None else "a client without a login"
    verb = "publish" if denial.operation == "publish" else "subscribe"
    text = (
        f'{who} may not {verb} to "{denial.subject}", which it needs {purposes.of(denial)}. Allow it in the server\'s'
    )
    text += " permissions of this user"
    if denial.operation == "subscribe" and denial.subject.startswith(f"{purposes.inbox_prefix}."):
        text += ", or set inbox_prefix to one that it may use"
    return PermissionDenied(text, operation=denial.operation, subject=denial.subject)
