"""Where settings come from, which source wins, and what is refused before anything is sent."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import keylane
from keylane.errors import InvalidInput
from keylane.jetstream import ConnectionHooks, check_seconds
from keylane.jetstream.credentials import Token, UserPassword
from keylane.jetstream.settings import ConnectionSettings, Given, resolve
from keylane.jetstream.urls import parse_servers, redacted

WriteContext = Callable[..., None]


@pytest.fixture
def write_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteContext:
    """Writes a context file where the `nats` tool would; nothing of the machine's own is seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "nats" / "context"
    directory.mkdir(parents=True)

    def write(name: str, *, select: bool = False, **fields: object) -> None:
        (directory / f"{name}.json").write_text(json.dumps(fields))
        if select:
            (tmp_path / "nats" / "context.txt").write_text(name)

    return write


def given(**values: object) -> Given:
    return Given(source="the arguments", **values)  # type: ignore[arg-type]  # each test gives its own few


def servers_of(settings: ConnectionSettings) -> list[str]:
    return [str(server) for server in settings.servers]


# ---- URLs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nats://demo.example:4333", ["nats://demo.example:4333"]),
        ("demo.example", ["nats://demo.example:4222"]),
        ("demo.example:4333", ["nats://demo.example:4333"]),
        ("tls://demo.example", ["tls://demo.example:4222"]),
        ("nats://[::1]:4333", ["nats://[::1]:4333"]),
        ("nats://a:1, nats://b:2", ["nats://a:1", "nats://b:2"]),
        ("nats://a:1,nats://a:1", ["nats://a:1"]),
        ("ws://a", ["ws://a:80"]),
        ("wss://a/nats", ["wss://a:443/nats"]),
        ("nats://a:1/", ["nats://a:1"]),
        (" nats://a:1\n", ["nats://a:1"]),
    ],
)
def test_urls_are_completed(text: str, expected: list[str]) -> None:
    servers, login = parse_servers(text)
    assert [str(server) for server in servers] == expected
    assert login is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("http://a:1", "unknown scheme 'http'"),
        ("nats://", "the host is missing"),
        ("nats://:4222", "the host is missing"),
        ("nats://a:0", "from 1 to 65535"),
        ("nats://a:65536", "from 1 to 65535"),
        ("nats://a:", "from 1 to 65535"),
        ("nats://a:x", "from 1 to 65535"),
        ("nats://::1:4222", "from 1 to 65535"),
        ("nats://a b:1", "no blanks"),
        ("nats://a\n:1", "no blanks"),
        ("nats://a:1/path", "nothing may follow the port"),
        ("nats://a:1?x=1", "nothing may follow the port"),
        ("", "empty server URL"),
        ("nats://a:1,,nats://b:1", "empty server URL"),
        ("nats://a:1,ws://b:1", "mix websocket"),
        ("nats://u:p@a:1,nats://v:q@b:1", "different logins"),
        ("nats://@a:1", "login before the '@' is empty"),
        ("nats://:p@a:1", "user before the ':' is empty"),
    ],
)
def test_bad_urls_are_refused(text: str, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        parse_servers(text)


def test_an_empty_list_and_other_types_are_refused() -> None:
    with pytest.raises(InvalidInput, match="empty server URL"):
        parse_servers([])
    with pytest.raises(InvalidInput, match="list of strings"):
        parse_servers([4222])  # type: ignore[list-item]


def test_a_login_in_a_url_is_taken_out_and_decoded() -> None:
    servers, login = parse_servers("nats://al%40ice:p%3Aw@a:1,nats://b:2")
    assert [str(server) for server in servers] == ["nats://a:1", "nats://b:2"]
    assert isinstance(login, UserPassword)
    assert (login.user, login.password) == ("al@ice", "p:w")
    _, token = parse_servers("nats://s3cret@a:1")
    assert isinstance(token, Token)
    assert token.token == "s3cret"  # noqa: S105


@pytest.mark.parametrize(
    "text",
    [
        "nats://alice:hunter2@a:0",
        "alice:hunter2@a:99999",
        "http://alice:hunter2@a",
        "nats://alice:hunter2@a:1/p",
        "nats://alice:x,hunter2@a:1",
        "nats://alice:hunter2,x@a:1",
        "nats://alice:hunter2@a:1,ws://b:1",
        "nats://alice:hunter2@a:1,nats://bob:hunter2x@b:1",
        "nats://ali ce:hunter2@a:1",
        "nats://alice:hunter2/x@a:1",
        "nats://alice:hunter2?x@a:1",
        "nats://alice:hunter2#x@a:1",
        "alice:x/hunter2@a:1",
        "alice:1/hunter2@a:1",
        "nats://hunter2/x@a:1",
        "nats://alice:hunter2[@a:1",
        "nats://alice:hunter2\u2100@a:1",
        "nats://alice:hunter2@[a:1",
    ],
)
def test_a_password_is_never_shown(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_servers(text)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    assert refused.value.__context__ is None
    assert "hunter2" not in redacted("alice:hunter2@a")


@pytest.mark.parametrize("mark", "/?#")
def test_a_mark_that_ends_the_host_is_named(mark: str) -> None:
    with pytest.raises(InvalidInput, match="%2F"):
        parse_servers(f"nats://alice:hunter{mark}2@a:1")
    _, login = parse_servers(f"nats://alice:hunter%{ord(mark):X}2@a:1")
    assert isinstance(login, UserPassword)
    assert login.password == f"hunter{mark}2"


def test_secrets_are_not_in_reprs() -> None:
    settings = resolve(given(url="nats://alice:hunter2@a:1"), None, {})
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in repr(given(password="hunter2", user="x"))  # noqa: S106
    assert "hunter2" not in repr(resolve(given(url="a", token="hunter2"), None, {}))  # noqa: S106


# ---- precedence -------------------------------------------------------------------------------------


def test_the_default_is_the_local_server(write_context: WriteContext) -> None:
    settings = resolve(given(), None, {})
    assert servers_of(settings) == ["nats://127.0.0.1:4222"]
    assert settings.auth is None
    assert not settings.tls_wanted
    assert settings.api_prefix == "$JS.API"


def test_arguments_beat_the_context_which_beats_the_environment(write_context: WriteContext) -> None:
    write_context("prod", url="nats://context:1", user="c", password="c")  # noqa: S106
    environ = {"NATS_URL": "nats://environment:1", "NATS_USER": "e", "NATS_PASSWORD": "e"}
    assert servers_of(resolve(given(url="nats://argument:1"), "prod", environ)) == ["nats://argument:1"]
    settings = resolve(given(), "prod", environ)
    assert servers_of(settings) == ["nats://context:1"]
    assert isinstance(settings.auth, UserPassword)
    assert settings.auth.user == "c"
    assert servers_of(resolve(given(), None, environ)) == ["nats://environment:1"]


def test_a_named_context_is_complete_without_the_environment(write_context: WriteContext) -> None:
    write_context("open", url="nats://context:1")
    assert resolve(given(), "open", {"NATS_USER": "secret"}).auth is None


def test_the_environment_beats_the_context_it_names(write_context: WriteContext) -> None:
    write_context("prod", url="nats://context:1", user="c", password="c")  # noqa: S106
    settings = resolve(given(), None, {"NATS_CONTEXT": "prod"})
    assert servers_of(settings) == ["nats://context:1"]
    assert "NATS_CONTEXT" in settings.servers_from
    settings = resolve(given(), None, {"NATS_CONTEXT": "prod", "NATS_URL": "nats://environment:1"})
    assert servers_of(settings) == ["nats://environment:1"]


def test_the_selected_context_counts_only_where_nothing_names_a_server(write_context: WriteContext) -> None:
    write_context("chosen", select=True, url="nats://chosen:1", token="t")  # noqa: S106
    settings = resolve(given(), None, {})
    assert servers_of(settings) == ["nats://chosen:1"]
    assert isinstance(settings.auth, Token)
    assert "'chosen' (selected in the nats tool)" in settings.servers_from
    assert resolve(given(url="nats://argument:1"), None, {}).auth is None
    assert resolve(given(), None, {"NATS_URL": "nats://environment:1"}).auth is None


def test_a_lone_user_in_the_environment_is_a_token(write_context: WriteContext) -> None:
    auth = resolve(given(), None, {"NATS_USER": "s3cret"}).auth
    assert isinstance(auth, Token)
    assert auth.token == "s3cret"  # noqa: S105


def test_each_tls_setting_comes_from_the_strongest_source_that_has_it(tmp_path: Path) -> None:
    environ = {"NATS_CA": "/env/ca", "NATS_CERT": "/env/cert", "NATS_KEY": "/env/key"}
    settings = resolve(given(url="a", tls_cert="~/cert", tls_key=tmp_path / "key"), None, environ)
    assert settings.tls_ca == "/env/ca"
    assert settings.tls_identity == (str(Path.home() / "cert"), str(tmp_path / "key"))
    assert settings.tls_wanted


def test_any_tls_setting_and_any_secure_url_demand_tls() -> None:
    assert resolve(given(url="tls://a,nats://b"), None, {}).tls_wanted
    assert resolve(given(url="a", tls_hostname="b"), None, {}).tls_wanted
    assert resolve(given(url="a", tls_first=True), None, {}).tls_wanted
    assert not resolve(given(url="a", tls_first=False), None, {}).tls_wanted


# ---- one way to log in ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"user": "a", "password": "b", "token": "t"}, "user and password and token"),
        ({"url": "nats://u:p@h", "token": "t"}, "the user and password in the URL and token"),
        ({"url": "nats://t@h", "user": "a", "password": "b"}, "the token in the URL and user and password"),
    ],
)
def test_two_ways_to_log_in_are_refused_by_name(values: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        resolve(given(**values), None, {})


def test_half_a_login_is_refused() -> None:
    with pytest.raises(InvalidInput, match="user is given without password"):
        resolve(given(user="a"), None, {})
    with pytest.raises(InvalidInput, match="password is given without user"):
        resolve(given(password="b"), None, {})  # noqa: S106
    with pytest.raises(InvalidInput, match=r"certificate .* without its key"):
        resolve(given(tls_cert="c"), None, {})
    with pytest.raises(InvalidInput, match=r"key .* without its certificate"):
        resolve(given(tls_key="k"), None, {})


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "cannot read this creds file: No such file"),
        ("", "no '-----BEGIN NATS USER JWT-----'"),
        ("-----BEGIN NATS USER JWT-----\na.b.c\n", "no '-----BEGIN USER NKEY SEED-----'"),
        ("-----BEGIN NATS USER JWT-----\nabc\n-----BEGIN USER NKEY SEED-----\nSUX\n", "JWT .* is damaged"),
        ("-----BEGIN NATS USER JWT-----\na.b.c\n-----BEGIN USER NKEY SEED-----\nSUX\n", "seed is damaged"),
        ("-----BEGIN NATS USER JWT-----\na.b.c\n-----BEGIN USER NKEY SEED-----\nSAX\n", "begins with 'SU'"),
        (b"\xff\xfe\x00", "not text"),
    ],
)
async def test_bad_creds_files_are_refused_by_name(tmp_path: Path, content: str | bytes | None, rule: str) -> None:
    path = tmp_path / "user.creds"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=rule) as refused:
        await keylane.connect("nats://127.0.0.1:1", creds_file=path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "cannot read this nkey seed file"),
        ("", "no nkey seed in this file"),
        ("SAAAAA", "begins with 'SU'"),
        ("SUAAAA", "seed is damaged"),
        ("SUAMK2FG4MI6UE3ACF3FK3OIQBCEIEZV7NSWFFEW63UXMRLFM2XLAXK4GZ", "its checksum is wrong"),
    ],
)
async def test_bad_seed_files_are_refused_by_name(tmp_path: Path, content: str | None, rule: str) -> None:
    path = tmp_path / "user.nk"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput, match=rule) as refused:
        await keylane.connect("nats://127.0.0.1:1", nkey_seed_file=path)
    assert str(path) in str(refused.value)


# ---- the rest ---------------------------------------------------------------------------------------


def test_domain_and_prefix() -> None:
    assert resolve(given(url="a", domain="hub"), None, {}).api_prefix == "$JS.hub.API"
    assert resolve(given(url="a", api_prefix="acme.js."), None, {}).api_prefix == "acme.js"
    with pytest.raises(InvalidInput, match=r"'hub'.*'acme'"):
        resolve(given(url="a", domain="hub", api_prefix="acme"), None, {})
    with pytest.raises(InvalidInput, match="one token"):
        resolve(given(url="a", domain="hub.eu"), None, {})
    with pytest.raises(InvalidInput, match="api_prefix"):
        resolve(given(url="a", api_prefix="acme.*"), None, {})
    with pytest.raises(InvalidInput, match="inbox_prefix"):
        resolve(given(url="a", inbox_prefix="in box"), None, {})


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), True, "5"])
def test_deadlines_must_be_numbers_above_zero(bad: float) -> None:
    with pytest.raises(InvalidInput, match="timeout_s"):
        check_seconds(bad, "timeout_s")


async def test_connect_checks_its_own_arguments() -> None:
    async def hook(reason: str) -> None: ...

    with pytest.raises(InvalidInput, match="connect_timeout_s"):
        await keylane.connect("nats://127.0.0.1:1", connect_timeout_s=0)
    with pytest.raises(InvalidInput, match="request_timeout_s"):
        await keylane.connect("nats://127.0.0.1:1", request_timeout_s=-1)
    with pytest.raises(InvalidInput, match=r"on_close.*plain function"):
        await keylane.connect("nats://127.0.0.1:1", hooks=ConnectionHooks(on_close=hook))  # type: ignore[arg-type]
