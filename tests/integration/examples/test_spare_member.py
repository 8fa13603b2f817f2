"""The elastic app of the manifests: a pod whose member nobody has listed yet is ready, so that a rollout goes on."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

import keylane
from keylane import groups
from keylane.jetstream import StreamConfig, streams
from keylane.server import NatsServer
from tests.integration.cli.groups_rig import running

APPS = Path(__file__).parents[3] / "examples" / "kubernetes"


async def test_a_spare_member_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(APPS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MEMBER", "billing-3")
    with NatsServer.start() as server:
        async with keylane.connect(server.url) as connection:
            await streams.create(connection, StreamConfig(name="ORDERS", subjects=["orders.*"]))
            await groups.create_elastic(
                connection, "ORDERS", "billing", partitions=4, partition_by="orders.*", members=["billing-0"]
            )
            words = ["run", "billing:app", "--log-json", "--metrics-port", "0", "-s", server.url]
            async with running(*words) as command:
                port = (await command.event("metrics"))["port"]
                await command.event("ready")
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:  # noqa: ASYNC210
                    assert answer.status == 200
