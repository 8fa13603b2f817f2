"""The dashboard for Grafana, made from the names of the catalogue: `deploy/grafana/keylane.json`.

It has variables for the data source, the stream and the group, so one dashboard serves every account.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from keylane.metrics.catalogue import DEFAULT_PREFIX
from keylane.metrics.exposition import check_prefix


class Panel(NamedTuple):
    """One panel: its queries, each with the legend of its lines. `{p}` in a query is the prefix of the names."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"


class PanelRow(NamedTuple):
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


_GROUP = 'stream=~"$stream", group=~"$group"'
_FLEET = 'stream=~"$stream", fleet=~"$group"'
_MARSHAL = 'group=~"$group"'
_BY_GROUP = "{{stream}}/{{group}}"
_BY_MEMBER = "{{stream}}/{{group}} {{member}} {{process}}"
_BY_WORKER = "{{stream}}/{{fleet}} {{worker}}"
_BY_CLIENT = "{{group}} {{client}}"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def _gauge(name: str, only: str, legend: str) -> tuple[str, str]:
    return f"{{p}}{name}{{{only}}}", legend


def _rate(name: str, only: str, legend: str) -> tuple[str, str]:
    return f"rate({{p}}{name}{{{only}}}[$__rate_interval])", legend


def _quantile(share: float, name: str, only: str, by: str, legend: str) -> tuple[str, str]:
    buckets = f"sum by (le, {by}) (rate({{p}}{name}_bucket{{{only}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})", f"{legend} p{share * 100:g}"


def _latencies(name: str, only: str, by: str, legend: str) -> tuple[tuple[str, str], ...]:
    return tuple(_quantile(share, name, only, by, legend) for share in (0.5, 0.99))


ROWS: tuple[PanelRow, ...] = (
    PanelRow(
        "Every group (keylane exporter)",
        (
            Panel("Lag: age of the oldest message", (_gauge("group_lag_seconds", _GROUP, _BY_GROUP),), "s"),
            Panel("Lag: messages", (_gauge("group_lag_messages", _GROUP, _BY_GROUP),)),
            Panel(
                "Members at work, and listed",
                (
                    _gauge("group_active_members", _GROUP, f"{_BY_GROUP} at work"),
                    _gauge("group_members", _GROUP, f"{_BY_GROUP} listed"),
                ),
            ),
            Panel("Partitions that nobody handles", (_gauge("group_unowned_partitions", _GROUP, _BY_GROUP),)),
            Panel(
                "Dead letters and parked keys",
                (
                    _gauge("group_dead_letters", _GROUP, f"{_BY_GROUP} dead letters"),
                    _gauge("group_parked_keys", _GROUP, f"{_BY_GROUP} parked keys"),
                ),
            ),
            Panel(
                "Queues of elastic groups",
                (
                    _gauge("group_queue_messages", _GROUP, _BY_GROUP),
                    _gauge("group_source_lag_messages", _GROUP, f"{_BY_GROUP} not copied yet"),
                ),
            ),
            Panel(
                "In flight, of the cap",
                (
                    (
                        f"{{p}}group_member_in_flight{{{_GROUP}}} / {{p}}group_member_max_in_flight{{{_GROUP}}}",
                        "{{stream}}/{{group}} {{member}}",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Partitions with the oldest messages",
                ((f"topk(20, {{p}}group_partition_lag_seconds{{{_GROUP}}})", "{{stream}}/{{group}} {{partition}}"),),
                "s",
            ),
            Panel(
                "Partitions by owner",
                (
                    (
                        f"count by (stream, group, member) ({{p}}group_partition_owner{{{_GROUP}}})",
                        "{{stream}}/{{group}} {{member}}",
                    ),
                ),
            ),
        ),
    ),
    PanelRow(
        "Members of groups",
        (
            Panel("Messages delivered", (_rate("member_messages_total", _GROUP, _BY_MEMBER),), "cps"),
            Panel(
                "Handler latency",
                _latencies("member_handler_latency_seconds", _GROUP, "stream, group, member", _BY_MEMBER),
                "s",
            ),
            Panel(
                "In flight, of the cap",
                (
                    (
                        f"{{p}}member_in_flight{{{_GROUP}}} / {{p}}member_max_in_flight{{{_GROUP}}}",
                        _BY_MEMBER,
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Handler calls by outcome",
                (
                    (
                        f"sum by (outcome) (rate({{p}}member_handler_tries_total{{{_GROUP}}}[$__rate_interval]))",
                        "{{outcome}}",
                    ),
                ),
                "cps",
            ),
            Panel(
                "Delivered again, retried, given up",
                (
                    _rate("member_redeliveries_total", _GROUP, f"{_BY_MEMBER} delivered again"),
                    _rate("member_retries_total", _GROUP, f"{_BY_MEMBER} retried"),
                    _rate("member_dead_letters_total", _GROUP, f"{_BY_MEMBER} dead letters"),
                    _rate("member_parked_messages_total", _GROUP, f"{_BY_MEMBER} parked"),
                ),
                "cps",
            ),
            Panel(
                "Rebalances by cause",
                (
                    (
                        f"sum by (stream, group, cause) (increase({{p}}member_rebalances_total{{{_GROUP}}}[5m]))",
                        "{{stream}}/{{group}} {{cause}}",
                    ),
                ),
            ),
            Panel(
                "Rebalance duration",
                (_quantile(0.99, "member_rebalance_duration_seconds", _GROUP, "stream, group, member", _BY_MEMBER),),
                "s",
            ),
            Panel(
                "Pin changes and resets",
                (
                    (f"increase({{p}}member_pin_changes_total{{{_GROUP}}}[5m])", f"{_BY_MEMBER} pin"),
                    (f"increase({{p}}member_resets_total{{{_GROUP}}}[5m])", f"{_BY_MEMBER} reset"),
                ),
            ),
            Panel("Crowded lanes", ((f"increase({{p}}member_crowded_lanes_total{{{_GROUP}}}[5m])", _BY_MEMBER),)),
        ),
    ),
    PanelRow(
        "Fleets",
        (
            Panel("Messages delivered", (_rate("consumer_messages_total", _FLEET, _BY_WORKER),), "cps"),
            Panel(
                "Handler latency",
                _latencies("handler_latency_seconds", _FLEET, "stream, fleet, worker", _BY_WORKER),
                "s",
            ),
            Panel("Lag: age of the oldest message", (_gauge("fleet_lag_seconds", _FLEET, _BY_WORKER),), "s"),
            Panel("Lag: messages", (_gauge("fleet_lag_messages", _FLEET, _BY_WORKER),)),
            Panel("Partitions", (_gauge("fleet_partitions", _FLEET, _BY_WORKER),)),
            Panel(
                "Rebalances by cause",
                (
                    (
                        f"sum by (stream, fleet, cause) (increase({{p}}fleet_rebalances_total{{{_FLEET}}}[5m]))",
                        "{{stream}}/{{fleet}} {{cause}}",
                    ),
                ),
            ),
            Panel(
                "Delivered again, retried, given up",
                (
                    _rate("consumer_redeliveries_total", _FLEET, f"{_BY_WORKER} delivered again"),
                    _rate("retries_total", _FLEET, f"{_BY_WORKER} retried"),
                    _rate("dead_letters_total", _FLEET, f"{_BY_WORKER} dead letters"),
                ),
                "cps",
            ),
            Panel(
                "Degraded workers, and processes that are not at work",
                (
                    _gauge("fleet_degraded", _FLEET, _BY_WORKER),
                    (
                        f"{{p}}supervisor_workers{{{_FLEET}}} - {{p}}supervisor_workers_ready{{{_FLEET}}}",
                        "{{stream}}/{{fleet}} not at work",
                    ),
                ),
            ),
            Panel(
                "Restarts of processes",
                ((f"increase({{p}}supervisor_restarts_total{{{_FLEET}}}[5m])", "{{stream}}/{{fleet}}"),),
            ),
        ),
    ),
    PanelRow(
        "Marshal consumers",
        (
            Panel("Messages read", (_rate("marshal_messages_total", _MARSHAL, _BY_CLIENT),), "cps"),
            Panel(
                "Handler latency",
                _latencies("marshal_handler_latency_seconds", _MARSHAL, "group, client", _BY_CLIENT),
                "s",
            ),
            Panel(
                "Partitions, claims and releases",
                (
                    _gauge("marshal_partitions", _MARSHAL, _BY_CLIENT),
                    (f"increase({{p}}marshal_claims_total{{{_MARSHAL}}}[5m])", f"{_BY_CLIENT} claims"),
                    (f"increase({{p}}marshal_releases_total{{{_MARSHAL}}}[5m])", f"{_BY_CLIENT} releases"),
                ),
            ),
        ),
    ),
)


def queries(prefix: str = DEFAULT_PREFIX) -> list[tuple[str, str]]:
    """Every query of the dashboard, with the title of its panel."""
    return [
        (f"{row.title}: {panel.title}", query.replace("{p}", prefix))
        for row in ROWS
        for panel in row.panels
        for query, _ in panel.queries
    ]


def dashboard_file(prefix: str = DEFAULT_PREFIX) -> str:
    """The dashboard as a file to import into Grafana, or to provision."""
    check_prefix(prefix)
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(
            {"type": "row", "title": row.title, "id": len(panels) + 1, "gridPos": _place(0, top, 24, 1), "panels": []}
        )
        top += 1
        for number, panel in enumerate(row.panels):
            line, column = divmod(number, _COLUMNS)
            place = _place(column * _WIDTH, top + line * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append(_panel(panel, len(panels) + 1, place, prefix))
        top += -(-len(row.panels) // _COLUMNS) * _HEIGHT
    found = {
        "title": "keylane",
        "uid": "keylane",
        "tags": ["keylane", "nats"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(prefix)},
        "panels": panels,
    }
    return json.dumps(found, indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int], prefix: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "id": number,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": query.replace("{p}", prefix),
                "legendFormat": legend,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _variables(prefix: str) -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}

    def choice(name: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        choice("stream", f"label_values({prefix}group_readable, stream)"),
        choice("group", f'label_values({prefix}group_readable{{stream=~"$stream"}}, group)'),
    ]
