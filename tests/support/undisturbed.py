"""Digests of runs that nothing happens to: each is trained once in a session of tests, by whichever process asks first."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

from fleet.settings.run import RunSettings

LIMIT_S = 240.0
"""For another process that trains the same run."""


class Undisturbed:
    """``undisturbed(lambda folder: settings(folder, world=2))`` is the final digest of that run without faults.

    Args:
        folder: shared by all processes of the session.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, make: Callable[[Path], RunSettings], train: Callable[[Any], None] | None = None) -> str:
        from tests.support import trains  # it imports torch

        train = train or trains.plain
        chosen = make(self._folder / "run")
        kept = self._folder / key(chosen, train)
        with filelock.FileLock(f"{kept}.lock", timeout=LIMIT_S):
            if not kept.exists():
                kept.write_text(_trained(train, make, Path(f"{kept}-run")))
        return kept.read_text()


def key(chosen: RunSettings, train: Callable[[Any], None]) -> str:
    """Of what decides the bits of a run, and not of where it has its files."""
    reported = dataclasses.asdict(chosen)
    reported["options"] = {name: value for name, value in chosen.options.items() if name != "flags"}
    said = json.dumps([f"{train.__module__}.{train.__qualname__}", reported], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:20]


def _trained(train: Callable[[Any], None], make: Callable[[Path], RunSettings], folder: Path) -> str:
    from tests.support.plain import PlainFleet

    with PlainFleet(train, make(folder), folder) as fleet:
        outcome = fleet.wait()
        assert outcome.status == "completed", outcome
        return str(fleet.coordinator.machine.state.ending.record.digest)
