"""Extras: distributions that only a part of Fleet needs. The error for a missing one names it, with the command that installs it."""

from __future__ import annotations

import importlib.util

from fleet.errors import ConfigError

WHERE = "FLEET is the wheel or the git URL that Fleet was installed from"
"""Fleet is on no package index."""


def is_there(module: str) -> bool:
    """Whether ``module`` can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def command(extra: str) -> str:
    """The command that installs an extra, and the meaning of FLEET in it."""
    return f"pip install 'fleet-train[{extra}] @ FLEET', where {WHERE}"


def need(module: str, extra: str, field: str, value: str) -> None:
    """Raises ConfigError for ``field`` and its ``value`` where ``module`` is not installed; ``extra`` installs it."""
    if not is_there(module):
        raise ConfigError(field, value, f"it needs {module}, which is not installed", f"Run {command(extra)}.")
