"""Files of Kafka client properties."""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.errors import InvalidInput
from keylane.kafka.client import parse_properties, read_properties

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


def test_what_a_kafka_user_has(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(
        "# ours\n! also a comment\n\nbootstrap.servers=a:9092,b:9092\nsecurity.protocol = SASL_SSL\n"
        "sasl.mechanism=SCRAM-SHA-512\nssl.ca.location=/etc/ca.pem\nkey.deserializer=org.Whatever\n"
        f'sasl.jaas.config={_PLAIN} required \\\n  username="al ice" \\\n  password="p=\\"w\\\\d";\n'
    )
    address = read_properties(path)
    assert address.bootstrap == "a:9092,b:9092"
    assert address.options == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "ssl.ca.location": "/etc/ca.pem",
        "sasl.username": "al ice",
        "sasl.password": 'p="w\\d',
    }
    assert "w\\d" not in repr(address)
    assert read_properties(path, "c:1").bootstrap == "c:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("just words", r"line 1 of f is 'just words': write name=value"),
        ("sasl.password hunter2hunter2hunter2", r"line 1 of f is 'sasl.password hunter…'"),
        ("ssl.truststore.location=/x.jks", r"is for Java clients: give ssl.ca.location with a PEM file instead"),
        ("sasl.jaas.config=com.sun.Krb5LoginModule required;", r"is not a plain or SCRAM login"),
    ],
)
def test_what_is_no_property(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_properties(text, "f")


def test_files_that_do_not_help(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_properties(tmp_path / "none")
    path = tmp_path / "empty"
    path.write_text("security.protocol=SSL\n")
    with pytest.raises(InvalidInput, match=r"has no bootstrap.servers: add it, or say where the brokers are"):
        read_properties(path)
