"""Credentials never end up in what Spark writes: plans, checkpoints, event logs, its own output."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nkeys  # type: ignore[import-untyped]  # it has no types
import pytest

import keylane
from keylane.jetstream import Outgoing, publish_many
from keylane.server import NatsServer
from tests.integration.spark.source_rig import ground, numbers
from tests.peers.store import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

PASSWORD = "correct-horse-battery-staple"  # noqa: S105 - made up


def fill(url: str, name: str, **login: Any) -> None:
    async def send() -> None:
        async with await keylane.connect(url, **login) as connection:
            config = {"name": name, "subjects": [f"{name}.*"], "storage": "memory"}
            await connection.api.request(f"STREAM.CREATE.{name}", config)
            await publish_many(connection, [Outgoing(f"{name}.a", b"x")] * 10)

    asyncio.run(send())


def seed_in(file: Path) -> tuple[str, str]:
    """Write a new seed; returns it, and the configuration of a server that lets in only who has it."""
    pair = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    file.write_bytes(bytes(pair.seed))
    return bytes(pair.seed).decode(), f"authorization {{ users: [{{ nkey: {pair.public_key.decode()} }}] }}"


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_seed_from_a_file_is_in_no_plan_and_no_checkpoint(
    spark: SparkSession, unique: Callable[..., str], tmp_path: Path
) -> None:
    name, file, shown = unique("S"), tmp_path / "reader.nk", tmp_path / "shown"
    seed, by_key = seed_in(file)
    with NatsServer.start(extra_config=by_key) as server, ground(server.url, spark, nkey_seed_file=file) as here:
        here.make(name)
        here.publish(name, range(10))
        frame = here.stream(name, nkeySeedFile=str(file))
        plan = io.StringIO()
        with contextlib.redirect_stdout(plan):
            frame.explain(extended=True)
        query = here.run(frame, shown)
        assert numbers(here.written(shown)) == list(range(10))
    assert "keylane" in plan.getvalue()
    assert seed not in plan.getvalue() + repr(frame) + str(query.recentProgress)
    looked_at = files_below(shown)
    assert "metadata" in {path.name for path in looked_at}
    assert [path for path in looked_at if seed.encode() in path.read_bytes()] == []


@pytest.mark.long("starts a Spark of its own, which has the password in its environment")
def test_a_password_from_the_environment_and_a_seed_from_a_file(unique: Callable[..., str], tmp_path: Path) -> None:
    name, file, shown = unique("S"), tmp_path / "reader.nk", tmp_path / "shown"
    seed, by_key = seed_in(file)
    by_password = f'authorization {{ user: "reader", password: "{PASSWORD}" }}'
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
    looked_at = files_below(shown)
    assert {"plan0.txt", "plan1.txt", "metadata"} <= {path.name for path in looked_at}
    assert any(path.is_relative_to(shown / "events") and path.stat().st_size for path in looked_at)
    for secret in (PASSWORD, seed):
        assert secret not in job.stdout + job.stderr
        assert [path for path in looked_at if secret.encode() in path.read_bytes()] == []
