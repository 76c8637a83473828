"""A run that is told to stop ends in order: no step is committed that its last checkpoint does not have."""

from __future__ import annotations

import pytest

from fleet.machine import stopping
from fleet.machine.state import MachineState
from fleet.machine.stopping import LEAVE_S
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Gathering
from fleet.protocol.member import MemberProtocol, Offer
from fleet.protocol.records import STOPPED, CheckpointRecord, Committed, DecisionMade, HistoryBegun, ProcessLost, RunEnded, ViewPublished
from fleet.protocol.types import StateId, View
from fleet.simulation.plan import FAST, Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import stops_plan
from tests.simulation.runs import simulate

MOST = 90


def test_in_these_seeds_runs_stop_in_time_and_through_other_troubles() -> None:
    """Else the test above shows little."""
    outcomes = [simulate(stops_plan(seed)) for seed in range(MOST)]
    stopped = [outcome for outcome in outcomes if outcome.status == STOPPED and last(outcome) is not None]
    in_time = [outcome for outcome in stopped if lasted_s(outcome) <= FAST.quiesce_s]
    assert len(in_time) > MOST // 6
    assert sum(any(isinstance(record, ProcessLost) for record in outcome.world.journal) for outcome in in_time) > MOST // 20
    assert sum(called_out(outcome) and bool(kept(outcome)) for outcome in stopped) > MOST // 15, (
        "what ranks hold is kept beside their loops"
    )


def lasted_s(outcome: Outcome) -> float:
    """From the word to the end."""
    return outcome.world.journal[-1].at_s - outcome.world.faults.asked_s if isinstance(outcome.world.journal[-1], RunEnded) else 0.0


def called_out(outcome: Outcome) -> bool:
    decided = [record.payload for record in outcome.world.journal if isinstance(record, DecisionMade)]
    return any(isinstance(payload, Gathering) and payload.why is GatherWhy.STOPS for payload in decided)


def last(outcome: Outcome) -> StateId | None:
    committed = [record.state for record in outcome.world.journal if isinstance(record, Committed)]
    return committed[-1] if committed else None


def kept(outcome: Outcome) -> list[StateId]:
    journal = outcome.world.journal
    return [record.state for record in journal if isinstance(record, CheckpointRecord) and record.phase == "durable"]


def run(*troubles: Trouble, seed: int = 1, world: int = 4, spares: int = 0, shard_s: float = 0.05) -> Outcome:
    """It is told to stop after two seconds; nothing is saved before."""
    settings = small(world, spares, nodes=2)
    plan = Plan(seed=seed, settings=settings, steps=2000, capacity=4, shard_s=shard_s, save_every_s=1000.0)
    outcome = simulate(with_troubles(plan, (Trouble(kind="stop", at_s=2.0), *troubles)))
    assert not outcome.broken, outcome.report()
    assert outcome.status == STOPPED, outcome.reason
    return outcome


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_halt_at_one_step_which_is_saved(seed: int) -> None:
    outcome = run(seed=seed)
    assert kept(outcome) == [last(outcome)] and lasted_s(outcome) < FAST.quiesce_s
    assert not any(isinstance(record, ProcessLost | HistoryBegun) for record in outcome.world.journal)
    ends = {rank.protocol.state for rank in outcome.world.train.processes}
    assert ends == {last(outcome)}, "nobody has taken a step more"


@pytest.mark.parametrize("point", ["reduced", "committed", "saving", "finished"])
def test_when_a_rank_is_lost_on_the_way_the_others_halt_once_more(point: str) -> None:
    outcome = run(Trouble(kind="kill", point=point, at_s=2.0, slot=1))
    assert kept(outcome)[-1] == last(outcome)
    assert sum(isinstance(record, ViewPublished) for record in outcome.world.journal) > 1


@pytest.mark.parametrize(("point", "slots"), [("compute", (1,)), ("compute", (0, 1, 2, 3)), ("committed", (1,)), ("committed", (0, 2, 3))])
def test_what_ranks_hold_that_come_to_no_end_of_their_step_is_kept_beside_their_loops(point: str, slots: tuple[int, ...]) -> None:
    """In their loop bodies all may be; of who hangs within a commit nobody can tell, and the others write for it."""
    outcome = run(*(Trouble(kind="hang", point=point, at_s=2.0, slot=slot) for slot in slots))
    assert max(kept(outcome)) >= (last(outcome) or StateId(0, 0)) > StateId(0, 0)
    assert lasted_s(outcome) < FAST.grace_s - LEAVE_S + 1.0


def test_a_slow_store_is_waited_for_while_it_writes() -> None:
    outcome = run(
        Trouble(kind="hang", point="compute", at_s=2.0, slot=1), Trouble(kind="store_slow", at_s=1.0, duration_s=60.0, delay_s=1.5)
    )
    assert kept(outcome) and max(kept(outcome)) >= (last(outcome) or StateId(0, 0))


def test_a_rank_that_is_lost_while_it_keeps_the_state_is_replaced_by_another() -> None:
    hangs = [Trouble(kind="hang", point="compute", at_s=2.0, slot=slot) for slot in range(4)]
    outcome = run(*hangs, Trouble(kind="kill", point="saving", at_s=2.0, slot=1))
    assert max(kept(outcome)) >= (last(outcome) or StateId(0, 0)) > StateId(0, 0)


def test_a_coordinator_that_is_killed_remembers_that_the_run_stops() -> None:
    for after in range(8):
        outcome = run(Trouble(kind="coordinator", at_s=2.0 + after / 10, duration_s=0.2))
        assert kept(outcome)[-1] == last(outcome)


def test_a_run_whose_ranks_went_on_while_the_last_checkpoint_is_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(machine: MachineState, now_s: float) -> None:
        view, stop = machine.view, machine.ending.stopping
        assert view is not None and stop is not None
        if stop.generation != view.generation:
            stop.generation = view.generation
            machine.say(*machine.checkpoints.store.request(view, now_s))

    right = stopping.is_over
    monkeypatch.setattr(stopping, "halt", ask)
    monkeypatch.setattr(stopping, "is_over", lambda machine, stop, now_s: right(machine, stop, now_s) or (
        stop.generation == machine.view.generation and not machine.checkpoints.pending))  # fmt: skip
    assert any(simulate(stops_plan(seed)).broken == "in order" for seed in range(MOST))


def test_a_rank_that_halts_by_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would go on without it."""
    right = MemberProtocol.agree

    def wrong(self: MemberProtocol, offers: list[Offer]) -> tuple[View | None, int | None]:
        agreed, reported = right(self, offers), self._orders.halt
        self._orders.halted = reported
        return agreed

    monkeypatch.setattr(MemberProtocol, "agree", wrong)
    assert any(simulate(stops_plan(seed)).broken == "agreement" for seed in range(MOST))
