"""`keylane fleet run`: worker processes of a fleet under one supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import ConnectionOptions, connected
from keylane.cli.metrics_port import MetricsOptions

if TYPE_CHECKING:
    from keylane.core.fleet_records import FleetSpec
    from keylane.jetstream import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """Where the partitions of a fleet come from; nothing given: from the fleet, which exists."""

    partitions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Partitions by hash; with --filter."),
    ] = None
    filter: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="The subjects to hash, such as 'orders.*'."),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Which '*' of the filter make up the key, such as 1,2. Default: all."),
    ] = None
    subject: Annotated[list[str] | None, typer.Option(metavar="SUBJECT", help="A partition of its own; repeat it.")] = (
        None
    )
    subjects: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with such subjects, one on each line."),
    ] = None

    discover: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="A partition for each key of the subjects that match."),
    ] = None
    kv: Annotated[
        str | None, typer.Option(metavar="BUCKET/KEY", help="A list of subjects in this KV key, watched.")
    ] = None

    def source(self) -> dict[str, Any] | None:
        """As the fleet's record has it; None if nothing was given."""
        from keylane.cli.groups.arguments import parse_key
        from keylane.core.partitions import PartitionBy
        from keylane.errors import InvalidInput
        from keylane.fleet import discovered, from_kv, listed

        named = [*(self.subject or []), *self._from_file()]
        given = [
            bool(named),
            self.partitions is not None or self.filter is not None,
            bool(self.discover),
            bool(self.kv),
        ]
        if sum(given) > 1:
            raise InvalidInput(
                "partitions come from one source: --partitions and --filter, --subject, --discover or --kv"
            )
        if named:
            return listed(named).to_wire()
        if self.kv:
            return from_kv(*self.kv.partition("/")[::2]).to_wire()
        if self.discover:
            return discovered(PartitionBy(self.discover, parse_key(self.key))).to_wire()
        return self._hashed()

    def _hashed(self) -> dict[str, Any] | None:
        from keylane.cli.groups.arguments import parse_key
        from keylane.core.partitions import PartitionBy
        from keylane.errors import InvalidInput
        from keylane.fleet import hashed

        if self.partitions is None and self.filter is None and self.key is None:
            return None
        if self.partitions is None or self.filter is None:
            raise InvalidInput(
                "partitions by hash need --partitions and --filter, such as --partitions 32 --filter 'orders.*'"
            )
        return hashed(self.partitions, PartitionBy(self.filter, parse_key(self.key))).to_wire()

    def _from_file(self) -> list[str]:
        from keylane.errors import InvalidInput

        if self.subjects is None:
            return []
        try:
            lines = self.subjects.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidInput(f"--subjects {self.subjects}: {error.strerror}") from None
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRunOptions:
    """How the workers handle messages: the options of `fleet.join`."""

    label: Annotated[list[str] | None, typer.Option(metavar="LABEL", help="A label of the workers; repeat it.")] = None
    strategy: Annotated[
        str, typer.Option(help="How partitions are shared: consistent, weighted, sticky or round_robin.")
    ] = "consistent"
    layout: Annotated[
        str | None,
        typer.Option(help="What has a consumer: partition, worker or auto. Else as the fleet, or partition."),
    ] = None
    acks: Annotated[
        str | None,
        typer.Option(help="What is committed: message or prefix. Else as the fleet, or message."),
    ] = None
    state: Annotated[str, typer.Option(help="Where consumers keep their state: replicated, checkpointed or auto.")] = (
        "auto"
    )
    concurrency: Annotated[int, typer.Option(min=1, help="Handlers that run in one worker.")] = 64
    max_ack_pending: Annotated[int, typer.Option(min=1, help="Messages in flight in one worker.")] = 500
    max_tries: Annotated[
        int | None, typer.Option(min=1, help="Tries before a message becomes a dead letter; else for ever.")
    ] = None
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="How long a handler may take.")
    ] = None
    executor: Annotated[str, typer.Option(help="Where a plain function runs: thread or process.")] = "thread"
    lease: Annotated[
        float | None, typer.Option(min=0.5, metavar="SECONDS", help="How long a dead worker keeps its partitions.")
    ] = None
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long handlers may go on after the lease is lost.")
    ] = 1.0
    stop_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long handlers may take to finish at a stop.")
    ] = 25.0

    def join_options(self, stored: FleetSpec | None) -> dict[str, Any]:
        """What is not given is as in the fleet, if it exists. `join` checks the values, and chooses a state itself."""
        options = {
            "labels": self.label or [],
            "strategy": self.strategy,
            "layout": self.layout or (stored.layout if stored is not None else None),
            "acks": self.acks or (stored.acks if stored is not None else None),
            "state": self.state,
            "concurrency": self.concurrency,
            "max_ack_pending": self.max_ack_pending,
            "max_tries": self.max_tries,
            "time_limit_s": self.time_limit,
            "executor": self.executor,
            "lease_s": self.lease or (stored.lease_s if stored is not None else None),
            "grace_s": self.grace,
            "stop_timeout_s": self.stop_timeout,
        }
        return {name: value for name, value in options.items() if value is not None}


def run_fleet(
    handler: str,
    stream: str,
    fleet: str,
    *,
    workers: int,
    name: str | None,
    log_json: bool,
    partitions: PartitionOptions,
    options: FleetRunOptions,
    metrics: MetricsOptions,
    link: ConnectionOptions,
) -> None:
    """Check all that can be checked, then run the workers until a signal."""
    from keylane.cli.command import exit_on_invalid_input
    from keylane.cli.fleet.worker import TARGET, link_settings
    from keylane.cli.worker_processes import run_workers
    from keylane.core.fleet_names import check_fleet_name
    from keylane.core.names import check_stream_name
    from keylane.errors import InvalidInput

    with exit_on_invalid_input():
        check_stream_name(stream)
        check_fleet_name(fleet)
        source = partitions.source()
        metrics.check()
    stored = connected(link, lambda connection: _stored(connection, stream, fleet))
    with exit_on_invalid_input():
        if source is None and stored is None:
            raise InvalidInput(
                f"stream {stream!r} has no fleet {fleet!r} yet: say what its partitions are, such as "
                "--partitions 32 --filter 'orders.*'"
            )
    settings = {
        "handler": handler,
        "stream": stream,
        "fleet": fleet,
        "source": source if source is not None or stored is None else stored.source,
        "join": options.join_options(stored),
        "link": link_settings(link),
    }
    run_workers(
        TARGET,
        settings,
        workers=workers,
        name=name,
        log_json=log_json,
        stop_timeout_s=options.stop_timeout,
        metrics=metrics,
        labels=(stream, fleet),
    )


async def _stored(connection: Connection, stream: str, fleet: str) -> FleetSpec | None:
    from keylane.fleet import stored_spec
    from keylane.jetstream import streams

    await streams.info(connection, stream)
    return await stored_spec(connection, stream, fleet)
