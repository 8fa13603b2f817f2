"""The ways to log in, and the files they come from.

Owns: what each way needs, reading and checking seed and creds files, and what nats-py is told. Never puts a
secret into an error or a repr.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nats.errors
import nkeys  # type: ignore[import-untyped]  # ships no types

from keylane.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class UserPassword:
    """A user name and a password."""

    user: str
    password: str = field(repr=False)
    given: str = "user and password"

    def describe(self) -> str:
        return f"user {self.user!r} with a password"

    def nats_options(self) -> dict[str, Any]:
        return {"user": self.user, "password": self.password}


@dataclass(frozen=True, slots=True)
class Token:
    """One shared secret."""

    token: str = field(repr=False)
    given: str = "token"

    def describe(self) -> str:
        return "a token"

    def nats_options(self) -> dict[str, Any]:
        return {"token": self.token}


@dataclass(frozen=True, slots=True)
class Nkey:
    """An nkey: the seed signs what the server asks, and only the public key is sent."""

    seed: str = field(repr=False)
    origin: str = "nkey_seed"
    given: str = "nkey"

    def __post_init__(self) -> None:
        _check_seed(self.seed, self.origin)

    def describe(self) -> str:
        public = nkeys.from_seed(bytearray(self.seed.encode())).public_key.decode()
        return f"the nkey {public}"

    def nats_options(self) -> dict[str, Any]:
        return {"nkeys_seed_str": self.seed}


@dataclass(frozen=True, slots=True)
class UserJwt:
    """A user JWT with the seed that proves it is ours.

    `read` gives both. It is asked at every login, so that a renewed creds file is used on a reconnect.
    """

    read: Callable[[], tuple[str, str]] = field(repr=False)
    origin: str
    given: str = "creds file"

    def __post_init__(self) -> None:
        self.read()

    def describe(self) -> str:
        return f"the user JWT of {self.origin}"

    def nats_options(self) -> dict[str, Any]:
        return {"user_jwt_cb": self._jwt, "signature_cb": self._sign}

    def _jwt(self) -> bytes:
        return self._current()[0].encode()

    def _sign(self, nonce: str) -> bytes:
        pair = nkeys.from_seed(bytearray(self._current()[1].encode()))
        return base64.b64encode(pair.sign(nonce.encode()))

    def _current(self) -> tuple[str, str]:
        try:
            return self.read()
        except InvalidInput as error:
            # In the midst of a reconnect nats-py survives its own errors only.
            raise nats.errors.Error(str(error)) from error


Auth = UserPassword | Token | Nkey | UserJwt


def nkey_from_file(path: str) -> Nkey:
    """Read an nkey seed file; the seed may stand alone or between BEGIN and END lines."""
    for line in read_text(path, "nkey seed file").splitlines():
        if line.strip().startswith("S"):
            return Nkey(line.strip(), path)
    raise InvalidInput(f"{path}: no nkey seed in this file; a line must begin with 'SU'")


def jwt_from_file(path: str) -> UserJwt:
    """Read a creds file, as `nsc` and `nats auth` write it."""
    return UserJwt(lambda: _read_creds(path), path)


def jwt_from_text(jwt: str, seed: str, origin: str) -> UserJwt:
    """A user JWT and its seed, given as they are."""
    _check_seed(seed, origin)
    return UserJwt(lambda: (jwt, seed), origin, "user JWT")


def read_text(path: str, what: str) -> str:
    """The text of a small file, or `InvalidInput` that names it."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: this {what} is not text") from error
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read this {what}: {error.strerror}") from error


def _read_creds(path: str) -> tuple[str, str]:
    text = read_text(path, "creds file")
    jwt = _between(text, "NATS USER JWT")
    seed = _between(text, "USER NKEY SEED")
    if not jwt or not seed:
        missing = "NATS USER JWT" if not jwt else "USER NKEY SEED"
        raise InvalidInput(
            f"{path}: not a creds file: no '-----BEGIN {missing}-----' with a line after it; "
            "write one with `nsc generate creds` or `nats auth user creds`"
        )
    if jwt.count(".") != 2:
        raise InvalidInput(f"{path}: the user JWT in this creds file is damaged: it needs three parts")
    _check_seed(seed, path)
    return jwt, seed


def _between(text: str, title: str) -> str:
    lines = iter(text.splitlines())
    for line in lines:
        if f"BEGIN {title}" in line:
            return next((each.strip() for each in lines if each.strip()), "")
    return ""


def _check_seed(seed: str, origin: str) -> None:
    if not seed.startswith("SU"):
        raise InvalidInput(f"{origin}: not the seed of a user: a user's nkey seed begins with 'SU'")
    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
        # nkeys reads a seed without a look at its checksum, so a typing error would become another key.
        whole = nkeys.encode_seed(bytes(raw[:32]), prefix) == seed.encode()
    except Exception as error:
        # nkeys raises its own errors and ValueErrors; to the caller each means the same.
        raise InvalidInput(f"{origin}: this nkey seed is damaged (its alphabet or length is wrong)") from error
    if not whole:
        raise InvalidInput(f"{origin}: this nkey seed is damaged (its checksum is wrong)")
