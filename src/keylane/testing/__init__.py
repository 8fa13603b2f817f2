"""Tools for testing handlers: apps in memory, and an independent judge of what handlers really did.

`pytest_plugin` has fixtures for both, and for apps on a real server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lazy import loader, public_names
from keylane.testing.verdict import DeliveryVerdict, Effect, Evidence, judge

if TYPE_CHECKING:
    from keylane.testing.app_in_memory import TestApp, TestedDeadLetter, TestedDelay, TestedMessage, TestedParked

Verdict = DeliveryVerdict

__all__ = [
    "DeliveryVerdict",
    "Effect",
    "Evidence",
    "TestApp",
    "TestedDeadLetter",
    "TestedDelay",
    "TestedMessage",
    "TestedParked",
    "Verdict",
    "judge",
]

_HOMES = dict.fromkeys(
    ("TestApp", "TestedDeadLetter", "TestedDelay", "TestedMessage", "TestedParked"), "keylane.testing.app_in_memory"
)

if not TYPE_CHECKING:  # the judge alone needs no NATS client
    __getattr__ = loader(__name__, _HOMES)

__dir__ = public_names(__all__)
