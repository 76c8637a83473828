"""A run that is told to stop while its loops are in something long: what they have committed is kept, within the grace, bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan, RunResult
from fleet.app.recipes import LiveRun
from fleet.machine.stopping import ANSWER_S, LEAVE_S, WRITE, WRITE_S
from fleet.protocol.records import CheckpointRecord, Committed, ProcessLost, ProcessUp, RunEnded
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import FAST, of, settings
from tests.support.journals import records
from tests.support.long_loops import AT, trains_long
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import lives, until

pytestmark = pytest.mark.timeout(200)
SEASON = {"steps": "12", "pause_s": "0.01"}
PATIENCE_S = 2.0
"""For the end of a step: what is left of the grace."""


def chosen(folder: Path, where: str, **changes: Any) -> RunSettings:
    seldom = CheckpointSettings(policy="fixed", interval_s=3600.0)
    grace_s = LEAVE_S + ANSWER_S + WRITE * WRITE_S + PATIENCE_S
    reported = {"world": 2, "checkpoint": seldom, "peer_copies": 0, "options": SEASON | {"where": where, "norm": "batch"}} | changes
    return dataclasses.replace(settings(folder, **reported), timeouts=dataclasses.replace(FAST, grace_s=grace_s))


@pytest.fixture(scope="session")
def truth(undisturbed: Undisturbed) -> str:
    """The digest of the run that is not stopped, of another world size."""
    return undisturbed(lambda folder: chosen(folder, "nowhere", world=1), trains_long)


def stop_in(fleet: PlainFleet, folder: Path, what: str, ranks: int) -> list[Any]:
    """Told to stop once so many ranks are in it; the journal of the run that has ended."""
    until(lambda: len(list((folder / "flags").glob(f"{what}-*"))) == ranks, f"{ranks} are in {what}", 60.0)
    fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "SIGTERM")
    assert fleet.wait(60.0).status == "stopped"
    return fleet.records()


def ended(reported: list[Any], step: int) -> tuple[str, Any]:
    """The last commit is ``step``, and is durable; (its checkpoint, its state)."""
    assert max(record.state.step for record in of(Committed, reported)) == step
    kept = [record for record in of(CheckpointRecord, reported) if record.phase == "durable"]
    assert kept and kept[-1].state.step == step, [record.detail for record in of(CheckpointRecord, reported)]
    assert not of(ProcessLost, reported), "nobody was lost for it"
    [end] = of(RunEnded, reported)
    assert end.reason == "SIGTERM"
    return kept[-1].checkpoint, kept[-1].state


def goes_on(run: RunSettings, folder: Path, begin: tuple[str, Any]) -> str:
    """The digest of the run that goes on from there."""
    (folder / "flags" / "rested").touch()
    shutil.move(folder / "journal.jsonl", folder / "first.jsonl")
    with PlainFleet(trains_long, run, folder, begin=begin) as fleet:
        assert fleet.wait().status == "completed"
        return str(fleet.coordinator.machine.state.ending.record.digest)


@pytest.mark.parametrize(("where", "ranks"), [("evaluation", 1), ("backward", 2)])
def test_what_is_committed_is_kept_while_loops_are_in_something_long(tmp_path: Path, truth: str, where: str, ranks: int) -> None:
    """One rank evaluates, and the other waits for it; or both are in a backward, whose forward has changed the buffers of a batch norm."""
    run = chosen(tmp_path, where)
    with PlainFleet(trains_long, run, tmp_path) as fleet:
        begin = ended(stop_in(fleet, tmp_path, where, ranks), AT)
    assert goes_on(run, tmp_path, begin) == truth


def test_weights_that_an_evaluation_has_put_in_place_are_not_taken_for_the_state(tmp_path: Path) -> None:
    """There is no other rank that could write what was committed."""
    with PlainFleet(trains_long, chosen(tmp_path, "swaps", world=1), tmp_path) as fleet:
        reported = stop_in(fleet, tmp_path, "swaps", 1)
    assert not [record for record in of(CheckpointRecord, reported) if record.phase == "durable"]
    assert any("has changed" in record.detail for record in of(CheckpointRecord, reported) if record.phase == "failed")


def test_a_rank_alone_in_an_evaluation_writes_what_it_holds(tmp_path: Path, truth: str) -> None:
    run = chosen(tmp_path, "evaluation", world=1)
    with PlainFleet(trains_long, run, tmp_path) as fleet:
        begin = ended(stop_in(fleet, tmp_path, "evaluation", 1), AT)
    assert goes_on(run, tmp_path, begin) == truth


def test_a_long_step_is_waited_for_when_the_grace_allows_it(tmp_path: Path) -> None:
    run = chosen(tmp_path, "backward")
    run = dataclasses.replace(run, options={**run.options, "long_s": str(PATIENCE_S / 4)}, timeouts=FAST)
    with PlainFleet(trains_long, run, tmp_path) as fleet:
        reported = stop_in(fleet, tmp_path, "backward", 2)
    ended(reported, max(record.state.step for record in of(Committed, reported)))
    assert max(record.state.step for record in of(Committed, reported)) > AT


def test_a_first_step_that_takes_long_has_nothing_to_keep(tmp_path: Path) -> None:
    with PlainFleet(trains_long, chosen(tmp_path, "first"), tmp_path) as fleet:
        reported = stop_in(fleet, tmp_path, "first", 2)
    assert not of(CheckpointRecord, reported) and not of(Committed, reported)


def test_on_a_cluster_ranks_that_compute_are_gone_when_the_run_has_stopped(cluster: LocalCluster, tmp_path: Path) -> None:
    run = chosen(tmp_path, "backward")
    live = LiveRun(RunPlan(name="run", folder=tmp_path / "run", settings=run, train=trains_long), cluster)
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    thread.start()
    until(lambda: len(list((tmp_path / "flags").glob("backward-*"))) == 2, "both are in it", 90.0)
    live.stop("SIGTERM")
    thread.join(90.0)
    [result] = results
    assert result.status == "stopped"
    kept = records(tmp_path / "run")
    ended(kept, AT)
    processes = [record.process for record in of(ProcessUp, kept)]
    assert len(processes) >= 2
    until(
        lambda: not any(lives(process.pid, process.start_ticks) for process in processes),
        "the kernel has taken back all that they held",
        10.0,
    )


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_a_state_that_is_spread_is_written_by_all_who_hold_a_part(tmp_path: Path, sharding: str) -> None:
    run = chosen(tmp_path, "backward", optimizer_sharding=sharding)
    with PlainFleet(trains_long, run, tmp_path) as fleet:
        begin = ended(stop_in(fleet, tmp_path, "backward", 2), AT)
    other = dataclasses.replace(run, optimizer_sharding="none")
    whole = tmp_path / "whole"
    (whole / "flags").mkdir(parents=True)
    (whole / "flags" / "rested").touch()
    alone = dataclasses.replace(other, options={**other.options, "flags": str(whole / "flags")})
    with PlainFleet(trains_long, alone, whole) as fleet:
        assert fleet.wait().status == "completed"
        truth = str(fleet.coordinator.machine.state.ending.record.digest)
    assert goes_on(other, tmp_path, begin) == truth
