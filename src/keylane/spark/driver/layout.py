"""What exactly is read: the stream, its subject filters, what the keys are, and how messages are read. Pure.

Where stored subjects begin with a partition number, each partition is one filter. Such a stream may also hold messages
without a number: older than its transform, or outside of the transform's source. Unless partitions are asked for by
name, these belong to the read too, so they get filters of their own: by their first token, which is not a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keylane.core.partitions import Partitioning, parse_transform, partition_filters
from keylane.core.subjects import is_subset
from keylane.errors import InvalidInput, NotAMember
from keylane.groups import ElasticConfig, StaticConfig
from keylane.spark.options import ReadOptions, SplitBy

GroupRecord = StaticConfig | ElasticConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """What is read. `whole`: the filters leave nothing of the stream out."""

    stream: str
    way: Literal["consumer", "direct"]
    numbered: bool
    partitioning: tuple[Partitioning, ...]
    subject_filters: tuple[str | None, ...]
    split_by: SplitBy
    whole: bool

    @property
    def is_queue(self) -> bool:
        """Whether messages leave the stream when they are handled."""
        return self.way == "direct"


@dataclass(frozen=True, slots=True)
class Numbering:
    """What a stream's configuration says about numbers in front of its subjects."""

    partitioning: tuple[Partitioning, ...]
    unnumbered: tuple[str, ...]
    """First tokens of subjects that get no number, where a filter can distinguish them from those that do."""
    mixed: bool
    """Other subjects get no number either, and no filter can distinguish them."""

    @property
    def partitions(self) -> int:
        return max((one.partitions for one in self.partitioning), default=0)


def numbering(config: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> Numbering:
    """Read a stream's configuration, as the server reports it; `origin` is that of the stream it mirrors unchanged."""
    found: list[Partitioning] = []
    uncovered: list[str] = []
    own = config.get("subject_transform") or {}
    covered = _read(own, found)
    uncovered += [one for one in config.get("subjects") or () if covered is None or not is_subset(one, covered)]
    for other in (*([config["mirror"]] if config.get("mirror") else ()), *(config.get("sources") or ())):
        transforms = other.get("subject_transforms") or ()
        uncovered += [one.get("src") or ">" for one in transforms if _read(one, found) is None]
        if not transforms:
            copied = numbering(origin) if origin is not None else None
            if copied is not None and copied.partitioning:
                found += copied.partitioning
                uncovered += [f"{token}.>" for token in copied.unnumbered] + [">"] * copied.mixed
            else:
                uncovered.append(other.get("filter_subject") or ">")
    tokens = {one.split(".", 1)[0] for one in uncovered}
    apart = tuple(sorted(token for token in tokens if token not in ("*", ">") and not _is_number(token)))
    return Numbering(tuple(dict.fromkeys(found)), apart, mixed=len(apart) < len(tokens))


def lay_out(
    options: ReadOptions,
    config: Mapping[str, Any],
    group: GroupRecord | None,
    numbers: Numbering,
    stored: Iterable[str] = (),
) -> Layout:
    """What the options ask for, of the stream with this configuration: the group's queue where that is read.

    `stored` are subjects of the stream as they are stored, as far as they are known: they show what an earlier
    configuration left behind. Raises `InvalidInput` for what this stream cannot give.
    """
    if isinstance(group, ElasticConfig) and not options.queue:
        _check_reads_the_stream(options)
        return _plain(options, config, _partitioning(group, numbers))
    if group is None and not numbers.partitioning:
        return _plain(options, config, (options.keys,) if options.keys is not None else ())
    if options.keys is not None:
        raise InvalidInput(
            f"option 'keyFilter' is {options.keys.filter!r}: the subjects of stream {config['name']!r} carry partition "
            "numbers, which also define the key; leave keyFilter, keyWildcards and keyPartitions out"
        )
    known = group.partitions if group is not None else numbers.partitions
    filters = _filters(options, group)
    chosen = _chosen(options, group, known)
    every = chosen is None
    unnumbered: Sequence[str] = ()
    partitions: Sequence[int] = chosen if chosen is not None else range(known)
    if every and group is None:
        partitions, unnumbered = _left_behind(numbers, stored)
    split_by = _split_by(options, mixed=every and group is None and numbers.mixed)
    if split_by == "sequence" and every and not filters and group is None:
        subject_filters: tuple[str | None, ...] = (None,)
    else:
        numbered = partition_filters(partitions, filters)
        if split_by == "sequence" and every and not unnumbered:
            numbered = [f"*.{one}" for one in filters or (">",)]
        subject_filters = (*numbered, *_within(unnumbered, filters))
    return Layout(
        stream=config["name"],
        way=_way(config),
        numbered=True,
        partitioning=_partitioning(group, numbers),
        subject_filters=subject_filters,
        split_by=split_by,
        whole=every and not filters,
    )


def _left_behind(numbers: Numbering, stored: Iterable[str]) -> tuple[list[int], list[str]]:
    """All partitions that the stream may hold, and filters for what has no number."""
    partitions = set(range(numbers.partitions))
    unnumbered = set(numbers.unnumbered)
    alone = set()
    for subject in stored:
        token, dot, _ = subject.partition(".")
        if not _is_number(token):
            unnumbered.add(token)
        elif dot:
            partitions.add(int(token))
        else:
            alone.add(token)  # a number alone is a subject, not a partition
    below = [one for token in sorted(unnumbered) for one in (token, f"{token}.>")]
    return sorted(partitions), [*below, *sorted(alone)]


def _check_reads_the_stream(options: ReadOptions) -> None:
    """Refuse what only the queue of an elastic group can give."""
    for name, given in (("member", options.member), ("partitions", options.partitions)):
        if given is not None:
            raise InvalidInput(
                f"option {name!r} is given, but the partitions of elastic group {options.group!r} are not in the "
                f"subjects of stream {options.stream!r}: select rows by the column 'partition', or give queue=true to "
                "read the group's queue"
            )
    if options.acknowledge:
        raise InvalidInput(
            f"option 'acknowledge' is true, and the query reads stream {options.stream!r}, not the queue of group "
            f"{options.group!r}: give queue=true to read and acknowledge the queue, or leave 'acknowledge' out"
        )


def _plain(options: ReadOptions, config: Mapping[str, Any], partitioning: tuple[Partitioning, ...]) -> Layout:
    name = config["name"]
    if options.partitions is not None:
        raise InvalidInput(
            f"option 'partitions' is given, but the subjects of stream {name!r} carry no partition numbers: leave it "
            "out, or give the group whose partitions you mean"
        )
    if options.split_by == "partition":
        raise InvalidInput(
            f"option 'splitBy' is 'partition', but the subjects of stream {name!r} carry no partition numbers: use "
            "splitBy=sequence"
        )
    return Layout(
        stream=name,
        way=_way(config),
        numbered=False,
        partitioning=partitioning,
        subject_filters=options.filters or (None,),
        split_by="sequence",
        whole=not options.filters,
    )


def _split_by(options: ReadOptions, *, mixed: bool) -> SplitBy:
    if not mixed:
        return options.split_by or "partition"
    if options.split_by == "partition":
        raise InvalidInput(
            f"option 'splitBy' is 'partition', but some subjects of stream {options.stream!r} get no partition number, "
            "and no filter can distinguish them: use splitBy=sequence, or name the 'partitions' to read"
        )
    return "sequence"


def _chosen(options: ReadOptions, group: GroupRecord | None, known: int) -> Sequence[int] | None:
    """The partitions that the options name; None for all."""
    if options.member is not None:
        assert group is not None
        if not group.has_member(options.member):
            raise NotAMember(
                f"option 'member' is {options.member!r}: group {options.group!r} has "
                f"{', '.join(group.plan.members) or 'no members'}"
            )
        owned = tuple(group.plan.partitions_of(options.member))
        if not owned:
            raise InvalidInput(
                f"option 'member' is {options.member!r}: it owns no partition, so it has nothing to read"
            )
        return owned
    for one in options.partitions or ():
        if one >= known:
            raise InvalidInput(f"option 'partitions' names {one}: there are partitions 0 to {known - 1}")
    return options.partitions


def _filters(options: ReadOptions, group: GroupRecord | None) -> tuple[str, ...]:
    """The filters behind the partition number: the options', within those of a static group."""
    # Members in the old dialect of the Go library ask for whole partitions.
    given = group.filters if isinstance(group, StaticConfig) and group.dialect == "present" else ()
    for one in options.filters if given else ():
        if not any(is_subset(one, outer) for outer in given):
            raise InvalidInput(
                f"option 'filter' has {one!r}, which is not within the filters of group {options.group!r} "
                f"({', '.join(given)}): narrow it, or read the stream without the group"
            )
    return options.filters or given


def _partitioning(group: GroupRecord | None, numbers: Numbering) -> tuple[Partitioning, ...]:
    if isinstance(group, ElasticConfig):
        return group.partitioning or (Partitioning(">", (), group.partitions),)
    return numbers.partitioning


def _way(config: Mapping[str, Any]) -> Literal["consumer", "direct"]:
    """A consumer of a work queue or an interest stream would take messages away, so these are read by direct get."""
    if config.get("retention", "limits") == "limits":
        return "consumer"
    if not config.get("allow_direct"):
        raise InvalidInput(
            f"stream {config['name']!r} has retention {config['retention']!r} and no allow_direct: it can be read "
            "neither by a consumer, which would take messages away, nor directly; set allow_direct on the stream"
        )
    return "direct"


def _within(unnumbered: Iterable[str], filters: Sequence[str]) -> list[str]:
    """What the filters select of subjects without a number, which are given as `token`, `token.>`."""
    if not filters:
        return list(unnumbered)
    found: dict[str, None] = {}
    for one in unnumbered:
        token = one.split(".", 1)[0]
        for each in filters:
            first, _, rest = each.partition(".")
            narrowed = one if first == ">" else f"{token}.{rest}" if rest else token
            if first in (">", "*", token) and is_subset(narrowed, one):
                found[narrowed] = None
    return list(found)


def _read(transform: Mapping[str, Any], found: list[Partitioning]) -> str | None:
    """The source of a transform that numbers its subjects; adds what it says to `found`."""
    if not transform:
        return None
    source = transform.get("src") or ">"
    try:
        partitioning = parse_transform(source, transform.get("dest") or source)
    except InvalidInput:
        return None  # the number cannot be read back, so the subject counts as it is
    if partitioning is None:
        return None
    found.append(partitioning)
    return source


def _is_number(text: str) -> bool:
    """Whether the server could have written it: no leading zeros."""
    return text.isascii() and text.isdecimal() and (len(text) == 1 or text[0] != "0") and int(text) < 2**31
