"""Tools for testing handlers: an independent judge of what handlers really did."""

from __future__ import annotations

from keylane.testing.verdict import DeliveryVerdict, Effect, judge

Verdict = DeliveryVerdict

__all__ = ["DeliveryVerdict", "Effect", "Verdict", "judge"]
