"""Every metric: its name without the prefix, its kind, its labels, what it says.

No label holds a key or a subject, so the number of series is bounded by workers, states and outcomes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

DEFAULT_PREFIX = "keylane_"

MetricKind = Literal["counter", "gauge", "histogram"]

LATENCY_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_WORKER = ("stream", "fleet", "worker")
_MEMBER = ("stream", "group", "member", "process")
_CONSUMER = ("group", "client")
_GROUP = ("stream", "group", "kind")
_GROUP_MEMBER = (*_GROUP, "member")
_GROUP_PARTITION = (*_GROUP, "partition")


class MetricSpec(NamedTuple):
    """One metric."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = _WORKER
    bounds_s: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram, without the last, which has none."""


class Reading(NamedTuple):
    """A metric's value at one time. JSON can hold it, so that it can be carried between processes."""

    name: str
    labels: dict[str, str]
    value: Any
    """A number; of a histogram the counts of its buckets and the sum: `[[3, 0, 1], 0.27]`."""


METRICS: tuple[MetricSpec, ...] = (
    # ---- by the names of the parti design -------------------------------------------------------------------
    MetricSpec("consumer_messages_total", "counter", "Messages that the server delivered to the worker."),
    MetricSpec("consumer_redeliveries_total", "counter", "Of these, messages that had been delivered before."),
    MetricSpec(
        "consumer_inflight",
        "gauge",
        "Messages of the worker's partitions that are not acked: waiting on the server, or delivered. Absent while "
        "unknown.",
    ),
    MetricSpec(
        "consumer_update_duration_seconds",
        "histogram",
        "How long it took to create, open or change a consumer.",
        bounds_s=STEP_BOUNDS_S,
    ),
    MetricSpec(
        "consumer_update_failures_total", "counter", "Creations, openings and changes of consumers that failed."
    ),
    MetricSpec(
        "consumer_update_skipped_total",
        "counter",
        "Changes of a worker's consumer that were not needed (layout worker).",
    ),
    MetricSpec(
        "consumer_duplicate_subjects_total", "counter", "Subjects that were given twice for a consumer (layout worker)."
    ),
    MetricSpec("consumer_subject_count", "gauge", "Subjects or filters that the worker's consumers deliver."),
    MetricSpec(
        "consumer_subject_limit",
        "gauge",
        "How many subjects a worker's consumer may have. Absent if there is no limit.",
    ),
    MetricSpec(
        "handler_latency_seconds", "histogram", "How long handlers that returned took.", bounds_s=LATENCY_BOUNDS_S
    ),
    # ---- handling ---------------------------------------------------------------------------------------------
    MetricSpec(
        "handler_tries_total",
        "counter",
        "Handler calls by outcome: done, failed (tried again), delayed (tried again later), dead (became a dead "
        "letter), parked, cancelled, other.",
        (*_WORKER, "outcome"),
    ),
    MetricSpec("dead_letters_total", "counter", "Messages that failed max_tries times and became dead letters."),
    MetricSpec("retries_total", "counter", "Handler calls that failed and are tried again."),
    # ---- the fleet ----------------------------------------------------------------------------------------------
    MetricSpec("fleet_partitions", "gauge", "Partitions that the worker owns and handles."),
    MetricSpec(
        "fleet_lag_messages",
        "gauge",
        "Messages of the worker's partitions that are not handled. Absent while unknown.",
    ),
    MetricSpec(
        "fleet_lag_seconds",
        "gauge",
        "Age of the oldest message of the worker's partitions that is not handled; 0: there is none. Absent while "
        "unknown.",
    ),
    MetricSpec("fleet_lag_unknown_partitions", "gauge", "Partitions of the worker whose lag is not known."),
    MetricSpec(
        "fleet_rebalances_total",
        "counter",
        "Assignments that changed the worker's partitions, by cause: start, join, leave, crash, partitions, "
        "restore, other.",
        (*_WORKER, "cause"),
    ),
    MetricSpec(
        "fleet_rebalance_duration_seconds",
        "histogram",
        "From an assignment until the worker handles exactly its partitions.",
        bounds_s=STEP_BOUNDS_S,
    ),
    MetricSpec("fleet_claims_total", "counter", "Partitions that the worker claimed, each with a new fencing token."),
    MetricSpec("fleet_releases_total", "counter", "Partitions that the worker gave up or lost."),
    MetricSpec("fleet_assignment_version", "gauge", "The version of the assignment that the worker follows."),
    MetricSpec("fleet_assignment_epoch", "gauge", "The epoch of that assignment: it grows with every leader."),
    MetricSpec("fleet_leader", "gauge", "1 if the worker leads the fleet, else 0."),
    MetricSpec("fleet_worker_state", "gauge", "1 for the state of the worker, 0 for the others.", (*_WORKER, "state")),
    MetricSpec(
        "fleet_degraded", "gauge", "1 while the worker recovers, cannot reach its store, or has lost its lease; else 0."
    ),
    MetricSpec("fleet_resets_total", "counter", "Resets of the worker's consumers: what is not acked comes again."),
    MetricSpec("fleet_crowded_lanes_total", "counter", "Keys that came to hold half of all that may be in flight."),
    # ---- a member of a group ---------------------------------------------------------------------------------
    MetricSpec("member_messages_total", "counter", "Messages that the server delivered to the member.", _MEMBER),
    MetricSpec("member_redeliveries_total", "counter", "Of these, messages that had been delivered before.", _MEMBER),
    MetricSpec("member_in_flight", "gauge", "Messages that wait or run in the member.", _MEMBER),
    MetricSpec("member_max_in_flight", "gauge", "How many may be in flight: max_ack_pending.", _MEMBER),
    MetricSpec(
        "member_handler_latency_seconds",
        "histogram",
        "How long handlers that returned took.",
        _MEMBER,
        bounds_s=LATENCY_BOUNDS_S,
    ),
    MetricSpec(
        "member_handler_tries_total",
        "counter",
        "Handler calls by outcome: done, failed (tried again), delayed (tried again later), dead (became a dead "
        "letter), parked, cancelled, other.",
        (*_MEMBER, "outcome"),
    ),
    MetricSpec("member_retries_total", "counter", "Handler calls that failed and are tried again.", _MEMBER),
    MetricSpec(
        "member_dead_letters_total", "counter", "Messages that failed max_tries times and became dead letters.", _MEMBER
    ),
    MetricSpec("member_parked_messages_total", "counter", "Messages that were parked with their key.", _MEMBER),
    MetricSpec("member_partitions", "gauge", "Partitions that the member's consumer covers.", _MEMBER),
    MetricSpec("member_active", "gauge", "1 if this instance gets the member's messages, 0 on standby.", _MEMBER),
    MetricSpec("member_state", "gauge", "1 for the state of the instance, 0 for the others.", (*_MEMBER, "state")),
    MetricSpec(
        "member_rebalances_total",
        "counter",
        "Plans that changed the member's partitions, by cause: start, join, leave, mapping.",
        (*_MEMBER, "cause"),
    ),
    MetricSpec(
        "member_rebalance_duration_seconds",
        "histogram",
        "From a plan until the member's consumer covers exactly its partitions.",
        _MEMBER,
        bounds_s=STEP_BOUNDS_S,
    ),
    MetricSpec("member_partitions_gained_total", "counter", "Partitions that came to the member.", _MEMBER),
    MetricSpec("member_partitions_lost_total", "counter", "Partitions that went from the member.", _MEMBER),
    MetricSpec("member_pin_changes_total", "counter", "Changes of this instance between active and standby.", _MEMBER),
    MetricSpec(
        "member_resets_total", "counter", "Resets of the member's consumer: what is not acked comes again.", _MEMBER
    ),
    MetricSpec(
        "member_crowded_lanes_total", "counter", "Keys that came to hold half of all that may be in flight.", _MEMBER
    ),
    # ---- a Marshal consumer -----------------------------------------------------------------------------------
    MetricSpec("marshal_messages_total", "counter", "Messages that the consumer read.", _CONSUMER),
    MetricSpec("marshal_in_flight", "gauge", "Messages of its partitions that are read and not done.", _CONSUMER),
    MetricSpec("marshal_max_in_flight", "gauge", "How many may be: max_in_flight for each partition.", _CONSUMER),
    MetricSpec(
        "marshal_handler_latency_seconds",
        "histogram",
        "How long handlers that returned took.",
        _CONSUMER,
        bounds_s=LATENCY_BOUNDS_S,
    ),
    MetricSpec(
        "marshal_handler_tries_total",
        "counter",
        "Handler calls by outcome: done, failed (tried again), dead (given up), parked, cancelled, other.",
        (*_CONSUMER, "outcome"),
    ),
    MetricSpec("marshal_partitions", "gauge", "Partitions that the consumer owns.", _CONSUMER),
    MetricSpec("marshal_claims_total", "counter", "Partitions that the consumer has claimed.", _CONSUMER),
    MetricSpec("marshal_releases_total", "counter", "Partitions that the consumer has given up or lost.", _CONSUMER),
    MetricSpec("marshal_troubles_total", "counter", "Failures of the log or the source, which are retried.", _CONSUMER),
    # ---- the supervisor -------------------------------------------------------------------------------------------
    MetricSpec("supervisor_workers", "gauge", "Worker processes that are wanted.", ("stream", "fleet")),
    MetricSpec("supervisor_workers_ready", "gauge", "Worker processes that are at work.", ("stream", "fleet")),
    MetricSpec(
        "supervisor_restarts_total", "counter", "Worker processes that ended by themselves.", ("stream", "fleet")
    ),
    MetricSpec("supervisor_crash_loops", "gauge", "Workers that end again and again.", ("stream", "fleet")),
    # ---- the exporter: every group and fleet of an account ---------------------------------------------------
    MetricSpec("exporter_up", "gauge", "1 if the account could be read, else 0.", ()),
    MetricSpec("exporter_read_seconds", "gauge", "How long the last reading of the account took.", ()),
    MetricSpec("group_readable", "gauge", "1 if the group could be read, 0 if its record or stream is broken.", _GROUP),
    MetricSpec("group_members", "gauge", "Members that the group lists, or workers that hold an id.", _GROUP),
    MetricSpec("group_active_members", "gauge", "Of these, those that are at work.", _GROUP),
    MetricSpec("group_partitions", "gauge", "Partitions of the group.", _GROUP),
    MetricSpec("group_unowned_partitions", "gauge", "Partitions that nobody handles now.", _GROUP),
    MetricSpec("group_lag_messages", "gauge", "Messages that are not handled. Absent while unknown.", _GROUP),
    MetricSpec(
        "group_lag_seconds",
        "gauge",
        "Age of the oldest message that is not handled; 0: there is none. Absent while unknown.",
        _GROUP,
    ),
    MetricSpec("group_in_flight", "gauge", "Messages that are delivered and not acked. Absent while unknown.", _GROUP),
    MetricSpec(
        "group_redelivered", "gauge", "Of these, messages that were delivered before. Absent while unknown.", _GROUP
    ),
    MetricSpec("group_dead_letters", "gauge", "Dead letters that are kept now. Absent while unknown.", _GROUP),
    MetricSpec("group_parked_keys", "gauge", "Keys that are parked now. Absent while unknown.", _GROUP),
    MetricSpec(
        "group_parked_messages", "gauge", "Messages that wait behind parked keys. Absent while unknown.", _GROUP
    ),
    MetricSpec("group_paused", "gauge", "1 while a consumer of the group is paused, else 0.", _GROUP),
    MetricSpec("group_queue_messages", "gauge", "Messages in the queue of an elastic group.", _GROUP),
    MetricSpec("group_queue_bytes", "gauge", "Bytes in the queue of an elastic group.", _GROUP),
    MetricSpec("group_queue_fill_ratio", "gauge", "How full the queue is, 0 to 1. Absent without a limit.", _GROUP),
    MetricSpec("group_source_lag_messages", "gauge", "Messages that are not in the queue yet, roughly.", _GROUP),
    MetricSpec("group_member_active", "gauge", "1 if the member is at work, else 0.", _GROUP_MEMBER),
    MetricSpec("group_member_partitions", "gauge", "Partitions that the member is to handle.", _GROUP_MEMBER),
    MetricSpec(
        "group_member_lag_messages",
        "gauge",
        "Messages of the member that are not handled. Absent while unknown.",
        _GROUP_MEMBER,
    ),
    MetricSpec(
        "group_member_lag_seconds",
        "gauge",
        "Age of the oldest of them; 0: there is none. Absent while unknown.",
        _GROUP_MEMBER,
    ),
    MetricSpec("group_member_in_flight", "gauge", "Delivered to the member and not acked.", _GROUP_MEMBER),
    MetricSpec(
        "group_member_max_in_flight",
        "gauge",
        "What the member may have in flight. Absent if there is no limit.",
        _GROUP_MEMBER,
    ),
    MetricSpec(
        "group_partition_lag_messages",
        "gauge",
        "Messages of the partition that are not handled. Absent while unknown.",
        _GROUP_PARTITION,
    ),
    MetricSpec(
        "group_partition_lag_seconds",
        "gauge",
        "Age of the oldest of them; 0: there is none. Absent while unknown.",
        _GROUP_PARTITION,
    ),
    MetricSpec(
        "group_partition_owner",
        "gauge",
        "1, with the member that handles the partition. Absent if nobody does.",
        (*_GROUP_PARTITION, "member"),
    ),
)

BY_NAME = {one.name: one for one in METRICS}
assert len(BY_NAME) == len(METRICS)
