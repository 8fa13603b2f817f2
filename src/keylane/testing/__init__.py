"""Tools for testing handlers: an independent judge of what handlers really did."""

from __future__ import annotations

from keylane.testing.verdict import Effect, Verdict, judge

__all__ = ["Effect", "Verdict", "judge"]
