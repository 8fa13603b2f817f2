"""The address of the server, in a form that Spark may log: it travels through plans and checkpoints to every executor.

An address holds no secret. It names files and contexts, which every process reads where it runs; what is set in
the environment (`NATS_USER`, `NATS_TOKEN` and so on) is read there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from keylane.errors import InvalidInput
from keylane.spark.secrets import has_login

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
