"""keylane: every key its own ordered lane, on NATS JetStream."""

from __future__ import annotations

__version__ = "0.1.0"
