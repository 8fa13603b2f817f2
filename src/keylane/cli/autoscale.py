"""`keylane autoscale STREAM GROUP`: keeps a group as large as its lag needs."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import ConnectionOptions, StreamArgument, exit_on_invalid_input, single_command

if TYPE_CHECKING:
    from keylane.autoscale import Autoscaler, AutoscaleReport
    from keylane.autoscale.autoscaler import ScaleCommand
    from keylane.cli.event_lines import EventLines

_COMMAND_S = 60.0


def autoscale(
    stream: StreamArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="A fleet or an elastic group.")],
    *,
    most: Annotated[int, typer.Option("--max", metavar="N", min=1, help="Never more workers or members.")],
    least: Annotated[int, typer.Option("--min", metavar="N", min=1, help="Never fewer.")] = 1,
    target_age: Annotated[
        float, typer.Option(metavar="SECONDS", help="No message is to wait for longer. Two windows or more.")
    ] = 120.0,
    target_lag: Annotated[
        int | None, typer.Option(metavar="MESSAGES", help="No more messages are to wait; else only their age counts.")
    ] = None,
    window: Annotated[float, typer.Option(metavar="SECONDS", help="At most one change in this time.")] = 60.0,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Look so often.")] = 5.0,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Members that may be added and dropped, with commas; repeat it. They run."),
    ] = None,
    execute: Annotated[
        str | None,
        typer.Option("--exec", metavar="COMMAND", help="Run this for a fleet; {replicas} is the wanted number."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65_535, help="Serve the wanted number; 0: any.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="On which address.")] = "0.0.0.0",  # noqa: S104 - KEDA asks from another machine
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each look.")] = False,
    link: ConnectionOptions,
) -> None:
    """Keep a fleet or an elastic group as large as its lag needs, until Ctrl-C.

    Members of an elastic group are added from a pool of names whose processes run already, and dropped. For a fleet it
    prints the wanted number, serves it for KEDA at /wanted, or runs a command. An unknown lag changes nothing.

    \b
      keylane autoscale ORDERS billing --max 8 --pool w1,w2,w3,w4 --dry-run
      keylane autoscale ORDERS shop --max 8 --exec 'kubectl scale deployment/shop --replicas={replicas}'
      keylane autoscale ORDERS shop --max 8 --port 9466
    """
    from keylane.cli.event_lines import EventLines, run_consumer
    from keylane.core.scaling import ScalingRule
    from keylane.errors import InvalidInput

    rule = ScalingRule(target_s=target_age, min_workers=least, max_workers=most, window_s=window, target_lag=target_lag)
    names = [name.strip() for text in pool or () for name in text.split(",") if name.strip()]
    with exit_on_invalid_input():
        rule.check()
        if execute is not None and "{replicas}" not in execute:
            raise InvalidInput(f"--exec {execute!r} has no {{replicas}}: say where the number goes")
        if dry_run and port is not None:
            raise InvalidInput("--dry-run serves no number, as somebody would act on it: give --port alone")

    async def run() -> None:
        from contextlib import AsyncExitStack

        from keylane.autoscale import Autoscaler, serve_wanted_number

        lines = EventLines(as_json=as_json)
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(link.open())
            command = _command(execute) if execute is not None else None
            scaler = Autoscaler(connection, stream, group, rule, pool=names, command=command, dry_run=dry_run)
            if port is not None:
                chosen = await stack.enter_async_context(
                    serve_wanted_number(scaler, port=port, host=host, stale_after_s=3 * interval + link.timeout)
                )
                lines.write("serving", f"the wanted number is on http://{host}:{chosen}/wanted", port=chosen)
            await _look_until_stopped(scaler, lines, interval)

    with exit_on_invalid_input():
        run_consumer(run())


async def _look_until_stopped(scaler: Autoscaler, lines: EventLines, interval_s: float) -> None:
    import asyncio
    from contextlib import suppress

    from keylane.cli.event_lines import stop_on_signals

    shown = ""
    with stop_on_signals(lines.stop):
        while not lines.stop.is_set():
            report = await scaler.look()
            text = in_words(report)
            if lines.as_json or text.partition(":")[0] != shown:  # text is for people: only what is new
                lines.write("look", text, **{name: one for name, one in asdict(report).items() if name != "time"})
            shown = text.partition(":")[0]
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await lines.stop.wait()


def in_words(report: AutoscaleReport) -> str:
    """One line: what was decided, and why."""
    if report.wanted is None:
        return f"unknown: {report.reason}"
    names = [f"adds {', '.join(report.added)}"] * bool(report.added)
    names += [f"drops {', '.join(report.dropped)}"] * bool(report.dropped)
    number = f"{report.wanted - report.change} → {report.wanted}" if report.change else f"stays at {report.wanted}"
    would = "would be " if (report.change or names) and not report.done else ""
    return f"{would}{', '.join([number, *names])}: {report.reason}"


def _command(template: str) -> ScaleCommand:
    words = shlex.split(template)

    async def scale(wanted: int) -> None:
        import asyncio

        from keylane.errors import KeylaneError

        filled = [word.replace("{replicas}", str(wanted)) for word in words]
        try:
            process = await asyncio.create_subprocess_exec(
                *filled,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise KeylaneError(f"{filled[0]!r} cannot be run: {error.strerror}") from error
        try:
            async with asyncio.timeout(_COMMAND_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise KeylaneError(f"{shlex.join(filled)!r} took longer than {_COMMAND_S:.0f} s") from None
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:] or [""]
            raise KeylaneError(f"{shlex.join(filled)!r} ended with exit code {process.returncode}: {last[0]}")

    return scale


app = single_command(autoscale)
