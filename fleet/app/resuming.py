"""Checks of a run that is to be resumed, before any of its processes starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from chaos.settings import ChaosSettings
from fleet.app import plans
from fleet.app.configuration import Configuration
from fleet.app.plans import RunPlan
from fleet.app.policy_choice import completed
from fleet.errors import ConfigError
from fleet.host.folds import is_written
from fleet.host.journal import read_journal
from fleet.host.provenance import digest_of_script
from fleet.machine.sessions import MOST, Sessions, in_words
from fleet.protocol.decisions import GoneBack
from fleet.protocol.draws import in_texts, left_out_of, range_of, without
from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, Record, Resumed
from fleet.protocol.types import StateId
from fleet.settings.fields import read, values_of
from fleet.settings.run import RunSettings
from storage.backends.urls import redact

FREE = ("storage",)
"""Settings that may differ: the store's URL may have credentials now."""
BEYOND = (*FREE, "steps")
"""Settings that may differ in a run that continues a completed run."""
OPTIONS, ABSENT = "options", "not set"


def check(folder: Path, found: Configuration, script: str = "") -> None:
    """Raises ConfigError when the run in ``folder`` may not go on, with ``script`` in the place of its own, and with the given settings.

    It may not when a given setting differs, or when it came to one step from two checkpoints.
    """
    check_given(folder, found)
    check_returns(folder, script)


def check_idle(folder: Path) -> None:
    """Raises ConfigError when another process of this host writes the journal in ``folder``."""
    if is_written(folder / "journal.jsonl"):
        reason = "it goes on: another process writes its journal"
        raise ConfigError("--resume", folder.name, reason, f"See it with fleet runs watch {folder.name}, or end it with fleet stop.")


def check_given(folder: Path, found: Configuration, free: Collection[str] = FREE) -> None:
    """Raises ConfigError when a given setting, which is not ``free``, differs from that of the run in ``folder``."""
    run, content = plans.recorded(folder)
    was, now = _values(recorded_settings(content)), _values(found)
    for name in (each for each in found.given if each not in free):
        for field, old, new in _differences(name, was.get(name), now.get(name)):
            reason = f"run {run} is resumed with the settings that it began with, where it is {old}"
            way_out = "Leave it out. For another value begin a new run: run.track(weights=...) takes the model of this one."
            raise ConfigError(field, new, reason, way_out)


def recorded_settings(content: Mapping[str, Any]) -> Configuration:
    """All settings of a run, from its journal's record."""
    return Configuration(run=plans.settings_in(content), chaos=read(ChaosSettings, content["chaos"], "chaos."))


def _values(found: Configuration) -> dict[str, Any]:
    run: RunSettings = completed(found.run)
    return values_of(run) | values_of(found.chaos, "chaos.")


def _differences(name: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(the user's name, the old value, the new value) of a setting that differs; for ``--set``, of each of its values that differs."""
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
        way_out = f"Mend the script, and resume it then; fleet report {folder.name} --diagnose shows where it failed."
        raise ConfigError("--resume", folder.name, in_words(sessions.returns), way_out)


def going_back(plan: RunPlan, token: str, from_step: int, skip_steps: Sequence[str]) -> RunPlan:
    """The plan of a run that goes back to its checkpoint of step ``from_step``, and then leaves out the samples of ``skip_steps``.

    Raises ConfigError: there is no such checkpoint, or some of these steps come before it.
    """
    ranges = [range_of("--skip-steps", text) for text in skip_steps]
    for text, (first, _) in zip(skip_steps, ranges, strict=True):
        if first < from_step:
            reason = f"the run goes back to step {from_step}, and has taken step {first} there"
            raise ConfigError("--skip-steps", text, reason, f"Begin with step {from_step} or a later one, or go back further.")
    state = _checkpoint_of(plan, from_step)
    left_out = in_texts(without(left_out_of(plan.settings.left_out), ranges))
    back = GoneBack(state.history, state.step, left_out, token)
    return dataclasses.replace(plan, back=back, settings=dataclasses.replace(plan.settings, left_out=left_out))


def _checkpoint_of(plan: RunPlan, step: int) -> StateId:
    """The run's newest checkpoint of that step that was not withdrawn. Raises ConfigError, which names the nearest steps."""
    from storage.checkpoint.manifest import CheckpointDamaged, parse_checkpoint_id
    from storage.checkpoint.store import CheckpointStore

    store = CheckpointStore(plans.store_url(plan), run=plan.name, index=False)
    withdrawn = {each.checkpoint for each in read_journal(plan.journal, spans=False) if _is_withdrawn(each)}
    known = {parse_checkpoint_id(name)[0]: name for name in store.list() if name not in withdrawn}
    found = max((state for state in known if state.step == step), default=None)
    if found is None:
        steps = sorted({state.step for state in known})
        near = [*[each for each in steps if each < step][-1:], *[each for each in steps if each > step][:1]]
        way_out = f"The nearest are of step {' and '.join(map(str, near))}." if near else "There is none at all."
        raise ConfigError("--from-step", step, f"no checkpoint of that step is kept in {redact(plans.store_url(plan))}", way_out)
    try:
        store.verify(known[found])
    except CheckpointDamaged as error:
        raise ConfigError("--from-step", step, str(error), "Name another step; see fleet checkpoint verify.") from error
    return found


def _is_withdrawn(record: Record) -> TypeGuard[CheckpointRecord]:
    return isinstance(record, CheckpointRecord) and record.phase == "withdrawn" and record.level == STORE


def returns_of(journal: Path) -> int:
    """How often in a row the run has come back to the same step, from a checkpoint."""
    return len(Sessions().note_all(read_journal(journal, spans=False)).returns)
