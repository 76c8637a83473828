"""Ranks that compute a shard together: one or several of them are lost at any point, and no step is lost while a column has its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from fleet.machine import candidates as candidates_module
from fleet.machine import views as views_module
from fleet.protocol.decisions import DomainLost
from fleet.protocol.records import DecisionMade, ProcessLost, ViewPublished
from fleet.protocol.types import Candidate, Coordinate, Member, Ranges
from fleet.simulation import sharded as sharded_module
from fleet.simulation import steps as steps_module
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import Outcome
from policies import groups as groups_module
from tests.simulation.runs import completed, rollbacks, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 40
MUTATED = 150
"""Seeds are of whole, zero1 and fsdp columns: some mutations need one kind."""
STEPS = 14


def run(*troubles: Trouble, world: int = 4, tensor: int = 2, spares: int = 0, seed: int = 1, steps: int = STEPS) -> Outcome:
    settings = dataclasses.replace(small(world, spares, nodes=2), mesh={"tensor": tensor})
    return completed(Plan(seed=seed, settings=settings, steps=steps, capacity=world + spares), *troubles)


def members(outcome: Outcome) -> list[tuple[Member, ...]]:
    return [record.view.members for record in outcome.world.journal if isinstance(record, ViewPublished)]


def calls(outcome: Outcome) -> int:
    """How many spares were called, once the run had begun."""
    journal = outcome.world.journal
    first = next(place for place, record in enumerate(journal) if isinstance(record, ViewPublished))
    return sum(isinstance(record, DecisionMade) and record.action == "call" for record in journal[first:])


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("point", ["collective", "ready", "decided", "compute", "reducing", "mutating", "committed"])
def test_a_member_lost_anywhere_costs_its_group_and_no_state(point: str, spares: int) -> None:
    outcome = run(Trouble(kind="kill", point=point, step=5, slot=1), spares=spares)
    assert rollbacks(outcome) == 0
    sizes = {len(each) for each in members(outcome)}
    assert sizes <= {2, 4} and (2 in sizes or spares), "a group is there whole or not at all"


@pytest.mark.parametrize("spares", [0, 1])
def test_the_rank_that_gives_its_state_to_a_newcomer_is_lost(spares: int) -> None:
    """Its column has another one with that state."""
    first, second = Trouble(kind="kill", point="collective", step=3, slot=1), Trouble(kind="kill", point="donating", step=4)
    assert rollbacks(run(first, second, world=6, spares=spares, steps=3 * STEPS)) == 0


def test_the_other_groups_go_on_at_once_and_a_spare_takes_the_coordinate() -> None:
    outcome = run(Trouble(kind="kill", point="collective", step=5, slot=1), spares=1)
    first, alone, again = members(outcome)
    broken = next(first[place : place + 2] for place in (0, 2) if any(each.slot == 1 for each in first[place : place + 2]))
    assert alone == tuple(each for each in first if each not in broken)
    (left,), (lost,) = [each for each in broken if each.slot != 1], [each for each in broken if each.slot == 1]
    (called,) = [each for each in again if each not in first]
    assert called.coordinate == lost.coordinate
    assert left in again, "the rest of the broken group is in it again"
    assert calls(outcome) == 1


def test_a_node_that_is_lost_with_its_group_is_one_loss() -> None:
    outcome = run(Trouble(kind="lose_node", at_s=1.5, node=1, noticed=True), Trouble(kind="join", at_s=4.0))
    reported = [one.payload for one in outcome.world.journal if isinstance(one, DecisionMade) and isinstance(one.payload, DomainLost)]
    assert [(one.level, one.domain, len(one.members), one.in_view) for one in reported] == [("node", "node-1", 2, 2)]
    assert rollbacks(outcome) == 0


def test_two_members_of_two_groups_with_different_coordinates_leave_one_whole_group() -> None:
    first = members(run())[0]
    outcome = run(*(Trouble(kind="kill", point="collective", step=5, slot=first[rank].slot) for rank in (1, 2)))
    assert rollbacks(outcome) == 0
    assert {first[0], first[3]} in map(set, members(outcome)), "perhaps behind a view of the group that was whole when the first was lost"


def test_a_column_that_is_lost_goes_back_to_the_newest_checkpoint() -> None:
    first = members(run())[0]
    assert rollbacks(run(Trouble(kind="kill", point="compute", step=8, slots=(first[1].slot, first[3].slot)))) == 1


def test_one_replica_alone_goes_back_with_any_loss() -> None:
    assert rollbacks(run(Trouble(kind="kill", point="collective", step=8, slot=1), world=2)) == 1


def test_a_rank_one_step_behind_has_what_it_needs() -> None:
    """Ranks are killed as they know that all have their sums, of each column the one that stepped first, too."""
    outcomes = [
        run(Trouble(kind="kill", point="decided", step=4), Trouble(kind="kill", point="decided", step=4), world=6, seed=seed)
        for seed in range(MOST)
    ]
    assert sum(map(rollbacks, outcomes)) <= MOST // 4, "only where both ranks of a column that were left had no sums"
    assert any("AT advancing" in line for outcome in outcomes for line in outcome.trace)


def slowed(*ranks: int, spares: int = 0) -> Outcome:
    """Steps take about as long as each other, and these ranks of the first view are three times as slow from step 50 on."""
    settings = dataclasses.replace(small(4, spares, nodes=2), mesh={"tensor": 2}, shards=16)
    plan = Plan(seed=1, settings=settings, steps=200, capacity=6, jitter=(0.97, 1.03), shard_s=0.02, save_every_s=1000.0)
    first = members(completed(plan))[0]
    slots = tuple(first[rank].slot for rank in ranks)
    return completed(plan, Trouble(kind="slow", point="compute", step=50, slots=slots, severity=3.0, duration_s=60.0))


def test_a_slow_group_gets_fewer_shards() -> None:
    outcome = slowed(2, 3)
    views = [record.view for record in outcome.world.journal if isinstance(record, ViewPublished)]
    spans = [[hi - lo for lo, hi in view.ranges] for view in views]
    assert spans[0] == [8] * 4 and len(views) > 1, "nothing was done about it"
    assert all(one[0] == one[1] and one[2] == one[3] and one[0] + one[2] == 16 for one in spans)
    assert spans[1][0] > 8
    assert not any(isinstance(record, ProcessLost) for record in outcome.world.journal)


def test_no_rank_of_a_slow_group_is_exchanged() -> None:
    """Its ranks wait for each other, and so nobody knows which one is slow."""
    outcome = slowed(2, 3, spares=2)
    assert not any(isinstance(record, ProcessLost) for record in outcome.world.journal)


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def any_rank_gives_its_state_to_all(patch: Patch) -> None:
    patch.setattr(candidates_module, "columns", lambda members: {(): list(range(len(members)))})


def shards_are_assigned_to_ranks(patch: Patch) -> None:
    def wrong(members: Sequence[Member], computing: int, shards: int, share: Callable[[Sequence[Any]], Ranges]) -> Ranges:
        return share(members)

    patch.setattr(views_module, "shards_of", wrong)


def what_a_broken_group_computed_counts(patch: Patch) -> None:
    right, gradient, useless = steps_module.SimStep._together, steps_module.gradient, list[int]()

    def wrong(self: Any, step: int, shard: int) -> Any:
        if not (yield from right(self, step, shard)):
            self._met.lost = ""
            useless.append(shard)
        return True

    def computed(weights: int, step: int, shard: int) -> int:
        if shard in useless:
            useless.remove(shard)
            return gradient(weights, step, shard) + 1
        return gradient(weights, step, shard)

    patch.setattr(steps_module.SimStep, "_together", wrong)
    patch.setattr(steps_module, "gradient", computed)


def members_are_in_the_order_of_slots(patch: Patch) -> None:
    def wrong(groups: Iterable[tuple[Candidate, ...]]) -> list[Candidate]:
        return sorted((one for group in groups for one in group), key=lambda one: one.member.slot)

    patch.setattr(groups_module, "in_order", wrong)


def groups_are_made_of_any_ranks(patch: Patch) -> None:
    def wrong(rest: Sequence[Candidate], columns: Mapping[Coordinate, list[Candidate]]) -> tuple[Candidate, ...]:
        there = [one for column in columns.values() for one in column]
        return tuple(there[: len(columns)])

    patch.setattr(groups_module, "_completed", wrong)


def each_column_comes_to_a_state_of_its_own(patch: Patch) -> None:
    right = sharded_module.come_to_one

    def wrong(rank: Any, members: Sequence[Member], donor: int, mine: Any) -> Any:
        column = rank.group.view.column_of(rank.member)
        claims, target = yield from right(rank, column.members, column.donor, mine)
        found = dict(zip(column.members, claims, strict=True))
        return [found.get(member, claims[column.donor]) for member in members], target

    patch.setattr(sharded_module, "come_to_one", wrong)


MUTATIONS = (
    any_rank_gives_its_state_to_all, shards_are_assigned_to_ranks, what_a_broken_group_computed_counts, members_are_in_the_order_of_slots,
    groups_are_made_of_any_ranks, each_column_comes_to_a_state_of_its_own,
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    for seed in range(MUTATED):
        try:
            if simulate_seed("mesh", seed).broken:
                return
        except (AssertionError, ValueError, LookupError, RuntimeError):
            return
    pytest.fail(f"{mutation.__name__} was not caught in {MUTATED} runs")
