"""A run is made larger and smaller, paused and resumed, as its user types it; it ends with the bits of one to which nothing happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.protocol.causes import EndWhy
from fleet.protocol.records import Committed, HistoryBegun, ProcessLost, ProcessUp, Record, RunEnded, ViewPublished
from tests.fault.test_bad_luck import settings
from tests.support.journals import NAME, records
from tests.support.processes import begin
from tests.support.terminal import ROOT
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import until

SCRIPT = "from tests.support.trains import plain as train\n"
OPTIONS = {"steps": "70", "norm": "layer"}


class Typed:
    """What a user types in a folder with a script; the run is called ``run``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs" / "run"
        (folder / "script.py").write_text(SCRIPT)
        (folder / "flags").mkdir()
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        return begin([sys.executable, "-m", "fleet", *arguments], self.folder, self._environment)

    def say(self, *arguments: str) -> tuple[int | None, str]:
        command = self.begin(*arguments)
        said, _ = command.communicate(timeout=200)
        return command.returncode, said

    def wait(self, condition: Callable[[list[Record]], bool], what: str) -> None:
        until(lambda: (self.runs / NAME).exists() and condition(records(self.runs)), what, 90)

    def wait_for_world(self, size: int) -> None:
        """Of so many ranks, with a step of its own."""

        def steps(kept: list[Record]) -> bool:
            last = next((place for place in reversed(range(len(kept))) if isinstance(kept[place], ViewPublished)), 0)
            view = kept[last] if kept else None
            taken = sum(isinstance(record, Committed) for record in kept[last:])
            return isinstance(view, ViewPublished) and len(view.view.members) == size and taken >= 3

        self.wait(steps, f"{size} ranks train")


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path)


def test_a_run_is_resized_and_paused_and_resumed(typed: Typed, undisturbed: Undisturbed) -> None:
    options = [
        part
        for key, value in (OPTIONS | {"flags": str(typed.folder / "flags"), "pause_s": "0.4"}).items()
        for part in ("--set", f"{key}={value}")
    ]
    sizes = ("--world", "2", "--config", "max_world=4", "--spares", "0", "--shards", "8", "--nodes", "2")
    run = typed.begin("run", "script.py", "--name", "run", *sizes, *options, "--checkpoint", "60")
    typed.wait(lambda kept: sum(isinstance(one, ProcessUp) for one in kept) == 4, "all slots are held")
    typed.wait_for_world(2)
    assert typed.say("runs", "set", "run", "world=4")[0] == 0
    typed.wait_for_world(4)
    for size, reason in (("5", "more than max_world = 4"), ("0", "must be at least 1")):
        code, said = typed.say("runs", "set", "run", f"world={size}")
        assert code == 2 and reason in " ".join(said.split()), said
    assert typed.say("runs", "set", "run", "world=1")[0] == 0
    typed.wait_for_world(1)
    code, said = typed.say("stop", "run")
    assert code == 0 and "fleet run --resume run goes on" in said
    run.communicate(timeout=60)
    kept = records(typed.runs)
    [ended] = [record for record in kept if isinstance(record, RunEnded)]
    assert (ended.status, ended.why) == ("stopped", EndWhy.PAUSED)
    assert not any(isinstance(record, ProcessLost | HistoryBegun) for record in kept), "nobody was lost, and nothing is done again"
    last = max(record.state.step for record in kept if isinstance(record, Committed))
    code, said = typed.say("run", "--resume", "run")
    assert code == 0, said[-3000:]
    kept = records(typed.runs)
    first = next(record.from_state.step for record in kept if isinstance(record, HistoryBegun))
    assert first == last < 70, "it has gone on from its last step"
    end = [record for record in kept if isinstance(record, RunEnded)][-1]
    assert end.status == "completed"
    assert end.digest == undisturbed(lambda folder: settings(folder, world=1, options=OPTIONS))


def test_a_run_that_has_ended_is_not_resized(typed: Typed) -> None:
    typed.runs.mkdir(parents=True)
    (typed.runs / NAME).touch()
    code, said = typed.say("runs", "set", "run", "world=2")
    assert code not in (0, None) and "no coordinator answers" in said
