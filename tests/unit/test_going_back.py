"""A run that goes back to a checkpoint, and leaves out samples from there: what is asked, what is journalled, what knows of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.rank.data.lineage import Lineage
from actors.rank.data.sampling import sample_indices
from fleet.app import plans, resuming
from fleet.app.cli import main as cli
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.ledger.lineage import DataHistory
from fleet.protocol.decisions import GoneBack
from fleet.protocol.events import CheckpointDurable
from fleet.protocol.instructions import Write
from fleet.protocol.records import VERSION, CheckpointRecord, Committed, DataRead, DecisionMade, HistoryBegun, Resumed, RunEnded, RunStarted
from fleet.protocol.types import Member, StateId
from tests.unit.test_cli_checkpoint import save
from tests.unit.test_machine import STEP_3, Bench
from tests.unit.test_runs import planned

READ = DataRead(Member(0, 0), 1000, 16, "ab" * 32, 2000, 0, 0, "permuted", at_s=1.0)


def kept(tmp_path: Path, steps: tuple[int, ...] = (40, 60, 80), *more: Any) -> plans.RunPlan:
    """A run with checkpoints of these steps."""
    plan = planned(tmp_path, "some-run")
    writer = JournalWriter(plan.journal)
    writer.append(RunStarted(VERSION, plan.name, 0.0, 1.7e9, 3, 1, 16, plans.describe(plan)))
    for record in (READ, *more, Committed(StateId(0, 90), 3.0), RunEnded("stopped", "enough", 10.0, "", "")):
        writer.append(record)
    writer.close()
    for step in steps:
        save(plans.store_url(plan), step)
    return plans.resumed_plan(plan.folder, plans.Executed())


def test_the_plan_names_the_checkpoint_and_what_is_left_out(tmp_path: Path) -> None:
    plan = resuming.going_back(kept(tmp_path), "token", 60, ["70:75", "90:91"])
    assert plan.back is not None
    assert (plan.back.history, plan.back.step, plan.back.left_out) == (0, 60, ("70:75", "90:91"))
    assert plan.settings.left_out == plan.back.left_out
    twin = plans.twin_of(plan)
    assert twin.settings.left_out == plan.back.left_out and twin.back is plan.back


def test_a_later_resume_knows_what_is_left_out_and_so_does_a_repeated_run(tmp_path: Path) -> None:
    plan = kept(tmp_path, (40, 60), DecisionMade("data", "go_back", "as told", GoneBack(0, 40, ("50:55",), "x"), 2.0))
    assert plan.settings.left_out == ("50:55",)
    assert plans.repeated_plan(plan.folder, plans.Executed(), tmp_path).settings.left_out == ("50:55",)
    again = resuming.going_back(plan, "token", 60, ["61:63"])
    assert again.settings.left_out == ("50:55", "66:68"), "what steps 61 and 62 take by now"


@pytest.mark.parametrize(
    ("step", "skipped", "words"),
    [
        (50, [], r"--from-step = 50: no checkpoint of that step is kept in .*\. The nearest are of step 40 and 60\."),
        (20, [], r"The nearest are of step 40\."),
        (99, [], r"The nearest are of step 80\."),
        (60, ["55:65"], r"--skip-steps = '55:65': the run goes back to step 60, and has taken step 55 there\. Begin with step 60"),
        (60, ["65"], r"--skip-steps = '65': it is FIRST:END"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(step: int, skipped: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        resuming.going_back(kept(tmp_path), "token", step, skipped)


def test_a_checkpoint_that_was_withdrawn_is_none(tmp_path: Path) -> None:
    plan = kept(tmp_path, (40, 60))
    writer = JournalWriter(plan.journal)
    name = "step-00000060-history-0000"
    found = next(path.name for path in (plan.folder / "checkpoints").iterdir() if "60" in path.name)
    writer.append(CheckpointRecord(found, "withdrawn", StateId(0, 60), 11.0, detail=name))
    writer.close()
    with pytest.raises(ConfigError, match=r"The nearest are of step 40\."):
        resuming.going_back(plan, "token", 60, [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from-step", "60"], "--from-step = 60: it is about a run that is resumed"),
        (["--resume", "some-run", "--skip-steps", "70:75"], "Say where it goes back to: --from-step STEP --skip-steps 70:75"),
        (["--resume", "some-run", "--from-step", "0"], "--from-step = 0"),
        (["--resume", "some-run", "--from-step", "60", "--steps", "9"], "--steps = 9: run some-run goes back"),
        (["--resume-or-start", "some-run", "--from-step", "60"], "--from-step = 60: it is about a run that is resumed"),
        (["--resume", "some-run", "--from-step", "50"], "The nearest are of step 40 and 60"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_starts(options: list[str], words: str, tmp_path: Path) -> None:
    kept(tmp_path)
    done = CliRunner().invoke(cli.app, ["run", "--storage", str(tmp_path), *options])
    assert words in str(done.exception), (done.output, done.exception)


# ---- the machine -------------------------------------------------------------------------------------------------------------------------


def went_back(word: str = "one") -> tuple[Bench, list[Any], GoneBack]:
    bench = Bench(world=2).start(STEP_3)
    for step in (3, 5, 7):
        bench.send(CheckpointDurable(f"c{step}", StateId(0, step), 2, 0.1, 0.2))
    back = GoneBack(0, 3, ("4:6",), word)
    bench.machine = bench.new_machine()
    again = Resumed(100.0, 1.7e9, "its user", "other")
    bench.journal.append(again)
    said = bench.machine.resume(list(bench.journal), 100.0, back)
    written = [each.record for each in said if isinstance(each, Write)]
    bench.journal += written
    return bench, written, back


def test_newer_checkpoints_are_used_no_more_and_the_word_is_journalled() -> None:
    bench, written, back = went_back()
    assert [each.state.step for each in written if isinstance(each, CheckpointRecord) and each.phase == "withdrawn"] == [5, 7]
    (said,) = [each for each in written if isinstance(each, DecisionMade) and each.policy == "data"]
    assert said.payload == back and said.reason == "its user has it go back to step 3, without the samples of 4:6"
    assert bench.machine.state.checkpoints.newest_state == STEP_3


def test_a_coordinator_that_is_started_again_with_the_same_word_does_not_go_back_again() -> None:
    bench, _, back = went_back()
    bench.journal.append(CheckpointRecord("c9", "durable", StateId(1, 9), 120.0))
    bench.machine = bench.new_machine()
    said = bench.machine.resume([*bench.journal, Resumed(200.0, 1.7e9, "again", "third")], 200.0, back)
    assert not [each for each in said if isinstance(each, Write) and isinstance(each.record, DecisionMade) and each.record.policy == "data"]
    assert bench.machine.state.checkpoints.newest_state == StateId(1, 9)
    bench.machine = bench.new_machine()
    said = bench.machine.resume(list(bench.journal), 200.0, dataclasses.replace(back, asked="another word"))
    assert bench.machine.state.checkpoints.newest_state == STEP_3


# ---- what went into a step ---------------------------------------------------------------------------------------------------------------


def history() -> DataHistory:
    started = RunStarted(VERSION, "some-run", 0.0, 1.7e9, 2, 0, 4, json.dumps({"settings": {"seed": 3}}))
    back = DecisionMade("data", "go_back", "as told", GoneBack(0, 5, ("7:9",), "x"), 4.0)
    later = dataclasses.replace(READ, history=1, step=5)
    records = [started, READ, Committed(StateId(0, 12), 3.0), back, HistoryBegun(1, StateId(0, 5), 5.0, "back"), later]
    return DataHistory().apply_all([*records, Committed(StateId(1, 20), 6.0)])


def test_lineage_tells_the_samples_of_each_history() -> None:
    first, then = Lineage(history()).took(8, 2)
    assert (first.stretch.counts, then.stretch.counts) == (False, True)
    assert list(first.indices) == sample_indices(3, 8, 2, 4, 16, 1000)
    assert list(then.indices) == sample_indices(3, 10, 2, 4, 16, 1000)
    (before,) = Lineage(history()).took(4, 0)
    assert list(before.indices) == sample_indices(3, 4, 0, 4, 16, 1000)
