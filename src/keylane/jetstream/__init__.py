"""The adapter to NATS: connections, publishing, feeds, and the JetStream API. Other packages import from here only.

`consumers` and `streams` are modules, used as `streams.create(connection, config)`. Every name is loaded when it is
first used: importing this package alone does not import the NATS client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.lazy import loader, public_names

if TYPE_CHECKING:
    from keylane.jetstream import consumers, streams
    from keylane.jetstream.client import Client
    from keylane.jetstream.connection import Connection, connect
    from keylane.jetstream.consumers import (
        AckPolicy,
        ConsumerConfig,
        ConsumerInfo,
        DeliverPolicy,
        PriorityGroupState,
        PriorityPolicy,
        parse_time,
    )
    from keylane.jetstream.direct import MOST_BYTES, OWN_HEADERS, StoredMessage, read_all, read_batch
    from keylane.jetstream.features import Version, missing_features, supports
    from keylane.jetstream.feed import Feed, open_feed
    from keylane.jetstream.feed_options import FeedOptions, Notice, PinOptions, SharedBudget
    from keylane.jetstream.first_messages import FirstMessage, first_messages
    from keylane.jetstream.headers import encode_headers, number_in, parse_headers, status_of
    from keylane.jetstream.hooks import ConnectionHooks
    from keylane.jetstream.kv import Bucket, KvEntry, change
    from keylane.jetstream.message import Message
    from keylane.jetstream.missing_names import existing_stream, naming_missing, stream_names
    from keylane.jetstream.publisher import (
        Outgoing,
        PublishAck,
        Publisher,
        open_publisher,
        publish,
        publish_atomic,
        publish_many,
        publish_raw,
        read_answer,
    )
    from keylane.jetstream.settings import check_seconds
    from keylane.jetstream.streams import RetentionPolicy, StorageType, StreamConfig, StreamInfo, StreamState

__all__ = [
    "MOST_BYTES",
    "OWN_HEADERS",
    "AckPolicy",
    "Bucket",
    "Client",
    "Connection",
    "ConnectionHooks",
    "ConsumerConfig",
    "ConsumerInfo",
    "DeliverPolicy",
    "Feed",
    "FeedOptions",
    "FirstMessage",
    "KvEntry",
    "Message",
    "Notice",
    "Outgoing",
    "PinOptions",
    "PriorityGroupState",
    "PriorityPolicy",
    "PublishAck",
    "Publisher",
    "RetentionPolicy",
    "SharedBudget",
    "StorageType",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "Version",
    "change",
    "check_seconds",
    "connect",
    "consumers",
    "encode_headers",
    "existing_stream",
    "first_messages",
    "missing_features",
    "naming_missing",
    "number_in",
    "open_feed",
    "open_publisher",
    "parse_headers",
    "parse_time",
    "publish",
    "publish_atomic",
    "publish_many",
    "publish_raw",
    "read_all",
    "read_answer",
    "read_batch",
    "status_of",
    "stream_names",
    "streams",
    "supports",
]

_HOMES = {
    "": "consumers streams",
    ".client": "Client",
    ".connection": "Connection connect",
    ".consumers": "AckPolicy ConsumerConfig ConsumerInfo DeliverPolicy PriorityGroupState PriorityPolicy parse_time",
    ".direct": "MOST_BYTES OWN_HEADERS StoredMessage read_all read_batch",
    ".features": "Version missing_features supports",
    ".feed": "Feed open_feed",
    ".feed_options": "FeedOptions Notice PinOptions SharedBudget",
    ".first_messages": "FirstMessage first_messages",
    ".headers": "encode_headers number_in parse_headers status_of",
    ".hooks": "ConnectionHooks",
    ".kv": "Bucket KvEntry change",
    ".message": "Message",
    ".missing_names": "existing_stream naming_missing stream_names",
    ".publisher": "Outgoing PublishAck Publisher open_publisher publish publish_atomic publish_many publish_raw"
    " read_answer",
    ".settings": "check_seconds",
    ".streams": "RetentionPolicy StorageType StreamConfig StreamInfo StreamState",
}

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for good
    __getattr__ = loader(__name__, {name: __name__ + home for home, names in _HOMES.items() for name in names.split()})

__dir__ = public_names(__all__)
