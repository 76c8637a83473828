"""A coordinator whose state contradicts itself ends its run in order, by name, and looks at it for a bounded share of its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from actors.coordinator import Coordinator
from fleet.machine.audit import LEAST_S, MOST, SHARE, StateAudit, in_text
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import EndWhy, ProcessEnded
from fleet.protocol.events import CheckpointDurable, Finished, StopRequested
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Halt, Release
from fleet.protocol.records import DecisionMade, RunEnded
from fleet.protocol.types import StateId
from tests.unit.test_journal_trouble import Run
from tests.unit.test_machine import STEP_3, STEP_4, member


class Watched(Run):
    """The text that is kept of a state is in ``kept``."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []
        self.driver._keep = self._note

    def _note(self, text: str) -> str:
        self.kept.append(text)
        return "evidence/contradiction.txt"

    @property
    def state(self) -> MachineState:
        return self.bench.machine.state


def running(run: Watched) -> None:
    """As it is."""


def called_out(run: Watched) -> None:
    run.driver.submit(ProcessLost(member(1), ProcessEnded()))


def forming(run: Watched) -> None:
    called_out(run)
    run.quiesce(0)


def concluding(run: Watched) -> None:
    run.driver.submit(CheckpointDurable("c4", STEP_4, 1, 0.1, 0.2))
    for slot in range(2):
        run.driver.submit(Finished(member(slot), 1, STEP_4, "digest"))


REACH: dict[Phase, Callable[[Watched], None]] = {
    Phase.RUN: running, Phase.GATHER: called_out, Phase.FORM: forming, Phase.CONCLUDE: concluding,
}  # fmt: skip


def committed_in_no_history(state: MachineState) -> None:
    state.committed = StateId(state.assembly.history + 5, state.committed.step)


@pytest.mark.parametrize("phase", REACH)
def test_a_state_that_contradicts_itself_ends_the_run_by_name_within_the_grace(phase: Phase) -> None:
    run = Watched()
    REACH[phase](run)
    assert run.state.phase == phase
    run.tick(LEAST_S)
    assert run.state.ending.stopping is None and run.state.ending.record is None, "nothing is wrong yet"
    committed_in_no_history(run.state)
    run.tick(LEAST_S)
    assert len(run.kept) == 1 and "committed = StateId(history=5" in run.kept[0]
    for _ in range(30):
        run.tick(1.0)
    [end] = run.ended
    assert (end.status, end.why) == ("failed", EndWhy.CONTRADICTION)
    assert "history 0 is the greatest that was given out" in end.reason and "evidence/contradiction.txt" in end.reason
    assert "fleet run --resume" in end.reason
    assert isinstance(run.journal.records[-1], RunEnded) and Release in run.kinds()
    assert len(run.kept) == 1, "it is told once"


def test_ranks_are_told_to_halt_behind_a_step_once_that_is_written() -> None:
    run = Watched()
    run.state.assembly.generation = 0
    run.tick(LEAST_S)
    assert Halt in run.kinds() and not run.ended
    [stop] = [record for record in run.journal.records if isinstance(record, DecisionMade) and record.action == "stop"]
    assert "generation 1 is in use, and 0 is the greatest" in stop.reason
    for slot in range(2):
        run.driver.submit(Finished(member(slot), 1, STEP_4, "digest", halted=True))
    run.driver.submit(CheckpointDurable("c4", STEP_4, 1, 0.1, 0.2))
    [end] = run.ended
    assert (end.status, end.why) == ("failed", EndWhy.CONTRADICTION), "in order: the last commit is kept"
    assert run.state.committed == STEP_4


def test_a_run_that_stops_for_another_reason_ends_at_once_when_it_does_not_end_in_time() -> None:
    run = Watched()
    run.driver.submit(StopRequested("enough"))
    run.state.assembly.generation = 0
    run.tick(LEAST_S)
    stop = run.state.ending.stopping
    assert stop is not None and stop.why is EndWhy.STOPPED and not run.ended
    stop.until_s = float("inf")
    run.tick(run.state.settings.timeouts.grace_s)
    assert [end.why for end in run.ended] == [EndWhy.CONTRADICTION]


def test_a_run_that_has_ended_is_left_alone() -> None:
    run = Watched()
    run.driver.submit(StopRequested("the driver is gone", "lost"))
    committed_in_no_history(run.state)
    run.tick(LEAST_S)
    assert not run.kept and len(run.ended) == 1


def test_the_coordinator_keeps_the_first_state_beside_the_evidence(tmp_path: Path) -> None:
    run, path = Watched(), tmp_path / "evidence" / "contradiction.txt"
    kept = partial(Coordinator, run.bench.machine, run.clock, run.journal, None, run.ended.append)  # type: ignore[arg-type]
    assert [kept(evidence_folder=path.parent)._keep_state(text) for text in ("one", "two")] == ["evidence/contradiction.txt"] * 2
    assert path.read_text() == "one"
    assert kept(evidence_folder=path)._keep_state("one") == "", "no folder can be there"


def test_a_look_takes_at_most_a_hundredth_of_the_time() -> None:
    audit = StateAudit(0.0)
    assert audit.due(0.0)
    audit.done(0.0, 0.0001)
    assert not audit.due(LEAST_S * 0.99) and audit.due(LEAST_S)
    audit.done(10.0, 0.5)
    assert not audit.due(10.0 + 0.5 / SHARE - 0.1) and audit.due(10.0 + 0.5 / SHARE)


def test_a_state_is_kept_as_text_of_bounded_length() -> None:
    run = Watched()
    run.state.trained.files = {(f"{number:064}", number): True for number in range(10_000)}
    text = in_text(run.state)
    assert (
        "phase = <Phase.RUN: 'run'>" in text
        and "member=Member(slot=1, incarnation=0, coordinate=())" in text
        and f"committed = {STEP_3!r}" in text
    )
    assert len(text) < min(MOST, 100_000)


def test_the_text_of_a_state_has_every_attribute_of_each_of_its_parts() -> None:
    run = Watched()
    run.driver.submit(StopRequested("enough"))
    lines = in_text(run.state).splitlines()
    for said in ("ending.stopping.reason = 'enough'", "attendance.missing = set()", "liveness.hangs.number = 0", "growth.proposal = None"):
        assert said in lines
    for part in ("ending", "liveness", "uptime", "policies", "attendance", "assembly", "growth", "trained", "output", "roster"):
        for field in dataclasses.fields(getattr(run.state, part)):
            assert any(line.startswith((f"{part}.{field.name} = ", f"{part}.{field.name}.")) for line in lines), field.name
