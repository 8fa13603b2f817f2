"""The address of the server, in a form that Spark may log: it travels through plans and checkpoints to every executor.

An address holds no secret. It names files and contexts, which every process reads where it runs; what is set in
the environment (`NATS_USER`, `NATS_TOKEN` and so on) is read there too.

Spark writes the options of a source and its own settings into plans, logs, checkpoints and web pages. So a secret in
one of them is refused, and no error repeats the value of an option that may hold one. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from keylane.errors import InvalidInput

_FILES = ("creds_file", "nkey_seed_file", "tls_ca", "tls_cert", "tls_key")

FIELDS = {
    "url": "url",
    "context": "context",
    "credsFile": "creds_file",
    "nkeySeedFile": "nkey_seed_file",
    "tlsCa": "tls_ca",
    "tlsCert": "tls_cert",
    "tlsKey": "tls_key",
    "tlsHostname": "tls_hostname",
    "tlsFirst": "tls_first",
    "domain": "domain",
    "apiPrefix": "api_prefix",
    "inboxPrefix": "inbox_prefix",
}
"""The options of `format("keylane")` that say where the server is, as they are written, and their fields here."""
ADDRESS_NAMES = tuple(FIELDS)
_FIELDS_BY_LOWER = {name.lower(): field for name, field in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach the server; `keylane.connect` takes the same names. Unset ones come from each machine.

    Refuses a url with a login.
    """

    url: str | None = None
    context: str | None = None
    creds_file: str | None = None
    nkey_seed_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_hostname: str | None = None
    tls_first: bool | None = None
    domain: str | None = None
    api_prefix: str | None = None
    inbox_prefix: str | None = None

    def __post_init__(self) -> None:
        if has_login(self.url or ""):
            raise InvalidInput(
                "option 'url' has a user or a password in it, which Spark would log: leave it out of the url and give "
                "credsFile or context, or set NATS_USER and NATS_PASSWORD in the environment of driver and executors"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Address:
        """The address in a source's or sink's options (keys in lower case)."""
        found: dict[str, Any] = {
            _FIELDS_BY_LOWER[name]: value for name, value in options.items() if name in _FIELDS_BY_LOWER
        }
        if "tls_first" in found:
            found["tls_first"] = read_flag("tlsFirst", found["tls_first"])
        return cls(**found)

    def arguments(self, files: Path | None = None) -> dict[str, Any]:
        """The arguments of `keylane.connect` on this machine.

        `files` is where Spark puts what `--files` ships: a file that is not where the option says is looked for there.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if given["url"] and "," in given["url"]:
            given["url"] = [url.strip() for url in given["url"].split(",")]
        for name in _FILES:
            path = given[name]
            if path and files is not None and not Path(path).expanduser().exists():
                shipped = files / Path(path).name
                given[name] = str(shipped) if shipped.exists() else path
        return {name: value for name, value in given.items() if value is not None}


def secret_refused(name: str) -> InvalidInput:
    """The refusal of an option that holds a secret; never repeats its value."""
    return InvalidInput(
        f"option {name!r} would put a secret into Spark's plans and logs: give credsFile, nkeySeedFile or context, "
        "which name files, or set NATS_USER, NATS_PASSWORD or NATS_TOKEN in the environment of driver and executors"
    )


def read_flag(name: str, value: str) -> bool:
    """An option that is true or false."""
    if value.lower() not in ("true", "false"):
        raise InvalidInput(f"option {name!r} is {value!r}: give true or false")
    return value.lower() == "true"


# ---- secrets: passwords, tokens, keys, and URLs with a login in them ----------------------------------------------


_SECRET_NAME = re.compile(
    r"pass(?:w|phrase)|pwd?(?![a-z])|secret|token|seed|nkey|cred|jwt|login|user(?:name)?$"
    r"|(?:private|signing|access|account|api|auth)[._-]?key",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"NATS_(?:USER|PW|PWD)\b|NATS_\w*(?:PASSW|PASSPHRASE|TOKEN|SECRET|SEED|JWT)", re.IGNORECASE
)
"""In the name of a setting or the text of an option for Java. NATS_CREDS and NATS_NKEY name files."""
_URL_WITH_LOGIN = re.compile(r"\b(?:nats|tls|wss?)://[^\s,]*@", re.IGNORECASE)
_HOST_WITH_LOGIN = re.compile(r"[^\s,:/@=]+:(?!//)\S*@(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?")
_KEY_MATERIAL = re.compile(r"\bS[ACNOUX][A-Z2-7]{54,}\b|\beyJ[\w-]{8,}\.[\w-]+\.|-----BEGIN ")
"""An nkey seed, a JWT, or the text of a creds or PEM file."""
_SERVER_VARIABLE = re.compile(r"NATS_URL\b", re.IGNORECASE)
_REFERENCE = ".secretKeyRef."
"""Kubernetes: the name of a secret, not the secret."""


def is_secret_name(name: str) -> bool:
    """Whether an option of this name would hold a secret: `password`, `natsPassword`, `nkey`, `api_token`.

    >>> is_secret_name("natsPasswd"), is_secret_name("keyFilter")
    (True, False)
    """
    return _SECRET_NAME.search(name) is not None


def has_login(url: str) -> bool:
    """Whether the URL of a server, with or without a scheme, has anything before an `@`."""
    return "@" in url or "%40" in url


def shows_secret(text: str) -> bool:
    """Whether a text of any kind has a key or the URL of a NATS server with a login in it.

    >>> shows_secret("nats://alice:pw@host:4222"), shows_secret("abfss://data@account.example")
    (True, False)
    """
    return bool(_URL_WITH_LOGIN.search(text) or _KEY_MATERIAL.search(text))


def looks_like_login(text: str) -> bool:
    """Whether one of the words is `user:password@host`. A subject may look like that too.

    >>> looks_like_login("alice:pw@host:4222"), looks_like_login("spark:4.3@sha256:0a1b")
    (True, False)
    """
    return any(_HOST_WITH_LOGIN.fullmatch(one) for one in re.split(r"[\s,]+", text))


def without_value(setting: str) -> str:
    """`NAME=VALUE` as far as it may be shown.

    >>> without_value("spark.executorEnv.NATS_TOKEN=s3cr3t")
    'spark.executorEnv.NATS_TOKEN=…'
    """
    name, equals, _ = setting.partition("=")
    return f"{name}=…" if equals else setting


def check_setting(where: str, name: str, value: str) -> None:
    """Raise `InvalidInput` if a setting of Spark holds a secret of the NATS server; `where` is how it was given."""
    if _SECRET_VARIABLE.search(f"{name}={value}") and _REFERENCE not in name:
        raise InvalidInput(
            f"{where} {name} would show a secret to everyone who can see this machine's processes or Spark's pages: "
            "ship a creds file with --files, or set the variable in the environment of driver and executors"
        )
    if shows_secret(value) or looks_like_login(value) or (_SERVER_VARIABLE.search(name) and has_login(value)):
        raise InvalidInput(_login_advice(f"{where} {name}"))


def check_argument(where: str, argument: str, before: str = "") -> None:
    """Raise `InvalidInput` if an argument of a program has a login or a key in it; `before` is the argument before."""
    option, equals, value = argument.partition("=")
    named = option if equals and option.startswith("-") else before
    text = value if equals and option.startswith("-") else argument
    is_server = named in ("-s", "--server", "--other-server", "--url")
    if shows_secret(text) or looks_like_login(text) or (is_server and has_login(text)):
        raise InvalidInput(_login_advice(where))


def _login_advice(where: str) -> str:
    return (
        f"{where} has a user, a password or a key in it, where everyone can see it: leave it out of the url and ship a "
        "creds file with --files"
    )
