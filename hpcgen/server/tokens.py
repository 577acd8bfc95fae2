"""Bearer tokens: who may use the server, and whose files and batches are whose."""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from hpcgen.server.api_errors import ApiError
from hpcgen.server.errors import ServerError

ENVIRONMENT = "HPCGEN_TOKENS"
"""Tokens, separated by commas, where there is no token file."""
NOBODY = "local"
"""Owner of everything where no token is asked for."""
LEAST_CHARACTERS = 16


class Tokens:
    """Owners by token. Without tokens everybody is the one owner."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        """`owners`: token -> owner."""
        self._owners = [(_digest(token), owner) for token, owner in owners.items()]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, authorization: str | None) -> str:
        """The owner that a header `Authorization` stands for.

        Raises:
            ApiError: 401, no token or a wrong one.
        """
        if not self._owners:
            return NOBODY
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        owner = None
        # Every token is compared, each in constant time: how long it takes tells nothing.
        for digest, candidate in self._owners:
            if hmac.compare_digest(digest, given):
                owner = candidate
        if scheme.lower() != "bearer" or owner is None:
            message = "Incorrect API key provided" if token else "You didn't provide an API key: send a bearer token"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return owner


def load_tokens(file: Path | None, environment: Mapping[str, str] = os.environ) -> Tokens:
    """Tokens of a file, or else of the environment.

    A line of the file is a token, or a name and a token; what is named stays its owner's when the token changes.

    Raises:
        ServerError: the file cannot be read, others can read it, or a token is short or given twice.
    """
    if file is None:
        lines = [[token.strip()] for token in environment.get(ENVIRONMENT, "").split(",") if token.strip()]
        source = ENVIRONMENT
    else:
        try:
            if file.stat().st_mode & 0o077:
                raise ServerError(f"others can read the token file {file}: chmod 600 {file}")
            text = file.read_text()
        except OSError as error:
            raise ServerError(f"cannot read the token file {file}: {error.strerror}") from None
        lines = [words for line in text.splitlines() if (words := line.split()) and not words[0].startswith("#")]
        source = str(file)
        if not lines:
            raise ServerError(f"the token file {file} has no tokens: write one a line")
    owners: dict[str, str] = {}
    for words in lines:
        token = words[-1]
        if len(words) > 2 or len(token) < LEAST_CHARACTERS or token in owners:
            raise ServerError(
                f"{source}: each line is a token, or a name and a token; a token has {LEAST_CHARACTERS} characters or "
                "more, without spaces, and is given once. openssl rand -hex 24 makes one"
            )
        owners[token] = f"name:{words[0]}" if len(words) == 2 else f"token:{_digest(token).hex()[:32]}"
    return Tokens(owners)


def require_tokens_beyond_loopback(host: str, tokens: Tokens) -> None:
    """Raises ServerError where others than this machine could come in without a token."""
    if not tokens and not is_loopback(host):
        raise ServerError(
            f"--host {host} is not a loopback address: give --token-file, or tokens in {ENVIRONMENT}, so that not "
            "everybody can use the server"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
