"""Autoscaling of fleets and elastic groups: looks at the lag, decides how many workers there should be, and acts.

The rule is `core.scaling`; `load` makes its observations of an overview. `autoscaler` performs what it decides,
`wanted_number` serves the number over HTTP.
"""

from __future__ import annotations

from keylane.autoscale.autoscaler import Autoscaler, AutoscaleReport
from keylane.autoscale.load import load_of
from keylane.autoscale.wanted_number import serve_wanted_number
from keylane.lazy import public_names

__all__ = ["AutoscaleReport", "Autoscaler", "load_of", "serve_wanted_number"]

__dir__ = public_names(__all__)
