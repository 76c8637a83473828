"""The spares of a sharded run are in the view: each keeps a part of the state, computes no shard, and takes a lost rank's place at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from fleet.machine import views as views_module
from fleet.protocol.chunks import Claim
from fleet.protocol.moves import CastVote
from fleet.protocol.records import ViewPublished
from fleet.protocol.types import Member, View
from fleet.protocol.vote import Words
from fleet.simulation.model import POISON
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.sharded import SimChunks
from fleet.simulation.steps import SimStep
from fleet.simulation.world import Outcome
from policies import recovery
from policies.topology import joining
from tests.simulation.runs import completed, rollbacks, simulate

Patch = pytest.MonkeyPatch
WORLD, SPARE = 4, 4
KEPT = ("compute", "reducing", "reduced", "mutating", "committed", "ready", "decided", "placed", "slices")
"""Points of a spare, or of another rank beside it, from where it gets its part on."""


def planned(*, sharding: str = "fsdp", spares: int = 1, seed: int = 1, roomless: tuple[int, ...] = (), replica_size: int = 1) -> Plan:
    """Three nodes of two ranks. Processes are up soon, as a kernel forks them."""
    settings = dataclasses.replace(small(WORLD, spares, nodes=3), optimizer_sharding=sharding, replica_size=replica_size)
    return Plan(
        seed=seed, settings=settings, steps=24, capacity=2, save_every_s=0.3, roomless=roomless, build_s=(0.01, 0.05), restart_s=(0.1, 0.5)
    )


def views(outcome: Outcome) -> list[View]:
    return [record.view for record in outcome.world.journal if isinstance(record, ViewPublished)]


def first_spare(outcome: Outcome) -> tuple[list[View], Member]:
    """The views from the first with a spare on, and that spare."""
    found = views(outcome)
    first = next(number for number, view in enumerate(found) if view.spares)
    return found[first:], found[first].spares[0]


@pytest.mark.parametrize("replica_size", [1, 2])
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_a_spare_computes_in_the_very_view_that_follows_a_loss(sharding: str, replica_size: int) -> None:
    plan = planned(sharding=sharding, replica_size=replica_size)
    _, spare = first_spare(completed(plan))
    lost = next(slot for slot in range(WORLD + 1) if slot != spare.slot)
    outcome = completed(plan, Trouble(kind="kill", point="committed", step=12, slot=lost))
    assert rollbacks(outcome) == 0
    found, spare = first_spare(outcome)
    assert all(len(view.computing) == WORLD for view in found), "the world is full in each view"
    behind = next(view for view in found if all(member.slot != lost for member in view.members))
    assert spare in behind.members and not behind.spares


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
@pytest.mark.parametrize("point", KEPT)
def test_a_rank_or_the_spare_is_lost_while_the_spare_gets_or_keeps_its_part(point: str, sharding: str) -> None:
    fired = 0
    for slot, step in itertools.product(range(WORLD + 1), range(3, 10)):
        trouble = Trouble(kind="kill", point=point, step=step, slot=slot)
        outcome = simulate(with_troubles(planned(sharding=sharding, seed=step), (trouble,)))
        assert (outcome.broken, outcome.status, rollbacks(outcome)) == ("", "completed", 0)
        fired += outcome.world.faults.fired
    assert fired >= WORLD


@pytest.mark.parametrize("slots", [(1, SPARE), (0, 2)])
def test_with_two_copies_a_rank_and_the_spare_may_be_lost_in_one_step(slots: tuple[int, int]) -> None:
    plan = planned()
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, optimizer_copies=2))
    outcome = completed(plan, *(Trouble(kind="kill", point="reducing", step=10, slot=slot) for slot in slots))
    assert rollbacks(outcome) == 0


def test_a_spare_without_room_stands_by_until_it_is_needed() -> None:
    outcome = completed(planned(roomless=(SPARE,)), Trouble(kind="kill", point="compute", step=8, slot=1))
    inside = [view for view in views(outcome) if any(member.slot == SPARE for member in view.members)]
    assert inside and all(member.slot != SPARE for view in views(outcome) for member in view.spares)
    said = [record.reason for record in outcome.world.journal if getattr(record, "action", "") == "warn"]
    assert any("rank 4.0 stands by without a part" in reason and "lacks 1 byte" in reason for reason in said)


def test_whole_replicas_keep_their_spares_out_of_the_view() -> None:
    outcome = completed(planned(sharding="none"), Trouble(kind="kill", point="compute", step=8, slot=1))
    assert not any(view.spares for view in views(outcome))


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def a_spare_gets_a_part_without_room(patch: Patch) -> None:
    patch.setattr(recovery, "_newcomers", lambda waiting, staying, room, situation: joining(waiting, staying, room, situation.replica_size))


def the_spare_does_not_wait_for_the_words_of_others(patch: Patch) -> None:
    """Its part becomes newer than what all have the sums of."""
    right = SimStep._cast_vote

    def wrong(self: SimStep, move: CastVote) -> Any:
        view = self.machine.view
        if self.rank.member not in view.spares:
            return (yield from right(self, move))
        self.sums = self.layout.summed(move.reduced.merged)  # type: ignore[attr-defined]
        yield from self.layout.kept.arrive()
        return Words((True,) * len(view.members))

    patch.setattr(SimStep, "_cast_vote", wrong)


def slices_that_never_came_count(patch: Patch) -> None:
    """The spare gives, of a part that was on its way in a view that broke, what it does not have."""
    right, begins, ranks = SimChunks.claim, SimChunks.go_on, dict[SimChunks, int]()

    def noted(self: SimChunks) -> None:
        ranks[self] = self.rank.rank_machine.view.column_of(self.rank.member).rank_of(self.rank.member)
        begins(self)

    def wrong(self: SimChunks) -> Claim:
        if self.recut is not None and self.recut.coming:
            self.recut.end(late=False)
            self.more, self.more_value = self.recut.claimed(ranks[self]), POISON
        return right(self)

    patch.setattr(SimChunks, "go_on", noted)
    patch.setattr(SimChunks, "claim", wrong)


def a_spare_stands_by_while_ranks_are_missing(patch: Patch) -> None:
    patch.setattr(views_module, "computing", lambda machine, size: min(size, machine.settings.world - 1))


ONE = [(point, step, (slot,)) for slot in range(WORLD) for point, step in (("ready", 10), ("slices", 4), ("compute", 6))]
"""Where ranks are lost: point, step, slots."""
TWO = [("compute", 9, slots) for slots in itertools.combinations(range(WORLD + 1), 2)]
"""The last slices of the spare's part are on their way, and no rank has a copy of some chunk any more."""
MUTATIONS = {
    a_spare_gets_a_part_without_room: ("spares", ONE),
    the_spare_does_not_wait_for_the_words_of_others: ("spares", ONE),
    slices_that_never_came_count: ("two-phase", TWO),
    a_spare_stands_by_while_ranks_are_missing: ("spares", ONE),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    name, losses = MUTATIONS[mutation]
    found = ""
    for seed, (point, step, slots) in itertools.product(range(6), losses):
        plan = planned(seed=seed, roomless=(SPARE,) if "room" in mutation.__name__ else ())
        troubles = [Trouble(kind="kill", point=point, step=step, slot=slot) for slot in slots]
        found = found or simulate(with_troubles(plan, troubles)).broken or ""
        if found:
            break
    assert found == name, f"{mutation.__name__}: {found or 'nothing'} was broken first"
