"""Ranks that gather their parameters on demand: every invariant holds through random troubles, and what breaks the fetches is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fleet.protocol.chunks import Chunk, Readiness, StateCut
from fleet.protocol.records import Committed, ProcessLost
from fleet.protocol.types import StateId
from fleet.simulation import gathering as gathering_module
from fleet.simulation import sharded as sharded_module
from fleet.simulation.clockwork import Clockwork, Timer
from fleet.simulation.gathering import SimFsdpLayout
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 120


def run(*troubles: Trouble, copies: int = 1, seed: int = 1, replica_size: int = 1, spares: int = 0, looks: bool | None = None) -> Outcome:
    """Three nodes of two ranks: what is on one node has its copies on another."""
    settings = small(6, spares, nodes=3)
    settings = dataclasses.replace(settings, optimizer_sharding="fsdp", optimizer_copies=copies, replica_size=replica_size)
    evaluates = (0, False) if looks is None else (1, looks)
    return completed(Plan(seed=seed, settings=settings, steps=12, capacity=6, save_every_s=0.3, evaluates=evaluates), *troubles)


def missed(outcome: Outcome) -> int:
    return sum(" missed " in line for line in outcome.trace)


def test_without_a_loss_every_rank_has_what_it_asks_for() -> None:
    outcome = run()
    assert rollbacks(outcome) == missed(outcome) == 0


@pytest.mark.parametrize("point", ["gathering", "serving", "reducing", "ready", "decided", "mutating", "committed"])
def test_one_rank_lost_anywhere_in_a_step_costs_no_state(point: str) -> None:
    assert not any(rollbacks(run(Trouble(kind="kill", point=point, step=5), seed=seed)) for seed in range(6))


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("point", ["ready", "decided", "mutating", "committed", "serving"])
def test_one_rank_lost_while_the_first_one_evaluates_costs_no_state(point: str, looks: bool) -> None:
    """The first rank has taken the step, and asks a guard that takes it in the next view alone, for which it waits."""
    for slot in range(6):
        outcome = run(Trouble(kind="kill", point=point, step=5, slot=slot), seed=slot, looks=looks)
        assert not rollbacks(outcome), f"slot {slot}"
        assert {record.member.slot for record in outcome.world.journal if isinstance(record, ProcessLost)} == {slot}


@pytest.mark.parametrize("point", ["introduced", "placed", "slices"])
def test_one_rank_lost_while_a_newcomer_takes_its_chunks_costs_none_either(point: str) -> None:
    """The one that comes for a rank that was lost has chunks then, or those who have had them still do."""
    first = Trouble(kind="kill", point="compute", step=3, slot=1)
    assert not any(rollbacks(run(first, Trouble(kind="kill", point=point, step=3, slot=0), copies=2, seed=seed)) for seed in range(6))


def moments(patch: Patch, seed: int, step: int = 5) -> list[float]:
    """When anything at all happens in an undisturbed run, from one commit to the next."""
    right, times = Clockwork.after, set[float]()

    def after(self: Clockwork, delay_s: float, call: Callable[[], None]) -> Timer:
        times.add(self.now_s + delay_s)
        return right(self, delay_s, call)

    with patch.context() as noted:
        noted.setattr(Clockwork, "after", after)
        journal = run(seed=seed).world.journal
    commits = sorted({one.at_s for one in journal if isinstance(one, Committed) and one.state.step >= step})
    first, last = commits[:2]
    found = sorted(each for each in times if first <= each < last)
    assert len(found) >= 100, "too few events to speak of every moment"
    return found


@pytest.mark.parametrize(("seed", "every"), [(1, 12), (1, 1)])
def test_one_rank_lost_behind_any_event_of_a_step_costs_no_state(seed: int, every: int, monkeypatch: Patch) -> None:
    """Each event in turn, or some; who is lost goes round the ranks. The run up to there is the same each time."""
    for number, at_s in enumerate(moments(monkeypatch, seed)[::every]):
        lost = Trouble(kind="kill", at_s=at_s + 1e-9, slot=(number + seed) % 6)
        assert rollbacks(run(lost, seed=seed)) == 0, f"slot {lost.slot} is killed at {at_s} s"


def test_two_ranks_lost_at_once_behind_any_event_cost_no_state_where_there_are_two_copies(monkeypatch: Patch) -> None:
    for number, at_s in enumerate(moments(monkeypatch, 1)[::15]):
        lost = Trouble(kind="kill", at_s=at_s + 1e-9, slots=(number % 6, (number + 1 + number // 6 % 5) % 6))
        assert rollbacks(run(lost, copies=2, seed=1)) == 0, f"slots {lost.slots} are killed at {at_s} s"


def lose_a_server(seed: int) -> Outcome:
    return run(Trouble(kind="kill", point="serving", step=5), seed=seed)


def runs_that_missed() -> int:
    """Some do in any case: a rank that waits for a server which is in the next view already gives up as it is called there."""
    return sum(missed(lose_a_server(seed)) > 0 for seed in range(MOST // 10))


def test_where_nobody_lends_the_shard_is_not_computed_and_the_next_view_goes_on() -> None:
    outcomes = [run(Trouble(kind="kill", point="serving", step=5), copies=0, seed=seed) for seed in range(MOST // 10)]
    assert any(map(missed, outcomes)), "nobody missed anything in any of the runs"
    assert all(rollbacks(outcome) == 1 for outcome in outcomes), "without a copy one loss goes back to a checkpoint"


def test_all_copies_lost_goes_back_to_the_newest_checkpoint() -> None:
    assert rollbacks(run(Trouble(kind="kill", point="gathering", step=8, slots=(0, 1, 2, 3, 4)))) == 1


# ---- groups that keep a replica each -----------------------------------------------------------------------------------------------------


def test_groups_need_no_copies_beside_each_other() -> None:
    """``copies`` asks for none, and yet two of three groups may be lost at once: each of them is on one node."""
    lost = Trouble(kind="kill", point="gathering", step=6, slots=(0, 1, 3, 4))
    assert rollbacks(run(lost, copies=0, replica_size=2)) == 0
    assert rollbacks(run(lost, copies=0)) == 1


@pytest.mark.parametrize("point", ["gathering", "serving", "ready", "mutating"])
def test_a_spare_that_takes_a_members_place_costs_no_state(point: str) -> None:
    for seed in range(4):
        outcome = run(Trouble(kind="kill", point=point, step=5), copies=0, seed=seed, replica_size=2, spares=1)
        assert rollbacks(outcome) == 0


@pytest.mark.parametrize("point", ["introduced", "placed", "slices"])
def test_another_lost_while_the_spare_takes_its_chunks_costs_none_either(point: str) -> None:
    """The third group has them."""
    first = Trouble(kind="kill", point="compute", step=3)
    for seed in range(4):
        outcome = run(first, Trouble(kind="kill", point=point, step=3), copies=0, seed=seed, replica_size=2, spares=1)
        assert rollbacks(outcome) == 0


def test_all_siblings_lost_at_once_go_back_to_the_checkpoint() -> None:
    """Slots are dealt to nodes in turn, so these are one of each group, all at the same place."""
    outcome = run(Trouble(kind="kill", point="gathering", step=6, slots=(0, 1, 2)), copies=0, replica_size=2)
    assert rollbacks(outcome) == 1


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def serves_what_is_a_step_behind(patch: Patch) -> None:
    right = gathering_module.can_serve

    def wrong(here: StateId | None, wanted: StateId, *, still: bool = True, left: bool = False) -> Readiness:
        found = right(here, wanted, still=still, left=left)
        return Readiness.NOW if found is Readiness.LATER and still else found

    patch.setattr(gathering_module, "can_serve", wrong)


def serves_while_it_changes(patch: Patch) -> None:
    right = gathering_module.can_serve

    def wrong(here: StateId | None, wanted: StateId, *, still: bool = True, left: bool = False) -> Readiness:
        return right(here, wanted, still=True, left=left)

    patch.setattr(gathering_module, "can_serve", wrong)


def guards_one_copy_less(patch: Patch) -> None:
    right = sharded_module.guards
    patch.setattr(sharded_module, "guards", lambda places, copies, replica_size: right(places, copies - 1, replica_size))


def does_not_keep_what_it_guards(patch: Patch) -> None:
    patch.setattr(StateCut, "kept", StateCut.owned)


def asks_the_owner_alone(patch: Patch) -> None:
    patch.setattr(gathering_module, "servers", lambda keepers, *more: keepers[:1])


def what_was_missed_is_missed_for_ever(patch: Patch) -> None:
    right = SimFsdpLayout.place

    def wrong(self: SimFsdpLayout, *arguments: Any, **named: Any) -> None:
        missed = self.useless
        right(self, *arguments, **named)
        self.useless = missed

    patch.setattr(SimFsdpLayout, "place", wrong)


def asks_other_groups_first(patch: Patch) -> None:
    right = gathering_module.servers
    patch.setattr(gathering_module, "servers", lambda keepers, rank, *more: right(keepers, rank))


def guards_as_if_there_were_no_groups(patch: Patch) -> None:
    right = sharded_module.guards
    patch.setattr(sharded_module, "guards", lambda places, copies, replica_size: right(places, copies))


def leaves_the_last_group_without_copies(patch: Patch) -> None:
    """There are still as many as ``optimizer_copies`` asks for."""
    right = sharded_module.guards

    def wrong(places: Sequence[Any], copies: int, replica_size: int) -> tuple[tuple[int, ...], ...]:
        found = right(places, copies, replica_size)
        return tuple(chosen[:-1] if replica_size > 1 and len(chosen) > copies else chosen for chosen in found)

    patch.setattr(sharded_module, "guards", wrong)


MUTATIONS = {
    serves_what_is_a_step_behind: ("gathers",),
    serves_while_it_changes: ("serves", "gathers"),
    guards_one_copy_less: ("two-phase", "copies"),
    does_not_keep_what_it_guards: ("copies", "near"),
    asks_the_owner_alone: ("serves", "near"),
    what_was_missed_is_missed_for_ever: ("serves",),
    asks_other_groups_first: ("near",),
    guards_as_if_there_were_no_groups: ("copies", "near"),
    leaves_the_last_group_without_copies: ("copies", "near"),
}


@pytest.mark.parametrize(("mutation", "names"), MUTATIONS.items(), ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], names: tuple[str, ...], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    found = next((broken for seed in range(MOST) if (broken := simulate_seed("gathers", seed).broken)), "")
    assert found in names, f"{mutation.__name__}: {found or 'nothing'} was broken first, in up to {MOST} runs"


def test_a_guard_is_asked_where_the_owner_is_lost_and_the_shard_is_computed(monkeypatch: Patch) -> None:
    """When guards are not asked, it shows where no checker looks, too: more shards are missed."""
    right = runs_that_missed()
    monkeypatch.setattr(SimFsdpLayout, "_miss", _missing_unseen)
    asks_the_owner_alone(monkeypatch)
    assert runs_that_missed() >= right + 3


def _missing_unseen(self: SimFsdpLayout, state: StateId, chunk: Chunk) -> None:
    self.rank.world.note("missed", self.rank, state, chunk)
    self.useless, self._missed_in = "nobody gives it", self.rank.protocol.generation
