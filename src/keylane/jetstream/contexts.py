"""Reads the context files that the `nats` command line tool writes.

Owns where the files are, which fields they have and which of them keylane can honour. Never writes a
file, never opens a connection, and never follows a reference to a secret store.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keylane.core.name_suggestions import name_missing
from keylane.errors import InvalidInput

_PATHS = ("creds", "nkey", "cert", "key", "ca")
_SECRETS = ("token", "password", "user_jwt", "user_seed")
_PLAIN = (
    "url",
    "user",
    "jetstream_domain",
    "jetstream_api_prefix",
    "jetstream_event_prefix",
    "inbox_prefix",
)
_REFUSED = {
    "nsc": "generate a creds file with `nsc generate creds` and name it in `creds`",
    "socks_proxy": "connect without a proxy, or run a leaf node next to the program",
    "windows_cert_store": "name certificate files in `cert`, `key` and `ca`",
    "windows_cert_match": "name certificate files in `cert`, `key` and `ca`",
    "windows_ca_certs_match": "name certificate files in `cert`, `key` and `ca`",
}
_REFERENCES = ("op://", "nsc://", "env://", "data:")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsContext:
    """One context file: what is unset is an empty string. Paths are expanded."""

    name: str
    path: Path
    url: str = field(default="", repr=False)
    user: str = ""
    jetstream_domain: str = ""
    jetstream_api_prefix: str = ""
    jetstream_event_prefix: str = ""
    inbox_prefix: str = ""
    creds: str = ""
    nkey: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    tls_first: bool = False
    token: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    user_jwt: str = field(default="", repr=False)
    user_seed: str = field(default="", repr=False)


def contexts_dir() -> Path:
    """Where the `nats` tool keeps its contexts: `$XDG_CONFIG_HOME/nats/context`, else `~/.config/...`."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "nats" / "context"


def known_contexts() -> list[str]:
    """The names of all contexts, sorted."""
    directory = contexts_dir()
    if not directory.is_dir():
        return []
    return sorted(file.stem for file in directory.glob("*.json") if file.is_file() and file.stat().st_size)


def selected_context() -> str | None:
    """The context chosen with `nats context select`, if one is."""
    chosen = contexts_dir().parent / "context.txt"
    try:
        return chosen.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{chosen}: cannot read which nats context is selected: {error}") from error


def load_context(name: str) -> NatsContext:
    """Read the context `name`.

    Raises `InvalidInput` when it is not there, is not readable, or asks for something that keylane
    cannot do (a proxy, nsc, the Windows certificate store, a reference to a secret store).
    """
    if not name or ".." in name or "/" in name or os.sep in name:
        raise InvalidInput(f"nats context {name!r}: a context name is a file name without '/' and '..'")
    path = contexts_dir() / f"{name}.json"
    if not path.is_file():
        known = known_contexts()
        add = "" if known else "; make one with `nats context add`"
        raise InvalidInput(name_missing(f"nats context {name!r} is not in {path.parent}", name, known) + add)
    return _parse(name, path, _read_object(path))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read the nats context: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{path}: a nats context must be a JSON object in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: a nats context must be a JSON object, not {type(content).__name__}")
    return content


def _parse(name: str, path: Path, content: dict[str, Any]) -> NatsContext:
    for unsupported, instead in _REFUSED.items():
        if content.get(unsupported):
            raise InvalidInput(f"{path}: keylane does not support `{unsupported}`; {instead}")
    tls_first = content.get("tls_first") or False
    if not isinstance(tls_first, bool):
        raise InvalidInput(f"{path}: `tls_first` must be true or false")
    texts = {each: _text(path, content, each) for each in (*_PLAIN, *_SECRETS, *_PATHS)}
    for each in (*_SECRETS, *_PATHS):
        _refuse_reference(path, each, texts[each])
    for each in _PATHS:
        texts[each] = expand(texts[each])
    return NatsContext(name=name, path=path, tls_first=tls_first, **texts)


def _text(path: Path, content: dict[str, Any], field_name: str) -> str:
    value = content.get(field_name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidInput(f"{path}: `{field_name}` must be a string, not {type(value).__name__}")
    return value


def _refuse_reference(path: Path, field_name: str, value: str) -> None:
    schemes = (*_REFERENCES, "file://") if field_name in _SECRETS else _REFERENCES
    for scheme in schemes:
        if value.startswith(scheme):
            raise InvalidInput(
                f"{path}: `{field_name}` refers to a secret by {scheme}, which keylane does not follow; "
                "put the value or a file path there, or pass it to connect()"
            )


def expand(path: str) -> str:
    """A path as the `nats` tool reads it: `file://`, a leading `~` and `$VARIABLES` are resolved."""
    if not path:
        return ""
    return os.path.expanduser(os.path.expandvars(path.removeprefix("file://")))
