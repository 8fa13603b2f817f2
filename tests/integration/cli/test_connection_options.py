"""The connection options of every command: each reaches the server, and what fails is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # ships no types
import pytest
import trustme

from keylane.server import NatsServer

SEED: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
IN = "there is no stream 'NOT_THERE'; there is: none"
"""What a command says that was let in, and asked for a stream that is not there."""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a CA, a server's and a client's certificate, another CA, and an nkey seed."""
    directory = tmp_path_factory.mktemp("papers")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    for name, host in (("server", "127.0.0.1"), ("client", "client@example")):
        issued = authority.issue_cert(host)
        issued.private_key_pem.write_to_path(str(directory / f"{name}.key"))
        (directory / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (directory / "user.nk").write_bytes(SEED)
    trustme.CA().cert_pem.write_to_path(str(directory / "stranger.pem"))
    return directory


@pytest.fixture(scope="module")
def guarded(papers: Path) -> Iterator[NatsServer]:
    """Wants a client certificate and a login, and has a JetStream domain."""
    public: bytes = nkeys.from_seed(bytearray(SEED)).public_key
    config = f"""
    tls {{
      cert_file: "{papers}/server.pem", key_file: "{papers}/server.key"
      ca_file: "{papers}/ca.pem", verify: true
    }}
    accounts {{
      APP {{
        jetstream: enabled
        users: [ {{ user: alice, password: sesame }}, {{ nkey: {public.decode()} }} ]
      }}
      SYS {{ users: [ {{ user: sys, password: sesame }} ] }}
    }}
    system_account: SYS
    jetstream {{ store_dir: "{papers}/store", domain: hub }}
    """
    with NatsServer.start(extra_config=config) as server:
        yield server


@pytest.mark.parametrize(
    ("login", "said"),
    [
        ("--user alice --password sesame", IN),
        ("--nkey {papers}/user.nk", IN),
        ("--user alice --password sesame --domain hub", IN),
        ("--user alice --password wrong", "refused user 'alice'"),
        ("--user alice", "refused a token"),
        ("", "wants a login and none was given"),
        ("--password sesame", "password is given without user"),
        ("--creds {papers}/none.creds", "none.creds"),
        ("--user alice --password sesame --domain moon", "JetStream"),
    ],
)
def test_logins(papers: Path, guarded: NatsServer, keylane_here: Callable[..., Any], login: str, said: str) -> None:
    tls = "--tlsca {papers}/ca.pem --tlscert {papers}/client.pem --tlskey {papers}/client.key"
    words = f"{tls} {login}".format(papers=papers).split()
    done = keylane_here(
        "consumer",
        "info",
        "NOT_THERE",
        "c",
        "-s",
        f"tls://127.0.0.1:{guarded.port}",
        *words,
        "--timeout",
        "10",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "sesame" not in done.stderr


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("--tlsca {papers}/stranger.pem --tlscert {papers}/client.pem --tlskey {papers}/client.key", "CA"),
        ("--tlsca {papers}/ca.pem", "wants a client certificate and none was given"),
        ("--tlsca {papers}/ca.pem --tlscert {papers}/client.pem", "is given without its key"),
        ("--tlsca {papers}/ca.pem --tlskey {papers}/client.key", "is given without its certificate"),
    ],
)
def test_each_tls_file_is_used(
    papers: Path, guarded: NatsServer, keylane_here: Callable[..., Any], files: str, said: str
) -> None:
    url = f"tls://127.0.0.1:{guarded.port}"
    done = keylane_here("consumer", "info", "NOT_THERE", "c", "-s", url, *files.format(papers=papers).split())
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_environment_is_asked(
    papers: Path, guarded: NatsServer, keylane_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_URL", f"tls://127.0.0.1:{guarded.port}")
    monkeypatch.setenv("NATS_CA", str(papers / "ca.pem"))
    monkeypatch.setenv("NATS_CERT", str(papers / "client.pem"))
    monkeypatch.setenv("NATS_KEY", str(papers / "client.key"))
    monkeypatch.setenv("NATS_USER", "alice")
    monkeypatch.setenv("NATS_PASSWORD", "sesame")
    assert IN in keylane_here("consumer", "info", "NOT_THERE", "c").stderr
    options = ("--user", "alice", "--password", "wrong")
    assert "refused user" in keylane_here("consumer", "info", "NOT_THERE", "c", *options).stderr


def test_a_context(
    nats_server: NatsServer, keylane_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    file = tmp_path / "nats" / "context" / "mine.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"url": nats_server.url}))
    found = keylane_here("consumer", "info", "NOT_THERE", "c", "--context", "mine")
    assert "there is no stream 'NOT_THERE'" in found.stderr
    missing = keylane_here("consumer", "info", "NOT_THERE", "c", "--context", "other")
    assert missing.returncode == 1
    assert "'other'" in missing.stderr
    assert "there is: mine" in missing.stderr


@pytest.mark.parametrize("command", ["info", "unpin", "watch"])
def test_a_server_that_is_down(keylane_here: Callable[..., Any], command: str) -> None:
    with NatsServer.start() as server:
        url = server.url
    done = keylane_here("consumer", command, "S", "C", "-s", url, "--timeout", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert url in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "nats://127.0.0.1:none", "nats://"])
def test_a_bad_url(keylane_here: Callable[..., Any], url: str) -> None:
    done = keylane_here("consumer", "watch", "S", "--server", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("keylane: ")
    assert done.stderr.count("\n") == 1
    assert url in done.stderr
