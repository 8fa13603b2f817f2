"""The dashboard and the alert rules on Debian's Prometheus, which scrapes real members: no panel is empty."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import keylane
from keylane import marshal
from keylane.groups import GroupMessage
from keylane.metrics import MarshalMetrics, MemberMetrics, serve_metrics
from keylane.metrics.alert_rules import ALERT_RULES, GROUP_ALERT_RULES, rules_file
from keylane.metrics.dashboard import dashboard_file, queries
from keylane.server import NatsServer
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.fleet.test_fleet_run import running
from tests.integration.groups.conftest import stack
from tests.integration.groups.rig import Ground, make_ground
from tests.integration.metrics.test_exporter import exporter
from tests.waiter import until

__all__ = ["stack"]

ROOT = Path(__file__).parents[3]
PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's prometheus on PATH"),
    pytest.mark.timeout(240),
]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **query: str) -> Any:
        """The answer; None: it does not answer, or not yet."""
        return await asyncio.to_thread(self._get, f"{self._url}{path}?{urllib.parse.urlencode(query)}")

    def _get(self, url: str) -> Any:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - http, on this machine
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return json.loads(error.read()) if error.code != 503 else None
        except OSError:
            return None

    async def series(self, expression: str) -> list[Any]:
        """What an expression gives now. Raises if Prometheus refuses it."""
        answer = await self.get("/api/v1/query", query=expression)
        assert answer is not None
        assert answer["status"] == "success", (expression, answer)
        found: list[Any] = answer["data"]["result"]
        return found


@asynccontextmanager
async def prometheus(directory: Path, port: int, targets: list[int]) -> AsyncIterator[Prometheus]:
    rules = directory / "rules.yml"
    rules.write_text(rules_file())
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "keylane", "static_configs": [{"targets": [f"127.0.0.1:{one}" for one in targets]}]}
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    assert PROMETHEUS is not None
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    try:
        found = Prometheus(port)
        await until(lambda: found.get("/api/v1/status/buildinfo"), deadline_s=60)
        yield found
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def members_at_work(ground: Ground, numbered: Ground, stack: AsyncExitStack) -> AsyncIterator[int]:
    """A member of an elastic group and a Marshal consumer, with messages all the time; yields their port."""
    of_member, of_consumer = MemberMetrics(), MarshalMetrics()

    async def handle(message: GroupMessage) -> None:
        if message.data == b"bad":
            raise ValueError("no")

    async def take(message: marshal.MarshalMessage) -> None: ...

    await ground.elastic(members=["a"], max_buffered_messages=1000)
    of_member.watch(await ground.join("a", handle, hooks=of_member.hooks(), max_tries=1))
    log = await stack.enter_async_context(marshal.open_jetstream_log(ground.connection, interval_s=1, replicas=1))
    source = marshal.StreamSource(ground.connection)
    consumer = marshal.Consumer(log, source, "m", "anna", [numbered.stream], take, hooks=of_consumer.hooks())
    of_consumer.watch(consumer)
    await consumer.start()
    stack.push_async_callback(consumer.stop)
    await ground.publish(["k1"], b"bad")

    async def load() -> None:
        while True:
            await ground.publish([f"k{one}" for one in range(8)])
            await numbered.publish([f"k{one}" for one in range(8)])
            await asyncio.sleep(0.2)

    async with serve_metrics(lambda: of_member.readings() + of_consumer.readings(), port=0, host="127.0.0.1") as port:
        loading = asyncio.create_task(load())
        try:
            yield port
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


def as_grafana_asks(query: str) -> str:
    """With everything chosen, and the interval that Grafana would put in."""
    return query.replace("$__rate_interval", "1m").replace("$stream", ".*").replace("$group", ".*")


@pytest.mark.long("a fleet in processes, an exporter and a Prometheus start, and scrape for some seconds")
async def test_no_panel_is_empty_and_every_alert_runs(stack: AsyncExitStack, tmp_path: Path, free_port: int) -> None:
    server = stack.enter_context(NatsServer.start())
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    plain = await make_ground(stack, connection, "plain", server.url)
    numbered = await make_ground(stack, connection, "numbered", server.url, partitions=PARTITIONS, allow_direct=True)
    directory = tmp_path / "fleet"
    directory.mkdir()
    options = ("--metrics-port", "0", "--metrics-host", "127.0.0.1")
    async with (
        members_at_work(plain, numbered, stack) as port,
        running(FleetGround(numbered), directory, *options, workers=1) as fleet,
        exporter(server.url) as account,
    ):
        await until(lambda: fleet.all("metrics"), deadline_s=60)
        targets = [port, fleet.all("metrics")[0]["port"], account.port]
        async with prometheus(tmp_path, free_port, targets) as at:
            await until(lambda: at.series('keylane_group_lag_messages{kind="fleet"}'), deadline_s=60)
            for _, query in queries():
                await until(partial(at.series, as_grafana_asks(query)), deadline_s=60)
            rules = await at.get("/api/v1/rules")
            loaded = [one for group in rules["data"]["groups"] for one in group["rules"]]
            assert len(loaded) == len(ALERT_RULES) + len(GROUP_ALERT_RULES)
            await until(
                lambda: at.get("/api/v1/rules"),
                lambda told: {one["health"] for group in told["data"]["groups"] for one in group["rules"]} == {"ok"},
                deadline_s=60,
            )
            # An alert on a metric that is never set would never fire.
            worker_layout = {"keylane_consumer_subject_count", "keylane_consumer_subject_limit"}
            asked = {name for one in loaded for name in re.findall(r"\bkeylane_\w+", one["query"])}
            for name in sorted(asked - worker_layout):
                assert await at.series(name), name


def test_the_dashboard_is_the_one_that_the_catalogue_makes() -> None:
    stored = (ROOT / "deploy" / "grafana" / "keylane.json").read_text(encoding="utf-8")
    assert stored == dashboard_file(), "write it again: docs/metrics.md says how"
    panels = json.loads(stored)["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels]
    assert len(set(places)) == len(places)
