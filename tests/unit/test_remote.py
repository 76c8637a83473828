"""A run of a cluster, as the process sees it that waits for its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from actors import supervisor
from actors.messages import PauseWanted
from actors.supervisor import DriverStanding
from fleet.app import remote
from fleet.app.cluster import ray_internals
from fleet.app.plans import RunPlan
from fleet.app.remote import Attached, RemoteRun, plan_of
from fleet.errors import ConfigError, FleetError, OutOfSight, RunFailed
from fleet.settings.run import RunSettings
from tests.support.journals import write_begun


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


class Starting(RemoteRun):
    """One whose driver starts, and has a journal when it was looked at so many times; ``ends`` is how it ends then instead."""

    def __init__(self, folder: Path, looks: int, ends: dict[str, Any] | None = None) -> None:
        super().__init__("run", folder, None)
        self.looks, self.ends, self.left = looks, ends, 0

    def standing(self) -> DriverStanding:
        self.looks -= 1
        over = self.looks < 0 and self.ends is not None
        return DriverStanding(str(self.folder), 7, 0, 0 if over else None, self.ends if over else None)

    def pull(self) -> bool:
        if self.looks < 0 and self.ends is None:
            write_begun(self.folder)
        return False

    def pause(self) -> None:
        """No time goes by."""

    def leave(self, forget: bool = False) -> None:
        self.left += 1


def test_a_run_that_starts_is_waited_for_as_long_as_it_does(tmp_path: Path) -> None:
    said: list[str] = []
    plan = plan_of(Starting(tmp_path, looks=10_000), said.append)
    assert plan is not None and plan.folder == tmp_path
    assert said == ["run has not begun yet: process 7 of the head starts it"]


def test_one_that_ends_before_it_has_begun_is_told_as_it_was_and_left_alone(tmp_path: Path) -> None:
    stopped = Starting(tmp_path, 3, {"status": "stopped", "reason": "it was stopped before it began", "detail": ""})
    assert plan_of(stopped, print) is None and stopped.left == 1
    with pytest.raises(ConfigError, match="too many. Ask for fewer"):
        plan_of(Starting(tmp_path, 3, {"refused": ["--world", "9", "too many", "Ask for fewer."]}), print)
    with pytest.raises(RunFailed, match="has ended before it began: a bug"):
        plan_of(Starting(tmp_path, 3, {"status": "failed", "reason": "a bug", "detail": ""}), print)


# ---- what the supervisor answers ---------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> RemoteRun:
    """A run whose supervisor has no answer but this error."""

    def get(call: Any, timeout: float) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    return RemoteRun("run", Path("run"), MagicMock())


def raised(error: Exception) -> Exception:
    """As Ray raises here what a task has raised there."""
    found: Exception = RayTaskError("ask", "Traceback of the actor\n" * 40, error).as_instanceof_cause()
    return found


@pytest.mark.parametrize("error", [FleetError(f"run: {'a long reason ' * 40}"), ConfigError("RUN", "run", "deleted", "Choose another.")])
def test_what_fleet_has_raised_there_comes_whole(error: FleetError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)) as error_here:
        failing(monkeypatch, raised(error)).ask(PauseWanted("paused"))
    assert str(error_here.value) == str(error)


def test_a_supervisor_that_fails_says_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"no disk: {'x' * 400}"
    with pytest.raises(RunFailed, match="its supervisor on the head has failed: ValueError: no disk") as error_here:
        failing(monkeypatch, raised(ValueError(reason))).standing()
    assert reason in error_here.value.reason


@pytest.mark.parametrize("error", [GetTimeoutError("late"), ActorDiedError(), ActorUnavailableError("away", None)])
def test_one_that_does_not_answer_is_no_run_that_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfSight, match="^run run: "):
        failing(monkeypatch, error).standing()


@pytest.mark.parametrize(
    ("resume", "code", "words"),
    [
        (
            True,
            None,
            "--resume = 'run': the cluster has a run of this name, which goes on. See it with fleet attach run; fleet stop run ends it.",
        ),
        (
            False,
            None,
            "--name = 'run': the cluster has a run of this name, which goes on. Choose another name, or see it with fleet attach",
        ),
        (True, 0, "which has ended, and no user has seen its end. See its end with fleet attach run, and resume it then."),
    ],
)
def test_a_name_that_the_cluster_has_is_refused_by_how_far_its_run_is(
    resume: bool, code: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*arguments: Any) -> None:
        raise ValueError("The name run-run (namespace=fleet) is already taken.")

    monkeypatch.setattr(supervisor, "start", taken)
    monkeypatch.setattr(supervisor, "find", lambda name: MagicMock())
    monkeypatch.setattr(ray, "get", lambda call, timeout: DriverStanding("", 7, 0, code, None))
    monkeypatch.setattr(remote, "environment", lambda code: {})
    monkeypatch.setattr(ray_internals, "uploaded", lambda environment: environment)
    plan = RunPlan(name="run", folder=tmp_path / "run", settings=RunSettings(), train=lambda run: None, resume=resume)
    with pytest.raises(ConfigError) as refused:
        remote.begin(plan, tmp_path, None)
    assert words in str(refused.value)
    assert not plan.folder.exists()
