"""Requests to the JetStream API: JSON out, JSON in, every failure one error.

Owns the API prefix, the deadline of a request, and the meaning of error answers. Never retries: a caller
knows better than we do what may be asked twice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from keylane.core.subjects import check_subject
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    Disconnected,
    InvalidInput,
    JetStreamDisabled,
    KeylaneError,
    NotFound,
    RequestTimeout,
)
from keylane.jetstream.client import Client
from keylane.jetstream.settings import check_seconds

_NOT_ENABLED = (10039, 10076)
_NO_STREAM = 10059
_NO_CONSUMER = 10014
_TWO_WORDS = ("DURABLE", "LEADER", "MSG", "PEER")
"""What follows STREAM or CONSUMER in the subject of a request whose verb has two words, as in STREAM.MSG.GET.ORDERS."""


class JetStreamApi:
    """The JetStream API of one connection.

    >>> info = await connection.api.request("STREAM.INFO.ORDERS")  # doctest: +SKIP
    """

    def __init__(self, client: Client, *, prefix: str, timeout_s: float) -> None:
        self._client = client
        self.prefix = prefix
        self.timeout_s = timeout_s

    def subject(self, name: str) -> str:
        """The whole subject of an API call, prefix included."""
        return check_subject(f"{self.prefix}.{name}")

    async def request(
        self, subject: str, payload: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Ask the API at `subject` (without the prefix) and return its answer.

        Raises `ApiError` (or `NotFound`) for an error answer, `RequestTimeout` when none came in time,
        `ApiUnavailable` when nobody listens, `JetStreamDisabled` when the account has no JetStream,
        `PermissionDenied` when the server forbids the subject, and `Disconnected` when the link went away.
        """
        full = self.subject(subject)
        deadline_s = check_seconds(self.timeout_s if timeout_s is None else timeout_s, "timeout_s")
        body = json.dumps(payload).encode() if payload is not None else b""
        answer = self._decode(full, (await self._ask(full, body, deadline_s)).data)
        if error := answer.get("error"):
            raise self._error(full, error)
        return answer

    async def paged(
        self,
        subject: str,
        list_field: str,
        payload: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Any]:
        """Every item of a paged list: `paged("CONSUMER.LIST.ORDERS", "consumers")`.

        The deadline counts for each page.
        """
        offset = 0
        while True:
            answer = await self.request(subject, {**(payload or {}), "offset": offset}, timeout_s)
            items = answer.get(list_field) or []
            for item in items:
                yield item
            offset += len(items)
            if not items or offset >= answer.get("total", 0):
                return

    async def _ask(self, subject: str, body: bytes, deadline_s: float) -> Msg:
        try:
            return await self._client.ask(subject, body, deadline_s)
        except nats.errors.NoRespondersError as error:
            raise ApiUnavailable(
                f"nobody answers on {subject}: this account has no JetStream, or the domain or API "
                f"prefix is wrong ({self.prefix})"
            ) from error
        except nats.errors.MaxPayloadError as error:
            limit = self._client.max_payload
            raise InvalidInput(f"{subject}: the request has {len(body)} bytes and the server takes {limit}") from error
        except nats.errors.TimeoutError as error:
            state = "" if self._client.is_connected else "; the connection is down and being rebuilt"
            raise RequestTimeout(f"no answer on {subject} within {deadline_s:g} s{state}") from error
        except nats.errors.Error as error:
            raise Disconnected(f"{subject} could not be asked: {error}") from error

    def _decode(self, subject: str, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._not_jetstream(subject, "no JSON object")
        return answer

    def _error(self, subject: str, error: object) -> KeylaneError:
        match error:
            case {"code": int(code), **rest}:
                err_code = rest.get("err_code", 0)
                description = str(rest.get("description", "no description"))
                return _api_error(self.prefix, subject, code, err_code if isinstance(err_code, int) else 0, description)
        return self._not_jetstream(subject, f"an error of another form, {str(error)[:80]}")

    def _not_jetstream(self, subject: str, why: str) -> ApiUnavailable:
        return ApiUnavailable(
            f"what answers on {subject} is not JetStream: {why}. Check the API prefix ({self.prefix})"
        )


def _api_error(prefix: str, subject: str, code: int, err_code: int, description: str) -> KeylaneError:
    if err_code in _NOT_ENABLED:
        return JetStreamDisabled(f"{subject}: {description}. Turn JetStream on in the server and for this account")
    if code != 404:
        return ApiError(code, err_code, description, doing=subject)
    words = subject.removeprefix(f"{prefix}.").split(".")
    stream, consumer = [*words[3 if words[1] in _TWO_WORDS else 2 :], "", ""][:2]
    if err_code == _NO_STREAM:
        text = f"there is no stream {stream!r}"
        return NotFound(code, err_code, description, doing=subject, text=text, stream=stream)
    if err_code == _NO_CONSUMER:
        text = f"stream {stream!r} has no consumer {consumer!r}"
        return NotFound(code, err_code, description, doing=subject, text=text, stream=stream, consumer=consumer)
    return NotFound(code, err_code, description, doing=subject)
