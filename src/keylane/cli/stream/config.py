"""The options of `keylane stream create`, named as in the `nats` tool, and the configuration that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from keylane.core.partitions import Partitioning
    from keylane.jetstream import StreamConfig

_RETENTIONS = {"limits": "limits", "interest": "interest", "work": "workqueue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a new stream is like. Each field is one option."""

    subjects: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBJECTS",
            help="What it stores, such as 'orders.>'; several with commas, or repeated. "
            "Default: what --partition-by selects.",
        ),
    ] = None
    partition_by: Annotated[
        str | None,
        typer.Option(
            metavar="FILTER",
            help="Put a partition number in front of these subjects, such as 'orders.*': fleets, static groups and "
            "Marshal need it.",
        ),
    ] = None
    partitions: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many partitions.")] = None
    key: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Which '*' of --partition-by make up the key, such as 1,2. Default: all."),
    ] = None
    storage: Annotated[Literal["file", "memory"], typer.Option(help="Where messages are kept.")] = "file"
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=5, help="How many servers keep each message.")] = 1
    retention: Annotated[
        Literal["limits", "interest", "work"],
        typer.Option(
            help="Until when: limits (below), interest (every consumer has acked), work (a queue: the first ack)."
        ),
    ] = "limits"
    max_age: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Remove messages after this time: 90s, 12h, 30d.")
    ] = None
    max_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="At most this much: 500MB, 10GiB.")] = None
    max_msgs: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most this many messages.")] = None
    max_msgs_per_subject: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most this many messages of each subject.")
    ] = None
    max_msg_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Refuse larger messages: 64KB, 1MiB.")] = None
    discard: Annotated[
        Literal["old", "new"],
        typer.Option(help="What a full stream does: remove old messages, or refuse new ones."),
    ] = "old"
    dupe_window: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long message ids are remembered. Default: the server's, 2 minutes."),
    ] = None
    compression: Annotated[Literal["none", "s2"], typer.Option(help="Compress what is on disk.")] = "none"
    description: Annotated[str | None, typer.Option(metavar="TEXT", help="What it is for.")] = None

    def partitioning(self) -> Partitioning | None:
        """How subjects get their partition number; None: they get none."""
        from keylane.cli.groups.arguments import parse_key
        from keylane.core.partitions import PartitionBy
        from keylane.errors import InvalidInput

        if self.partition_by is None:
            if self.partitions is not None or self.key is not None:
                raise InvalidInput("--partitions and --key need --partition-by, such as --partition-by 'orders.*'")
            return None
        if self.partitions is None:
            raise InvalidInput(
                f"--partition-by {self.partition_by!r} needs --partitions: how many; ten times as many as workers is a "
                "good start"
            )
        return PartitionBy(self.partition_by, parse_key(self.key)).over(self.partitions)

    def config(self, name: str) -> StreamConfig:
        """The stream's configuration. Raises `InvalidInput` if the options do not fit together."""
        from nats.js.api import DiscardPolicy, StoreCompression, SubjectTransform

        from keylane.core.quantities import parse_duration_s, parse_size
        from keylane.jetstream import RetentionPolicy, StorageType, StreamConfig

        partitioning = self.partitioning()
        config = StreamConfig(
            name=name,
            description=self.description,
            subjects=self._subjects(partitioning, name),
            storage=StorageType(self.storage),
            num_replicas=self.replicas,
            retention=RetentionPolicy(_RETENTIONS[self.retention]),
            discard=DiscardPolicy(self.discard),
            max_msgs=self.max_msgs,
            max_bytes=None if self.max_bytes is None else parse_size(self.max_bytes, "--max-bytes"),
            max_age=None if self.max_age is None else parse_duration_s(self.max_age),
            max_msgs_per_subject=self.max_msgs_per_subject or -1,
            max_msg_size=-1 if self.max_msg_size is None else parse_size(self.max_msg_size, "--max-msg-size"),
            compression=StoreCompression(self.compression),
            allow_direct=True,
        )
        if self.dupe_window is not None:
            config.duplicate_window = parse_duration_s(self.dupe_window)
        elif config.max_age is not None:
            config.duplicate_window = min(config.max_age, 120.0)
        if partitioning is not None:
            config.subject_transform = SubjectTransform(src=partitioning.filter, dest=partitioning.destination)
        return config

    def _subjects(self, partitioning: Partitioning | None, name: str) -> list[str]:
        from keylane.core.subjects import is_subset
        from keylane.errors import InvalidInput

        given = [one.strip() for text in self.subjects or () for one in text.split(",")]
        if partitioning is None:
            if not given:
                raise InvalidInput(f"stream {name!r} needs its subjects: --subjects '{name.lower()}.>', for example")
            return given
        for one in given:
            if not is_subset(one, partitioning.filter):
                raise InvalidInput(
                    f"--subjects {one!r} has more than --partition-by {partitioning.filter!r} selects: such messages "
                    "would get no partition number, and no group would see them"
                )
        return given or [partitioning.filter]
