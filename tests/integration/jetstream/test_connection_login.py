"""Every way to log in, on real servers, and what a refusal says."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # ships no types
import pytest

import keylane
from keylane.errors import (
    AuthenticationFailed,
    Disconnected,
    InvalidInput,
    JetStreamDisabled,
    PermissionDenied,
)
from keylane.jetstream import ConnectionHooks
from keylane.server import NatsServer


def new_seed(prefix: int = nkeys.PREFIX_BYTE_USER) -> str:
    seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
    return seed.decode()


def public_key(seed: str) -> str:
    key: bytes = nkeys.from_seed(bytearray(seed.encode())).public_key
    return key.decode()


NKEY_SEED = new_seed()

USERS = f"""
accounts {{
  APP {{
    jetstream: enabled
    users: [
      {{ user: alice, password: "p@ss:w,rd" }}
      {{ nkey: {public_key(NKEY_SEED)} }}
      {{ user: shy, password: pw
         permissions: {{ publish: {{ deny: ["$JS.API.INFO", "$JS.API.STREAM.DELETE.*"] }} }} }}
      {{ user: boxed, password: pw, permissions: {{ subscribe: {{ allow: ["_BOX.>"] }} }} }}
    ]
  }}
  BARE {{ users: [ {{ user: bare, password: pw }} ] }}
  SYS {{ users: [ {{ user: sys, password: pw }} ] }}
}}
system_account: SYS
"""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer.start(extra_config=USERS) as started:
        yield started


async def test_user_and_password(server: NatsServer) -> None:
    async with await keylane.connect(server.url, user="alice", password="p@ss:w,rd") as connection:  # noqa: S106
        assert await connection.api.request("INFO")
        assert "p@ss" not in repr(connection)


async def test_user_and_password_in_the_url(server: NatsServer) -> None:
    url = f"nats://alice:p%40ss%3Aw%2Crd@127.0.0.1:{server.port}"
    async with await keylane.connect(url) as connection:
        assert connection.server == server.url


async def test_nkey_from_text_and_file(server: NatsServer, tmp_path: Path) -> None:
    async with await keylane.connect(server.url, nkey_seed=NKEY_SEED) as connection:
        assert connection.is_connected
    path = tmp_path / "user.nk"
    path.write_text(f"-----BEGIN USER NKEY SEED-----\n{NKEY_SEED}\n------END USER NKEY SEED------\n")
    async with await keylane.connect(server.url, nkey_seed_file=path) as connection:
        assert connection.is_connected


async def test_token(tmp_path: Path) -> None:
    with NatsServer.start(extra_config='authorization { token: "s3cr3t" }') as guarded:
        async with await keylane.connect(guarded.url, token="s3cr3t") as connection:  # noqa: S106
            assert connection.is_connected
        with pytest.raises(AuthenticationFailed, match="refused a token"):
            await keylane.connect(guarded.url, token="wrong")  # noqa: S106


async def test_a_wrong_password_ends_at_once(server: NatsServer) -> None:
    started = time.monotonic()
    with pytest.raises(AuthenticationFailed) as refused:
        await keylane.connect(server.url, user="alice", password="hunter2")  # noqa: S106
    assert time.monotonic() - started < 4
    assert f"{server.url} refused user 'alice' with a password (Authorization Violation)" in str(refused.value)
    assert "hunter2" not in str(refused.value)


async def test_no_other_server_is_tried_with_refused_credentials(server: NatsServer) -> None:
    before = server.monitor("varz")["total_connections"]
    urls = [f"nats://127.0.0.1:{server.port}", f"nats://localhost:{server.port}"]
    with pytest.raises(AuthenticationFailed):
        await keylane.connect(urls, user="alice", password="hunter2")  # noqa: S106
    assert server.monitor("varz")["total_connections"] == before + 1


async def test_no_login_at_all(server: NatsServer) -> None:
    with pytest.raises(AuthenticationFailed, match="wants a login and none was given"):
        await keylane.connect(server.url)


async def test_an_unknown_nkey_is_named_by_its_public_key(server: NatsServer) -> None:
    seed = new_seed()
    with pytest.raises(AuthenticationFailed, match=f"refused the nkey {public_key(seed)}"):
        await keylane.connect(server.url, nkey_seed=seed)


async def test_a_mistyped_seed_is_refused_before_anything_is_sent() -> None:
    seed = new_seed()
    other = "A" if seed[20] != "A" else "B"
    with pytest.raises(InvalidInput, match="checksum"):
        await keylane.connect("nats://127.0.0.1:1", nkey_seed=seed[:20] + other + seed[21:])


async def test_an_account_without_jetstream(server: NatsServer) -> None:
    with pytest.raises(JetStreamDisabled, match="JetStream"):
        await keylane.connect(server.url, user="bare", password="pw")  # noqa: S106


# ---- permissions ------------------------------------------------------------------------------------


async def test_a_user_who_may_not_ask_for_the_state_still_connects(server: NatsServer) -> None:
    errors: list[Exception] = []
    async with await keylane.connect(
        server.url,
        user="shy",
        password="pw",  # noqa: S106
        hooks=ConnectionHooks(on_error=errors.append),
    ) as connection:
        assert (await connection.api.request("STREAM.NAMES"))["total"] == 0
        started = time.monotonic()
        with pytest.raises(PermissionDenied, match=r"STREAM\.DELETE\.Orders"):
            await connection.api.request("STREAM.DELETE.Orders")
        assert time.monotonic() - started < 4
        assert [type(error) for error in errors] == [PermissionDenied]
        assert await connection.api.request("STREAM.NAMES")


async def test_a_user_who_may_not_receive_answers(server: NatsServer) -> None:
    with pytest.raises(PermissionDenied, match="inbox_prefix"):
        await keylane.connect(server.url, user="boxed", password="pw")  # noqa: S106
    async with await keylane.connect(
        server.url,
        user="boxed",
        password="pw",  # noqa: S106
        inbox_prefix="_BOX",
    ) as connection:
        assert await connection.api.request("INFO")


# ---- JWT --------------------------------------------------------------------------------------------


def encode(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def mint(issuer_seed: str, subject: str, name: str, nats: dict[str, object], lives_s: float | None = None) -> str:
    """A JWT as the NATS server reads it, signed with an nkey."""
    now = time.time()
    claims: dict[str, object] = {
        "iat": int(now),
        "iss": public_key(issuer_seed),
        "name": name,
        "sub": subject,
        "nats": {"version": 2, **nats},
    }
    if lives_s is not None:
        claims["exp"] = int(now + lives_s)
    digest = hashlib.sha256(json.dumps(claims).encode()).digest()
    claims["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = f"{encode({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{encode(claims)}"
    signature = nkeys.from_seed(bytearray(issuer_seed.encode())).sign(signed.encode())
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@dataclass(frozen=True)
class Realm:
    """A server that trusts one operator, with one account."""

    server: NatsServer
    account_seed: str

    def write_creds(self, path: Path, lives_s: float | None = None, issuer: str | None = None) -> Path:
        user = new_seed()
        limits: dict[str, object] = {
            "type": "user",
            "pub": {},
            "sub": {},
            "subs": -1,
            "data": -1,
            "payload": -1,
        }
        jwt = mint(issuer or self.account_seed, public_key(user), "u", limits, lives_s)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user}\n------END USER NKEY SEED------\n"
        )
        return path


@pytest.fixture(scope="module")
def realm() -> Iterator[Realm]:
    operator, account = new_seed(nkeys.PREFIX_BYTE_OPERATOR), new_seed(nkeys.PREFIX_BYTE_ACCOUNT)
    system = new_seed(nkeys.PREFIX_BYTE_ACCOUNT)
    every = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    stored = ("mem_storage", "disk_storage", "streams", "consumer")
    limits = {**dict.fromkeys((*every, *stored), -1), "wildcards": True}
    bare = {**dict.fromkeys(every, -1), "wildcards": True}
    accounts = {
        public_key(account): mint(operator, public_key(account), "APP", {"type": "account", "limits": limits}),
        public_key(system): mint(operator, public_key(system), "SYS", {"type": "account", "limits": bare}),
    }
    preload = "\n".join(f"  {key}: {jwt}" for key, jwt in accounts.items())
    config = f"""
operator: {mint(operator, public_key(operator), "O", {"type": "operator"})}
system_account: {public_key(system)}
resolver: MEMORY
resolver_preload {{
{preload}
}}
"""
    with NatsServer.start(extra_config=config) as server:
        yield Realm(server, account)


async def test_creds_file(realm: Realm, tmp_path: Path) -> None:
    path = realm.write_creds(tmp_path / "user.creds")
    async with await keylane.connect(realm.server.url, creds_file=path) as connection:
        assert await connection.api.request("INFO")


async def test_creds_of_a_strange_account(realm: Realm, tmp_path: Path) -> None:
    path = realm.write_creds(tmp_path / "user.creds", issuer=new_seed(nkeys.PREFIX_BYTE_ACCOUNT))
    with pytest.raises(AuthenticationFailed, match=r"refused the user JWT of .*user\.creds"):
        await keylane.connect(realm.server.url, creds_file=path)


async def test_expired_creds_end_the_connection_and_renewed_ones_do_not(
    realm: Realm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.jetstream.login.RECONNECT_WAIT_S", (0.05, 0.1))
    expiring = realm.write_creds(tmp_path / "expiring.creds", lives_s=5)
    renewed = realm.write_creds(tmp_path / "renewed.creds", lives_s=5)
    lost: list[str] = []
    closed: list[str] = []
    back = asyncio.Event()
    async with (
        asyncio.timeout(30),
        await keylane.connect(
            realm.server.url, creds_file=expiring, hooks=ConnectionHooks(on_close=closed.append)
        ) as doomed,
        await keylane.connect(
            realm.server.url,
            creds_file=renewed,
            hooks=ConnectionHooks(on_disconnect=lost.append, on_reconnect=lambda _: back.set()),
        ) as lucky,
    ):
        realm.write_creds(renewed)
        reason = await doomed.wait_closed()
        assert "refused the login on a reconnect" in reason
        assert doomed.closed_reason == reason
        assert closed == [reason]
        with pytest.raises(Disconnected, match="refused the login"):
            await doomed.api.request("INFO")
        await back.wait()
        assert lost == ["User Authentication Expired"]
        assert await lucky.api.request("INFO")


async def test_creds_that_became_unreadable_are_told_and_tried_again(
    realm: Realm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keylane.jetstream.login.RECONNECT_WAIT_S", (0.05, 0.1))
    path = realm.write_creds(tmp_path / "user.creds")
    told, back = asyncio.Event(), asyncio.Event()
    errors: list[Exception] = []

    def note(error: Exception) -> None:
        errors.append(error)
        told.set()

    async with (
        asyncio.timeout(30),
        await keylane.connect(
            realm.server.url, creds_file=path, hooks=ConnectionHooks(on_error=note, on_reconnect=lambda _: back.set())
        ) as connection,
    ):
        path.write_text("half a file")
        await connection.nats.force_reconnect()
        await told.wait()
        assert "not a creds file" in str(errors[0])
        realm.write_creds(path)
        await back.wait()
        assert await connection.api.request("INFO")
