"""Settings of a run that can change while it goes on, and their new values. Pure."""

from __future__ import annotations

import dataclasses

from fleet.errors import ConfigError
from fleet.settings.fields import from_text, keys
from fleet.settings.run import RunSettings

LIVE = {key.name: key for key in keys(RunSettings).values() if key.live}
"""By name. Settings that define the result, or the processes that run, are fixed for a run's life."""

WORLD = "world"
"""It may change up to ``max_world``; see ``fleet runs set``."""

ADDRESS_FILE = "coordinator"
"""In the run's folder: ``host:port`` at which its coordinator listens, while the run goes on."""


def parsed(key: str, text: str) -> float:
    """``text`` as a number, for setting ``key``. Raises ConfigError: the setting is unknown or fixed, or the value not of its kind."""
    if key not in LIVE:
        known, exists = f"Settings that can: {', '.join(sorted(LIVE))}.", key in keys(RunSettings)
        raise ConfigError(key, text, "it cannot change while a run goes on" if exists else "there is no such setting", known)
    return float(from_text({key: dataclasses.replace(LIVE[key], optional=False)}, key, text)[key])


def changed(settings: RunSettings, key: str, value: float) -> RunSettings:
    """``settings`` with ``key`` set, checked as at the start. Raises ConfigError."""
    group, _, name = key.rpartition(".")
    if group == "checkpoint":
        if not value > 0:
            raise ConfigError(key, value, "must be greater than 0 s")
        return dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, policy="fixed", interval_s=value))
    if key == WORLD:
        if value < settings.world and settings.spread and not settings.optimizer_copies:
            reason = "a rank that leaves would take its part of the optimizer's state along: there is no copy of it"
            raise ConfigError(key, value, reason, "Begin the run with --config optimizer_copies=1 or more to make it smaller.")
        return dataclasses.replace(settings, world=int(value), max_world=settings.most)
    inner = dataclasses.replace(getattr(settings, group), **{name: LIVE[key].kind(value)})
    return dataclasses.replace(settings, **{group: inner})
