"""Look-up by name; the error for an unknown name lists the known ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from fleet.errors import ConfigError

T = TypeVar("T")


def find(field: str, name: str, known: Mapping[str, T]) -> T:
    """``known[name]``. The comparison ignores case, spaces, dots, dashes and underscores.

    Raises:
        ConfigError: no such name; the way out names all, and first one that is spelt alike.
    """
    if name in known:
        return known[name]
    plain = {_plain(key): value for key, value in known.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(field, name, "unknown", f"{meant}Known: {', '.join(known)}.")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
