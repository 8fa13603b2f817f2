"""Credentials never end up in what Spark writes: plans, checkpoints, event logs, its own output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # it has no types
import pytest

import keylane
from keylane.jetstream import Outgoing, publish_many
from keylane.server import NatsServer
from tests.peers.store import REPOSITORY

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

PASSWORD = "correct-horse-battery-staple"  # noqa: S105 - made up


def fill(url: str, name: str, **login: Any) -> None:
    async def send() -> None:
        async with await keylane.connect(url, **login) as connection:
            config = {"name": name, "subjects": [f"{name}.*"], "storage": "memory"}
            await connection.api.request(f"STREAM.CREATE.{name}", config)
            await publish_many(connection, [Outgoing(f"{name}.a", b"x")] * 10)

    asyncio.run(send())


def test_a_password_from_the_environment_and_a_seed_from_a_file(unique: Callable[..., str], tmp_path: Path) -> None:
    pair = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    seed = bytes(pair.seed).decode()
    file = tmp_path / "reader.nk"
    file.write_text(seed)
    name = unique("S")
    by_password = f'authorization {{ user: "reader", password: "{PASSWORD}" }}'
    by_key = f"authorization {{ users: [{{ nkey: {pair.public_key.decode()} }}] }}"
    shown = tmp_path / "shown"
    shown.mkdir()
    with NatsServer.start(extra_config=by_password) as first, NatsServer.start(extra_config=by_key) as second:
        fill(first.url, name, user="reader", password=PASSWORD)
        fill(second.url, name, nkey_seed_file=file)
        reads = [
            {"url": first.url, "stream": name},
            {"url": second.url, "stream": name, "nkeySeedFile": str(file)},
        ]
        job = subprocess.run(
            [sys.executable, "-m", "tests.integration.spark.secret_job", str(shown), json.dumps(reads)],
            cwd=REPOSITORY,
            env=os.environ | {"NATS_USER": "reader", "NATS_PASSWORD": PASSWORD},
            capture_output=True,
            text=True,
            timeout=450,
            check=False,
        )
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout.splitlines()[-1]) == [[10, 10], [10, 10]]
    looked_at = [path for path in shown.rglob("*") if path.is_file()]
    assert {"plan0.txt", "plan1.txt", "metadata"} <= {path.name for path in looked_at}
    assert any(path.is_relative_to(shown / "events") and path.stat().st_size for path in looked_at)
    for secret in (PASSWORD, seed):
        assert secret not in job.stdout + job.stderr
        assert [path for path in looked_at if secret.encode() in path.read_bytes()] == []
