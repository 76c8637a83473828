"""A script that is not Fleet's, under the same chaos and the same ledger: real processes of PyTorch's own launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fleet.app import plans
from fleet.app.plain import PlainRun
from fleet.app.result import report_data
from fleet.host.journal import JournalTail, read_journal
from fleet.host.proc import start_ticks, stat_fields
from fleet.ledger.report import build_report
from fleet.protocol.records import COMMIT, COMPLETED, CheckpointRecord, Committed, HistoryBegun, ProcessUp, Record, Spans, ViewPublished
from fleet.settings.run import RunSettings
from tests.support.processes import begin
from tests.support.waiting import lives, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_plain.py"
STEPS, SAVE_EVERY = 240, 20
LIMIT_S = 120.0
"""For what takes some seconds on a machine that does nothing else."""


def plan_of(folder: Path, name: str, *arguments: str) -> plans.RunPlan:
    settings = RunSettings(world=2, nodes=2, shards=2)
    words = (*arguments, "--checkpoint", str(folder / f"{name}.pt"))
    return plans.RunPlan(name=name, folder=folder / name, settings=settings, train=plans.elsewhere, script=str(EXAMPLE), plain=words)


def execute(plan: plans.RunPlan, meanwhile: Callable[[PlainRun], None] = lambda run: None) -> plans.RunResult:
    """Carry it out in a thread, which is where its processes begin and end."""
    run, results = PlainRun(plan), list[plans.RunResult]()
    thread = threading.Thread(target=lambda: results.append(run.execute()))
    thread.start()
    try:
        meanwhile(run)
    finally:
        if not results and sys.exc_info()[0] is not None:
            run.stop("the test has failed")
        thread.join(LIMIT_S)
    return results[0]


def inject_twice(run: PlainRun) -> None:
    """Kill rank 1 in the middle of training, and again when all have started anew and trained on."""
    run.controls.heal()  # whoever conducts chaos has had an order then, and looks for the next one often
    for launch, step in enumerate((30, 90)):
        until(lambda at=launch, upto=step: run.job.launch == at and run.job.committed >= upto, "the step at which it is struck")
        run.controls.inject("kill_rank", slot=1)


def printed(plan: plans.RunPlan) -> list[int]:
    """The steps that rank 0 says it has made, in all of its processes."""
    files = sorted((plan.folder / "logs").glob("rank-0.*.log"))
    return [int(step) for file in files for step in re.findall(r"^step (\d+):", file.read_text(), re.MULTILINE)]


def made(records: Sequence[Record]) -> int:
    """Steps that all ranks have made, counted from their own time lines, launch by launch."""
    counts: dict[int, dict[int, int]] = {}
    for spans in (record for record in records if isinstance(record, Spans)):
        of_launch = counts.setdefault(spans.member.incarnation, {0: 0, 1: 0})
        of_launch[spans.member.slot] += spans.codes.count(COMMIT)
    return sum(min(of_launch.values()) for of_launch in counts.values())


def saved_before_each_restart(records: Sequence[Record]) -> list[int]:
    """The step of the newest file when all ranks started again."""
    found, newest = list[int](), 0
    for record in records:
        newest = record.state.step if isinstance(record, CheckpointRecord) else newest
        found += [newest] if isinstance(record, HistoryBegun) else []
    return found


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"{name}.pt", weights_only=True)["model"]
    return found


def test_a_script_goes_on_from_its_own_checkpoint_and_ends_as_without_faults(tmp_path: Path) -> None:
    arguments = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--print-every", "1", "--batch-size", "256")
    injected, calm = (plan_of(tmp_path, name, *arguments) for name in ("struck", "calm"))
    assert execute(injected, inject_twice).status == execute(calm).status == COMPLETED

    one, other = weights(tmp_path, "struck"), weights(tmp_path, "calm")
    assert all(torch.equal(one[name], other[name]) for name in other)

    records = list(read_journal(injected.journal))
    data = report_data(build_report(records), "", None)
    assert data["steps"] == STEPS
    assert data["closes"]
    assert {check["verdict"] for check in data["checks"]} <= {"ok", "unknown"}
    assert data["counts"]["faults_by_kind"]["kill_rank"]["executed"] == 2
    assert data["counts"]["views"] >= 3

    starts = [record.from_state.step for record in records if isinstance(record, HistoryBegun)]
    assert len(starts) >= 2
    assert starts == saved_before_each_restart(records)
    assert all(start and start % SAVE_EVERY == 0 for start in starts)
    assert data["rolled_back_steps"] == made(records) - STEPS > 0
    assert data["rolled_back_steps"] == sum(each["last_step"] - each["first_step"] + 1 for each in data["rollbacks"])
    lost_at_most = len(starts)  # of a step that rank 0 has ended and rank 1 has not
    assert 0 <= len(printed(injected)) - STEPS - data["rolled_back_steps"] <= lost_at_most
    assert data["categories"]["rework"] > 0 < data["categories"]["init"]

    whole = report_data(build_report(read_journal(calm.journal)), "", None)
    assert (whole["steps"], whole["rolled_back_steps"], whole["counts"]["views"]) == (STEPS, 0, 1)
    assert whole["closes"]


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "fleet", "run", "--plain", "--storage", str(folder / "runs"), *words]


def test_nothing_is_left_of_a_run_whose_command_is_killed(tmp_path: Path) -> None:
    words = command(tmp_path, str(EXAMPLE), "--world", "2", "--name", "killed", "--", "--steps", "1000000")
    child = begin(words, tmp_path, dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tail, seen = JournalTail(tmp_path / "runs" / "killed" / "journal.jsonl"), list[Any]()

    def trains() -> bool:
        seen.extend(tail.poll())
        return any(isinstance(record, Committed) for record in seen)

    until(trains, "the first step")
    ranks = {record.process.pid: record.process.start_ticks for record in seen if isinstance(record, ProcessUp)}
    launcher = {int(stat_fields(pid)[1]) for pid in ranks}
    processes = ranks | {pid: start_ticks(pid) for pid in launcher}
    assert len(processes) == 3
    assert child.pid not in processes
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    until(lambda: not any(lives(pid, ticks) for pid, ticks in processes.items()), "the end of all processes")


def test_a_script_that_always_fails_is_not_started_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('there are no samples')\n")
    words = command(tmp_path, str(script), "--world", "2", "--name", "broken")
    done = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    reported = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, reported
    assert "the script failed 4 times by itself, without an optimizer step in between" in reported
    assert "ValueError: there are no samples" in reported
    records = list(read_journal(tmp_path / "runs" / "broken" / "journal.jsonl"))
    assert {record.member.incarnation for record in records if isinstance(record, ProcessUp)} == {0, 1, 2, 3}
    assert build_report(records).summary.closes
    assert not any(isinstance(record, ViewPublished) for record in records)
