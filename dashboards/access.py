"""Who may read and who may change: bearer tokens, host and origin checks, and the audit log. No HTTP in here but its words."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.cluster.clock import unix_time_s
from fleet.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WRITE, READ, NOBODY = "write", "read", "nobody"
READ_TOKEN = "read-token"
"""File of the token for those who may only look."""
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server.

    Args:
        write_token: whoever shows it may change things, and read.
        read_token: whoever shows it may read; None: everybody may, which is for loopback alone.
        hosts: names under which the server may be called; others are refused, so that no web page can reach it by a name of its own.
            Empty: any.
    """

    write_token: str
    read_token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK

    def __post_init__(self) -> None:
        for name in ("write_token", "read_token"):
            token = getattr(self, name)
            if token is not None and len(token) < 16:
                raise ConfigError(name, "***", "shorter than 16 characters can be guessed", "Make one with `openssl rand -hex 32`.")

    def right(self, authorization: str) -> str:
        """``write``, ``read`` or ``nobody``, for the value of an ``Authorization`` header."""
        scheme, _, token = authorization.partition(" ")
        shown = token.strip().encode() if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(shown, self.write_token.encode()):
            return WRITE
        if self.read_token is None or hmac.compare_digest(shown, self.read_token.encode()):
            return READ
        return NOBODY

    def knows_host(self, host: str) -> bool:
        """Whether the ``Host`` header names this server."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return not self.hosts or name.strip("[]") in self.hosts

    @staticmethod
    def same_origin(headers: Mapping[str, str]) -> bool:
        """Whether a request that changes something comes from our own page, or from no page at all."""
        origin = headers.get("Origin")
        return origin is None or origin.partition("://")[2] == headers.get("Host", "")


def stored_token(folder: Path, name: str = "token") -> str:
    """The write token kept in ``folder``, or another one by ``name``, made when there is none. The file is its owner's alone (0600)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        os.chmod(path, 0o600)
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        token = secrets.token_hex(24)
        file.write(token + "\n")
    return token


class Audit:
    """Who did what, one JSON line each, only ever appended to. Anybody can be refused: refusals are kept up to ``MOST_BYTES``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, remote: str, right: str, action: str, run: str, asked: Mapping[str, object], outcome: str) -> None:
        """``right`` is what the token that was shown gives: write, read or nobody."""
        if right != WRITE and self._path.exists() and self._path.stat().st_size > MOST_BYTES:
            return
        who = {"unix_s": unix_time_s(), "remote": remote, "right": right}
        line = who | {"action": action, "run": run, "asked": dict(asked), "outcome": outcome}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(json.dumps(line) + "\n")
