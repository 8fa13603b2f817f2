"""One embedded nats-server: start, health, stop, kill, restart.

Owns one server and its store directory. Other modules own the program (`binary`), the ports (`ports`), the
configuration text (`settings`) and the process (`process`).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, ServerStartFailed, ServerUnreachable
from keylane.server.binary import ServerBinary, find_binary
from keylane.server.ports import LOOPBACK, ReservedPort, checked_port
from keylane.server.process import GuardedProcess, lock_store, open_private
from keylane.server.settings import SYNC_DEFAULT, ClusterRoutes, ServerSettings, checked_sync

CONFIG_NAME = "server.conf"
LOG_NAME = "server.log"
START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 10.0
_REQUEST_DEADLINE_S = 5.0
_PRIVATE_DIRECTORY = 0o700
_LOOK_EVERY_S = 0.005
_TAIL_LINES = 6
_LOG_PREFIX = re.compile(r"^\[\d+\] \S+ \S+ ")


class NatsServer:
    """A real nats-server on loopback with JetStream enabled.

    Create one with `NatsServer.start()`. It ends with this process, however this process ends.
    """

    def __init__(
        self, *, binary: ServerBinary, settings: ServerSettings, ports: list[ReservedPort], temporary: bool
    ) -> None:
        self._binary = binary
        self._settings = settings
        self._ports = ports
        self._temporary = temporary
        self._process: GuardedProcess | None = None
        self._log_start = 0
        self._stopped = False

    # ---- start ------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        *,
        port: int | None = None,
        store_dir: Path | None = None,
        sync: str = SYNC_DEFAULT,
        extra_config: str = "",
        name: str = "keylane",
        timeout_s: float = START_DEADLINE_S,
    ) -> Self:
        """Start a server and return when it is healthy.

        `port` None takes a free one. `store_dir` None stores in a temporary directory that `stop()` removes.
        `sync` is how long acknowledged messages may stay in the operating system before they are written to
        disk: a duration, or "always". `extra_config` is added to the server's configuration file as it is.
        """
        server = cls.prepare(port=port, store_dir=store_dir, sync=sync, extra_config=extra_config, name=name)
        try:
            server.launch()
            server.wait_up(timeout_s)
        except BaseException:
            server.stop()
            raise
        return server

    @classmethod
    def prepare(
        cls,
        *,
        port: int | None,
        store_dir: Path | None,
        sync: str,
        extra_config: str,
        name: str,
        routes: ClusterRoutes | None = None,
    ) -> Self:
        """Check the options, take the ports and the directory, and start nothing yet."""
        checked_port(port)
        checked_sync(sync)
        binary = find_binary()
        ports: list[ReservedPort] = []
        try:
            ports.append(ReservedPort(port))
            ports.append(ReservedPort())
            directory = usable_directory(store_dir)
        except BaseException:
            for reserved in ports:
                reserved.release()
            raise
        settings = ServerSettings(
            name=name,
            port=ports[0].number,
            monitor_port=ports[1].number,
            store_dir=directory,
            log_path=directory / LOG_NAME,
            sync=sync,
            extra_config=extra_config,
            routes=routes,
        )
        return cls(binary=binary, settings=settings, ports=ports, temporary=store_dir is None)

    def launch(self) -> None:
        """Start the process without waiting for it to be up."""
        config_path = self.store_dir / CONFIG_NAME
        lock_fd = lock_store(self.store_dir)
        try:
            with open(config_path, "w", encoding="utf-8", opener=open_private) as config:
                config.write(self._settings.config_text())
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = GuardedProcess(
                [str(self._binary.path), "-c", str(config_path)],
                lock_fd=lock_fd,
                output=self.log_path,
                doomed_dir=self.store_dir if self._temporary else None,
            )
        except OSError as error:
            raise ServerStartFailed(f"cannot write into {str(self.store_dir)!r}: {error}") from error
        finally:
            os.close(lock_fd)

    def wait_up(self, timeout_s: float = START_DEADLINE_S) -> None:
        """Return when the server accepts clients and JetStream is enabled; raise `ServerStartFailed` otherwise."""
        # A node of a cluster is only fully healthy once there is a leader, which `cluster` waits for.
        health = "healthz" if self._settings.routes is None else "healthz?js-enabled-only=true"
        deadline = time.monotonic() + timeout_s
        process = self._process
        assert process is not None
        while True:
            code = process.exit_code()
            if code is not None:
                raise ServerStartFailed(f"nats-server ended with code {code} at its start{self._log_tail()}")
            left_s = max(_LOOK_EVERY_S, deadline - time.monotonic())
            try:
                answer = self.monitor(health, timeout_s=min(left_s, _REQUEST_DEADLINE_S))
            except ServerUnreachable as error:
                answer = {"error": str(error)}
            if answer.get("status") == "ok":
                return
            if time.monotonic() > deadline:
                raise ServerStartFailed(
                    f"nats-server was not up within {timeout_s:g} s ({answer['error']}){self._log_tail()}"
                )
            time.sleep(_LOOK_EVERY_S)

    # ---- facts ------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """The address of the server's monitoring pages (`/varz`, `/jsz`, `/healthz`)."""
        return f"http://{LOOPBACK}:{self._settings.monitor_port}"

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def port(self) -> int:
        return self._settings.port

    @property
    def pid(self) -> int:
        """The process id of nats-server itself (of the last one, if none runs now)."""
        assert self._process is not None
        return self._process.pid

    @property
    def state(self) -> RunState:
        """`ended` also while it is killed, until `restart`."""
        if self._process is None:
            return RunState.NEW
        return RunState.RUNNING if self._process.exit_code() is None else RunState.ENDED

    @property
    def store_dir(self) -> Path:
        return self._settings.store_dir

    @property
    def log_path(self) -> Path:
        return self._settings.log_path

    @property
    def version(self) -> tuple[int, int, int]:
        return self._binary.version

    def monitor(self, page: str, *, timeout_s: float = _REQUEST_DEADLINE_S) -> dict[str, Any]:
        """Read one monitoring page, for example `monitor("jsz?streams=true")`."""
        link = http.client.HTTPConnection(LOOPBACK, self._settings.monitor_port, timeout=timeout_s)
        try:
            link.request("GET", f"/{page}")
            body = link.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(f"{self!r} does not answer on {self.monitor_url} ({error!r})") from error
        finally:
            link.close()
        try:
            answer: dict[str, Any] = json.loads(body)
        except ValueError as error:
            raise InvalidInput(f"{page!r} is not a monitoring page of the server. Give for example 'varz'") from error
        return answer

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.state is RunState.RUNNING else "not running"
        return f"<NatsServer {self.name} {self.url} {state}>"

    # ---- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the server cleanly, release its ports and remove a temporary store. Safe to repeat."""
        if self._stopped:
            return
        self._stopped = True
        self._end_process()
        for reserved in self._ports:
            reserved.release()
        if self._temporary:
            shutil.rmtree(self.store_dir, ignore_errors=True)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would. Data and ports stay for `restart()`."""
        if self._process is not None:
            self._process.kill()

    def restart(self, *, timeout_s: float = START_DEADLINE_S) -> None:
        """Start again on the same port and data; a server that still runs is stopped cleanly first."""
        if self._stopped:
            raise InvalidInput("this server was stopped for good. Start a new one with NatsServer.start()")
        self._end_process()
        self.launch()
        self.wait_up(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # ---- inside -----------------------------------------------------------------------------------

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.terminate(_STOP_DEADLINE_S)
            self._process.dismiss_watcher()

    def _log_tail(self) -> str:
        """The last lines that this start wrote to the log, for an error message."""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [_LOG_PREFIX.sub("", line) for line in lines if line.strip()]
        where = "its log" if self._temporary else str(self.log_path)
        return f". The end of {where}:" + "".join(f"\n  {line}" for line in said[-_TAIL_LINES:])


def usable_directory(store_dir: Path | None) -> Path:
    """Create the directory if it does not exist, for this user only; None creates a temporary one."""
    if store_dir is None:
        return Path(tempfile.mkdtemp(prefix="keylane-server-"))
    directory = Path(store_dir).absolute()
    try:
        directory.mkdir(_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"store directory {str(directory)!r} cannot be made ({error.strerror}). "
            "Give a directory that you may write to"
        ) from error
    return directory
