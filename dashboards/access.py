"""Who may read and who may change: bearer tokens, host and origin checks, and the audit log. No HTTP in here but its words."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dashboards.identities import Identity, NamedToken, who_has
from fleet.errors import ConfigError
from fleet.host.clock import unix_time_s

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WRITE, QUEUE, READ, NOBODY = "write", "queue", "read", "nobody"
"""What somebody may: all, hand in and take back runs of their team, look, nothing."""
READ_TOKEN = "read-token"
"""File of the token for those who may only look."""
NO_PAGE, OUR_PAGE = "none", "same-origin"
"""What a browser says of where a request comes from, also where it leaves ``Origin`` out."""
MOST_BYTES = 16 << 20
BY_ITSELF = "the queue"
"""Who starts runs, and has them give way, in the audit log; no token can have this name."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server.

    Args:
        write_token: whoever shows it may change things, and read.
        read_token: whoever shows it may read; None: everybody may, which is for loopback alone.
        hosts: names under which the server may be called; others are refused, so that no web page can reach it by a name of its own.
            Empty: any.
        named: tokens of people and programs that may hand in runs, each for its team.
        operator: the name of whoever shows the write token.
    """

    write_token: str
    read_token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    named: tuple[NamedToken, ...] = ()
    operator: str = "operator"

    def __post_init__(self) -> None:
        for name in ("write_token", "read_token"):
            token = getattr(self, name)
            if token is not None and len(token) < 16:
                raise ConfigError(name, "***", "shorter than 16 characters can be guessed", "Make one with `openssl rand -hex 32`.")

    def right(self, authorization: str) -> str:
        """``write``, ``queue``, ``read`` or ``nobody``, for the value of an ``Authorization`` header."""
        identity = self.identity(authorization)
        if identity is not None:
            return WRITE if identity.operator else QUEUE
        if self.read_token is None or hmac.compare_digest(_shown(authorization), self.read_token.encode()):
            return READ
        return NOBODY

    def identity(self, authorization: str) -> Identity | None:
        """Who has the token that the header shows; None: somebody without a name, who may look at most."""
        shown = _shown(authorization)
        if hmac.compare_digest(shown, self.write_token.encode()):
            return Identity(self.operator, operator=True)
        return who_has(shown, self.named)

    def knows_host(self, host: str) -> bool:
        """Whether the ``Host`` header names this server."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return not self.hosts or name.strip("[]") in self.hosts

    @staticmethod
    def same_origin(headers: Mapping[str, str]) -> bool:
        """Whether a request that changes something comes from our own page, or from no page at all."""
        sites = [headers[name].partition("://")[2].partition("/")[0] for name in ("Origin", "Referer") if name in headers]
        return headers.get("Sec-Fetch-Site", NO_PAGE) in (NO_PAGE, OUR_PAGE) and all(site == headers.get("Host", "") for site in sites)


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


def _shown(authorization: str) -> bytes:
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


class Audit:
    """Who did what, one JSON line each, only ever appended to. Anybody can be refused: refusals are kept up to ``MOST_BYTES``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(
        self, remote: str, right: str, action: str, run: str, asked: Mapping[str, object], outcome: str, who: str = "", team: str = ""
    ) -> None:
        """``right`` is what the token that was shown gives; ``who`` and ``team`` are those of its owner."""
        bounded = right in (READ, NOBODY) or (right == QUEUE and outcome.startswith("refused"))
        if bounded and self._path.exists() and self._path.stat().st_size > MOST_BYTES:
            return
        self._append(
            {"remote": remote, "right": right, "who": who, "team": team, "action": action, "run": run, "asked": dict(asked)}, outcome
        )

    def done(self, action: str, run: str, owner: str, team: str, why: str) -> None:
        """What the queue does by itself with somebody's run."""
        self._append({"who": BY_ITSELF, "team": team, "action": action, "run": run, "owner": owner}, why)

    def _append(self, facts: Mapping[str, object], outcome: str) -> None:
        line = json.dumps({"unix_s": unix_time_s(), **facts, "outcome": outcome}) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(number, "wb", buffering=0) as file:  # one call: lines of others do not come between
            file.write(line.encode())
