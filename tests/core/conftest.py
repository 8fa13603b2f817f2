"""No example of a property has a deadline: a machine that stands still for a moment proves nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("keylane", deadline=None)
settings.load_profile("keylane")
