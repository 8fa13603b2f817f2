"""Consumers coordinated by nothing but a log: the consumer, its logs and sources, and the admin's view.

Names are loaded when they are first used: a program with a log in Kafka does not need the NATS client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lazy import loader, public_names

if TYPE_CHECKING:
    from keylane.core.claim_choice import Appetite, TopicPartition
    from keylane.core.claim_facts import (
        Claim,
        Freshness,
        Key,
        LogRecord,
        MessageClaim,
        Misplaced,
        Owner,
        Pause,
        Request,
        Snapshot,
        Tenure,
        Verdict,
    )
    from keylane.core.run_state import RunState
    from keylane.core.world import World, replay
    from keylane.marshal.admin import Admin, Load, PartitionLoad
    from keylane.marshal.consumer import Consumer
    from keylane.marshal.jetstream_log import JetStreamLog, open_jetstream_log
    from keylane.marshal.log import Bounds, CoordinationLog, MemoryLog, Newest, Position, catch_up
    from keylane.marshal.message import MarshalMessage
    from keylane.marshal.options import ConsumerHooks
    from keylane.marshal.source import Extent, MemorySource, Reader, Source, SourceRecord
    from keylane.marshal.stream_source import StreamSource

_HOMES = {
    "keylane.core.claim_facts": (
        "Claim",
        "Freshness",
        "Key",
        "LogRecord",
        "MessageClaim",
        "Misplaced",
        "Owner",
        "Pause",
        "Request",
        "Snapshot",
        "Tenure",
        "Verdict",
    ),
    "keylane.core.run_state": ("RunState",),
    "keylane.core.world": ("World", "replay"),
    "keylane.core.claim_choice": ("Appetite", "TopicPartition"),
    "keylane.marshal.admin": ("Admin", "Load", "PartitionLoad"),
    "keylane.marshal.consumer": ("Consumer",),
    "keylane.marshal.jetstream_log": ("JetStreamLog", "open_jetstream_log"),
    "keylane.marshal.log": ("Bounds", "CoordinationLog", "MemoryLog", "Newest", "Position", "catch_up"),
    "keylane.marshal.message": ("MarshalMessage",),
    "keylane.marshal.source": ("Extent", "MemorySource", "Reader", "Source", "SourceRecord"),
    "keylane.marshal.stream_source": ("StreamSource",),
    "keylane.marshal.options": ("ConsumerHooks",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Admin",
    "Appetite",
    "Bounds",
    "Claim",
    "Consumer",
    "ConsumerHooks",
    "CoordinationLog",
    "Extent",
    "Freshness",
    "JetStreamLog",
    "Key",
    "Load",
    "LogRecord",
    "MarshalMessage",
    "MemoryLog",
    "MemorySource",
    "MessageClaim",
    "Misplaced",
    "Newest",
    "Owner",
    "PartitionLoad",
    "Pause",
    "Position",
    "Reader",
    "Request",
    "RunState",
    "Snapshot",
    "Source",
    "SourceRecord",
    "StreamSource",
    "Tenure",
    "TopicPartition",
    "Verdict",
    "World",
    "catch_up",
    "open_jetstream_log",
    "replay",
]

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    __getattr__ = loader(__name__, _HOME_OF)

__dir__ = public_names(__all__)
