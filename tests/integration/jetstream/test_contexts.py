"""The `nats` tool's context files: found, read, refused, and used on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import keylane
from keylane.errors import AuthenticationFailed, InvalidInput, ServerUnreachable
from keylane.jetstream.contexts import contexts_dir, known_contexts, load_context, selected_context
from keylane.server import NatsServer


def tool_file(**fields: object) -> str:
    """A context as the tool writes it: every field is there, unset ones are empty."""
    texts = [
        *("description", "url", "socks_proxy", "token", "user", "password", "creds", "nkey", "cert", "key"),
        *("ca", "nsc", "jetstream_domain", "jetstream_api_prefix", "jetstream_event_prefix"),
        *("inbox_prefix", "user_jwt", "user_seed", "color_scheme", "windows_cert_store"),
        *("windows_cert_match_by", "windows_cert_match"),
    ]
    whole = {**dict.fromkeys(texts, ""), "tls_first": False, "windows_ca_certs_match": None}
    return json.dumps({**whole, **fields}, indent=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tool's directory of contexts, with nothing of this machine in it."""
    for name in ("NATS_URL", "NATS_CONTEXT", "NATS_USER", "NATS_PASSWORD", "NATS_CREDS", "NATS_NKEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "nats" / "context"
    directory.mkdir(parents=True)
    return directory


def test_where_contexts_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    assert contexts_dir() == Path("/somewhere/nats/context")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert contexts_dir() == tmp_path / ".config" / "nats" / "context"
    assert known_contexts() == []
    assert selected_context() is None


def test_contexts_are_listed(folder: Path) -> None:
    for name in ("b", "a", "ngs.js"):
        (folder / f"{name}.json").write_text(tool_file())
    (folder / "empty.json").touch()
    (folder / "notes.txt").write_text("x")
    assert known_contexts() == ["a", "b", "ngs.js"]
    assert selected_context() is None
    (folder.parent / "context.txt").write_text("b\n")
    assert selected_context() == "b"


def test_fields_are_read_and_paths_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("KEYS", "/keys")
    (folder / "full.json").write_text(
        tool_file(
            url="tls://a:1,tls://b:2",
            user="me",
            password="pw",  # noqa: S106
            creds="~/user.creds",
            nkey="$KEYS/user.nk",
            cert="cert.pem",
            key="file:///keys/key.pem",
            ca="/~/ca.pem",
            jetstream_domain="hub",
            inbox_prefix="_MINE",
            tls_first=True,
            something_new={"of": "tomorrow"},
        )
    )
    context = load_context("full")
    assert context.url == "tls://a:1,tls://b:2"
    assert context.creds == "/home/me/user.creds"
    assert context.nkey == "/keys/user.nk"
    assert context.cert == "cert.pem"
    assert context.key == "/keys/key.pem"
    assert context.ca == "/~/ca.pem"
    assert context.tls_first
    assert "pw" not in repr(context)


def test_an_unknown_context_lists_the_known_ones(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="there is: none; make one with `nats context add`"):
        load_context("prod")
    (folder / "dev.json").write_text(tool_file())
    (folder / "stage.json").write_text(tool_file())
    with pytest.raises(InvalidInput, match=r"'prod' is not in .*context; there is: dev, stage"):
        load_context("prod")


@pytest.mark.parametrize("name", ["", "..", "../secrets", "a/b"])
def test_a_context_name_is_no_path(folder: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="without '/' and"):
        load_context(name)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object, not list"),
        ('{"url": 4}', "`url` must be a string, not int"),
        ('{"tls_first": "yes"}', "`tls_first` must be true or false"),
        ('{"nsc": "nsc://o/a/u"}', "does not support `nsc`; generate a creds file"),
        ('{"socks_proxy": "socks5://p"}', "does not support `socks_proxy`"),
        ('{"windows_cert_store": "user"}', "does not support `windows_cert_store`"),
        ('{"creds": "op://vault/hunter2"}', "`creds` refers to a secret by op://"),
        ('{"nkey": "env://HUNTER2"}', "`nkey` refers to a secret by env://"),
        ('{"password": "file://hunter2"}', "`password` refers to a secret by file://"),
        ('{"token": "data:;base64,hunter2"}', "`token` refers to a secret by data:"),
    ],
)
def test_what_cannot_be_honoured_is_refused(folder: Path, content: str, rule: str) -> None:
    (folder / "bad.json").write_text(content)
    with pytest.raises(InvalidInput, match=rule) as refused:
        load_context("bad")
    assert str(folder / "bad.json") in str(refused.value)
    assert "hunter2" not in str(refused.value)


async def test_connect_by_name(folder: Path) -> None:
    with NatsServer.start(extra_config='authorization { user: me, password: "pw" }') as server:
        (folder / "good.json").write_text(tool_file(url=server.url, user="me", password="pw"))  # noqa: S106
        (folder / "wrong.json").write_text(tool_file(url=server.url, user="me", password="no"))  # noqa: S106
        (folder / "away.json").write_text(tool_file(url="nats://127.0.0.1:1"))
        async with await keylane.connect(context="good") as connection:
            assert connection.server == server.url
        with pytest.raises(AuthenticationFailed, match="refused user 'me'"):
            await keylane.connect(context="wrong")
        with pytest.raises(ServerUnreachable, match="from the nats context 'away'"):
            await keylane.connect(context="away")
        async with await keylane.connect(context="wrong", user="me", password="pw"):  # noqa: S106
            pass  # an argument beats the context


async def test_connect_by_the_environment_and_the_selection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer.start(extra_config='authorization { token: "t0k" }') as server:
        (folder / "chosen.json").write_text(tool_file(url=server.url, token="t0k"))  # noqa: S106
        (folder.parent / "context.txt").write_text("chosen")
        async with await keylane.connect() as connection:
            assert connection.server == server.url
        (folder.parent / "context.txt").unlink()
        monkeypatch.setenv("NATS_CONTEXT", "chosen")
        async with await keylane.connect() as connection:
            assert connection.server == server.url
        monkeypatch.delenv("NATS_CONTEXT")
        monkeypatch.setenv("NATS_URL", server.url)
        monkeypatch.setenv("NATS_USER", "t0k")
        async with await keylane.connect() as connection:
            assert connection.server == server.url


async def test_a_selection_that_points_nowhere(folder: Path) -> None:
    (folder.parent / "context.txt").write_text("gone")
    with pytest.raises(InvalidInput, match="nats context 'gone' is not in"):
        await keylane.connect()


async def test_user_jwt_needs_its_seed(folder: Path) -> None:
    (folder / "half.json").write_text(tool_file(user_jwt="a.b.c"))
    with pytest.raises(InvalidInput, match="the nats context 'half': user_jwt and user_seed"):
        await keylane.connect(context="half")
