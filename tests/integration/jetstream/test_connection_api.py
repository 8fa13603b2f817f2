"""Requests to the JetStream API: prefixes, errors, pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import nats.js.api
import pytest

import keylane
from keylane import Connection
from keylane.errors import ApiError, ApiUnavailable, InvalidInput, NotFound, RequestTimeout
from keylane.jetstream.api import JetStreamApi
from keylane.server import NatsServer

Unique = Callable[..., str]


async def test_an_answer(connection: Connection, unique: Unique) -> None:
    name = unique("S")
    made = await connection.api.request(f"STREAM.CREATE.{name}", {"name": name, "subjects": [name]})
    assert made["config"]["name"] == name
    assert await connection.api.request(f"STREAM.DELETE.{name}") == {
        "type": "io.nats.jetstream.api.v1.stream_delete_response",
        "success": True,
    }


async def test_not_found(connection: Connection) -> None:
    with pytest.raises(NotFound) as missing:
        await connection.api.request("STREAM.INFO.nowhere")
    assert (missing.value.code, missing.value.err_code) == (404, 10059)
    assert str(missing.value) == "there is no stream 'nowhere'"


async def test_an_error_answer_carries_the_servers_words(connection: Connection) -> None:
    with pytest.raises(ApiError) as refused:
        await connection.api.request("STREAM.CREATE.A", {"name": "B"})
    assert not isinstance(refused.value, NotFound)
    assert refused.value.code == 400
    assert "match" in refused.value.description


async def test_a_deadline_names_the_subject_and_itself(connection: Connection, unique: Unique) -> None:
    subject = unique("SILENT")
    await connection.nats.subscribe(f"$JS.API.{subject}")
    started = time.monotonic()
    with pytest.raises(RequestTimeout, match=rf"no answer on \$JS\.API\.{subject} within 0\.2 s$"):
        await connection.api.request(subject, timeout_s=0.2)
    assert time.monotonic() - started < 4


async def test_nobody_listens(connection: Connection) -> None:
    elsewhere = JetStreamApi(connection.nats, prefix="$JS.moon.API", timeout_s=5)
    with pytest.raises(ApiUnavailable, match=r"nobody answers on \$JS\.moon\.API\.INFO: .* prefix is wrong"):
        await elsewhere.request("INFO")


async def test_the_server_is_silent_about_an_unknown_request(connection: Connection) -> None:
    """JetStream listens to everything under its prefix and drops what it does not know."""
    with pytest.raises(RequestTimeout, match=r"\$JS\.API\.NO\.SUCH\.THING within 0\.2 s"):
        await connection.api.request("NO.SUCH.THING", timeout_s=0.2)


async def test_an_answer_that_is_not_json(connection: Connection, unique: Unique) -> None:
    subject = unique("ODD")

    async def answer(message: object) -> None:
        await message.respond(b"[1, 2]")  # type: ignore[attr-defined]

    await connection.nats.subscribe(f"$JS.API.{subject}", cb=answer)
    with pytest.raises(ApiUnavailable, match="is not JetStream: no JSON object"):
        await connection.api.request(subject)


async def test_bad_input_is_refused_before_it_is_sent(connection: Connection) -> None:
    for subject in ("STREAM.INFO.a b", "STREAM.INFO.*", "STREAM.INFO.", ""):
        with pytest.raises(InvalidInput):
            await connection.api.request(subject)
    with pytest.raises(InvalidInput, match="timeout_s"):
        await connection.api.request("INFO", timeout_s=0)
    too_much = {"name": "x" * connection.nats.max_payload}
    with pytest.raises(InvalidInput, match=r"the request has .* bytes and the server takes"):
        await connection.api.request("STREAM.CREATE.X", too_much)


async def test_every_page_of_a_list() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            assert [each async for each in connection.api.paged("STREAM.NAMES", "streams")] == []
            await connection.api.request("STREAM.CREATE.S", {"name": "S", "storage": "memory"})
            names = [f"c{number:04}" for number in range(300)]
            for name in names:
                config = {"name": name, "ack_policy": "none", "mem_storage": True, "inactive_threshold": 60_000_000_000}
                body = {"stream_name": "S", "config": config}
                await connection.api.request(f"CONSUMER.CREATE.S.{name}", body)
            listed = [each["name"] async for each in connection.api.paged("CONSUMER.LIST.S", "consumers")]
            assert sorted(listed) == names
            first = await connection.api.request("CONSUMER.LIST.S", {"offset": 0})
            assert len(first["consumers"]) < 300  # so there were several pages


async def test_a_domain(tmp_path: Path) -> None:
    config = f'jetstream {{ store_dir: "{tmp_path}", domain: hub }}'
    with NatsServer.start(extra_config=config) as server:
        async with await keylane.connect(server.url, domain="hub") as connection:
            assert connection.api.prefix == "$JS.hub.API"
            await connection.api.request("STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
            assert (await connection.jetstream.stream_info("S")).config.name == "S"
            bucket = await connection.jetstream.create_key_value(nats.js.api.KeyValueConfig("B"))
            await bucket.put("k", b"v")
            assert (await bucket.get("k")).value == b"v"


async def test_an_api_prefix_of_an_imported_account() -> None:
    config = """
accounts {
  DATA {
    jetstream: enabled
    users: [ { user: data, password: pw } ]
    exports: [ { service: "$JS.API.>", response_type: stream } ]
  }
  APP {
    users: [ { user: app, password: pw } ]
    imports: [ { service: { account: DATA, subject: "$JS.API.>" }, to: "data.js.>" } ]
  }
}
"""
    with NatsServer.start(extra_config=config) as server:
        async with await keylane.connect(server.url, user="data", password="pw") as owner:  # noqa: S106
            await owner.api.request("STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
        async with await keylane.connect(
            server.url,
            user="app",
            password="pw",  # noqa: S106
            api_prefix="data.js",
        ) as connection:
            assert (await connection.api.request("STREAM.INFO.S"))["config"]["name"] == "S"
            assert (await connection.jetstream.stream_info("S")).config.name == "S"
