"""Metrics for Prometheus, and the state of health, on one port. Needs `pip install keylane[metrics]`.

`catalogue` names every metric. `fleet_metrics` listens to the hooks of a fleet worker and counts, `member_metrics` to
those of a member of a group, `marshal_metrics` to those of a Marshal consumer; `lag_sampler` asks how far behind the
partitions of a worker are. `account_exporter` reads every group of an account. `exposition` writes readings, of one
process or of several, in Prometheus' format; `http_server` serves them. `alert_rules` makes the alert rules from the
same names.
"""

from __future__ import annotations

from keylane.lazy import public_names
from keylane.metrics.account_exporter import AccountExporter
from keylane.metrics.catalogue import DEFAULT_PREFIX, METRICS, MetricSpec, Reading
from keylane.metrics.exposition import ReadingsCollector, check_prefix, exposition, require_client
from keylane.metrics.fleet_metrics import FleetMetrics
from keylane.metrics.http_server import HealthReport, serve_metrics
from keylane.metrics.lag_sampler import LagSampler
from keylane.metrics.marshal_metrics import MarshalMetrics
from keylane.metrics.member_metrics import MemberMetrics

__all__ = [
    "DEFAULT_PREFIX",
    "METRICS",
    "AccountExporter",
    "FleetMetrics",
    "HealthReport",
    "LagSampler",
    "MarshalMetrics",
    "MemberMetrics",
    "MetricSpec",
    "Reading",
    "ReadingsCollector",
    "check_prefix",
    "exposition",
    "require_client",
    "serve_metrics",
]

__dir__ = public_names(__all__)
