"""`join`: take part in a fleet. Checks what cannot work before anything starts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from keylane.awaitable_context import awaitable_context
from keylane.core.assignment_strategies import Strategy
from keylane.core.consumer_filters import SUBJECT_CAP
from keylane.core.fleet_layout import Layout, StreamShape, choose_layout
from keylane.core.fleet_leader import LeaderWindows
from keylane.core.fleet_names import check_fleet_name, check_label, partition_consumer
from keylane.core.fleet_partitions import (
    DiscoveredPartitions,
    HashedPartitions,
    KvPartitions,
    Partition,
    PartitionSource,
    source_from_wire,
)
from keylane.core.fleet_records import SPEC, FleetSpec, read_spec
from keylane.core.fleet_state import State, choose_state
from keylane.core.names import check_stream_name
from keylane.core.parked_keys import AfterTries
from keylane.core.partitions import Partitioning, parse_transform
from keylane.dispatch import Executor
from keylane.errors import ApiError, BrokenFleetRecord, FleetError, InvalidInput
from keylane.fleet.admin import stored_spec
from keylane.fleet.collisions import refuse_collisions
from keylane.fleet.consumer_limit import TOO_MANY_CONSUMERS, ensure_room
from keylane.fleet.partition_reader import ReaderOptions
from keylane.fleet.partition_source import KvLookup, PartitionLookup, SourceKeeper, SubjectLookup, first_look
from keylane.fleet.partition_table import FleetPartitions
from keylane.fleet.pinned_consumer import PIN_GROUP
from keylane.fleet.planner import FleetPlanner
from keylane.fleet.positions import CHECKPOINT_S
from keylane.fleet.repartition import GenerationKeeper
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.store import FLEET_BUCKET
from keylane.fleet.stream_copy import CopyKeeper, ensure_copy
from keylane.fleet.worker import Worker, WorkerHooks, identity_of
from keylane.fleet.worker_layout import WorkerLayoutOptions
from keylane.groups import can_store
from keylane.jetstream import (
    Bucket,
    Connection,
    ConsumerConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    check_seconds,
    consumers,
    existing_stream,
    streams,
)
from keylane.processing.dead_letters import DeadLetters
from keylane.processing.delayed_retries import with_delayed_retries
from keylane.processing.handler_options import Commits, Handler, HandlerOptions, MessageJournal
from keylane.processing.joined import STOP_TIMEOUT_S
from keylane.processing.key_parking import with_parking
from keylane.processing.message import Place, Placing, placing_by
from keylane.processing.message_processor import handler_call

ACK_WAIT_S = 30.0
MAX_ACK_PENDING = 500
PIN_TIMEOUT_S = 60.0
"""The lease decides about failure, so the pin may last: an idle partition costs the server a pull every 30 s."""
LEASE_S = 3.0
_MOST_SUBJECTS = 100_000
"""With more, a look at all of them would hold the first worker up."""
_TRIAL_S = 10.0

_log = logging.getLogger("keylane.fleet")


@awaitable_context
async def join(
    connection: Connection,
    stream: str,
    fleet: str,
    handler: Handler,
    *,
    partitions: PartitionSource,
    name: str | None = None,
    labels: Iterable[str] = (),
    strategy: Strategy = "consistent",
    layout: Layout | Literal["auto"] = "partition",
    max_subjects: int = SUBJECT_CAP,
    split_consumer: bool = False,
    acks: Commits = "message",
    state: State | Literal["auto"] = "auto",
    checkpoint_s: float = CHECKPOINT_S,
    concurrency: int = 64,
    max_ack_pending: int = MAX_ACK_PENDING,
    max_tries: int | None = None,
    retry_delays: Sequence[float] | None = None,
    after_tries: AfterTries = "dead_letter",
    time_limit_s: float | None = None,
    executor: Executor = "thread",
    lease_s: float = LEASE_S,
    grace_s: float = 1.0,
    stop_timeout_s: float = STOP_TIMEOUT_S,
    journal: MessageJournal | None = None,
    hooks: WorkerHooks | None = None,
) -> Worker:
    """Take part in a fleet: start as many workers as you like, and they share the partitions by themselves.

    The first worker creates the fleet; the others must bring the same `partitions` and `lease_s`. Every worker gets an
    id such as `billing-3`. One that is stopped hands its partitions over and keeps its id reserved for 30 s; one that
    dies loses its partitions when its lease ends, `lease_s` after its last sign of life.

    `layout`: `"partition"` gives each partition a consumer, `"worker"` each worker one for all its partitions, with at
    most `max_subjects` filters, or a second consumer where `split_consumer` allows it. `"auto"` chooses when the fleet
    is created (docs/fleet.md says how).

    `acks`: `"message"` acks every message, and a crash repeats the fewest. `"prefix"` commits the contiguous handled
    prefix of a partition with one ack, which costs the server half as much; a crash repeats everything above it. It
    needs a stream with limits retention. A planned change repeats nothing with either.

    `state`: `"replicated"` gives the consumers the replicas of the stream. `"checkpointed"` keeps them in memory with
    one replica, and positions in the fleet's bucket, every `checkpoint_s` and whenever a partition moves: the servers
    carry thousands of partitions. `"auto"` takes the second for more than 100 partitions of a replicated stream.

    `max_ack_pending` bounds what is in flight in this worker, over all its partitions (docs/fleet.md).

    A message that failed `max_tries` times becomes a dead letter, and its key goes on; without, it is tried for ever.
    With `after_tries="park"` the key stops there instead: its later messages are stored behind the failed one, in
    order, until `keylane dlq release`, and other keys go on. All workers of the fleet need the same `after_tries`.

    `retry_delays=(5, 60, 600)`: where the order of a key does not matter, a failed message leaves its lane and is tried
    again 5 s later, then 60 s, then 600 s, by any worker; after that it is a dead letter (docs/retries.md).

    The handler gets the messages of a key in their order. When it returns, the message is acked; when it raises, the
    message is tried again while later messages of its key wait. `message.origin.revision` is the fencing token of its
    partition: it grows with every change of owner.

    >>> orders = hashed(32, "orders.*")
    >>> async with fleet.join(connection, "ORDERS", "billing", handler, partitions=orders) as worker:
    ...     await worker.wait()
    """
    hooks = hooks or WorkerHooks()
    check_stream_name(stream)
    check_fleet_name(fleet)
    check_seconds(lease_s, "lease_s")
    check_seconds(checkpoint_s, "checkpoint_s")
    _check_choices(strategy, acks, state)
    _check_layout(layout, max_subjects, acks)
    _check_source(partitions)
    connection.require("consumer_reset")
    info = await existing_stream(connection, stream)
    replicas = info.config.num_replicas or 1
    bucket = Bucket(connection, FLEET_BUCKET)
    await bucket.ensure(replicas=replicas)
    source = await _agreed_source(connection, stream, fleet, partitions)
    reads, config = stream, info.config
    if copies := isinstance(source, HashedPartitions) and source.copy is not None:
        is_new = await stored_spec(connection, stream, fleet) is None
        reads = await ensure_copy(connection, config, fleet, source, is_new=is_new)
        config = (await streams.info(connection, reads)).config
    known = FleetPartitions(connection, stream, fleet, source)
    lookup = _lookup(connection, stream, source, known)
    await known.read()
    if lookup is not None:
        await first_look(lookup, known)
    await _check_stored(connection, fleet, config, known)
    is_queue = config.retention == RetentionPolicy.WORK_QUEUE
    layout = await _resolved_layout(connection, stream, fleet, layout, config=config, known=known, copies=copies)
    names = _consumer_names(fleet, layout, known)
    await refuse_collisions(connection, stream, fleet, names)
    if layout == "worker":
        state = "replicated"  # of the few consumers; positions are recorded in any case
    else:
        acks = await _resolved_acks(connection, reads, names, acks, is_queue=is_queue)
        state = await _resolved_state(bucket, stream, fleet, state, choice=choose_state(replicas, len(names)))
    _check_journal(journal, stream)
    terms = HandlerOptions(
        order="key",
        concurrency=concurrency,
        ack_wait_s=ACK_WAIT_S,
        remember=2 * max_ack_pending,
        max_tries=max_tries,
        time_limit_s=time_limit_s,
        executor=executor,
        grace_s=grace_s,
        on_failure=hooks.on_failure,
        give_up=DeadLetters(connection, stream, fleet).give_up,
        on_crowded=hooks.on_crowded,
        journal=journal,
        commits=acks,
        tracks_position=not is_queue and layout == "partition",
        on_returned=hooks.on_returned,
        on_outcome=hooks.on_outcome,
        on_reset=hooks.on_reset,
    )
    terms, retries = await with_delayed_retries(
        connection,
        stream,
        fleet,
        terms,
        retry_delays,
        after_tries=after_tries,
        order="key",
        needs_order=getattr(handler, "needs_order", False),
    )
    terms, parking = await with_parking(connection, stream, fleet, terms, after_tries)
    call = handler_call(handler, terms)
    await call.start()
    worker = Worker(
        connection,
        stream,
        fleet,
        spec=FleetSpec(source=source.to_wire(), prefix=fleet, lease_s=lease_s, layout=layout, acks=acks, state=state),
        identity=identity_of(name, [check_label(label) for label in labels]),
        planner=lambda offset_s: FleetPlanner(lambda: known.current, strategy, LeaderWindows(), offset_s),
        partitions=known,
        place_of=_places(source),
        reader_options=ReaderOptions(
            stream=reads,
            is_queue=is_queue,
            ack_wait_s=ACK_WAIT_S,
            max_ack_pending=max_ack_pending,
            pin_timeout_s=PIN_TIMEOUT_S,
            commits=acks,
            is_checkpointed=state == "checkpointed",
            on_delivered=hooks.on_delivered,
        ),
        worker_layout=WorkerLayoutOptions(
            terms=ConsumerTerms(
                stream=stream,
                is_queue=is_queue,
                ack_wait_s=ACK_WAIT_S,
                max_ack_pending=max_ack_pending,
                pin_timeout_s=PIN_TIMEOUT_S,
            ),
            max_subjects=max_subjects,
            split_consumer=split_consumer,
        ),
        call=call,
        handling=terms,
        hooks=hooks,
        stop_timeout_s=stop_timeout_s,
        checkpoint_s=checkpoint_s,
        parking=parking,
        retries=retries,
    )
    if lookup is not None:
        worker.keep(SourceKeeper(lookup, known, worker.report_source))
    if copies:
        worker.keep(CopyKeeper(connection, info.config, fleet, known))
    if isinstance(source, HashedPartitions) and layout == "partition":
        keeper = GenerationKeeper(
            connection,
            stream,
            fleet,
            known,
            view=worker.view,
            is_held=worker.claimer.is_held,
            leads=worker.leads_surely,
        )
        worker.keep(keeper)
    worker.start()
    return worker


def _check_layout(layout: str, max_subjects: int, acks: str) -> None:
    if layout not in (*get_args(Layout), "auto"):
        raise InvalidInput(f"layout is {layout!r}: use one of {', '.join(get_args(Layout))}, auto")
    if max_subjects < 1:
        raise InvalidInput(f"max_subjects is {max_subjects}: a consumer needs at least 1 filter")
    if layout == "worker" and acks != "message":
        raise InvalidInput("layout='worker' acks every message: its consumer is of many partitions; leave out acks")


def _consumer_names(fleet: str, layout: Layout, known: FleetPartitions) -> list[str]:
    if layout == "worker":
        return [f"{fleet}-{number}" for number in range(FleetSpec(source={}).pool)]
    return [partition_consumer(fleet, one.id) for one in known.current]


async def _resolved_layout(
    connection: Connection,
    stream: str,
    fleet: str,
    layout: Layout | Literal["auto"],
    *,
    config: StreamConfig,
    known: FleetPartitions,
    copies: bool,
) -> Layout:
    """`config`: of the stream that is read."""
    if copies and layout == "worker":
        raise FleetError(
            f"fleet {fleet!r} reads a copy of stream {stream!r}, which is trimmed by the consumers of its partitions: "
            "use layout='partition'"
        )
    if layout != "auto":
        return layout
    if copies:
        return "partition"
    return await _stored_layout(connection, stream, fleet) or await _chosen_layout(connection, config, known)


async def _stored_layout(connection: Connection, stream: str, fleet: str) -> Layout | None:
    """What the fleet was created with; None: it is created now."""
    spec = await stored_spec(connection, stream, fleet)
    if spec is None:
        return None
    return "worker" if spec.layout == "worker" else "partition"


async def _check_stored(connection: Connection, fleet: str, config: StreamConfig, known: FleetPartitions) -> None:
    """A new fleet begins with what is stored, and numbers of an earlier number of partitions are not among its own."""
    check_stream(config, known)
    source, stream = known.source, str(config.name)
    if not isinstance(source, HashedPartitions) or source.copy is not None:
        return
    if await stored_spec(connection, stream, fleet) is not None:
        return
    wanted = source.partitioning
    if (await streams.info_json(connection, stream))["state"].get("num_subjects", 0) > _MOST_SUBJECTS:
        return
    counts = await streams.subject_counts(connection, stream, f"*.{wanted.filter}")
    numbers = {subject: int(first) for subject in counts if (first := subject.split(".", 1)[0]).isdecimal()}
    strange = {subject: number for subject, number in numbers.items() if number >= wanted.partitions}
    if strange:
        _log.warning(
            "stream %r holds %d messages with partition numbers from %d to %d, of an earlier number of partitions: "
            "fleet %r has %d partitions and will not handle them",
            stream,
            sum(counts[subject] for subject in strange),
            min(strange.values()),
            max(strange.values()),
            fleet,
            wanted.partitions,
        )


async def _chosen_layout(connection: Connection, config: StreamConfig, known: FleetPartitions) -> Layout:
    wire = await streams.info_json(connection, str(config.name))
    choice = choose_layout(
        StreamShape(
            in_files=config.storage != StorageType.MEMORY,
            replicas=config.num_replicas or 1,
            subjects=wire["state"].get("num_subjects", 0),
            partitions=len(known.current),
        )
    )
    _log.info("layout %s: %s", choice.layout, choice.reason)
    return choice.layout


def _check_journal(journal: MessageJournal | None, stream: str) -> None:
    if journal is not None and journal.stream != stream:
        raise InvalidInput(f"the journal is that of stream {journal.stream!r}: stream {stream!r} needs its own")


def _check_source(partitions: object) -> None:
    if not isinstance(partitions, PartitionSource):
        raise InvalidInput(f"partitions is {partitions!r}: use hashed(…), listed(…), discovered(…) or from_kv(…)")


def _check_choices(strategy: str, acks: str, state: str) -> None:
    for name, given, known in (
        ("strategy", strategy, get_args(Strategy)),
        ("acks", acks, get_args(Commits)),
        ("state", state, (*get_args(State), "auto")),
    ):
        if given not in known:
            raise InvalidInput(f"{name} is {given!r}: use one of {', '.join(known)}")


async def _resolved_acks(
    connection: Connection, stream: str, names: list[str], acks: Commits, *, is_queue: bool
) -> Commits:
    await ensure_room(connection, stream, names)
    return await _prefix_or_message(connection, stream, is_queue=is_queue) if acks == "prefix" else acks


async def _resolved_state(
    bucket: Bucket, stream: str, fleet: str, state: State | Literal["auto"], *, choice: State
) -> State:
    if state != "auto":
        return state
    return await _stored_state(bucket, stream, fleet) or choice


async def _stored_state(bucket: Bucket, stream: str, fleet: str) -> State | None:
    """What the fleet was created with; None: it is created now. What cannot be read is refused later."""
    entry = await bucket.get(f"{stream}.{fleet}.{SPEC}")
    if entry is None or entry.value is None:
        return None
    try:
        return "checkpointed" if read_spec(entry.value).state == "checkpointed" else "replicated"
    except BrokenFleetRecord:
        return None


async def _prefix_or_message(connection: Connection, stream: str, *, is_queue: bool) -> Commits:
    """Whether the server takes a pinned consumer that acks all: the design of pins asks for explicit acks."""
    if is_queue:
        raise FleetError(
            f"stream {stream!r} is a work queue, which takes no consumer that acks all up to a message: join with "
            "acks='message', or use a stream with limits retention"
        )
    trial = ConsumerConfig(
        name=f"trial-{secrets.token_hex(8)}",
        deliver_policy="new",
        ack_policy="all",
        inactive_threshold_s=_TRIAL_S,
        num_replicas=1,
        mem_storage=True,
        priority_groups=(PIN_GROUP,),
        priority_policy="pinned_client",
        priority_timeout_s=PIN_TIMEOUT_S,
    )
    try:
        made = await consumers.create(connection, stream, trial)
    except ApiError as error:
        if error.is_transient or error.err_code == TOO_MANY_CONSUMERS:
            raise
        _log.warning(
            "fleet of stream %r: the server takes no pinned consumer that acks all up to a message (%s); every "
            "message is acked instead, as with acks='message'",
            stream,
            error,
        )
        return "message"
    await consumers.delete(connection, stream, made.name)
    return "prefix"


async def _agreed_source(connection: Connection, stream: str, fleet: str, given: PartitionSource) -> PartitionSource:
    """The fleet's own source where the given one differs in a number of partitions that the fleet has had, or gets.

    So workers that were started with the old number and with the new one can share a fleet while it is deployed.
    """
    spec = await stored_spec(connection, stream, fleet)
    if spec is None or not isinstance(given, HashedPartitions):
        return given
    stored = source_from_wire(spec.source)
    if not isinstance(stored, HashedPartitions):
        return given
    known = FleetPartitions(connection, stream, fleet, stored)
    await known.read()
    number = given.partitioning.partitions
    present = known.table.target or known.table.generations[-1].partitions
    if number not in known.table.numbers:
        raise FleetError(
            f"fleet {fleet!r} of stream {stream!r} has {present} partitions, and this worker asks for {number}: join "
            f"with {present}, or change the fleet first: `keylane fleet repartition {stream} {fleet} {number}`"
        )
    if number != present:
        _log.warning(
            "fleet %r of stream %r has %d partitions: this worker asked for %d and uses those of the fleet",
            fleet,
            stream,
            present,
            number,
        )
    first = replace(given.partitioning, partitions=stored.partitioning.partitions)
    return replace(given, partitioning=first)


def _lookup(
    connection: Connection, stream: str, source: PartitionSource, known: FleetPartitions
) -> PartitionLookup | None:
    match source:
        case KvPartitions():
            return KvLookup(connection, source)
        case DiscoveredPartitions():
            return SubjectLookup(connection, stream, source, known)
    return None


def _places(source: PartitionSource) -> Callable[[Partition], Placing]:
    if isinstance(source, HashedPartitions):
        place = placing_by([source.partitioning], whole_subject=not source.partitioning.wildcards)
        return lambda _: place
    return _one_lane


def _one_lane(partition: Partition) -> Placing:
    """A partition that is a subject of its own is one lane: what in its subjects is a key, nobody has said."""
    number = int(partition.id.rsplit("-", 1)[-1], 16) & 0x7FFF_FFFF  # databases and journals keep 32 bits

    def place(raw_subject: bytes) -> Place:
        return Place.of(number, raw_subject.decode("utf-8", "surrogateescape"), partition.id)

    return place


def check_stream(config: StreamConfig, known: FleetPartitions) -> None:
    """Raise `FleetError` if a fleet cannot read its partitions from a stream with this configuration."""
    source, found = known.source, known.current
    if config.retention == RetentionPolicy.INTEREST:
        raise FleetError(
            f"stream {config.name!r} has interest retention, which deletes a message that is published before the "
            "consumer of its partition exists: use a stream with work queue or limits retention"
        )
    if isinstance(source, HashedPartitions):
        _check_numbers(config, source.partitioning, set(known.table.numbers))
    lacking = next((one.filter for one in found if can_store(config, one.filter) is False), None)
    if lacking is not None:
        raise FleetError(
            f"stream {config.name!r} stores no subject that matches {lacking!r}: look at the filter, and at the "
            "stream's subjects"
        )


def _check_numbers(config: StreamConfig, wanted: Partitioning, numbers: set[int]) -> None:
    """The stream must number its subjects as the fleet counts them: another number of partitions loses messages."""
    transform = config.subject_transform
    known = parse_transform(transform.src or ">", transform.dest) if transform is not None and transform.dest else None
    if known is None and can_store(config, f"0.{wanted.filter}") is False:
        raise FleetError(
            f"stream {config.name!r} puts no partition number in front of its subjects: give it a subject transform "
            f"from {wanted.filter!r} to {wanted.destination!r}"
        )
    if known is not None and known.partitions not in numbers:
        raise FleetError(
            f"stream {config.name!r} numbers {known.partitions} partitions, and the fleet asks for "
            f"{wanted.partitions}: ask for {known.partitions}"
        )
    if known is not None and known.filter == wanted.filter and known.wildcards != wanted.wildcards:
        raise FleetError(
            f"stream {config.name!r} hashes the wildcards {list(known.wildcards)} of {known.filter!r}, and the fleet's "
            f"key is {list(wanted.wildcards)}: messages of one key would be in several partitions"
        )
