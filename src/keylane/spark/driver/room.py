"""The KV bucket that the queries of an account share, and the names of their records in it."""

from __future__ import annotations

from keylane.jetstream.connection import Connection
from keylane.jetstream.kv import Bucket

BUCKET = "keylane-spark"


def bucket_of(connection: Connection) -> Bucket:
    return Bucket(connection, BUCKET)


def lease_key(query: str) -> str:
    return f"lease.{query}"


def start_key(query: str) -> str:
    return f"start.{query}"


def claim_key(stream: str) -> str:
    return f"claim.{stream}"
