"""`keylane server run`: the embedded server in the foreground until Ctrl-C or SIGTERM.

Owns the signals. The server itself is `keylane.server`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from keylane.cli.command import family
from keylane.core.run_state import RunState

if TYPE_CHECKING:
    from keylane.server import NatsServer

app = family("The embedded NATS server.")

_POLL_INTERVAL_S = 0.5


@app.callback()
def _server() -> None:
    """The embedded NATS server."""


@app.command()
def run(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on 127.0.0.1; of the first node in a cluster. Default: a free one."),
    ] = None,
    store_dir: Annotated[
        Path | None,
        typer.Option(help="Where the data lies; it is kept. Default: keylane/ in your data directory (XDG_DATA_HOME)."),
    ] = None,
    sync: Annotated[
        str, typer.Option(help="How often to sync to disk: a duration such as 1s, 500ms, 2m, or 'always'.")
    ] = "1s",
    cluster: Annotated[
        int | None, typer.Option(min=2, max=9, metavar="N", help="Run N nodes as one cluster, for trials.")
    ] = None,
) -> None:
    """Run a real nats-server with JetStream on 127.0.0.1 until Ctrl-C or SIGTERM.

    What --sync can lose:

    \b
      1s      (the default here) A power cut or a crash of the operating
              system can lose about the last second of acknowledged messages.
      2m      The same for about two minutes. This is what a nats-server does
              that is not told otherwise.
      always  Loses no acknowledged message, and is far slower: 3,900
              acknowledged publishes/s against 145,000, measured on a machine
              with 2 cores.

    With any of them, a killed server process loses no acknowledged message: what it acknowledged is already
    with the operating system. (Only a stream that was made with persist_mode "async" gives that up.)
    """
    _stop_on_signals()
    try:
        _serve(port=port, store_dir=store_dir, sync=sync, cluster=cluster)
    except _StopRequested:
        typer.echo("stopped")


def _serve(*, port: int | None, store_dir: Path | None, sync: str, cluster: int | None) -> None:
    from keylane.server import NatsCluster, NatsServer

    if cluster is None:
        directory = store_dir or _data_home() / "server"
        with NatsServer.start(port=port, store_dir=directory, sync=sync) as server:
            _announce([server], directory, sync)
            _watch([server])
    else:
        directory = store_dir or _data_home() / f"cluster-{cluster}"
        with NatsCluster.start(cluster, port=port, store_dir=directory, sync=sync) as nodes:
            _announce(nodes.nodes, directory, sync)
            _watch(nodes.nodes)


def _announce(nodes: list[NatsServer], directory: Path, sync: str) -> None:
    from keylane.server.settings import durability

    version = ".".join(str(part) for part in nodes[0].version)
    typer.echo(f"nats-server {version} with JetStream is running")
    for node in nodes:
        typer.echo(f"  url         {node.url}   (pid {node.pid}, monitoring {node.monitor_url})")
    typer.echo(f"  data        {directory.absolute()}   (kept when the server stops)")
    typer.echo(f"  durability  {durability(sync)}")
    typer.echo(f"  stop        Ctrl-C, or: kill {os.getpid()}")


def _watch(nodes: list[NatsServer]) -> None:
    """Never returns: reports each node that ends by itself; raises `ServerEnded` for the last one."""
    from keylane.errors import ServerEnded

    alive = list(nodes)
    while True:
        time.sleep(_POLL_INTERVAL_S)
        for node in [node for node in alive if node.state is RunState.ENDED]:
            alive.remove(node)
            ended = f"nats-server {node.name} (pid {node.pid}) ended by itself; its log is {node.log_path}"
            if not alive:
                raise ServerEnded(ended)
            typer.echo(ended, err=True)


def _data_home() -> Path:
    configured = os.environ.get("XDG_DATA_HOME", "")
    home = Path(configured) if os.path.isabs(configured) else Path.home() / ".local" / "share"
    return home / "keylane"


class _StopRequested(BaseException):
    """Raised by Ctrl-C or SIGTERM. Unwinding stops the server."""


def _stop_on_signals() -> None:
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        # A second Ctrl-C must not interrupt the clean stop, which has its own deadline.
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise _StopRequested

    for number in signals:
        signal.signal(number, stop)
