"""The options of an embedded server, checked, and its configuration file.

Owns the rules for option values and the text of the file. Never touches the disk or a process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keylane.errors import InvalidInput
from keylane.server.ports import LOOPBACK

SYNC_ALWAYS = "always"
SYNC_DEFAULT = "1s"
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
_LOG_LIMIT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ClusterRoutes:
    """The cluster a node belongs to: its name, this node's route port and everybody's route ports."""

    name: str
    port: int
    peers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything in the configuration file of one server."""

    name: str
    port: int
    monitor_port: int
    store_dir: Path
    log_path: Path
    sync: str
    extra_config: str = ""
    routes: ClusterRoutes | None = None

    def config_text(self) -> str:
        lines = [
            f"server_name: {_quoted(self.name)}",
            f"host: {LOOPBACK}",
            f"port: {self.port}",
            f'http: "{LOOPBACK}:{self.monitor_port}"',
            f"log_file: {_quoted(self.log_path)}",
            f"logfile_size_limit: {_LOG_LIMIT_BYTES}",
            "logfile_max_num: 3",
            "jetstream {",
            f"  store_dir: {_quoted(self.store_dir)}",
            f"  sync_interval: {_quoted(self.sync)}",
            "}",
        ]
        if self.routes is not None:
            peers = ", ".join(f'"nats://{LOOPBACK}:{peer}"' for peer in self.routes.peers)
            lines += [
                "cluster {",
                f"  name: {_quoted(self.routes.name)}",
                f'  listen: "{LOOPBACK}:{self.routes.port}"',
                f"  routes: [{peers}]",
                "}",
            ]
        return "\n".join([*lines, self.extra_config, ""])


def checked_sync(sync: str) -> str:
    """Return `sync` if it is "always" or a duration above zero, such as "500ms", "1s" or "2m"."""
    if sync == SYNC_ALWAYS:
        return sync
    if isinstance(sync, str) and _DURATION.fullmatch(sync) and re.search(r"[1-9]", sync):
        return sync
    raise InvalidInput(
        f"sync {sync!r} is neither 'always' nor a duration above zero. Give for example '1s', '500ms' or '2m'"
    )


def durability(sync: str) -> str:
    """A description of what a server with this `sync` can lose."""
    if sync == SYNC_ALWAYS:
        return "synced to disk before each acknowledgement: no acknowledged message is lost, not by a power cut"
    return (
        f"synced to disk every {sync}: a power cut or a crash of the operating system can lose the messages "
        f"acknowledged in about the last {sync}; a killed server process loses none"
    )


def _quoted(value: str | Path) -> str:
    return json.dumps(str(value), ensure_ascii=False)
