"""Ranks that have the layers of a model one after the other: one or several are lost at any point, and cost their units alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from fleet.protocol.pipelining import Half, Ways
from fleet.protocol.records import ViewPublished
from fleet.protocol.types import Candidate, Member, View, columns
from fleet.simulation import staged as staged_module
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import Outcome
from policies import groups as groups_module
from tests.simulation.runs import completed, rollbacks, simulate_seed

Patch = pytest.MonkeyPatch
MUTATED = 150
STEPS = 14


def run(*troubles: Trouble, world: int = 4, stage: int = 2, spares: int = 0, seed: int = 1, steps: int = STEPS) -> Outcome:
    settings = dataclasses.replace(small(world, spares, nodes=2), mesh={"stage": stage})
    return completed(Plan(seed=seed, settings=settings, steps=steps, capacity=world + spares), *troubles)


def members(outcome: Outcome) -> list[tuple[Member, ...]]:
    return [record.view.members for record in outcome.world.journal if isinstance(record, ViewPublished)]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("point", ["compute", "backward", "reducing", "reduced", "ready", "decided", "mutating", "committed"])
def test_a_rank_lost_anywhere_costs_no_state_and_no_other_rank(point: str, spares: int) -> None:
    outcome = run(Trouble(kind="kill", point=point, step=5, slot=1), spares=spares)
    assert rollbacks(outcome) == 0
    first, second = members(outcome)[:2]
    assert len(second) == 3 and set(second) < set(first), "the rest of its replica goes on"


def test_a_stage_that_is_lost_goes_back_to_the_newest_checkpoint() -> None:
    first = members(run())[0]
    ((_, places), *_) = columns(first).items()
    assert rollbacks(run(Trouble(kind="kill", point="compute", step=8, slots=tuple(first[place].slot for place in places)))) == 1


def test_ranks_of_all_stages_of_one_replica_are_lost_at_once() -> None:
    first = members(run(world=6))[0]
    lost = tuple(first[places[0]].slot for places in columns(first).values())
    outcome = run(Trouble(kind="kill", point="backward", step=5, slots=lost), world=6)
    assert rollbacks(outcome) == 0


def test_units_that_were_computed_are_not_computed_again(monkeypatch: Patch) -> None:
    right, units = staged_module.SimPipeline._compute, Counter[tuple[int, int, int]]()

    def counted(self: Any, step: int, turn: Any, came: int | None) -> None:
        units[step, self.stage, turn.shard] += turn.half is Half.BACKWARD
        right(self, step, turn, came)

    monkeypatch.setattr(staged_module.SimPipeline, "_compute", counted)
    outcome = run(Trouble(kind="kill", point="reducing", step=5, slot=1))
    first, second = [record.view for record in outcome.world.journal if isinstance(record, ViewPublished)][:2]
    (lost,) = [place for place, member in enumerate(first.members) if member not in second.members]
    again = {(dict(first.members[lost].coordinate)["stage"], shard) for shard in range(*first.ranges[lost])}
    assert {(stage, shard) for (step, stage, shard), count in units.items() if count > 1} == again


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def nothing_is_given_again(patch: Patch) -> None:
    right = staged_module.SimPipeline.join

    def wrong(self: Any, *given: Any) -> None:
        give, self._give = self._give, lambda half, shard: None
        right(self, *given)
        self._give = give

    patch.setattr(staged_module.SimPipeline, "join", wrong)


def a_rank_believes_in_its_own_units_alone(patch: Patch) -> None:
    right = staged_module.SimPipeline.join

    def wrong(self: Any, view: View, held: Sequence[Collection[int]], at: Any) -> None:
        me = view.rank_of(self.rank.member)
        right(self, view, [each if rank == me else () for rank, each in enumerate(held)], at)

    patch.setattr(staged_module.SimPipeline, "join", wrong)


def a_way_leads_through_a_rank_that_is_lost(patch: Patch) -> None:
    right, before = staged_module.SimPipeline._came, dict[Any, Any]()

    def wrong(self: Any, turn: Any) -> Any:
        view = self._view
        self._view = before.setdefault(self.rank, view) if len(before.get(self.rank, view).members) >= len(view.members) else view
        found = yield from right(self, turn)
        self._view = view
        return found

    patch.setattr(staged_module.SimPipeline, "_came", wrong)


def what_was_kept_of_an_earlier_step_is_given(patch: Patch) -> None:
    right = staged_module.SimPipeline._compute

    def wrong(self: Any, step: int, turn: Any, came: int | None) -> None:
        first = self.__dict__.setdefault("first", {}).get((turn.half, turn.shard))
        right(self, step, turn, came)
        self.first[turn.half, turn.shard] = self.kept[turn.half][turn.shard]
        if first is not None:
            self.kept[turn.half][turn.shard] = first

    patch.setattr(staged_module.SimPipeline, "_compute", wrong)


def a_unit_is_computed_by_no_rank(patch: Patch) -> None:
    right = Ways.turns

    def wrong(self: Ways, stage: int, place: int) -> Any:
        found = right(self, stage, place)
        return (
            [turn for turn in found if turn.shard != found[0].shard]
            if any(any(done) for one in self.stages for done in one.done)
            else found
        )

    patch.setattr(Ways, "turns", wrong)


def two_ranks_compute_a_unit(patch: Patch) -> None:
    right = Ways.turns

    def wrong(self: Ways, stage: int, place: int) -> Any:
        return right(self, stage, 0) if any(any(done) for one in self.stages for done in one.done) else right(self, stage, place)

    patch.setattr(Ways, "turns", wrong)


def a_view_may_lack_a_stage(patch: Patch) -> None:
    right = groups_module.whole

    def wrong(ranked: Sequence[Candidate], coordinates: Any, most: int, **more: Any) -> Any:
        return right(ranked, coordinates, most, **more) or [()]

    patch.setattr(groups_module, "whole", wrong)


MUTATIONS = (
    nothing_is_given_again, a_rank_believes_in_its_own_units_alone, a_way_leads_through_a_rank_that_is_lost,
    what_was_kept_of_an_earlier_step_is_given, a_unit_is_computed_by_no_rank, two_ranks_compute_a_unit, a_view_may_lack_a_stage,
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    for seed in range(MUTATED):
        try:
            if simulate_seed("stages", seed).broken:
                return
        except (AssertionError, ValueError, LookupError, RuntimeError):
            return
    pytest.fail(f"{mutation.__name__} was not caught in {MUTATED} runs")
