"""Which settings of a run can change while it goes on, and what they become. Pure."""

from __future__ import annotations

import dataclasses

from fleet.config import RunSettings
from fleet.errors import ConfigError

LIVE = {
    **{f"straggler.{name}": float for name in ("compute_slowdown", "network_slowdown", "data_slowdown", "gain", "window_s")},
    "straggler.enabled": bool,
    "straggler.changes": int,
    "checkpoint.interval_s": float,
    "timeouts.progress_s": float,
    "timeouts.run_s": float,
}
"""Name -> kind. What defines the result, or the processes that run, is fixed for a run's life."""

ADDRESS_FILE = "coordinator"
"""In the run's folder: ``host:port`` at which its coordinator listens, while the run goes on."""

WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


def parsed(key: str, text: str) -> float:
    """The value that ``text`` gives to setting ``key``, as a number. Raises ConfigError: unknown, fixed, or not of its kind."""
    kind = LIVE.get(key)
    if kind is None:
        known = f"Settings that can: {', '.join(sorted(LIVE))}."
        group, _, name = key.rpartition(".")
        exists = hasattr(getattr(RunSettings(), group, None) if group else RunSettings(), name)
        raise ConfigError(key, text, "it cannot change while a run goes on" if exists else "there is no such setting", known)
    try:
        return float(WORDS[text.lower()] if kind is bool else kind(text))
    except (KeyError, ValueError):
        expected = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(key, text, f"it takes {expected}") from None


def changed(settings: RunSettings, key: str, value: float) -> RunSettings:
    """``settings`` with ``key`` set, checked as at the start. Raises ConfigError."""
    group, _, name = key.rpartition(".")
    if group == "checkpoint":
        if not value > 0:
            raise ConfigError(key, value, "must be greater than 0 s")
        return dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, policy="fixed", interval_s=value))
    inner = dataclasses.replace(getattr(settings, group), **{name: LIVE[key](value)})
    return dataclasses.replace(settings, **{group: inner})
