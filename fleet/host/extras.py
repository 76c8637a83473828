"""Extras: distributions that only a part of Fleet needs. Where one is missing it is named, with the command that brings it along."""

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
    """What to type for an extra, and what stands for what in it."""
    return f"pip install 'fleet-train[{extra}] @ FLEET', where {WHERE}"


def need(module: str, extra: str, field: str, value: str) -> None:
    """Raises ConfigError for ``field`` and its ``value`` where ``module`` is not installed, which ``extra`` brings along."""
    if not is_there(module):
        raise ConfigError(field, value, f"it needs {module}, which is not installed", f"Run {command(extra)}.")
