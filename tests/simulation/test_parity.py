"""Ranks with parity in the place of copies: every invariant holds through random troubles, and what breaks the parity is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fleet.protocol.chunks import Chunk
from fleet.protocol.parity import Family
from fleet.simulation import parity as parity_module
from fleet.simulation.parity import PARTS, ParityRank, SimKept
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 120


def run(*troubles: Trouble, parity: int = 2, seed: int = 1, spares: int = 0) -> Outcome:
    """Three nodes of two ranks: two families of one rank of each node, or three families of two."""
    settings = dataclasses.replace(small(6, spares, nodes=3), optimizer_sharding="fsdp", parity=parity)
    return completed(Plan(seed=seed, settings=settings, steps=12, capacity=6, save_every_s=0.3), *troubles)


POINTS = ["gathering", "lending", "reducing", "noted", "ready", "decided", "telling", "mutating", "committed"]


@pytest.mark.parametrize("point", POINTS)
def test_one_rank_lost_anywhere_in_a_step_costs_no_state(point: str) -> None:
    assert not any(rollbacks(run(Trouble(kind="kill", point=point, step=5), seed=seed)) for seed in range(6))


@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_has_one_rank_of_each_family_can_be_lost(point: str) -> None:
    """Slots are dealt to nodes in turn: these two are on one."""
    assert not any(rollbacks(run(Trouble(kind="kill", point=point, step=5, slots=(0, 3)), seed=seed)) for seed in range(6))


@pytest.mark.parametrize("point", ["introduced", "placing", "placed"])
def test_one_of_another_family_lost_in_recovery_costs_none_either(point: str) -> None:
    """Slots 0 and 3 are on one node, and so in two families."""
    first = Trouble(kind="kill", point="telling", step=3, slot=0)
    assert not any(rollbacks(run(first, Trouble(kind="kill", point=point, step=3, slot=3), seed=seed)) for seed in range(6))


def test_one_of_the_same_family_lost_while_it_makes_a_stripe_goes_back_to_the_checkpoint() -> None:
    first = Trouble(kind="kill", point="telling", step=8, slot=0)
    assert all(rollbacks(run(first, Trouble(kind="kill", point="reviving", step=8), seed=seed)) == 1 for seed in range(4))


def test_three_of_two_families_go_back_to_the_checkpoint() -> None:
    for seed in range(4):
        assert rollbacks(run(Trouble(kind="kill", point="gathering", step=8, slots=(0, 1, 2)), seed=seed)) == 1


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def keeps_the_parity_of_the_view_before(patch: Patch) -> None:
    right = ParityRank._adopt

    def wrong(self: ParityRank, *arguments: Any) -> None:
        self._next = self.kept or self._next
        right(self, *arguments)

    patch.setattr(ParityRank, "_adopt", wrong)


def deals_families_of_one(patch: Patch) -> None:
    def wrong(places: Sequence[Any], parity: int) -> tuple[Family, ...]:
        return tuple((rank,) for rank in range(len(places)))

    patch.setattr(parity_module, "families", wrong)


def lets_go_before_it_is_taken_in(patch: Patch) -> None:
    right = ParityRank._tell

    def wrong(self: ParityRank, kept: SimKept) -> Any:
        yield from right(self, kept)
        kept.freed = PARTS

    patch.setattr(ParityRank, "_tell", wrong)


def does_not_note_the_means(patch: Patch) -> None:
    right = ParityRank._before_ready

    def wrong(self: ParityRank, reduced: Any) -> Any:
        yield from right(self, reduced)
        assert self.kept is not None
        self.kept.noted = None

    patch.setattr(ParityRank, "_before_ready", wrong)


def makes_nothing(patch: Patch) -> None:
    patch.setattr(parity_module, "revivals", lambda *arguments: [])


def keeps_nothing_beside(patch: Patch) -> None:
    """What was made for a view that somebody may have gone on to."""

    def wrong(self: ParityRank, wanted: tuple[Chunk, ...]) -> None:
        super(ParityRank, self)._keep_beside(wanted)

    patch.setattr(ParityRank, "_keep_beside", wrong)


MUTATIONS = {
    keeps_the_parity_of_the_view_before: ("copies",),
    deals_families_of_one: ("copies",),
    lets_go_before_it_is_taken_in: ("two-phase",),
    does_not_note_the_means: ("two-phase",),
    makes_nothing: ("two-phase",),
}


@pytest.mark.parametrize(("mutation", "names"), MUTATIONS.items(), ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], names: tuple[str, ...], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    found = next((broken for seed in range(MOST) if (broken := simulate_seed("parity", seed).broken)), "")
    assert found in names, f"{mutation.__name__}: {found or 'nothing'} was broken first, in up to {MOST} runs"


def test_parity_of_a_view_that_did_not_come_about_is_needed(monkeypatch: Patch) -> None:
    """Who has gone on to it is lost, and others of its old family have, too. No checker sees it: what is there says so itself."""

    def lost_state() -> int:
        first, second = (Trouble(kind="kill", point=point, step=3, slot=slot) for point, slot in (("telling", 0), ("placed", 3)))
        return sum(rollbacks(run(first, second, seed=seed)) for seed in range(12))

    assert lost_state() == 0
    keeps_nothing_beside(monkeypatch)
    assert lost_state() > 0
