"""Consumers coordinated by nothing but a log: its port, and the logs that keylane brings."""

from keylane.core.claim_facts import (
    Claim,
    Freshness,
    Key,
    LogRecord,
    MessageClaim,
    Misplaced,
    Owner,
    Pause,
    Snapshot,
    Tenure,
    Verdict,
)
from keylane.core.claims import World, replay
from keylane.marshal.jetstream_log import JetStreamLog, open_jetstream_log
from keylane.marshal.log import Bounds, CoordinationLog, MemoryLog, Newest, Position, catch_up

__all__ = [
    "Bounds",
    "Claim",
    "CoordinationLog",
    "Freshness",
    "JetStreamLog",
    "Key",
    "LogRecord",
    "MemoryLog",
    "MessageClaim",
    "Misplaced",
    "Newest",
    "Owner",
    "Pause",
    "Position",
    "Snapshot",
    "Tenure",
    "Verdict",
    "World",
    "catch_up",
    "open_jetstream_log",
    "replay",
]
