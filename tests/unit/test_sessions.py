"""A checkpoint that is whole and bad: sessions that come back to the same step are counted, and what led on is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from chaos.settings import ChaosSettings
from fleet.app import plans, resuming
from fleet.app.configuration import configured
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.machine.sessions import Sessions, in_words
from fleet.protocol.causes import EndWhy
from fleet.protocol.events import CheckpointDurable, PartWritten, Ready
from fleet.protocol.instructions import CommitCheckpoint, SaveCheckpoint, Write
from fleet.protocol.records import (
    VERSION,
    CheckpointRecord,
    Committed,
    HistoryBegun,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    ViewPublished,
    status_of,
)
from fleet.protocol.types import Part, StateId, View
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.unit.test_machine import Bench, member, only

SCRIPT = "def train(run):\n    pass\n"


def config(script: str = "a") -> str:
    return json.dumps({"made_of": {"script_sha256": script}})


@dataclass
class Journal:
    """A run of one rank, told in sessions. Each begins at ``at`` (0: at the first step) and commits up to ``to``."""

    records: list[Record] = field(default_factory=lambda: [RunStarted(VERSION, "run", 0.0, 0.0, 1, 0, 16, config())])
    history: int = 0

    def session(
        self, at: int, to: int, why: EndWhy = EndWhy.TRAIN_RAISED, script: str = "a", saves: tuple[int, ...] = ()
    ) -> Journal:  # fmt: skip
        if len(self.records) > 1:
            self.records.append(Resumed(0.0, 0.0, "resumed in a new cluster", "c", script_sha256=script))
            self.history += 1
            self.records.append(HistoryBegun(self.history, StateId(max(0, self.history - 1), at), 0.0, "resumed"))
        checkpoint = f"c{at}" if at else None
        view = View(self.history + 1, (member(0, self.history),), ((0, 16),), 0, (), StateId(self.history, at), "s", checkpoint)
        self.records.append(ViewPublished(view, 0.0, "all are there", False, ()))
        for step in range(at + 1, to + 1):
            self.records.append(Committed(StateId(self.history, step), 0.0))
            if step in saves:
                self.records.append(CheckpointRecord(f"c{step}", "durable", StateId(self.history, step), 0.0, 1, 0.1, 0.1))
        self.records.append(RunEnded(status_of(why), f"raised at step {to}", 0.0, "", "", why))
        return self

    @property
    def sessions(self) -> Sessions:
        return Sessions().note_all(self.records)


def test_a_session_that_comes_no_further_is_a_return_and_one_that_does_is_none() -> None:
    failed = Journal().session(0, 104)
    assert not failed.sessions.returns, "the first failure is no return"
    once = failed.session(103, 104)
    assert [(each.checkpoint, each.step) for each in once.sessions.returns] == [("c103", 104)]
    twice = once.session(101, 104)
    assert [each.checkpoint for each in twice.sessions.returns] == ["c103", "c101"]
    assert "from c103 and c101, and came to step 104 each time" in in_words(twice.sessions.returns)
    assert not twice.session(101, 105).sessions.returns, "it led on"


@pytest.mark.parametrize("why", [EndWhy.STOPPED, EndWhy.PAUSED, EndWhy.STORE_FAILED, EndWhy.DRIVER_FAILED])
def test_who_is_stopped_at_the_same_step_has_not_failed(why: EndWhy) -> None:
    assert not Journal().session(0, 104).session(104, 104, why).session(104, 104, why).sessions.returns


def test_another_script_begins_to_count_anew() -> None:
    twice = Journal().session(0, 104).session(103, 104).session(101, 104)
    assert not Sessions().note_all([*twice.records, Resumed(0.0, 0.0, "", script_sha256="b")]).returns
    assert len(Sessions().note_all([*twice.records, Resumed(0.0, 0.0, "", script_sha256="a")]).returns) == 2


def test_the_last_checkpoint_that_led_on_is_guarded_until_another_one_has() -> None:
    journal = Journal().session(0, 60, EndWhy.STOPPED)
    assert not journal.sessions.guarded
    journal.session(50, 104)
    before = journal.sessions.led_on
    journal.session(103, 104)
    assert before in journal.sessions.guarded and len(journal.sessions.guarded) == 2, "and the one that it has just begun from"
    journal.session(50, 300)
    assert journal.sessions.led_on is not None and journal.sessions.led_on.step == 50


def test_what_a_session_began_from_is_guarded_while_it_goes_back_to_newer_ones() -> None:
    """It was pushed out by those of attempts within the session, and the end named a checkpoint that was gone."""
    journal = Journal().session(0, 104).session(103, 104).session(101, 104)
    ended = journal.records.pop()
    journal.records.append(HistoryBegun(9, StateId(journal.history, 102), 0.0, "its rank raised"))
    journal.records.append(ViewPublished(View(9, (member(0, 9),), ((0, 16),), 0, (), StateId(9, 102), "s", "c102"), 0.0, "", False, ()))
    assert {state.step for state in journal.sessions.guarded} == {103, 101, 102}
    journal.records.append(ended)
    assert [each.checkpoint for each in journal.sessions.returns] == ["c103", "c101"]
    assert {state.step for state in journal.sessions.guarded} == {103, 101, 102}


def test_an_older_one_is_there_to_go_back_to_whatever_a_session_saves_meanwhile() -> None:
    """A rank that raised at once was replaced, and raised again: each attempt saved one, and those before the session were pushed out."""
    journal = Journal().session(0, 104, saves=(101, 102, 103))
    again = journal.session(103, 104)
    assert {state.step for state in again.sessions.guarded} == {103, 102}
    copied = Journal().session(0, 104, saves=(101, 103))
    copied.records.insert(-1, CheckpointRecord("m102", "durable", StateId(0, 102), 0.0, 1, 0.1, 0.1, level="peers"))
    assert {state.step for state in copied.session(103, 104).sessions.guarded} == {103, 101}, "a copy in memory is none to go back to"
    assert again.sessions.older([StateId(0, 102), StateId(0, 103), StateId(1, 104)]) == StateId(0, 102)
    assert again.sessions.older([StateId(0, 103), StateId(1, 104)]) is None, "that it came back from is no older one"


# ---- where a resumed run begins ----------------------------------------------------------------------------------------------------------


def begins_from(journal: Journal, script: str = "a") -> str | None:
    """The checkpoint of the first view of the next session."""
    kept = [record for record in journal.records if isinstance(record, CheckpointRecord)]
    newest = max(kept, key=lambda record: record.state)
    bench = Bench(world=1, checkpoint=(newest.checkpoint, newest.state))
    again = Resumed(1.0, 0.0, "resumed in a new cluster", "c2", script_sha256=script)
    written = bench.machine.resume([*journal.records, again], 1.0)
    assert all(isinstance(one, Write) for one in written)
    bench.now_s = 1.0
    bench.join(0, "new")
    [up] = [rank.member for rank in bench.machine.state.roster.in_order()]
    bench.send(Ready(up))
    bench.after(0.1)
    view = bench.machine.state.view
    assert view is not None
    return view.checkpoint


def test_the_second_return_begins_from_an_older_checkpoint() -> None:
    failed = Journal().session(0, 104, saves=(101, 102, 103))
    assert begins_from(failed) == "c103"
    once = failed.session(103, 104)
    assert begins_from(once) == "c101", "the oldest that is kept, as none has led on so far"
    assert begins_from(once, "b") == "c103", "with another script it is tried from the newest"


def test_what_led_on_is_where_it_begins_even_if_there_are_newer_ones() -> None:
    journal = Journal().session(0, 60, EndWhy.STOPPED, saves=(40, 50))
    journal.session(50, 104, saves=(101, 102, 103))
    assert begins_from(journal.session(103, 104)) == "c50"


def test_what_began_the_history_is_kept_by_machine_and_store() -> None:
    bench = Bench(world=1, checkpoint=("c50", StateId(0, 50)), interval_s=1.0)
    bench.start(StateId(1, 50))
    orders = []
    for step in range(51, 57):
        state = StateId(1, step)
        said = bench.after(2.0)
        request = only(SaveCheckpoint, said).request
        order = only(CommitCheckpoint, bench.send(PartWritten(member(0), request, f"c{step}", state, Part("p0", 1, "", (0,)), 0.1)))
        orders.append(order.guarded)
        bench.send(CheckpointDurable(f"c{step}", state, 1, 0.1, 0.2))
    assert orders == [("c50",)] * 6
    kept = bench.machine.state.checkpoints.store.kept
    assert sorted(kept.values()) == ["c50", "c54", "c55", "c56"]


# ---- before anything starts --------------------------------------------------------------------------------------------------------------


def on_disk(folder: Path, journal: Journal, **settings: object) -> Path:
    """The journal as that of a run whose script lies beside it."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    plan = plans.RunPlan(
        name="run", folder=folder / "run", settings=RunSettings(world=1, **settings), train=print, script=str(script), chaos=ChaosSettings()
    )  # type: ignore[arg-type]
    sha = plans.describe(plan)
    digest = json.loads(sha)["made_of"]["script_sha256"]
    writer = JournalWriter(plan.journal)
    for record in journal.records:
        if isinstance(record, RunStarted):
            record = replace(record, config=sha)
        elif isinstance(record, Resumed):
            record = replace(record, script_sha256=digest)
        writer.append(record)
    writer.close()
    return plan.folder


def test_the_third_return_is_refused_by_name_until_the_script_is_another(tmp_path: Path) -> None:
    folder = on_disk(tmp_path, Journal().session(0, 104).session(103, 104))
    resuming.check_returns(folder)
    twice = tmp_path / "twice"
    twice.mkdir()
    folder = on_disk(twice, Journal().session(0, 104).session(103, 104).session(101, 104))
    with pytest.raises(ConfigError, match="from c103 and c101, and came to step 104 each time") as refused:
        resuming.check_returns(folder)
    assert "\n" not in str(refused.value) and resuming.returns_of(folder / "journal.jsonl") == 2
    (twice / "job.py").write_text(SCRIPT + "# mended\n")
    resuming.check_returns(folder)


def test_settings_of_a_resume_are_those_of_the_run_or_refused_by_name(tmp_path: Path) -> None:
    """``--set lr=1e-3`` was ignored without a word."""
    folder = on_disk(
        tmp_path, Journal().session(0, 10), options={"lr": "1e-2"}, checkpoint=CheckpointSettings(policy="fixed", interval_s=2.0)
    )
    same = configured({"options": {"lr": "1e-2"}, "world": 1, "storage": "elsewhere", "checkpoint": {"interval_s": 2.0}})
    resuming.check(folder, same)
    resuming.check(folder, configured())
    resuming.check_given(folder, configured({"steps": 600}), resuming.BEYOND)
    for given, named in (
        ({"options": {"lr": "1e-3"}}, "--set = 'lr=1e-3': .* where it is lr=1e-2"),
        ({"options": {"steps": "600"}}, "--set = 'steps=600': .* where it is not set"),
        ({"world": 3}, "world = 3: .* where it is 1"),
        ({"steps": 600}, "steps = 600: .* where it is 0"),
        ({"checkpoint": {"policy": "fixed", "interval_s": 9.0}}, "checkpoint.interval_s = 9.0"),
        ({"chaos": "mtbf=15s"}, "chaos.mtbf_s = 15.0"),
    ):
        with pytest.raises(ConfigError, match=named):
            resuming.check(folder, configured(given))


def test_a_run_that_goes_on_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    """It was a traceback of sixty lines."""
    folder = on_disk(tmp_path, Journal().session(0, 10))
    writer = JournalWriter(folder / "journal.jsonl")
    try:
        with pytest.raises(ConfigError, match="--resume = 'run': it goes on: another process writes its journal"):
            resuming.check_idle(folder)
    finally:
        writer.close()
    resuming.check_idle(folder)
