"""Fixtures for the tests of the page: streams as those of groups and fleets have them."""

from __future__ import annotations

from tests.integration.fleet.conftest import limits
from tests.integration.groups.conftest import ground, make, partitioned, stack

__all__ = ["ground", "limits", "make", "partitioned", "stack"]
