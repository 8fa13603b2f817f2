"""`keylane pipeline run …`: the pipelines on Spark as commands.

Owns the order of a run: options, checks, connection, Spark session, progress, summary, exit code. What a pipeline does
is in `keylane.spark.pipelines`. Exit codes: 0 clean or met, 3 violations or not met, 2 wrong input, 1 it broke.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from keylane.cli.command import INTERRUPTED, ConnectionOptions, connected, exit_on_invalid_input, expand_options, family
from keylane.cli.pipeline.options import OPTIONS, PipelineArguments, gather, signature

if TYPE_CHECKING:
    from keylane.jetstream import Connection
    from keylane.spark.address import Address
    from keylane.spark.pipelines.interface import PipelineReport

app = family("Pipelines on Spark: what a stream, its journal and a coordination log tell.")
run_app = family("Run a pipeline. Each takes its options from the command line, from --config, or both.")
app.add_typer(run_app, name="run")

_LINE_INTERVAL_S = 5.0

_HELP = {
    "lake": """Write a stream into a table (Delta Lake), by partition and day, every sequence exactly once.

    Goes on until it is stopped (Ctrl-C), or with --available-now until everything is written. With --to it writes
    one range. Run it again with the same --table to go on: what the table has is never written twice.
    """,
    "audit": """Prove from journal and stream that nothing was lost, doubled or out of order.

    Exit code 0: clean. 3: violations were found, with evidence.
    """,
    "slo": """Handler times, waiting times, redeliveries and lag, by window, member and partition.

    With --thresholds: exit code 0 if all hold, 3 if one was broken.
    """,
    "skew": """Find hot keys and uneven members, and plan few moves that even the load out.

    Exit code 0: no member carries more than --max-imbalance times the mean. 3: one does.
    """,
    "parity": """Compare two consumers of one stream: missing, extra, other order, other outcome.

    Exit code 0: they agree. 3: they differ.
    """,
    "claims": """Replay a coordination log: who owned which partition when, overlaps, gaps and pauses.

    Exit code 0: no partition had two owners at any place in the log. 3: one had, with evidence.
    """,
}


def _add(name: str) -> None:
    def command(*, config: Path | None, conf: list[str] | None, link: ConnectionOptions, **values: Any) -> None:
        with exit_on_invalid_input():
            given = gather(name, values, conf, config, link)
            code = _run(name, given)
        raise typer.Exit(code)

    command.__doc__ = _HELP[name]
    command.__signature__ = signature(name)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in signature(name).parameters.values()}
    run_app.command(name)(expand_options(command))


for _name in OPTIONS:
    _add(_name)


@app.command("program")
def program() -> None:
    """Print the path of the program that runs pipelines on a cluster.

    keylane spark submit --master URL --env ENV.tar.gz "$(keylane pipeline program)" run audit --stream ORDERS ...
    """
    from keylane.cli.pipeline import program

    typer.echo(program.__file__)


def _run(name: str, given: PipelineArguments) -> int:
    from importlib import import_module

    from keylane.spark.pipelines.session import check_installed, check_settings, is_submitted, spark_session

    check_installed()
    _check_required(name, given)
    pipeline = import_module(f"keylane.spark.pipelines.{name}")
    conf = check_settings(given.conf)
    master = given.running["master"]
    settings = pipeline.Settings(**given.settings, address=_address(given.link, master))
    if name == "lake" and not is_submitted():
        conf = _lake_conf(settings, conf)
    _check_files(given)
    as_json = bool(given.running["json"])
    line = _ProgressLine(quiet=bool(given.running["quiet"]))
    if name == "claims":
        _check_one_server(given)
        _check_log(given.link, settings)
    elif not getattr(settings, "only_compact", False):
        names = ["group"] if given.settings.get("other_server") else ["group", "other_group"]
        groups = [getattr(settings, name, None) for name in names]
        _check_stream(given.link, settings.stream, [one for one in groups if one is not None])
    try:
        line.show("starting Spark")
        with spark_session(f"keylane {name}", master=master, settings=conf) as spark:
            line.show("Spark is ready")
            work = functools.partial(pipeline.run, spark, settings, line.show)
            report = _run_stoppable(work, line) if name in ("lake", "audit") else work()
    except KeyboardInterrupt:
        line.end()
        typer.echo("keylane: interrupted; run the same command to begin again", err=True)
        return INTERRUPTED
    finally:
        line.end()
    _show(report, as_json=as_json)
    if getattr(report, "stopped", False):
        typer.echo("stopped; run the same command to go on where it was", err=True)
    return int(report.exit_code)


def _lake_conf(settings: Any, conf: dict[str, str]) -> dict[str, str]:
    """Spark's settings for a table format; those of the user come first, and his jars instead of fetched ones."""
    from importlib.metadata import version

    from keylane.spark.pipelines.lake import session_settings

    needed = session_settings(settings, version("pyspark"))
    if {"spark.jars", "spark.jars.packages"} & conf.keys():
        needed.pop("spark.jars.packages", None)
    return needed | conf


def _show(report: PipelineReport, *, as_json: bool) -> None:
    from keylane.cli.formatting import json_text

    typer.echo(json_text(report.as_json(), indent=2) if as_json else report.as_text())


def _check_required(name: str, given: PipelineArguments) -> None:
    from keylane.errors import InvalidInput

    needed = {"lake": ("stream", "table"), "parity": ("stream", "group", "other_group"), "claims": ()}
    for one in needed.get(name, ("stream", "group")):
        if one not in given.settings:
            raise InvalidInput(
                f"--{one.replace('_', '-')} is missing: give it on the command line or in the file of --config"
            )


def _check_one_server(given: PipelineArguments) -> None:
    """A coordination log is in NATS or in Kafka."""
    from dataclasses import fields

    from keylane.errors import InvalidInput

    on_kafka = any(given.settings.get(one) is not None for one in ("kafka", "kafka_config"))
    for spec in fields(ConnectionOptions) if on_kafka else ():
        if spec.name != "timeout" and getattr(given.link, spec.name) is not None:
            raise InvalidInput(f"--{spec.name} is for NATS and --kafka for Kafka: give one of the two")


def _check_files(given: PipelineArguments) -> None:
    """Raise `InvalidInput` if an output file cannot be written, before the work starts."""
    from keylane.errors import InvalidInput

    if (chart := given.settings.get("chart")) is not None:
        from keylane.spark.pipelines.charts import check_chart

        check_chart(chart)
    plan = given.settings.get("plan")
    if plan is not None and not Path(plan).absolute().parent.is_dir():
        raise InvalidInput(f"--plan is {plan!r}: there is no directory {str(Path(plan).absolute().parent)!r}")


# ---- connection ---------------------------------------------------------------------------------------


def _address(link: ConnectionOptions, master: str | None) -> Address:
    """The server's address for Spark. Secrets go into the environment, which workers on this machine share."""
    from keylane.errors import InvalidInput
    from keylane.spark.address import Address
    from keylane.spark.pipelines.session import DEFAULT_MASTER, is_local, is_submitted

    secret = {"NATS_USER": link.user, "NATS_PASSWORD": link.password}
    if link.user is not None and link.password is None:
        secret = {"NATS_TOKEN": link.user}  # as in the `nats` tool
    url = link.server
    if url is not None and "@" in url:
        secret["NATS_URL"], url = url, None
    found = {name: value for name, value in secret.items() if value is not None}
    if found and (is_submitted() or not is_local(master or DEFAULT_MASTER)):
        raise InvalidInput(
            f"{', '.join(sorted(found))} would have to reach the executors: give --creds, --nkey or --context, or set "
            "them in the environment of driver and executors"
        )
    os.environ.update(found)
    return Address(
        url=url,
        context=link.context,
        creds_file=_text(link.creds),
        nkey_seed_file=_text(link.nkey),
        tls_ca=_text(link.tlsca),
        tls_cert=_text(link.tlscert),
        tls_key=_text(link.tlskey),
        domain=link.domain,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _check_stream(link: ConnectionOptions, stream: str, groups: Iterable[str] = ()) -> None:
    """Raise an error if server, stream or a group is missing, before Spark starts."""

    async def look(connection: Connection) -> None:
        from keylane.core.name_suggestions import name_missing
        from keylane.errors import NoSuchGroup
        from keylane.jetstream import streams

        await streams.info(connection, stream)
        known = await _readers(connection, stream)
        for group in groups:
            if group not in known:
                raise NoSuchGroup(name_missing(f"stream {stream!r} has no group {group!r}", group, known))

    connected(link, look)


async def _readers(connection: Connection, stream: str) -> set[str]:
    """The groups and fleets of a stream, and those of the past that its journal has records of."""
    from keylane.errors import NotFound
    from keylane.fleet import list_fleets
    from keylane.groups import list_groups
    from keylane.jetstream import streams
    from keylane.journal import journal_stream, journal_subject

    try:
        written = await streams.subjects(connection, journal_stream(stream), journal_subject(stream))
    except NotFound:
        written = []
    return {
        *(one.group for one in await list_groups(connection, stream)),
        *(fleet for _, fleet in await list_fleets(connection, stream)),
        *(one.removeprefix(f"keylane.journal.{stream}.").split(".")[0] for one in written),
    }


def _check_log(link: ConnectionOptions, settings: Any) -> None:
    """Raise an error if the server or the log is missing, or if the log is empty."""
    from keylane.errors import NotFound
    from keylane.marshal.jetstream_log import DEFAULT_NAME
    from keylane.spark.pipelines.claims import look
    from keylane.spark.pipelines.claims_log import no_such_log

    if not settings.is_on_kafka:
        name = settings.log or DEFAULT_NAME
        try:
            _check_stream(link, name)
        except NotFound as error:
            raise no_such_log(name) from error
    look(settings)


# ---- while it runs ------------------------------------------------------------------------------------


def _run_stoppable(work: Callable[..., Any], line: _ProgressLine) -> Any:
    """Run until done. Ctrl-C or SIGTERM requests a stop; the second one ends at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are for the main thread
        return work(stop=stop)

    def ask(number: int, frame: object) -> None:
        del number, frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        line.end()
        typer.echo("stopping; what is being written is finished first (again: end at once)", err=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work(stop=stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ProgressLine:
    """Progress on stderr: one line that changes on a terminal, else a new line every few seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._shown = False
        self._last_s = 0.0

    def show(self, text: str) -> None:
        if self._quiet:
            return
        now_s = time.monotonic()
        if self._live:
            typer.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._shown = True
        elif now_s - self._last_s >= _LINE_INTERVAL_S:
            typer.echo(text, err=True)
            self._last_s = now_s

    def end(self) -> None:
        if self._shown:
            typer.echo("\r\x1b[K", err=True, nl=False)
            self._shown = False
