"""A run of a cluster, as the process sees it that waits for its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.supervisor import DriverStanding
from fleet.app.plans import RunPlan
from fleet.app.remote import Attached, RemoteRun
from fleet.errors import ConfigError, RunFailed
from fleet.settings.run import RunSettings


class Ended(RemoteRun):
    """One whose driver has ended before there was a journal."""

    def __init__(self, folder: Path, outcome: dict[str, Any] | None) -> None:
        super().__init__("run", folder, None)
        self.outcome, self.forgotten = outcome, False

    def follow(self) -> DriverStanding:
        (self.folder / "driver.log").write_text("what the driver has printed")
        return DriverStanding(str(self.folder), 7, 0, 1, self.outcome)

    def leave(self, forget: bool = False) -> None:
        self.forgotten = forget


def attached(folder: Path, outcome: dict[str, Any] | None) -> Attached:
    plan = RunPlan(name="run", folder=folder, settings=RunSettings(), train=lambda run: None)
    return Attached(plan, Ended(folder, outcome))


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "has not begun: the process that drives the run ended with 1"),
        ({"status": "failed", "reason": "why", "detail": ""}, "not begun: why"),
    ],
)
def test_a_run_without_a_journal_fails_with_what_its_driver_said(tmp_path: Path, outcome: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(RunFailed, match=words) as raised:
        attached(tmp_path, outcome).execute()
    assert "what the driver has printed" in str(raised.value.detail)


def test_of_a_run_that_was_refused_nothing_is_left(tmp_path: Path) -> None:
    run = attached(tmp_path / "run", {"refused": ["--world", "9", "too many", "Ask for fewer."]})
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="too many. Ask for fewer"):
        run.execute()
    assert not (tmp_path / "run").exists() and run.run.forgotten  # type: ignore[attr-defined]
