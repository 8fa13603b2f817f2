"""The connection to a Kafka cluster: its address, its clients, blocking calls with deadlines, and clear errors.

Owns: the settings that all clients of a cluster share, and the translation of the client library's errors. Never knows
what the messages contain.

The client library's own asyncio classes run every call in a pool of a hundred threads, and their producer waits to
fill batches. Here admin calls are futures already, a producer needs one thread for delivery reports (`producer.py`),
and one thread fetches any number of partitions (`partition_fetcher.py`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from keylane.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    Disconnected,
    InvalidInput,
    KafkaRefused,
    KeylaneError,
    NoSuchTopic,
    PermissionDenied,
    RequestTimeout,
    ServerTooOld,
    ServerUnreachable,
    TlsFailed,
)

_log = logging.getLogger("keylane.kafka")

_T = TypeVar("_T")
Setting: TypeAlias = str | int | float | bool

_THREADS = 8
_SLACK_S = 2.0
"""How long after a call's own deadline we still wait for it."""
_LISTEN_S = 0.1
_BROKER = re.compile(r"(?:[A-Z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:,/\[\]]+)(?::\d{1,5})?")

_COMMON: Mapping[str, Setting] = {
    "client.id": "keylane",
    # A client reconnects to a broker within a second of its return.
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    "retry.backoff.ms": 50,
    "retry.backoff.max.ms": 500,
    "topic.metadata.refresh.interval.ms": 30_000,
    "topic.metadata.propagation.max.ms": 5_000,
    "socket.keepalive.enable": True,
    "allow.auto.create.topics": False,
}
_OURS = frozenset(
    {
        "acks",
        "allow.auto.create.topics",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "error_cb",
        "group.id",
        "isolation.level",
        "logger",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.timeout.ms",
        "metadata.broker.list",
        "on_delivery",
        "request.required.acks",
        "retries",
        "transactional.id",
    }
)


def _codes(*names: str) -> frozenset[int]:
    return frozenset(getattr(KafkaError, name) for name in names)


_DISCONNECTED = _codes("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "NETWORK_EXCEPTION", "_DESTROY")
_SLOW = _codes("_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "REQUEST_TIMED_OUT")
_UNAVAILABLE = _codes(
    "BROKER_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "FENCED_LEADER_EPOCH",
    "KAFKA_STORAGE_ERROR",
    "LEADER_NOT_AVAILABLE",
    "NOT_CONTROLLER",
    "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "NOT_LEADER_FOR_PARTITION",
    "OFFSET_NOT_AVAILABLE",
    "PREFERRED_LEADER_NOT_AVAILABLE",
    "REPLICA_NOT_AVAILABLE",
    "UNKNOWN_LEADER_EPOCH",
    "_WAIT_COORD",
)
_UNKNOWN = _codes("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC")
_FORBIDDEN = _codes(
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "TOPIC_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
)
_LOGIN = _codes("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE")
_TLS = _codes("_SSL")
_TOO_OLD = _codes("UNSUPPORTED_VERSION", "_UNSUPPORTED_FEATURE", "UNSUPPORTED_FOR_MESSAGE_FORMAT")
_CONNECTION_ERRORS = _LOGIN | _TLS | _codes("_RESOLVE", "_TRANSPORT")
"""Connection errors that the library reports to `error_cb`: the reason why a call then times out."""


class _InfoLogger:
    """The library logs every lost connection as an error. Here callers get an exception, so INFO is enough."""

    def log(self, level: int, *args: object) -> None:
        _log.log(min(level, logging.INFO), *args)


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """The brokers of a cluster, and how to log in there.

    `options`: settings of the client library, such as `security.protocol`, `sasl.mechanism`, `sasl.username`,
    `sasl.password`, `ssl.ca.location`. keylane itself sets those on which the safety of claims depends, and refuses
    them here.

    >>> KafkaAddress("broker-1:9092,broker-2:9092")
    KafkaAddress(bootstrap='broker-1:9092,broker-2:9092')
    """

    bootstrap: str
    options: Mapping[str, Setting] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bootstrap, str) or not all(
            _BROKER.fullmatch(part.strip()) for part in self.bootstrap.split(",")
        ):
            raise InvalidInput(
                f"bootstrap is {self.bootstrap!r}: give brokers as host:port, with commas between, such as "
                "'broker-1:9092,broker-2:9092'"
            )
        if taken := sorted(_OURS & self.options.keys()):
            raise InvalidInput(f"option {taken[0]!r} is given: keylane sets it itself, because claims depend on it")
        for name, value in self.options.items():
            if not isinstance(value, str | int | float):
                raise InvalidInput(f"option {name!r} is {type(value).__name__}: give text, a number, or True and False")


class KafkaLink:
    """The clients of one cluster. Made by `open_kafka`. It keeps the last connection error that a client reported."""

    def __init__(self, address: KafkaAddress, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._reported: KafkaError | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="keylane-kafka")
        self.admin: AdminClient = self._new(AdminClient, {})

    def __repr__(self) -> str:
        return f"<KafkaLink {self.address.bootstrap}>"

    def new_consumer(self, settings: Mapping[str, Setting]) -> Consumer:
        """A consumer that never commits by itself. `group.id` is required even if it joins no group."""
        return self._new(Consumer, {"enable.auto.commit": False, "enable.auto.offset.store": False, **settings})

    def new_producer(self, settings: Mapping[str, Setting]) -> Producer:
        return self._new(Producer, settings)

    async def call(self, function: Callable[..., _T], *args: Any, doing: str, timeout_s: float | None = None) -> _T:
        """Run a blocking call of a client in a thread. It must return within `timeout_s`, by default the link's."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))
        return await self._within(running, doing, timeout_s)

    async def answer(self, future: Future[_T], *, doing: str, timeout_s: float | None = None) -> _T:
        """Await the result of an admin call. Give the call itself `request_timeout=link.timeout_s`."""
        return await self._within(asyncio.wrap_future(future), doing, timeout_s)

    async def _within(self, running: asyncio.Future[_T], doing: str, timeout_s: float | None) -> _T:
        allowed_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(allowed_s + _SLACK_S):
                result = await running
        except KafkaException as error:
            raise self.problem(error.args[0], doing) from error
        except TimeoutError as late:
            raise RequestTimeout(f"{doing}: no answer within {allowed_s + _SLACK_S:g} s{self._why()}") from late
        self._reported = None
        return result

    async def connect(self) -> None:
        """Wait until a broker answers. A failed login is raised at once, although the library would go on trying."""
        doing = f"connecting to Kafka at {self.address.bootstrap}"
        asked = self.admin.describe_cluster(request_timeout=self.timeout_s)
        answer = asyncio.ensure_future(self.answer(asked, doing=doing))
        while not (await asyncio.wait({answer}, timeout=_LISTEN_S))[0]:
            self.admin.poll(0)
            if self._reported is not None and self._reported.code() in _LOGIN | _TLS:
                answer.cancel()
                raise translate(self._reported, doing)
        answer.result()

    def problem(self, error: KafkaError, doing: str) -> KeylaneError:
        """Translate an error. A timeout or connection error includes the last reported connection error."""
        self.admin.poll(0)  # runs `error_cb`
        reported = self._reported
        if reported is not None and error.code() in _SLOW | _DISCONNECTED and reported.code() in _LOGIN | _TLS:
            return translate(reported, doing)
        return translate(error, doing, self._why())

    async def close(self) -> None:
        """End its threads. The callers of `new_consumer` and `new_producer` have closed theirs before."""
        await asyncio.to_thread(self._threads.shutdown)

    def _new(self, kind: Callable[..., _T], settings: Mapping[str, Setting]) -> _T:
        config = {
            "bootstrap.servers": self.address.bootstrap,
            "socket.timeout.ms": max(int(self.timeout_s * 1000), 1000),
            **_COMMON,
            **self.address.options,
            **settings,
        }
        try:
            return kind({**config, "error_cb": self._report}, logger=_InfoLogger())
        except KafkaException as error:
            raise InvalidInput(
                f"Kafka options {sorted(self.address.options)} do not fit: {error.args[0].str()}; correct them"
            ) from error

    def _report(self, error: KafkaError) -> None:
        if error.code() in _CONNECTION_ERRORS:
            self._reported = error

    def _why(self) -> str:
        return "" if self._reported is None else f"; the last connection error was: {self._reported.str()}"


@asynccontextmanager
async def open_kafka(address: KafkaAddress | str, *, timeout_s: float = 10.0) -> AsyncIterator[KafkaLink]:
    """A link to a cluster that answers, for as long as the block lasts.

    `ServerUnreachable`, `AuthenticationFailed` or `TlsFailed` within `timeout_s` if it does not.

    >>> async with open_kafka("127.0.0.1:9092") as link:
    ...     await link.answer(link.admin.describe_cluster(), doing="looking around")
    """
    if isinstance(address, str):
        address = KafkaAddress(address)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 3600:
        raise InvalidInput(f"timeout_s is {timeout_s!r}: give seconds, more than 0, such as 10")
    link = KafkaLink(address, timeout_s)
    try:
        try:
            await link.connect()
        except (Disconnected, RequestTimeout, BrokerUnavailable) as error:
            raise ServerUnreachable(
                f"{error}; check that a broker listens at {address.bootstrap}, and security.protocol"
            ) from error
        yield link
    finally:
        await link.close()


def translate(error: KafkaError, doing: str, why: str = "") -> KeylaneError:
    """An error of the client library as one of keylane's."""
    code, text = error.code(), f"{doing}: {error.str()} ({error.name()}){why}"
    kinds: list[tuple[frozenset[int], type[KeylaneError], str]] = [
        (_DISCONNECTED, Disconnected, ""),
        (_SLOW, RequestTimeout, ""),
        (_UNAVAILABLE, BrokerUnavailable, ""),
        (_UNKNOWN, NoSuchTopic, "; check the name, and that this user may describe it"),
        (_FORBIDDEN, PermissionDenied, "; this user lacks a permission (ACL) for it"),
        (_LOGIN, AuthenticationFailed, "; check the sasl.* options"),
        (_TLS, TlsFailed, "; check security.protocol and the ssl.* options"),
        (_TOO_OLD, ServerTooOld, "; keylane needs Kafka 3.3 or newer"),
    ]
    for codes, kind, advice in kinds:
        if code in codes:
            return kind(text + advice)
    if error.retriable():
        return BrokerUnavailable(text)
    return KafkaRefused(code, error.name(), text)


# ---- properties files, as Kafka's own tools accept them with `--command-config` --------------------------
#
# A few names differ between the Java client and the client library used here. Everything else is passed on unchanged;
# the library rejects what it does not know.

_BOOTSTRAP = "bootstrap.servers"
_JAAS_LOGIN = re.compile(r"\S+\.(?:PlainLoginModule|ScramLoginModule)\s+required\b(?P<rest>.*);\s*", re.DOTALL)
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
    module = _JAAS_LOGIN.fullmatch(value)
    words = {} if module is None else {key: quoted or plain for key, quoted, plain in _WORD.findall(module["rest"])}
    if not words.keys() >= {"username", "password"}:
        raise InvalidInput(
            f"sasl.jaas.config in {name} is not a plain or SCRAM login with username and password: give sasl.mechanism "
            "and its own options, such as sasl.username and sasl.password"
        )
    return {f"sasl.{key}": re.sub(r"\\(.)", r"\1", words[key]) for key in ("username", "password")}


def _without_secrets(words: str) -> str:
    return words if len(words) <= 20 else f"{words[:20]}…"
