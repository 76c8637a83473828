"""The holder of a run, as the process that drives it sees it: on a folder, in processes of this machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.app import holding
from fleet.app.holding import HeldElsewhere, RunHold, looked_at
from fleet.app.plans import RunPlan
from fleet.errors import ConfigError
from fleet.host import holder
from fleet.host.proc import start_ticks, stat_fields
from fleet.protocol.holding import TakenOver, Tenure
from fleet.settings.run import RunSettings
from storage.lock import RunLock
from tests.support.waiting import until

LIMIT_S = 240.0
CLAIM = """
import sys
from fleet.host.holder import this_process
from storage.lock import RunLock

RunLock(sys.argv[1]).claim(this_process("token", "10.0.0.1:6379"))
"""


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return RunPlan(name="run", folder=tmp_path / "run", settings=RunSettings(storage=str(tmp_path)), train=print, resume=True)


@pytest.fixture
def elsewhere(plan: RunPlan) -> None:
    """The run is held by a process that has ended."""
    subprocess.run([sys.executable, "-c", CLAIM, f"file://{plan.folder}"], check=True, timeout=LIMIT_S)


def look(
    plan: RunPlan, take: bool = False, named: bool = True, address: str = "", say: Callable[[str], object] = print
) -> RunPlan:  # fmt: skip
    plan.folder.mkdir(exist_ok=True)
    plan.journal.touch()
    return looked_at(plan, named, address, take, say)


def test_a_run_that_goes_on_is_refused_by_the_name_of_its_holder_and_what_can_be_typed(plan: RunPlan) -> None:
    hold = RunHold(plan)
    with pytest.raises(HeldElsewhere, match=r"--resume = 'run': it goes on: process \d+ of \S+, since .* UTC holds it\. .*fleet stop run"):
        look(plan)
    with pytest.raises(HeldElsewhere, match="add --take-over"):
        RunHold(plan)
    hold.close()
    assert RunHold(look(plan)).tenure == Tenure(1, 1)


def test_a_holder_whose_process_has_ended_is_followed_at_once(plan: RunPlan, elsewhere: None) -> None:
    assert RunHold(look(plan)).tenure == Tenure(1, 1)
    assert RunHold(dataclasses.replace(plan, name="other", folder=plan.folder.parent / "other")).tenure == Tenure(0, 0)


def test_a_process_that_has_ended_is_no_holder_although_its_parent_has_not_asked_how() -> None:
    """As in a container whose first process asks about no other."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    mine = holder.this_process("token")
    other = dataclasses.replace(mine, pid=process.pid, start_ticks=start_ticks(process.pid))
    assert (holder.lives(mine), holder.lives(other), holder.lives(dataclasses.replace(other, boot="another"))) == (True, True, None)
    assert holder.lives(dataclasses.replace(other, start_ticks=1)) is False
    process.kill()
    until(lambda: stat_fields(process.pid)[0] == "Z", "the process has ended", LIMIT_S)
    assert holder.lives(other) is False
    process.communicate(timeout=LIMIT_S)
    assert holder.lives(other) is False


def test_a_holder_that_cannot_be_seen_is_refused_with_its_cluster(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stamp moves while it is looked at."""
    monkeypatch.setattr(holding, "lives", lambda who: None)
    lock = RunLock(f"file://{plan.folder}")
    tenure = lock.claim(holder.this_process("token", "10.0.0.1:6379"))
    said: list[str] = []
    moved = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        lock.renew(tenure, holding.Stamp(1))
        moved.set()

    with pytest.raises(HeldElsewhere, match="See it with fleet attach run --address 10.0.0.1:6379, end it with fleet stop run --address"):
        look(plan, say=say)
    assert moved.is_set() and "does it still live? That takes up to 30 s" in said[0]


def test_one_that_is_taken_over_hears_it_once_and_leaves_no_stamp(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "RENEW_S", 0.01)
    first, noticed = RunHold(plan), threading.Event()
    words: list[str] = []

    def lost(reason: str) -> None:
        words.append(reason)
        noticed.set()

    with first.kept(lost):
        second = RunHold(look(plan, take=True))
        assert second.tenure == Tenure(1, 1)
        assert noticed.wait(LIMIT_S)
    assert len(words) == 1 and words[0].startswith("the run was taken over by process ")
    assert first.tenure is not None
    with pytest.raises(TakenOver):
        RunLock(f"file://{plan.folder}").check(first.tenure)
    assert b'"over": true' not in (plan.folder / "lock" / "00000000.stamp").read_bytes()


def test_of_a_run_that_has_not_begun_nothing_is_left(plan: RunPlan) -> None:
    hold = RunHold(plan)
    with hold.kept(print):
        hold.forget()
    assert not (plan.folder / "lock").exists()


@pytest.mark.parametrize(
    ("named", "storage", "words"),
    [(False, "s3://bucket/runs", "Use it with --resume RUN"), (True, "runs", "End it there: fleet stop run --address auto")],
)
def test_what_cannot_be_taken_over(plan: RunPlan, named: bool, storage: str, words: str) -> None:
    there = dataclasses.replace(plan, settings=RunSettings(storage=storage))
    with pytest.raises(ConfigError, match=words):
        look(there, take=True, named=named, address="auto")
