"""A loop ends its run before the last step: at one step on all ranks, completed, and whatever strikes while it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.machine.state import Ending, EndOrder
from fleet.protocol.causes import EndWhy
from fleet.protocol.member import MemberProtocol
from fleet.protocol.probes import watch
from fleet.protocol.records import COMPLETED, HistoryBegun, RunEnded
from fleet.protocol.types import Member, StateId
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import ended_plan
from tests.simulation.runs import simulate

AT = 7


def run(*troubles: Trouble, on_top: bool = False, by: tuple[int, ...] = (), sharding: str = "none", **changes: object) -> Outcome:
    settings = replace(small(3, spares=1, nodes=2), optimizer_sharding=sharding)
    plan = Plan(seed=3, settings=settings, steps=400, capacity=4, ended_at=AT, on_top=on_top, ended_by=by, save_every_s=1000.0)
    outcome = simulate(replace(with_troubles(plan, troubles), **changes))  # type: ignore[arg-type]
    assert not outcome.broken, outcome.report()
    return outcome


def end_of(outcome: Outcome) -> RunEnded:
    (record,) = [record for record in outcome.world.journal if isinstance(record, RunEnded)]
    return record


@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
@pytest.mark.parametrize("on_top", [False, True])
def test_all_ranks_end_at_one_step_and_say_why(on_top: bool, sharding: str) -> None:
    outcome = run(on_top=on_top, sharding=sharding)
    ended = end_of(outcome)
    assert (ended.status, ended.why) == (COMPLETED, EndWhy.LOOP_ENDED)
    assert f"behind step {AT}" in ended.reason and ("on top" if on_top else "behind the step") in ended.reason


@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
@pytest.mark.parametrize("point", ["ending", "finished", "saving", "behind", "committed"])
def test_a_rank_that_is_lost_on_the_way_changes_nothing(point: str, sharding: str) -> None:
    """The rank in its place comes to the state from a donor, and has been through no loop body that could have ended the run."""
    outcome = run(Trouble(kind="kill", point=point, step=AT, slot=1), sharding=sharding)
    assert end_of(outcome).why is EndWhy.LOOP_ENDED


@pytest.mark.parametrize("point", ["finished", "behind"])
def test_when_all_are_lost_behind_the_last_step_the_run_is_over_there_still(point: str) -> None:
    """Behind the loop the final checkpoint is what they begin with again; before, an older one is, and they come there again."""
    outcome = run(Trouble(kind="kill", point=point, step=AT, slot=0, slots=(0, 1, 2, 3)), save_every_s=0.05)
    assert end_of(outcome).why is EndWhy.LOOP_ENDED
    assert any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


def test_a_coordinator_that_dies_meanwhile_has_it_from_its_journal() -> None:
    for after in range(12):
        trouble = Trouble(kind="coordinator", point="finished", step=AT, slot=0, after=after, duration_s=1.0)
        assert end_of(run(trouble)).why is EndWhy.LOOP_ENDED


@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
@pytest.mark.parametrize("on_top", [False, True])
def test_one_loop_alone_is_a_mistake_that_names_rank_step_and_reason(on_top: bool, sharding: str) -> None:
    with watch() as reached:
        outcome = run(on_top=on_top, by=(1,), sharding=sharding, statuses=("failed",), failures=(EndWhy.LOOP_WRONG,))
    reason = end_of(outcome).reason
    assert f"step {AT}: the loop of rank 1.0 has ended the run there" in reason and "goes on" in reason
    assert ("on top of the next step" if on_top else "behind the step") in reason
    assert "a loop goes on from where another one has ended the run" in reached


def test_in_every_seed_with_troubles_a_run_ends_where_its_loops_end_it() -> None:
    ended = 0
    for seed in range(60):
        outcome = simulate(ended_plan(seed, sharded=seed % 2 == 1))
        assert not outcome.broken, outcome.report()
        ended += end_of(outcome).why is EndWhy.LOOP_ENDED
    assert ended > 40


def test_without_a_word_to_newcomers_a_run_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemberProtocol, "_on_end", lambda protocol, word: "")
    found = [simulate(ended_plan(seed)) for seed in range(60)]
    assert any(outcome.broken or end_of(outcome).why is not EndWhy.LOOP_ENDED for outcome in found)


def test_an_end_that_a_rollback_has_taken_back_is_forgotten() -> None:
    state = EndOrder(StateId(0, AT), Member(0, 0), "why")
    kept, forgotten = ending_after(state, StateId(0, AT)), ending_after(state, StateId(0, AT - 1))
    assert kept is not None and kept.state == StateId(1, AT) and forgotten is None


def ending_after(order: EndOrder, start: StateId) -> EndOrder | None:
    found = Ending(order=order)
    found.roll_back(start, 1)
    return found.order
