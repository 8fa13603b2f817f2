"""Alert rules for Prometheus, made from the names of the catalogue: `keylane fleet alert-rules` prints them.

The thresholds are those that the parti design names as candidates, and its service levels: fewer than 3 % redeliveries,
99.9 % of consumer updates succeed, 99 % of messages take less than twice the 95th percentile.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from keylane.metrics.catalogue import DEFAULT_PREFIX
from keylane.metrics.exposition import check_prefix


class AlertRule(NamedTuple):
    """One alert. `{p}` in the expression is the prefix of the names."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str


_LATENCY = "sum by (le, stream, fleet) (rate({p}handler_latency_seconds_bucket[10m]))"
_UPDATE_FAILURES = "sum by (stream, fleet) (increase({p}consumer_update_failures_total[%s]))"
_UPDATES = "sum by (stream, fleet) (increase({p}consumer_update_duration_seconds_count[%s]))"


def _update_failure_ratio(window: str) -> str:
    failures, done = _UPDATE_FAILURES % window, _UPDATES % window
    return f"{failures} / ({failures} + {done})"


ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "RedeliveryRatioHigh",
        "sum by (stream, fleet) (rate({p}consumer_redeliveries_total[5m]))"
        " / sum by (stream, fleet) (rate({p}consumer_messages_total[5m])) > 0.03",
        "5m",
        "warning",
        "more than 3 % of the messages are delivered again: workers crash, or handlers outlast the ack wait",
    ),
    AlertRule(
        "SubjectCountNearLimit",
        "{p}consumer_subject_count / {p}consumer_subject_limit > 0.9",
        "5m",
        "warning",
        "a worker's consumer has more than 90 % of the subjects that it may have: add workers",
    ),
    AlertRule(
        "ConsumerUpdatesFail",
        f"{_update_failure_ratio('10m')} > 0.05",
        "0m",
        "warning",
        "more than 5 % of the changes of consumers failed within 10 minutes",
    ),
    AlertRule(
        "ConsumerUpdateServiceLevel",
        f"{_update_failure_ratio('1d')} > 0.001",
        "0m",
        "info",
        "fewer than 99.9 % of the changes of consumers succeeded within a day",
    ),
    AlertRule(
        "BacklogHigh",
        "sum by (stream, fleet) ({p}consumer_inflight) > 10000",
        "10m",
        "warning",
        "more than 10,000 messages have waited for 10 minutes: handlers do not keep up",
    ),
    AlertRule(
        "LagHigh",
        "max by (stream, fleet) ({p}fleet_lag_seconds) > 60",
        "5m",
        "warning",
        "the oldest message that is not handled is older than a minute",
    ),
    AlertRule(
        "LagUnknown",
        "sum by (stream, fleet) ({p}fleet_lag_unknown_partitions) > 0",
        "5m",
        "warning",
        "the lag of some partitions cannot be read",
    ),
    AlertRule(
        "LatencyServiceLevel",
        f"histogram_quantile(0.99, {_LATENCY}) > 2 * histogram_quantile(0.95, {_LATENCY})",
        "15m",
        "info",
        "more than 1 % of the messages take longer than twice the 95th percentile",
    ),
    AlertRule(
        "DeadLetters",
        "sum by (stream, fleet) (increase({p}dead_letters_total[10m])) > 0",
        "0m",
        "warning",
        "messages became dead letters: look at them with `keylane dlq ls`",
    ),
    AlertRule(
        "WorkerDegraded",
        "{p}fleet_degraded == 1",
        "1m",
        "warning",
        "a worker recovers, cannot reach its store, or has lost its lease",
    ),
    AlertRule(
        "NoLeader",
        "sum by (stream, fleet) ({p}fleet_leader) == 0",
        "1m",
        "warning",
        "the fleet has no leader: work goes on, and partitions of a worker that dies stay without owner",
    ),
    AlertRule(
        "WorkersNotReady",
        "{p}supervisor_workers_ready < {p}supervisor_workers",
        "5m",
        "warning",
        "some worker processes are not at work",
    ),
    AlertRule(
        "CrashLoop",
        "{p}supervisor_crash_loops > 0",
        "1m",
        "critical",
        "a worker process ends again and again; the supervisor's output says why",
    ),
)


_BY_GROUP = "by (stream, group)"

GROUP_ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "ExporterDown",
        "{p}exporter_up == 0",
        "2m",
        "critical",
        "the exporter cannot read the account: the lag of every group is unknown",
    ),
    AlertRule(
        "GroupUnreadable",
        "{p}group_readable == 0",
        "5m",
        "warning",
        "the record of a group is broken, or its stream is gone: look at `keylane elastic ls`, `static ls`, `fleet ls`",
    ),
    AlertRule(
        "GroupLagHigh",
        f"max {_BY_GROUP} ({{p}}group_lag_seconds) > 60",
        "5m",
        "warning",
        "the oldest message that the group has not handled is older than a minute",
    ),
    AlertRule(
        "GroupLagUnknown",
        "{p}group_readable == 1 unless on (stream, group, kind) {p}group_lag_messages",
        "10m",
        "info",
        "the lag of the group is unknown: a member of a static group never ran, or a part cannot be read",
    ),
    AlertRule(
        "GroupStandsStill",
        "{p}group_active_members == 0 and on (stream, group, kind) {p}group_lag_messages > 0",
        "2m",
        "critical",
        "messages wait and no member of the group is at work",
    ),
    AlertRule(
        "PartitionsWithoutOwner",
        "{p}group_unowned_partitions > 0",
        "5m",
        "warning",
        "nobody handles some partitions of the group: start the members that it lists, or drop them",
    ),
    AlertRule(
        "QueueNearLimit",
        "{p}group_queue_fill_ratio > 0.9",
        "5m",
        "warning",
        "the queue of the group is nearly full: its source is not copied any further then",
    ),
    AlertRule(
        "GroupDeadLetters",
        f"sum {_BY_GROUP} (delta({{p}}group_dead_letters[10m])) > 0",
        "0m",
        "warning",
        "messages became dead letters: look at them with `keylane dlq ls`",
    ),
    AlertRule(
        "KeysParked",
        f"sum {_BY_GROUP} ({{p}}group_parked_keys) > 0",
        "15m",
        "warning",
        "keys are parked and their messages wait: `keylane dlq ls`, and `keylane dlq release` when the cause is gone",
    ),
    AlertRule(
        "MemberInFlightAtLimit",
        "{p}member_in_flight / {p}member_max_in_flight > 0.95",
        "10m",
        "info",
        "a member holds all that it may have in flight: its handler is the limit, or one key crowds out the others",
    ),
    AlertRule(
        "MemberRedeliveryRatioHigh",
        f"sum {_BY_GROUP} (rate({{p}}member_redeliveries_total[5m]))"
        f" / sum {_BY_GROUP} (rate({{p}}member_messages_total[5m])) > 0.03",
        "5m",
        "warning",
        "more than 3 % of the messages are delivered again: members crash, or handlers outlast the ack wait",
    ),
    AlertRule(
        "PinFlaps",
        f"sum {_BY_GROUP} (increase({{p}}member_pin_changes_total[10m])) > 20",
        "0m",
        "warning",
        "instances of a group take over from each other again and again: processes stall, or the ack wait is too short",
    ),
)


def rules_file(prefix: str = DEFAULT_PREFIX) -> str:
    """The rules as a file for Prometheus' `rule_files`."""
    check_prefix(prefix)
    start = "".join(part.capitalize() for part in prefix.split("_") if part)
    lines = [
        "# Made by `keylane fleet alert-rules`: change keylane.metrics.alert_rules, not this file.",
        "groups:",
    ]
    for name, rules in (("fleet", ALERT_RULES), ("groups", GROUP_ALERT_RULES)):
        lines += [f"  - name: {prefix}{name}", "    rules:"]
        for one in rules:
            lines += _lines(one, prefix, start)
    return "\n".join(lines) + "\n"


def _lines(one: AlertRule, prefix: str, start: str) -> list[str]:
    return [
        f"      - alert: {start}{one.name}",
        f"        expr: {json.dumps(one.expression.replace('{p}', prefix))}",
        f"        for: {one.lasts}",
        "        labels:",
        f"          severity: {one.severity}",
        "        annotations:",
        f"          summary: {json.dumps(one.summary)}",
    ]
