"""Kafka client properties files, as Kafka's own tools accept them with `--command-config`.

Owns: the few names that differ between the Java client and the client library used here. Everything else is passed on
unchanged; the library rejects what it does not know.
"""

from __future__ import annotations

import re
from pathlib import Path

from keylane.errors import InvalidInput
from keylane.kafka.client import KafkaAddress

_BOOTSTRAP = "bootstrap.servers"
_LOGIN = re.compile(r"\S+\.(?:PlainLoginModule|ScramLoginModule)\s+required\b(?P<rest>.*);\s*", re.DOTALL)
_WORD = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|(\S+))')
_INSTEAD = {
    "ssl.truststore.location": "ssl.ca.location with a PEM file",
    "ssl.truststore.password": "ssl.ca.location with a PEM file",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "sasl.login.callback.handler.class": "sasl.oauthbearer.method=oidc",
}
_OF_JAVA_ONLY = re.compile(r"(?:key|value)\.(?:de)?serializer")


def read_properties(path: Path, bootstrap: str | None = None) -> KafkaAddress:
    """The address in a file; `bootstrap` goes before the file's own `bootstrap.servers`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the Kafka properties cannot be read: {error}") from error
    found = parse_properties(text, str(path))
    brokers = found.pop(_BOOTSTRAP, None)
    if not (bootstrap or brokers):
        raise InvalidInput(f"{path} has no {_BOOTSTRAP}: add it, or say where the brokers are (--kafka)")
    return KafkaAddress(bootstrap or brokers or "", found)


def parse_properties(text: str, name: str) -> dict[str, str]:
    """Names and values of `name=value` lines; `name` is the file's, for messages.

    >>> parse_properties("security.protocol = SSL\\n# a comment\\n", "client.properties")
    {'security.protocol': 'SSL'}
    """
    found: dict[str, str] = {}
    for number, line in enumerate(re.sub(r"\\\r?\n[ \t]*", "", text).splitlines(), start=1):
        words = line.strip()
        if not words or words[0] in "#!":
            continue
        key, equals, value = (part.strip() for part in words.partition("="))
        if not equals or not key or " " in key:
            raise InvalidInput(f"line {number} of {name} is {_without_secrets(words)!r}: write name=value")
        if key in _INSTEAD:
            raise InvalidInput(f"{key!r} in {name} is for Java clients: give {_INSTEAD[key]} instead")
        if key == "sasl.jaas.config":
            found |= _login(value, name)
        elif not _OF_JAVA_ONLY.fullmatch(key):
            found[key] = value
    return found


def _login(value: str, name: str) -> dict[str, str]:
    """User and password from the Java client's `sasl.jaas.config`."""
    module = _LOGIN.fullmatch(value)
    words = {} if module is None else {key: quoted or plain for key, quoted, plain in _WORD.findall(module["rest"])}
    if not words.keys() >= {"username", "password"}:
        raise InvalidInput(
            f"sasl.jaas.config in {name} is not a plain or SCRAM login with username and password: give sasl.mechanism "
            "and its own options, such as sasl.username and sasl.password"
        )
    return {f"sasl.{key}": re.sub(r"\\(.)", r"\1", words[key]) for key in ("username", "password")}


def _without_secrets(words: str) -> str:
    return words if len(words) <= 20 else f"{words[:20]}…"
