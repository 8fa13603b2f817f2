"""A broker that wants TLS and a login, reached by the commands with a file of client properties."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from keylane.kafka import open_kafka
from keylane.kafka.client import read_properties
from tests.integration.kafka.topic_rig import Unique, make_topic
from tests.integration.marshal.command import Command, count, events
from tests.peers.kafka import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

PASSWORD = "boss secret=1"  # noqa: S105 - of a broker of this test
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


@dataclass(frozen=True, slots=True)
class Guarded:
    kafka: Kafka
    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def properties(self, name: str, *, password: str = PASSWORD, ca: Path | None = None) -> Path:
        """A file as Kafka's own tools take it."""
        path = self.directory / name
        path.write_text(
            f"bootstrap.servers={self.kafka.bootstrap}\nsecurity.protocol=SASL_SSL\nsasl.mechanism=PLAIN\n"
            f"ssl.ca.location={ca or self.ca}\n"
            f'sasl.jaas.config={MODULE} required \\\n  username="boss" password="{password}";\n'
        )
        return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("kafka tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain = [blob.bytes() for blob in (*issued.cert_chain_pems, authority.cert_pem)]
    certificate = directory / "broker.pem"
    certificate.write_bytes(b"".join([key, *chain]))
    with Kafka.start(logins={"boss": PASSWORD}, certificate=certificate) as kafka:
        yield Guarded(kafka, directory)


async def test_consume_and_world_through_a_file(guarded: Guarded, unique: Unique) -> None:
    topic, path = unique("orders"), guarded.properties("boss.properties")
    async with open_kafka(read_properties(path)) as link:
        await make_topic(link, topic, 2)
    marshal = Command("--kafka-config", str(path), "--log", unique("__marshal"), "--interval", "3", deadline_s=60)
    async with marshal.running("consume", "billing", "anna", topic, "--greedy", "--json") as consumer:
        await events(consumer, lambda found: count(found, "claimed") == 2)
        told = await marshal.told("world")
        assert {one["owner"] for one in told["claims"]} == {"anna"}
        consumer.send_signal(signal.SIGTERM)
        _, err = await consumer.communicate()
        assert (consumer.returncode, err) == (0, b"")


def wrong_password(guarded: Guarded) -> Path:
    return guarded.properties("wrong.properties", password="not mine")  # noqa: S106 - it is wrong


def strange_ca(guarded: Guarded) -> Path:
    stranger = guarded.directory / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    return guarded.properties("strange.properties", ca=stranger)


@pytest.mark.parametrize(
    ("properties", "said"),
    [(wrong_password, "check the sasl.* options"), (strange_ca, "check security.protocol and the ssl")],
)
async def test_a_wrong_login_or_ca_is_one_line_without_the_password(
    guarded: Guarded, properties: Callable[[Guarded], Path], said: str
) -> None:
    marshal = Command("--kafka-config", str(properties(guarded)), "--log", "__marshal", deadline_s=60)
    code, out, err = await marshal("world", "--timeout", "20")
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert "not mine" not in err
    assert PASSWORD not in err
