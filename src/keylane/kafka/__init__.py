"""Marshal on Apache Kafka: the coordination log in a topic, and topics as sources.

Needs `pip install "keylane[kafka]"`. Names are loaded when they are first used, and the client library with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.extras import extra_missing
from keylane.lazy import loader, public_names

if TYPE_CHECKING:
    from keylane.kafka.client import KafkaAddress, KafkaLink, open_kafka
    from keylane.kafka.log import KafkaLog, open_kafka_log
    from keylane.kafka.source import KafkaSource, open_kafka_source

_HOMES = {
    "keylane.kafka.client": ("KafkaAddress", "KafkaLink", "open_kafka"),
    "keylane.kafka.log": ("KafkaLog", "open_kafka_log"),
    "keylane.kafka.source": ("KafkaSource", "open_kafka_source"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["KafkaAddress", "KafkaLink", "KafkaLog", "KafkaSource", "open_kafka", "open_kafka_log", "open_kafka_source"]

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    _load = loader(__name__, _HOME_OF)

    def __getattr__(name: str) -> object:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "confluent_kafka":
                raise
            problem = f"keylane.kafka.{name} needs confluent-kafka, which is not installed"
            raise extra_missing(problem, "kafka") from error


__dir__ = public_names(__all__)
