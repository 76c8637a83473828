"""Old runs, removed by a rule: which runs go, why the others stay, and the sizes of their folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.errors import ConfigError
from fleet.host.folds import is_written
from fleet.host.follow import SILENT_S, last_words
from fleet.protocol.records import RunEnded, RunStarted, configuration
from fleet.settings.fields import seconds

SILENT = "silent"
"""A run without an end, whose journal no process writes any more."""
STATUSES = ("completed", "completed, not saved", "stopped", "failed", SILENT)
GONE = ".pruned-"


@dataclass(frozen=True, slots=True)
class PruneRule:
    """A run goes when all conditions fit: not changed for ``older_than_s``, of one of ``statuses``, and not of the newest ``keep`` of
    those.

    Raises ConfigError for an empty rule, or a condition that no run can meet.
    """

    older_than_s: float | None = None
    keep: int | None = None
    statuses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.older_than_s is None and self.keep is None and not self.statuses:
            raise ConfigError("--older-than", "", "there is no rule, so every run would go", "Give --older-than 30d, --keep N or --status.")
        if self.keep is not None and self.keep < 0:
            raise ConfigError("--keep", self.keep, "it is a number of runs", "0 keeps none.")
        for status in self.statuses:
            if status not in STATUSES:
                raise ConfigError("--status", status, "no run ends so", f"There are: {'; '.join(STATUSES)}.")


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and the verdict. ``stays``: why it stays; empty: it goes. ``elsewhere``: the store that has its checkpoints, if any."""

    name: str
    folder: Path
    status: str
    changed_unix_s: float
    size_bytes: int
    stays: str = ""
    elsewhere: str = ""


def duration_s(text: str) -> float:
    """Seconds of ``30d``, ``12h``, ``90m`` or ``2w``. Raises ConfigError, also for a number alone: it might be meant as days."""
    if text[-1:].isdigit():
        raise ConfigError("--older-than", text, "it is a number and a unit", "As in 30d.")
    return seconds(text, "--older-than")


def judge(root: Path, rule: PruneRule, now_unix_s: float) -> list[Judged]:
    """Judge all runs under ``root``, newest first. No folder is touched."""
    seen = sorted((_look(path) for path in root.glob("*/journal.jsonl")), key=lambda run: -run.changed_unix_s)
    origins = {run.name: _origin(run.folder) for run in seen}
    found: list[Judged] = []
    fits = 0
    for run in seen:
        why = _stays(run, rule, now_unix_s)
        if not why:
            fits += 1
            why = f"it is one of the newest {rule.keep}" if rule.keep is not None and fits <= rule.keep else ""
        found.append(replace(run, stays=why))
    kept = {run.name for run in found if run.stays}
    needed = {name: other for other in kept if (name := origins[other])}
    return [
        replace(run, stays=f"{needed[run.name]} goes on from its checkpoint") if not run.stays and run.name in needed else run
        for run in found
    ]


def _look(journal: Path) -> Judged:
    started, ended = last_words(journal)
    folder = journal.parent
    status = ended.status if isinstance(ended, RunEnded) else SILENT if isinstance(started, RunStarted) else "not a run"
    storage = str(configuration(started.config).get("settings", {}).get("storage", "")) if started is not None else ""
    return Judged(folder.name, folder, status, journal.stat().st_mtime, size_bytes(folder), "", storage if "://" in storage else "")


def _origin(folder: Path) -> str:
    """The run whose checkpoint this run went on from; empty: it began anew."""
    started, _ = last_words(folder / "journal.jsonl")
    origin = str(configuration(started.config).get("origin", "")) if started is not None else ""
    return origin.rstrip("/").rpartition("/")[0].rpartition("/")[2]


def _stays(run: Judged, rule: PruneRule, now_unix_s: float) -> str:
    if run.status not in STATUSES:
        return "its journal cannot be read"
    if run.folder.is_symlink():
        return "its folder is a link to elsewhere"
    if is_going_on(run, now_unix_s):
        return "it is going on"
    if rule.older_than_s is not None and now_unix_s - run.changed_unix_s < rule.older_than_s:
        return "it is not that old"
    return f"it is {run.status}" if rule.statuses and run.status not in rule.statuses else ""


def is_going_on(run: Judged, now_unix_s: float) -> bool:
    """Whether a process holds the run's journal, or has just written it without an end. The twin's journal counts, too."""
    journals = [path for path in (run.folder / "journal.jsonl", run.folder / "twin" / "journal.jsonl") if path.is_file()]
    fresh = run.status == SILENT and now_unix_s - run.changed_unix_s <= SILENT_S
    return fresh or any(is_written(path) for path in journals)


def size_bytes(folder: Path) -> int:
    """Bytes that its files take on the disk; links are not followed."""
    sizes = [os.lstat(Path(where, name)) for where, _, names in os.walk(folder) for name in names]
    return sum(found.st_blocks * 512 for found in sizes)


def remove(runs: Iterable[Judged], now_unix_s: float) -> list[Judged]:
    """Remove the folders of runs that do not stay, and return these runs. A run that goes on again meanwhile stays."""
    went = []
    for run in runs:
        if run.stays or is_going_on(_look(run.folder / "journal.jsonl"), now_unix_s):
            continue
        away = run.folder.with_name(f"{GONE}{run.name}")
        run.folder.rename(away)  # at once, so that no list shows half a run
        shutil.rmtree(away)
        went.append(run)
    return went
