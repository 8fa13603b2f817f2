"""The rules of `keylane doctor`: each takes all facts and yields what is wrong, why it matters and what fixes it.

Owns the rules and their order. Never asks a server: `operations/diagnosis.py` collects the facts. A rule says nothing
where its facts are missing; whoever collected them has listed that under `unread` or `unchecked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from keylane.core.diagnosis_facts import DiagnosedConsumer, DiagnosedGroup, DiagnosedStream, DoctorFacts, Finding
from keylane.core.fleet_names import worker_in
from keylane.core.plans import ranges
from keylane.core.server_faults import ALL_FAULTS, Concern
from keylane.core.subjects import is_subset

Rule = Callable[[DoctorFacts], Iterator[Finding]]

GROUP_PIN, FLEET_PIN = "PCG", "fleet"
_BUCKETS = ("KV_static-consumer-groups", "KV_elastic-consumer-groups", "KV_keylane-fleets")
_CLOCK_S = 1.0
_LONGEST_SYNC_S = 10.0
_SHORT_WINDOW_S = 60.0
_SLOW_ZONE = range(100, 50_001)
"""Distinct subjects of a stream on disk, where a second filter costs ten times and more."""
_MANY_FILTERS = 500
_DEFAULT_MAX_CONSUMERS = 1000
_HAS_DEFAULT = (2, 15, 0)
_RAFT_GROUPS = 100
_UNEVEN = 1.5
_FLAPS = 3
_SHOWN = 5


def diagnose(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Every finding, the worst first.

    >>> from keylane.core.diagnosis_facts import DiagnosedServer
    >>> diagnose(DoctorFacts(server=DiagnosedServer(version=(2, 15, 1))))
    ()
    """
    found = [one for rule in RULES for one in rule(facts)]
    return tuple(sorted(found, key=lambda one: ("error", "warning", "note").index(one.severity)))


# ---- the server -------------------------------------------------------------------------------------------


def old_server(facts: DoctorFacts) -> Iterator[Finding]:
    """A server without features that keylane uses."""
    missing = facts.server.missing_features
    if not missing:
        return
    costs = "members handle one message at a time" if "consumer reset" in missing else "some options are refused"
    yield Finding(
        rule="old-server",
        severity="warning" if "consumer reset" in missing else "note",
        where="server",
        what=f"nats-server {_text(facts.server.version)} has no {', no '.join(missing)}",
        why=f"without these {costs}",
        fix="update nats-server to 2.15 or newer",
    )


def known_faults(facts: DoctorFacts) -> Iterator[Finding]:
    """Faults of this version that concern what is in use here."""
    version = facts.server.version
    for fault in ALL_FAULTS:
        if not fault.concerns(version) or not (where := _in_use(facts, fault.concern)):
            continue
        remedy = fault.remedy(version)
        yield Finding(
            rule="server-fault",
            severity="warning" if remedy is not None else "note",
            where=where,
            what=f"nats-server {_text(version)} has a known fault (#{fault.issue}): {fault.what}",
            why=fault.why,
            fix=f"update nats-server to {remedy} or newer" if remedy else "no release fixes it; expect such repeats",
            issue=fault.url,
        )


def _in_use(facts: DoctorFacts, concern: Concern) -> str:
    """Where this is in use; empty: nowhere."""
    reads = {one.stream for one in facts.groups} | {one.stream for one in facts.fleets}
    streams = [one for name, one in sorted(facts.streams.items()) if name in reads]
    sourced = {source for one in facts.streams.values() for source in one.sources}
    several = {one.stream for found in facts.consumers.values() for one in found if len(one.filters) > 1}
    chosen = {
        "pins": streams,
        "filters": streams,
        "single_server": [] if facts.server.is_clustered else streams,
        "interest_in_cluster": [one for one in streams if one.retention == "interest" and one.replicas > 1],
        "sourced_queue": [
            one
            for one in facts.streams.values()
            if one.name in sourced and one.retention == "workqueue" and one.replicas > 1
        ],
        "purges": [one for one in facts.streams.values() if one.name in several and one.allows_rollup],
        "schedules": [one for one in facts.streams.values() if one.allows_schedules],
        "ids": [one for one in streams if one.retention == "workqueue"],
    }[concern]
    if concern in ("pins", "filters", "single_server"):
        return "server" if chosen else ""
    return ", ".join(one.name for one in chosen[:_SHOWN])


def clocks(facts: DoctorFacts) -> Iterator[Finding]:
    """This machine's clock and the server's."""
    ahead = facts.server.clock_ahead_s
    if ahead is None or abs(ahead) - facts.server.clock_error_s <= _CLOCK_S:
        return
    yield Finding(
        rule="clock",
        severity="warning",
        where="server",
        what=f"the server's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
        why="ages of messages, starts by time, pauses and the history of fleets are wrong by as much",
        fix="synchronise both machines: `timedatectl set-ntp true`",
    )


def disk_sync(facts: DoctorFacts) -> Iterator[Finding]:
    """How much a power cut can lose."""
    late = {name: one for name, one in (facts.server.sync_s or {}).items() if one > _LONGEST_SYNC_S}
    if late:
        yield Finding(
            rule="sync-interval",
            severity="warning",
            where="server",
            what=f"{', '.join(sorted(late)[:_SHOWN])} writes to disk for good every {max(late.values()):g} s only",
            why="a power cut, or a crash of the operating system, loses the messages acknowledged in that time",
            fix='set `sync_interval: "1s"` (or `always`) in the jetstream block of the server\'s configuration',
        )


def permissions(facts: DoctorFacts) -> Iterator[Finding]:
    """What this user may not read."""
    for one in facts.unread:
        yield Finding(
            rule="permission",
            severity="warning",
            where="server",
            what=one.text,
            why="what lies behind it was not checked, and programs of this user fail on it",
            fix=f'add "{one.subject}" to the permissions of this user (docs/connection.md has the whole table)',
        )


# ---- streams ----------------------------------------------------------------------------------------------


def retention(facts: DoctorFacts) -> Iterator[Finding]:
    """Retention against what reads the stream."""
    for stream, readers in _read_streams(facts):
        if stream.retention == "interest":
            yield Finding(
                rule="interest-retention",
                severity="error",
                where=stream.name,
                what=f"it has interest retention and is read by {_names(readers)}",
                why="a message without a consumer at the moment it is published, as while partitions move, is deleted",
                fix=f"nats stream edit {stream.name} --retention limits",
            )
        if stream.retention == "workqueue" and len(readers) > 1:
            yield Finding(
                rule="shared-work-queue",
                severity="error",
                where=stream.name,
                what=f"it is a work queue and is read by {_names(readers)}",
                why="each message goes to one of them, and the server refuses the consumers of the others (10100)",
                fix=f"read it with one group, or make a stream with limits retention: `keylane stream create "
                f"{stream.name}2 --retention limits …`",
            )


def discards(facts: DoctorFacts) -> Iterator[Finding]:
    """Limits that delete what nobody has handled yet."""
    for stream, readers in _read_streams(facts):
        if stream.max_per_subject > 0:
            yield Finding(
                rule="per-subject-limit",
                severity="warning",
                where=stream.name,
                what=f"it keeps {stream.max_per_subject:,} messages of each subject and is read by {_names(readers)}",
                why="earlier messages of a key are deleted although nobody has handled them",
                fix=f"nats stream edit {stream.name} --max-msgs-per-subject=-1",
            )
        limit = stream.max_messages if stream.max_messages > 0 else stream.max_bytes
        if limit > 0 and stream.discard == "old":
            is_queue = stream.retention == "workqueue"
            yield Finding(
                rule="discard-old",
                severity="warning" if is_queue or _fill(stream) > 0.9 else "note",
                where=stream.name,
                what=f"it drops its oldest messages when it is full, and is {_fill(stream):.0%} full",
                why="what a group has not handled by then is lost, and no error tells"
                if not is_queue
                else "everything in a work queue is unhandled, so a full one loses work, and no error tells",
                fix=f"nats stream edit {stream.name} --discard new",
            )


def duplicate_windows(facts: DoctorFacts) -> Iterator[Finding]:
    """Windows that are shorter than a publisher needs to repeat after an outage."""
    for stream, _ in _read_streams(facts):
        if stream.duplicate_window_s < _SHORT_WINDOW_S and not stream.sources:
            yield Finding(
                rule="duplicate-window",
                severity="warning",
                where=stream.name,
                what=f"message ids are remembered for {stream.duplicate_window_s:g} s",
                why="a publisher that repeats a message after a failover (as `publish=` does) stores it twice",
                fix=f"nats stream edit {stream.name} --dupe-window 2m",
            )


def replication(facts: DoctorFacts) -> Iterator[Finding]:
    """Replicas of streams and of the buckets that hold the records."""
    if not facts.server.is_clustered:
        return
    read = [stream for stream, _ in _read_streams(facts)]
    for stream in read:
        if stream.replicas == 1:
            yield Finding(
                rule="replicas",
                severity="warning",
                where=stream.name,
                what="the server is a cluster, and the stream is on one of its nodes",
                why="while that node is down nothing is published or handled; with its disk all messages are lost",
                fix=f"nats stream edit {stream.name} --replicas 3",
            )
    most = max((stream.replicas for stream in read), default=1)
    for name in _BUCKETS:
        bucket = facts.streams.get(name)
        if bucket is not None and bucket.replicas < most:
            yield Finding(
                rule="bucket-replicas",
                severity="warning",
                where=name,
                what=f"the records of groups are on {bucket.replicas} node, their streams on up to {most}",
                why="without its records no member can join and no fleet can move a partition",
                fix=f"nats stream edit {name} --replicas {most}",
            )


def async_persistence(facts: DoctorFacts) -> Iterator[Finding]:
    for stream, _ in _read_streams(facts):
        if stream.is_async:
            yield Finding(
                rule="async-persistence",
                severity="warning",
                where=stream.name,
                what="it acknowledges messages before they are written (persist_mode async)",
                why="a killed server loses messages that their publishers believe to be stored",
                fix=f"make it again without persist_mode: `keylane stream create {stream.name} …`",
            )


def transforms(facts: DoctorFacts) -> Iterator[Finding]:
    """The partition numbers in front of subjects, against those that groups and fleets expect."""
    for group in facts.groups:
        if group.problem is None and group.kind == "static" and (stream := facts.streams.get(group.stream)):
            yield from _numbers(
                stream, group.where, group.partitions, f"keylane static info {group.stream} {group.group}"
            )
        if group.problem is None and group.kind == "elastic" and (queue := facts.streams.get(group.reads)):
            yield from _queue_numbers(group, queue)
    for fleet in facts.fleets:
        stream = facts.streams.get(fleet.reads)
        if (
            fleet.problem is None
            and fleet.numbers is not None
            and not fleet.is_changing
            and stream
            and not stream.sources
        ):
            look = f"keylane fleet repartition {fleet.stream} {fleet.fleet} N"
            yield from _numbers(stream, fleet.where, fleet.numbers, look)
    for stream, readers in _read_streams(facts):
        if stream.numbering is None or stream.transform is None or _numbered_readers(facts).isdisjoint(readers):
            continue
        filter_ = stream.transform[0]
        if outside := [one for one in stream.subjects if not is_subset(one, filter_)]:
            yield Finding(
                rule="unnumbered-subjects",
                severity="error",
                where=stream.name,
                what=f"it stores {', '.join(outside[:_SHOWN])}, and its transform numbers {filter_} only",
                why="the other messages get no partition number, and no member ever sees them",
                fix=f"nats stream edit {stream.name} --subjects '{filter_}'",
            )


def _numbers(stream: DiagnosedStream, where: str, wanted: int, look: str) -> Iterator[Finding]:
    if stream.transform_problem is not None:
        yield Finding(
            rule="transform-unusable",
            severity="error",
            where=where,
            what=stream.transform_problem,
            why="keys and partitions of messages are unknown",
            fix=f"nats stream edit {stream.name} --transform-source … --transform-destination …",
        )
    elif stream.numbering is None and stream.carries_numbers is False:
        yield Finding(
            rule="transform-missing",
            severity="error",
            where=where,
            what=f"stream {stream.name} puts no partition number in front of its subjects",
            why="its consumers ask for subjects that begin with a number: no message reaches any of them",
            fix=f"make a stream with one: `keylane stream create NAME --partition-by '…' --partitions {wanted}`; an "
            "elastic group needs none",
        )
    elif stream.numbering is not None and stream.numbering.partitions != wanted:
        has = stream.numbering.partitions
        lost = (
            f"messages of partitions {wanted} to {has - 1} reach nobody" if has > wanted else "keys change partitions"
        )
        yield Finding(
            rule="transform-differs",
            severity="error",
            where=where,
            what=f"stream {stream.name} numbers {has} partitions, and {where} has {wanted}",
            why=f"somebody has changed the transform: {lost}, and the order of keys is lost",
            fix=f"change the transform back to {wanted}; `{look}` shows the other side",
        )


def _queue_numbers(group: DiagnosedGroup, queue: DiagnosedStream) -> Iterator[Finding]:
    if group.transforms and set(queue.source_numberings) != set(group.transforms):
        yield Finding(
            rule="transform-differs",
            severity="error",
            where=group.where,
            what=f"its queue {queue.name} numbers other subjects, or with another number, than its record says",
            why="messages reach no member, or members other than those that have their key",
            fix=f"make the group again under another name: `keylane elastic create {group.stream} …`, then "
            f"`keylane elastic delete {group.stream} {group.group}`",
        )


def consumer_room(facts: DoctorFacts) -> Iterator[Finding]:
    """How many consumers a stream takes against how many its readers need."""
    for name, stream in sorted(facts.streams.items()):
        limit = stream.max_consumers
        if limit <= 0 and facts.server.version >= _HAS_DEFAULT:
            limit = _DEFAULT_MAX_CONSUMERS
        present = {one.name for one in facts.consumers.get(name, ())}
        wanted = _wanted_consumers(facts, name)
        if limit <= 0 or not wanted or len(present | wanted) <= limit:
            continue
        total = len(present | wanted)
        yield Finding(
            rule="max-consumers",
            severity="error",
            where=name,
            what=f"it takes {limit:,} consumers, and its groups and fleets need {total:,}",
            why="the server refuses the rest (10026): their partitions have no reader",
            fix=f"nats stream edit {name} --max-consumers {total + _DEFAULT_MAX_CONSUMERS}",
        )


def slow_filters(facts: DoctorFacts) -> Iterator[Finding]:
    """Consumers with several filters, where the server is slow with them."""
    for name, found in sorted(facts.consumers.items()):
        stream = facts.streams.get(name)
        if stream is None:
            continue
        several = [one for one in found if len(one.filters) > 1]
        if several and stream.storage == "file" and stream.distinct_subjects in _SLOW_ZONE:
            most = max(len(one.filters) for one in several)
            yield Finding(
                rule="slow-filters",
                severity="warning",
                where=name,
                what=f"{len(several)} of its consumers have up to {most} filters, on {stream.distinct_subjects:,} "
                "distinct subjects on disk",
                why="with 100 to 50,000 distinct subjects on disk a second filter makes the server ten times slower",
                fix="use a fleet, which has one consumer for each partition (`keylane fleet run`), as many members as "
                "partitions, or memory storage",
            )
        huge = [one for one in found if len(one.filters) > _MANY_FILTERS]
        if huge:
            yield Finding(
                rule="many-filters",
                severity="warning",
                where=name,
                what=f"consumer {huge[0].name} has {len(huge[0].filters):,} filters",
                why="the server needs seconds to create or change it, and members wait for that when they take over",
                fix="add members, so that each has fewer partitions",
            )


def raft_groups(facts: DoctorFacts) -> Iterator[Finding]:
    """Replicated consumers: each is a Raft group."""
    for fleet in facts.fleets:
        stream = facts.streams.get(fleet.reads)
        count = len(fleet.partitions)
        is_steep = stream is not None and stream.storage == "file" and stream.distinct_subjects in _SLOW_ZONE
        if stream is None or stream.replicas < 2 or fleet.layout != "partition" or not fleet.is_replicated:
            continue
        if count > _RAFT_GROUPS and not is_steep:
            yield Finding(
                rule="raft-groups",
                severity="warning",
                where=fleet.where,
                what=f"its {count:,} partitions have a replicated consumer each",
                why="each is a Raft group: 500 idle ones cost the servers of a cluster 40 % of a core",
                fix='begin a new fleet with `state="checkpointed"`, or with `layout="worker"`',
            )


# ---- groups and fleets ------------------------------------------------------------------------------------


def broken_records(facts: DoctorFacts) -> Iterator[Finding]:
    for group in facts.groups:
        if group.problem is not None:
            yield Finding(
                rule="broken-record",
                severity="error",
                where=group.where,
                what=group.problem,
                why="no member can join, and running ones end at the next change",
                fix=f"keylane {group.kind} delete {group.stream} {group.group} --force, then create it again",
            )
    for fleet in facts.fleets:
        if fleet.problem is not None:
            yield Finding(
                rule="broken-record",
                severity="error",
                where=fleet.where,
                what=fleet.problem,
                why="no worker can join, and partitions do not move",
                fix=f"restore the record from a backup, or delete it: `nats kv del keylane-fleets {fleet.stream}."
                f"{fleet.fleet}.…`",
            )


def missing_streams(facts: DoctorFacts) -> Iterator[Finding]:
    """Records of groups whose stream, or queue, is gone."""
    for group in facts.groups:
        if group.stream not in facts.streams:
            yield Finding(
                rule="stream-missing",
                severity="error",
                where=group.where,
                what=f"there is no stream {group.stream}, but a record of this group",
                why="its members cannot run",
                fix=f"keylane {group.kind} delete {group.stream} {group.group}",
            )
        elif group.kind == "elastic" and group.reads not in facts.streams:
            yield Finding(
                rule="queue-missing",
                severity="error",
                where=group.where,
                what=f"its queue, stream {group.reads}, is gone",
                why="no message reaches the group; what was in the queue is lost to it",
                fix=f"`keylane elastic delete {group.stream} {group.group}`, then create it again: it reads the stream "
                "from its beginning",
            )
    for fleet in facts.fleets:
        if fleet.problem is None and fleet.reads not in facts.streams:
            yield Finding(
                rule="stream-missing",
                severity="error",
                where=fleet.where,
                what=f"stream {fleet.reads}, which it reads, is gone",
                why="its workers cannot run",
                fix="create the stream again, or delete the fleet's records: `nats kv del keylane-fleets "
                f"{fleet.stream}.{fleet.fleet}.spec`",
            )


def shares(facts: DoctorFacts) -> Iterator[Finding]:
    """The number of partitions against the number of members."""
    for group in facts.groups:
        if group.plan.idle:
            idle = group.plan.idle
            yield Finding(
                rule="idle-members",
                severity="warning",
                where=group.where,
                what=f"{len(group.plan.members)} members share {group.partitions} partitions: "
                f"{', '.join(idle[:_SHOWN])} {'owns' if len(idle) == 1 else 'own'} none",
                why="they only wait; the number of partitions of a group is fixed when it is created",
                fix=f"keylane {group.kind} drop {group.stream} {group.group} {' '.join(idle[:_SHOWN])}"
                if group.kind == "elastic"
                else f"make a group with more partitions: `keylane stream create … --partitions {4 * len(idle)}`",
            )
        sizes = [len(owned) for _, owned in group.plan.shares if owned]
        if sizes and not group.plan.idle and max(sizes) > _UNEVEN * min(sizes):
            yield Finding(
                rule="uneven-shares",
                severity="note",
                where=group.where,
                what=f"one member owns {max(sizes)} partitions, another {min(sizes)}",
                why="the largest share sets the pace of the group",
                fix="ten times as many partitions as members makes shares even; a weighted plan evens out hot keys: "
                "`keylane pipeline run skew`",
            )


def unowned(facts: DoctorFacts) -> Iterator[Finding]:
    """Partitions that nobody owns, or whose owner does not run."""
    for group in facts.groups:
        if group.problem is not None:
            continue
        missing = [one for one in range(group.partitions) if group.plan.owner_of(one) is None]
        if missing:
            yield Finding(
                rule="unowned-partitions",
                severity="error",
                where=group.where,
                what=f"partitions {ranges(missing)} belong to no member",
                why="their messages wait until somebody owns them",
                fix=f"keylane elastic add {group.stream} {group.group} MEMBER",
            )
        if (found := facts.consumers.get(group.reads)) is None:
            continue
        by_name = {one.name: one for one in found}
        absent = [
            member for member, owned in group.plan.shares if owned and not _runs(by_name.get(group.consumer(member)))
        ]
        if absent:
            pending = sum(by_name[one].pending for one in map(group.consumer, absent) if one in by_name)
            waits = f", and {pending:,} messages wait" if pending else ""
            name = f"{group.stream} {group.group}"
            yield Finding(
                rule="absent-members",
                severity="error" if pending else "warning",
                where=group.where,
                what=f"no instance of {', '.join(absent[:_SHOWN])}{_more(absent)} runs{waits}",
                why="nobody handles their partitions: a member's partitions do not move to others by themselves",
                fix=f"start them: `keylane {group.kind} consume {name} {absent[0]}`, or your program"
                + (f"; or drop them: `keylane elastic drop {name} {absent[0]}`" if group.kind == "elastic" else ""),
            )
    for fleet in facts.fleets:
        loose = [one for one in fleet.partitions if one not in fleet.owned]
        if fleet.problem is None and loose and not fleet.is_changing:
            yield Finding(
                rule="unowned-partitions",
                severity="error" if not fleet.workers else "warning",
                where=fleet.where,
                what=f"{len(loose):,} of {len(fleet.partitions):,} partitions have no owner; "
                f"{len(fleet.workers)} {'worker runs' if len(fleet.workers) == 1 else 'workers run'}",
                why="their messages wait until a worker claims them",
                fix=f"start workers: `keylane fleet run {fleet.stream} {fleet.fleet} …`; `keylane fleet status "
                f"{fleet.stream} {fleet.fleet}` shows labels and drained workers",
            )


def orphans(facts: DoctorFacts) -> Iterator[Finding]:
    """Consumers, queues and copies of groups and fleets that no longer exist, and of dead workers."""
    for name, found in sorted(facts.consumers.items()):
        known = _wanted_consumers(facts, name)
        fleets = [one for one in facts.fleets if one.reads == name]
        if any(one.problem for one in fleets) or any(one.problem for one in facts.groups if one.reads == name):
            continue  # whose consumers there are is unknown then
        for consumer in found:
            if consumer.pin_group not in (GROUP_PIN, FLEET_PIN) or consumer.name in known:
                continue
            owner = next((one for one in fleets if worker_in(consumer.name, one.fleet) is not None), None)
            if owner is not None and worker_in(consumer.name, owner.fleet) in owner.workers:
                continue
            if consumer.is_pinned or consumer.waiting:
                continue  # somebody reads it, and will end by itself
            whose = (
                f"a worker of fleet {owner.fleet} that runs no more"
                if owner
                else "no group and no fleet of this stream"
            )
            yield Finding(
                rule="orphaned-consumer",
                severity="warning",
                where=name,
                what=f"consumer {consumer.name} belongs to {whose}, and nobody reads it",
                why="it keeps messages of a work queue, counts against max_consumers, and shows a lag that nobody has",
                fix=f"nats consumer rm {name} {consumer.name} --force",
            )
    groups = {one.reads for one in facts.groups if one.kind == "elastic"}
    copies = {one.where for one in facts.fleets}
    for name, stream in sorted(facts.streams.items()):
        is_queue = stream.retention == "workqueue" and any("artition(" in dest for _, dest in stream.source_numberings)
        is_left = is_queue and name not in groups and any(name.startswith(f"{one}-") for one in stream.sources)
        if is_left or (stream.fleet_copy_of is not None and stream.fleet_copy_of not in copies):
            yield Finding(
                rule="orphaned-stream",
                severity="warning",
                where=name,
                what=f"it copies {', '.join(stream.sources) or 'a stream'} for a group or fleet that no longer exists",
                why=f"nobody handles or deletes its {stream.messages:,} messages: it grows for ever",
                fix=f"keylane stream rm {name}",
            )


def collisions(facts: DoctorFacts) -> Iterator[Finding]:
    """Two readers that would share a consumer, a name or a queue."""
    names: dict[tuple[str, str], str] = {}
    for group in facts.groups:
        for member in group.plan.members:
            yield from _taken(names, group.reads, group.consumer(member), f"member {member} of group {group.where}")
    for fleet in facts.fleets:
        for consumer in sorted(fleet.consumers):
            yield from _taken(names, fleet.reads, consumer, f"fleet {fleet.where}")
    readers = [(one.where, f"{one.kind} group") for one in facts.groups] + [
        (one.where, "fleet") for one in facts.fleets
    ]
    for where, count in Counter(where for where, _ in readers).items():
        if count > 1:
            kinds = " and ".join(kind for one, kind in readers if one == where)
            yield Finding(
                rule="name-collision",
                severity="error",
                where=where,
                what=f"a {kinds} have this name",
                why="they share what is kept by name: dead letters, journals, tables of exactly once",
                fix="make one of them again under another name",
            )


def _taken(names: dict[tuple[str, str], str], stream: str, consumer: str, who: str) -> Iterator[Finding]:
    other = names.setdefault((stream, consumer), who)
    if other != who:
        yield Finding(
            rule="name-collision",
            severity="error",
            where=stream,
            what=f"{other} and {who} share the consumer {consumer}",
            why="each gets a part of the other's messages, and both delete and create it for ever",
            fix="make one of them again under another name",
        )


def flapping(facts: DoctorFacts) -> Iterator[Finding]:
    """Pins and leases that time out although their holders live."""
    timeouts = {(one.stream, one.name): one.pin_timeout_s for found in facts.consumers.values() for one in found}
    for (stream, consumer), count in sorted(facts.pin_timeouts.items()):
        if count >= _FLAPS - 1:
            limit = timeouts.get((stream, consumer))
            yield Finding(
                rule="flapping-pin",
                severity="warning",
                where=stream,
                what=f"the pin of consumer {consumer} timed out {count} times in {facts.watched_s:g} s"
                + (f" (timeout {limit:g} s)" if limit else ""),
                why="each time another instance takes over and messages in flight are handled twice",
                fix="join with a larger ack_wait_s (the pin's timeout follows it), or find what blocks the event loop",
            )
    for fleet in facts.fleets:
        if fleet.emergencies >= _FLAPS:
            yield Finding(
                rule="flapping-lease",
                severity="warning",
                where=fleet.where,
                what=f"{fleet.emergencies} times in ten minutes a worker or the leader was taken for dead "
                f"(lease {fleet.lease_s:g} s)",
                why="its partitions move each time, and are handled by nobody for about that long",
                fix=f"`keylane fleet history {fleet.stream} {fleet.fleet}` shows who; machines that pause longer need "
                "a new fleet with a larger lease_s",
            )


def redeliveries(facts: DoctorFacts) -> Iterator[Finding]:
    """Messages in flight that had to be delivered again: ack_wait against the time that handlers take."""
    for name, found in sorted(facts.consumers.items()):
        late = [one for one in found if one.redelivered and one.pin_group in (GROUP_PIN, FLEET_PIN)]
        if late:
            worst = max(late, key=lambda one: one.redelivered)
            yield Finding(
                rule="redeliveries",
                severity="note",
                where=name,
                what=f"{sum(one.redelivered for one in late):,} messages in flight were delivered before, most in "
                f"{worst.name} (ack_wait {worst.ack_wait_s:g} s)",
                why="their reader was lost, or did not say in time that it still works on them",
                fix="if it stays so with no restart: join with an ack_wait_s above the slowest handler's time",
            )


def other_findings(facts: DoctorFacts) -> Iterator[Finding]:
    yield from facts.others


RULES: tuple[Rule, ...] = (
    broken_records,
    missing_streams,
    collisions,
    transforms,
    unowned,
    retention,
    consumer_room,
    discards,
    orphans,
    flapping,
    slow_filters,
    raft_groups,
    shares,
    replication,
    async_persistence,
    duplicate_windows,
    old_server,
    known_faults,
    disk_sync,
    clocks,
    redeliveries,
    permissions,
    other_findings,
)


# ---- small things -----------------------------------------------------------------------------------------


def _read_streams(facts: DoctorFacts) -> Iterator[tuple[DiagnosedStream, list[str]]]:
    """Each stream that groups or fleets read, and their names."""
    for name, stream in sorted(facts.streams.items()):
        readers = [one.group for one in facts.groups if one.stream == name]
        readers += [one.fleet for one in facts.fleets if one.stream == name]
        if readers:
            yield stream, readers


def _numbered_readers(facts: DoctorFacts) -> set[str]:
    """Who relies on partition numbers of the stream itself."""
    static = {one.group for one in facts.groups if one.kind == "static"}
    return static | {one.fleet for one in facts.fleets if one.numbers is not None and one.reads == one.stream}


def _wanted_consumers(facts: DoctorFacts, stream: str) -> set[str]:
    """The consumers that groups and fleets need on a stream."""
    members = {one.consumer(each) for one in facts.groups if one.reads == stream for each in one.plan.members}
    return members.union(*(one.consumers for one in facts.fleets if one.reads == stream))


def _runs(consumer: DiagnosedConsumer | None) -> bool:
    return consumer is not None and (consumer.is_pinned or consumer.waiting > 0)


def _fill(stream: DiagnosedStream) -> float:
    pairs = ((stream.messages, stream.max_messages), (stream.bytes, stream.max_bytes))
    return min(max((held / limit for held, limit in pairs if limit > 0), default=0.0), 1.0)


def _names(readers: list[str]) -> str:
    return ", ".join(readers[:_SHOWN]) + _more(readers)


def _more(names: list[str]) -> str:
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
