"""Tools for testing handlers: an independent judge of what handlers really did."""

from __future__ import annotations

from keylane.lazy import public_names
from keylane.testing.verdict import DeliveryVerdict, Effect, judge

Verdict = DeliveryVerdict

__all__ = ["DeliveryVerdict", "Effect", "Verdict", "judge"]

__dir__ = public_names(__all__)
