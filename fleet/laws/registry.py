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
        ConfigError: no such name; the way out names the nearest one and all others.
    """
    if name in known:
        return known[name]
    plain = {_plain(key): value for key, value in known.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    raise ConfigError(field, name, "unknown", f"The nearest valid value is {near[0]}. Known: {', '.join(known)}.")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
