"""Checks of a run that is to be resumed, before any of its processes starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chaos.settings import ChaosSettings
from fleet.app import plans
from fleet.app.configuration import Configuration
from fleet.app.policy_choice import completed
from fleet.errors import ConfigError
from fleet.host.folds import is_written
from fleet.host.journal import read_journal
from fleet.host.provenance import digest_of_script
from fleet.machine.sessions import MOST, Sessions, in_words
from fleet.protocol.records import Resumed
from fleet.settings.fields import read, values_of
from fleet.settings.run import RunSettings
from policies.lemons import Lemons

FREE = ("storage",)
"""It may have credentials now."""
BEYOND = (*FREE, "steps")
"""What a run that goes on beyond another one's end may have of its own."""
OPTIONS, ABSENT = "options", "not set"


def check(folder: Path, found: Configuration, script: str = "") -> None:
    """Whether the run in ``folder`` may go on, with ``script`` in the place of its own, and with the settings that were given.

    Raises ConfigError: it goes on already, a setting is given that is another one than the run's, or it has come back to the same step from
    two checkpoints.
    """
    if is_written(folder / "journal.jsonl"):
        reason = "it goes on: another process writes its journal"
        raise ConfigError("--resume", folder.name, reason, f"See it with fleet watch {folder.name}, or end it with fleet pause.")
    check_given(folder, found)
    check_returns(folder, script)


def check_given(folder: Path, found: Configuration, free: Collection[str] = FREE) -> None:
    """Raises ConfigError when a setting is given, and is not ``free``, that is not the one that the run in ``folder`` began with."""
    run, content = plans.recorded(folder)
    was, now = _values(recorded_settings(content)), _values(found)
    for name in (each for each in found.given if each not in free):
        for field, old, new in _differences(name, was.get(name), now.get(name)):
            reason = f"run {run} is resumed with the settings that it began with, where it is {old}"
            way_out = "Leave it out. For another one begin a new run: run.track(weights=...) takes the model of this one."
            raise ConfigError(field, new, reason, way_out)


def recorded_settings(content: Mapping[str, Any]) -> Configuration:
    """All that was set of a run, from what its journal says."""
    chaos, lemons = read(ChaosSettings, content["chaos"], "chaos."), read(Lemons, content.get("lemons", {}), "lemons.")
    return Configuration(run=plans.settings_in(content), chaos=chaos, lemons=lemons)


def _values(found: Configuration) -> dict[str, Any]:
    run: RunSettings = completed(found.run)
    return values_of(run) | values_of(found.chaos, "chaos.") | values_of(found.lemons, "lemons.")


def _differences(name: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(what the user calls it, what it was, what it would be), of one setting; of ``--set`` each that differs."""
    if name == OPTIONS:
        return [("--set", _option(key, was), f"{key}={text}") for key, text in now.items() if (was or {}).get(key) != text]
    return [(name, was, now)] if was != now else []


def _option(key: str, was: Mapping[str, str] | None) -> str:
    return f"{key}={was[key]}" if was and key in was else ABSENT


def check_returns(folder: Path, script: str = "") -> None:
    """Raises ConfigError when the run in ``folder`` has come back to the same step from its newest checkpoint and from an older one."""
    sessions = Sessions().note_all(read_journal(folder / "journal.jsonl", spans=False))
    sessions.note(Resumed(0.0, 0.0, "", script_sha256=digest_of_script(script or plans.script_in(plans.recorded(folder)[1]))))
    if len(sessions.returns) >= MOST:
        way_out = f"Change what fails in the script, and resume it then; fleet diagnose {folder.name} shows where it failed."
        raise ConfigError("--resume", folder.name, in_words(sessions.returns), way_out)


def returns_of(journal: Path) -> int:
    """How often in a row the run has come back to the same step, from a checkpoint."""
    return len(Sessions().note_all(read_journal(journal, spans=False)).returns)
