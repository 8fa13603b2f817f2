"""The documentation site: every link leads somewhere, every page is in its menu, and a Kafka user finds their words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KAFKA_TERMS = """
topic, record, record key, partition, partitioner, offset, committed offset, log end offset, consumer lag, broker,
consumer group, group.id, member.id, group.instance.id, group coordinator, group leader, generation id, rebalance,
eager, cooperative, CooperativeStickyAssignor, ConsumerRebalanceListener, partition.assignment.strategy, poll(),
pause(), resume(), seek, commitSync, enable.auto.commit, auto.offset.reset, session.timeout.ms, heartbeat.interval.ms,
max.poll.interval.ms, max.poll.records, fetch.max.bytes, isolation.level, zombie, idempotent producer, acks=all,
min.insync.replicas, cleanup.policy, --list, --describe, --reset-offsets, --delete, kafka-topics, dead letter topic,
retry topics, parallel consumer, at most once, exactly once, standby replicas, interceptors, MirrorMaker, Kafka Connect,
Kafka Streams, Schema Registry, headers, retention, static membership
"""


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    commands = (tmp_path / "site" / "commands" / "index.html").read_text()
    assert "keylane fleet repartition" in commands
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="guarantees/"' in home


@pytest.mark.parametrize("term", [one.strip() for one in KAFKA_TERMS.replace("\n", " ").split(",")])
def test_a_kafka_user_finds_the_term(term: str) -> None:
    page = (ROOT / "docs" / "migrating" / "kafka.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    assert any(term in row for row in rows), f"the page has no row for {term!r}"
