"""TLS with a CA of our own, client certificates, and each way it can go wrong, on real servers."""

from __future__ import annotations

import asyncio
import datetime
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

import keylane
from keylane.errors import ConnectError, InvalidInput, ServerUnreachable, TlsFailed
from keylane.jetstream import ConnectionHooks
from keylane.server import NatsServer


@dataclass(frozen=True)
class Papers:
    """Certificates on disk: a CA and what it has signed, and a stranger's CA."""

    authority: trustme.CA
    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, name: str, *hosts: str, authority: trustme.CA | None = None, ends: str = "") -> Path:
        """Write `<name>.pem` and `<name>.key` and return the path of the first."""
        expires = datetime.datetime.fromisoformat(ends) if ends else None
        issued = (authority or self.authority).issue_cert(*hosts, not_after=expires)
        issued.private_key_pem.write_to_path(str(self.directory / f"{name}.key"))
        path = self.directory / f"{name}.pem"
        path.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return path

    def tls_block(self, name: str, more: str = "") -> str:
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        return f'tls {{\n cert_file: "{cert}"\n key_file: "{key}"\n ca_file: "{self.ca}"\n timeout: 20\n {more}\n}}'


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    made = Papers(trustme.CA(), tmp_path_factory.mktemp("tls"))
    made.authority.cert_pem.write_to_path(str(made.ca))
    trustme.CA().cert_pem.write_to_path(str(made.directory / "stranger.pem"))
    made.issue("server", "127.0.0.1", "localhost")
    made.issue("elsewhere", "db.example")
    made.issue("client", "client@example")
    made.issue("imposter", "client@example", authority=trustme.CA())
    made.issue("expired", "127.0.0.1", ends="2001-01-01T00:00:00+00:00")
    return made


@pytest.fixture(scope="module")
def tls_server(papers: Papers) -> Iterator[NatsServer]:
    with NatsServer.start(extra_config=papers.tls_block("server")) as server:
        yield server


@pytest.fixture(scope="module")
def strict_server(papers: Papers) -> Iterator[NatsServer]:
    """Wants a client certificate."""
    with NatsServer.start(extra_config=papers.tls_block("server", "verify: true")) as server:
        yield server


def tls_url(server: NatsServer) -> str:
    return f"tls://127.0.0.1:{server.port}"


# ---- it works -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_ca_of_our_own(tls_server: NatsServer, papers: Papers, scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:{tls_server.port}"
    async with await keylane.connect(url, tls_ca=papers.ca) as connection:
        assert await connection.api.request("INFO")
        assert tls_server.monitor("connz")["connections"][0]["tls_version"]


async def test_a_client_certificate(strict_server: NatsServer, papers: Papers) -> None:
    async with await keylane.connect(
        tls_url(strict_server),
        tls_ca=papers.ca,
        tls_cert=papers.directory / "client.pem",
        tls_key=papers.directory / "client.key",
    ) as connection:
        assert await connection.api.request("INFO")


async def test_tls_is_used_where_the_server_also_allows_plain_links(papers: Papers) -> None:
    config = papers.tls_block("server") + "\nallow_non_tls: true"
    with NatsServer.start(extra_config=config) as server:
        async with await keylane.connect(tls_url(server), tls_ca=papers.ca):
            assert server.monitor("connz")["connections"][0]["tls_version"]


async def test_handshake_first(papers: Papers) -> None:
    with NatsServer.start(extra_config=papers.tls_block("server", "handshake_first: true")) as server:
        async with await keylane.connect(tls_url(server), tls_ca=papers.ca, tls_first=True) as connection:
            assert await connection.api.request("INFO")
        with pytest.raises(ServerUnreachable, match=r"no NATS greeting came .* set tls_first"):
            await keylane.connect(tls_url(server), tls_ca=papers.ca, connect_timeout_s=0.4)


async def test_a_restart_is_survived(papers: Papers) -> None:
    back = asyncio.Event()
    with NatsServer.start(extra_config=papers.tls_block("server")) as server:
        async with await keylane.connect(
            tls_url(server), tls_ca=papers.ca, hooks=ConnectionHooks(on_reconnect=lambda _: back.set())
        ) as connection:
            await asyncio.to_thread(server.restart)
            async with asyncio.timeout(20):
                await back.wait()
            assert await connection.api.request("INFO")


# ---- it does not ----------------------------------------------------------------------------------------


async def test_an_unknown_ca(tls_server: NatsServer, papers: Papers) -> None:
    with pytest.raises(TlsFailed, match=r"not signed by the CAs of this machine .* Give its CA as tls_ca"):
        await keylane.connect(tls_url(tls_server))
    with pytest.raises(TlsFailed, match=r"not signed by the CA in .*stranger\.pem"):
        await keylane.connect(tls_url(tls_server), tls_ca=papers.directory / "stranger.pem")


async def test_a_server_that_demands_tls_of_a_plain_url(tls_server: NatsServer) -> None:
    with pytest.raises(TlsFailed, match="not signed by the CAs of this machine"):
        await keylane.connect(tls_server.url)


async def test_a_certificate_for_another_host(papers: Papers) -> None:
    with NatsServer.start(extra_config=papers.tls_block("elsewhere")) as server:
        with pytest.raises(TlsFailed, match=r"for another host .* give that name as tls_hostname"):
            await keylane.connect(tls_url(server), tls_ca=papers.ca)
        async with await keylane.connect(tls_url(server), tls_ca=papers.ca, tls_hostname="db.example") as connection:
            assert connection.is_connected


async def test_an_expired_certificate(papers: Papers) -> None:
    with (
        NatsServer.start(extra_config=papers.tls_block("expired")) as server,
        pytest.raises(TlsFailed, match=r"not valid now .* Renew it"),
    ):
        await keylane.connect(tls_url(server), tls_ca=papers.ca)


async def test_a_missing_client_certificate(strict_server: NatsServer, papers: Papers) -> None:
    with pytest.raises(TlsFailed, match="wants a client certificate and none was given"):
        await keylane.connect(tls_url(strict_server), tls_ca=papers.ca)


async def test_a_client_certificate_that_the_server_does_not_trust(strict_server: NatsServer, papers: Papers) -> None:
    with pytest.raises(TlsFailed, match=r"does not trust the client certificate|alert"):
        await keylane.connect(
            tls_url(strict_server),
            tls_ca=papers.ca,
            tls_cert=papers.directory / "imposter.pem",
            tls_key=papers.directory / "imposter.key",
        )


async def test_a_server_without_tls_gets_no_login(nats_server: NatsServer, papers: Papers) -> None:
    with pytest.raises(TlsFailed, match="does not offer TLS"):
        await keylane.connect(tls_url(nats_server))
    with pytest.raises(TlsFailed, match="does not offer TLS"):
        await keylane.connect(nats_server.url, tls_ca=papers.ca)


async def test_tls_first_at_a_server_that_greets_first(tls_server: NatsServer, papers: Papers) -> None:
    """Whose bytes cross first is chance; plain text is never taken for the server's in either case."""
    with pytest.raises(ConnectError, match=r"does not begin with TLS|plain text where TLS had to begin"):
        await keylane.connect(tls_url(tls_server), tls_ca=papers.ca, tls_first=True)


# ---- files ----------------------------------------------------------------------------------------------


async def test_bad_files_are_refused_by_name(papers: Papers, tmp_path: Path) -> None:
    url, folder = "tls://127.0.0.1:1", papers.directory
    with pytest.raises(InvalidInput, match=r"nowhere\.pem: cannot read this TLS CA file: No such file"):
        await keylane.connect(url, tls_ca="nowhere.pem")
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(InvalidInput, match=r"junk\.pem: no CA certificate"):
        await keylane.connect(url, tls_ca=junk)
    with pytest.raises(InvalidInput, match=r"client\.pem and .*server\.key: not a TLS certificate with its own key"):
        await keylane.connect(url, tls_cert=folder / "client.pem", tls_key=folder / "server.key")
    with pytest.raises(InvalidInput, match=r"gone\.key: cannot read this TLS key"):
        await keylane.connect(url, tls_cert=folder / "client.pem", tls_key=folder / "gone.key")


async def test_an_encrypted_key_is_refused_and_nobody_is_asked(papers: Papers, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key((papers.directory / "client.key").read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"pw"),
        )
    )
    with pytest.raises(InvalidInput, match="without a password"):
        await keylane.connect("tls://127.0.0.1:1", tls_cert=papers.directory / "client.pem", tls_key=locked)


async def test_a_login_given_up_in_its_handshake_leaves_nothing_open(tls_server: NatsServer, papers: Papers) -> None:
    """A transport that nobody closes would warn when it is collected, and warnings are errors here."""
    for tenth_ms in range(0, 200, 5):
        try:
            async with asyncio.timeout(tenth_ms / 10_000):
                connection = await keylane.connect(tls_url(tls_server), tls_ca=papers.ca)
            await connection.close()
        except TimeoutError:
            continue
    await asyncio.sleep(0)
    gc.collect()
