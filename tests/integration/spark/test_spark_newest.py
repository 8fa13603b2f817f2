"""The newest PySpark, beside the pinned one: a read, a write and a pipeline."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

import keylane
from keylane.jetstream import Outgoing, StreamConfig, publish_many, read_all, streams
from keylane.server import NatsServer
from tests.peers.spark_newest import NEWEST, packages
from tests.peers.store import REPOSITORY

MESSAGES = 100

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.long("starts a Spark of another version"),
]


async def test_the_newest_spark_reads_writes_and_runs_a_pipeline(tmp_path: Path) -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            for name in ("from", "to"):
                await streams.create(
                    connection, StreamConfig(name=name.upper(), subjects=[f"{name}.*"], allow_direct=True)
                )
            await publish_many(connection, [Outgoing(f"from.k{n % 7}", b"%d" % n) for n in range(MESSAGES)])
            path = os.pathsep.join([str(packages()), *filter(None, [os.environ.get("PYTHONPATH")])])
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.spark.newest_job", server.url, str(tmp_path)),
                cwd=REPOSITORY,
                env={name: value for name, value in os.environ.items() if name != "SPARK_HOME"} | {"PYTHONPATH": path},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, err = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, err.decode()
            told = json.loads(out.decode().splitlines()[-1])
            everything = list(range(MESSAGES))
            assert told == {"spark": NEWEST, "read": everything, "copied": True, "pipeline": MESSAGES}
            copied = [int(message.data) async for message in read_all(connection, "TO")]
            assert sorted(copied) == everything
