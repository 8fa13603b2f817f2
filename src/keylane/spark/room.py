"""The KV bucket that the queries of an account share, and the names of their records in it."""

from __future__ import annotations

import re

from keylane.core.subjects import shown
from keylane.errors import InvalidInput
from keylane.jetstream.connection import Connection
from keylane.jetstream.kv import Bucket

BUCKET = "keylane-spark"

_QUERY_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


def bucket_of(connection: Connection) -> Bucket:
    return Bucket(connection, BUCKET)


def check_query_name(name: str) -> str:
    """Return the name of a query unchanged, or raise `InvalidInput`."""
    if not isinstance(name, str) or not _QUERY_NAME.fullmatch(name):
        raise InvalidInput(
            f"queryName is {shown(name)}: it names records and a consumer on the server; use 1 to 200 of A-Z, a-z, "
            "0-9, '-' and '_'"
        )
    return name


def lease_key(query: str) -> str:
    return f"lease.{query}"


def start_key(query: str) -> str:
    return f"start.{query}"


def claim_key(stream: str) -> str:
    return f"claim.{stream}"
