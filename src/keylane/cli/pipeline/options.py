"""The options of `keylane pipeline run …`, on the command line and in a TOML file.

Owns the name of each option (`start` of a pipeline's settings is `--from` here), the signature of each command, and
the precedence: the command line, then the file. The pipeline's `Settings` check the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from keylane.cli.command import ConnectionOptions
from keylane.errors import InvalidInput
from keylane.spark.address import is_secret_name

Kind = type[str] | type[int] | type[float] | type[bool]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: the field of `Settings` that it fills, its type and its help."""

    field: str
    kind: Kind
    help: str
    metavar: str | None = None
    flag: str = ""

    @property
    def name(self) -> str:
        """As it is written on the command line, without the dashes."""
        return self.flag or self.field.removesuffix("_s").replace("_", "-")


_STREAM = Option("stream", str, "The stream.", "NAME")
_GROUP = Option("group", str, "The group.", "NAME")
_WHERE = "earliest, a sequence, a time such as 2026-05-01T12:00:00Z, or how long ago: -15m."
_PLACE = "an offset, a time such as 2026-05-01T12:00:00Z, or how long ago: -15m."
_FROM = Option("start", str, f"Where to begin: {_WHERE}", "WHERE", "from")
_TO = Option("end", str, "Where to end, in the same words; latest is what is there now.", "WHERE", "to")
_TOLERANCE = Option("tolerance_s", float, "How far the clocks of two members may be apart.", "SECONDS")
_SETTLE = Option("settle_s", float, "How long members may take to write down what they handled.", "SECONDS")
_COMPLETE = Option("complete", bool, "Every member has ended: a record that is not there never was.")
_EVIDENCE = Option("evidence", int, "How many findings of each kind to show.", "N")
_CHART = Option("chart", str, "Draw a chart into this PNG.", "FILE")

OPTIONS: dict[str, tuple[Option, ...]] = {
    "lake": (
        _STREAM,
        Option("table", str, "The directory that holds the table, also in an object store.", "DIR"),
        Option("format", str, "delta, or parquet: files of Spark's own sink. Default: delta.", "NAME"),
        Option("jars", str, "Delta Lake's jars, with commas. Default: Spark fetches them.", "FILES"),
        Option("group", str, "Take the keys of this group; of a static one also its filters.", "NAME"),
        Option("queue", bool, "Read the queue of the elastic --group instead of the stream."),
        Option("filter", str, "Only these subjects; several with commas.", "SUBJECTS"),
        Option("partitions", str, "Only these partitions, such as 0-3,7.", "NUMBERS"),
        Option("key_filter", str, "On a stream without partition numbers: the subjects that have keys.", "SUBJECT"),
        Option("key_wildcards", str, "The numbers of its '*' that make up the key, such as 2,1.", "NUMBERS"),
        Option("key_partitions", int, "How many partitions to compute.", "N"),
        Option("headers", bool, "Keep the headers, as a column."),
        _FROM,
        Option("end", str, "Write this range and end: a backfill. Without it the run goes on.", "WHERE", "to"),
        Option("available_now", bool, "End when everything is written that was there at the beginning."),
        Option("max_rows", int, "How many sequences a batch has at most.", "N"),
        Option("interval_s", float, "Seconds from one batch to the next.", "SECONDS"),
        Option("allow_loss", bool, "Go on where the server deleted messages before they were written."),
        Option("compact", bool, "Merge small files now and then, and at the end."),
        Option("compact_every", int, "How many batches of a streaming run lie between.", "N"),
        Option("only_compact", bool, "Merge small files of the table, and do nothing else."),
        Option(
            "vacuum_hours",
            float,
            "At the end, delete files that no version of the last hours needs.",
            "HOURS",
            "vacuum",
        ),
    ),
    "audit": (
        _STREAM,
        _GROUP,
        _FROM,
        _TO,
        Option("work", str, "Keep all findings here, and what the next run needs to go on.", "DIR"),
        Option("available_now", bool, "Go on from the last run in --work, up to now."),
        Option("follow", bool, "Do that again and again, until stopped."),
        Option("interval_s", float, "Seconds from one verdict to the next with --follow.", "SECONDS"),
        _TOLERANCE,
        _SETTLE,
        _COMPLETE,
        _EVIDENCE,
    ),
    "slo": (
        _STREAM,
        _GROUP,
        _FROM,
        _TO,
        Option("window_s", float, "How long a window is.", "SECONDS"),
        Option("thresholds", str, "A TOML file that says what must hold, such as handler_p99_ms = 250.", "FILE"),
        _CHART,
    ),
    "skew": (
        _STREAM,
        _GROUP,
        _FROM,
        _TO,
        Option("by", str, "What to spread: messages, bytes, or time (of handlers, from the journal).", "WHAT"),
        Option("max_imbalance", float, "The heaviest member may carry this many times the mean.", "RATIO"),
        Option("top", int, "How many hot keys to show.", "N"),
        Option("plan", str, "Write the plan here, for `keylane elastic apply-plan`.", "FILE"),
        _CHART,
    ),
    "parity": (
        _STREAM,
        Option("group", str, "The group that there is.", "NAME"),
        Option("other_group", str, "The group that is compared with it.", "NAME"),
        Option("other_server", str, "The other group's server, if it is another one.", "URL"),
        _FROM,
        _TO,
        Option("work", str, "Keep all findings here.", "DIR"),
        _TOLERANCE,
        _SETTLE,
        _COMPLETE,
        _EVIDENCE,
    ),
    "claims": (
        Option("log", str, "The coordination log. Default: marshal, on Kafka __marshal.", "NAME"),
        Option("kafka", str, "The log is in Kafka, here: host:port,host:port.", "BROKERS"),
        Option("kafka_config", str, "A file of Kafka client properties: security, login, brokers.", "FILE"),
        Option("interval_s", float, "The heartbeat interval of the log. Default: 10.", "SECONDS"),
        Option("placing", str, "What is hashed to find a log partition: topic_partition, or topic.", "WHAT"),
        Option("group", str, "Only this group.", "NAME"),
        Option("topic", str, "Only this topic.", "NAME"),
        Option("start", str, f"Tell of what was owned from there on: {_PLACE}", "WHERE", "from"),
        Option("at", str, f"The log as it was there: {_PLACE}", "WHERE"),
        Option("gap_s", float, "Tell of partitions that were nobody's for longer. Default: the interval.", "SECONDS"),
        Option("out", str, "Keep all tables here, as Parquet.", "DIR"),
        _EVIDENCE,
    ),
}

RUNNING = (
    Option("master", str, "Where Spark runs: local[*], local[2], spark://HOST:PORT.", "URL"),
    Option("quiet", bool, "Say nothing while it runs."),
    Option("json", bool, "Print JSON."),
)
"""The options of the command itself."""

_CONNECTION = {field.name for field in fields(ConnectionOptions)}


def signature(pipeline: str) -> inspect.Signature:
    """The parameters of a pipeline's command. No option has a default, so that a missing one is None."""
    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", metavar="FILE", help="Take options from this TOML file.")
            ],
        ),
        *(_parameter(option) for option in (*OPTIONS[pipeline], *RUNNING)),
        inspect.Parameter(
            "conf",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                list[str] | None,
                typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark. May be repeated."),
            ],
        ),
        inspect.Parameter("link", inspect.Parameter.KEYWORD_ONLY, annotation=ConnectionOptions),
    ]
    return inspect.Signature(parameters)


def _parameter(option: Option) -> inspect.Parameter:
    has_no = option.kind is bool and option.field != "json"
    flag = f"--{option.name}/--no-{option.name}" if has_no else f"--{option.name}"
    declared = typer.Option(flag, metavar=option.metavar, help=option.help, show_default=False)
    kind: Any = option.kind | None
    return inspect.Parameter(
        option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declared]
    )


@dataclass(frozen=True, slots=True)
class PipelineArguments:
    """The options from the command line and the file together."""

    settings: dict[str, Any]
    running: dict[str, Any]
    conf: tuple[str, ...]
    link: ConnectionOptions


def gather(
    pipeline: str, values: Mapping[str, Any], conf: list[str] | None, config: Path | None, link: ConnectionOptions
) -> PipelineArguments:
    """Merge the command line over the file. Raises `InvalidInput` if the file has an unknown or invalid option."""
    options = {option.name: option for option in (*OPTIONS[pipeline], *RUNNING)}
    written = _read(config, pipeline, options) if config is not None else {}
    merged = {options[name].field: value for name, value in written.items() if name in options}
    merged |= {name: value for name, value in values.items() if value is not None}
    own = {option.field for option in OPTIONS[pipeline]}
    running = {option.field: merged.get(option.field) for option in RUNNING}
    return PipelineArguments(
        settings={name: value for name, value in merged.items() if name in own},
        running=running,
        conf=tuple(conf if conf is not None else written.get("conf", ())),
        link=_merged_link(link, written),
    )


def _read(path: Path, pipeline: str, options: Mapping[str, Option]) -> dict[str, Any]:
    import tomllib

    where = f"config {str(path)!r}"
    try:
        wire = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{where} is no TOML: {error}") from error
    found = {}
    for written, value in wire.items():
        name = written.replace("_", "-")
        if name not in options and name not in _CONNECTION and name != "conf":
            known = ", ".join(sorted([*options, *_CONNECTION, "conf"]))
            raise InvalidInput(f"{where} has {written!r}, which is no option of {pipeline}: give {known}")
        if name in options:
            found[name] = _checked(where, written, value, options[name].kind)
        elif name == "conf":
            found[name] = _texts(where, written, value)
        else:
            found[name] = _checked(where, written, value, float if name == "timeout" else str)
    return found


def _checked(where: str, name: str, value: Any, kind: Kind) -> Any:
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # a sequence is a number, and so may a list of partitions be
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and hasattr(value, "isoformat"):
        return value.isoformat()
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
        held = "" if is_secret_name(name) or name == "server" else f" = {value!r}"
        raise InvalidInput(f"{where} has {name}{held}: give {words}")
    return value


def _texts(where: str, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidInput(f'{where} has {name}: give a list of texts, such as ["spark.driver.memory=4g"]')
    return value


def _merged_link(link: ConnectionOptions, written: Mapping[str, Any]) -> ConnectionOptions:
    """Options that the command line leaves at their default come from the file."""
    values = {}
    for field in fields(ConnectionOptions):
        given = getattr(link, field.name)
        if given == field.default and field.name in written:
            given = written[field.name]
            if field.name in ("creds", "nkey", "tlsca", "tlscert", "tlskey"):
                given = Path(given)
        values[field.name] = given
    return ConnectionOptions(**values)
