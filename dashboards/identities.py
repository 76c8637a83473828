"""Who somebody is that shows a token: names and teams, from a file that its owner alone can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError

LEAST = 16
"""Characters of a token: fewer can be guessed."""
FIELDS = ("name", "team", "token", "sha256")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. ``operator``: of the service itself; such a one may do all, and hand in runs for any team."""

    name: str
    team: str = ""
    operator: bool = False


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A person or program, and the SHA-256 of the token that only they have."""

    name: str
    team: str
    sha256: str


def named_tokens(path: Path) -> tuple[NamedToken, ...]:
    """Those of a file of tables ``[[token]]``. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError("--tokens", str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("--tokens", str(path), f"is no TOML: {error}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        reason = f"it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}: others may know or change it"
        raise ConfigError("--tokens", str(path), reason, f"chown it to yourself, and chmod 600 {path}.")
    tables = content.get("token")
    if set(content) != {"token"} or not isinstance(tables, list) or not tables:
        raise ConfigError("--tokens", str(path), "it has to hold tables [[token]], and nothing else", "See docs/cluster.md.")
    tokens = tuple(_read(table, f"--tokens: token {number}") for number, table in enumerate(tables, 1))
    for what in ("name", "sha256"):
        if len({getattr(each, what) for each in tokens}) < len(tokens):
            way_out = "Give each one of its own."
            raise ConfigError("--tokens", str(path), f"two of them have the same {'name' if what == 'name' else 'token'}", way_out)
    return tokens


def _read(table: Any, where: str) -> NamedToken:
    if not isinstance(table, Mapping):
        raise ConfigError(where, str(table)[:80], "is no table", "Begin it with [[token]].")
    for name, value in table.items():
        if name not in FIELDS or not isinstance(value, str):
            raise ConfigError(f"{where}: {name}", "***", "is no text field of a token", f"Fields are {', '.join(FIELDS)}.")
    for name in ("name", "team"):
        if not NAME.fullmatch(table.get(name, "")):
            raise ConfigError(f"{where}: {name}", table.get(name, ""), "must be a name: letters, digits and . _ @ -")
    if ("token" in table) == ("sha256" in table):
        raise ConfigError(where, table["name"], "it has to have token, or sha256, and not both", "printf %s TOKEN | sha256sum")
    if len(table.get("token", "x" * LEAST)) < LEAST:
        raise ConfigError(f"{where}: token", "***", f"fewer than {LEAST} characters can be guessed", "Make one with openssl rand -hex 32.")
    digest = table["sha256"].lower() if "sha256" in table else hashed(table["token"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ConfigError(f"{where}: sha256", "***", "is no SHA-256 in hexadecimal", "printf %s TOKEN | sha256sum")
    return NamedToken(table["name"], table["team"], digest)


def hashed(token: str) -> str:
    """As the file may have it in the place of the token itself."""
    return hashlib.sha256(token.encode()).hexdigest()


def who_has(token: bytes, known: tuple[NamedToken, ...]) -> Identity | None:
    """Whose token this is; None: nobody's. It takes as long whoever it is."""
    shown, found = hashlib.sha256(token).hexdigest(), None
    for each in known:
        if hmac.compare_digest(shown, each.sha256):
            found = Identity(each.name, each.team)
    return found
