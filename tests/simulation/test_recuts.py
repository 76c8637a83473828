"""A view that begins with a loss moves no chunk before its first step, and a few steps later all are where they belong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from fleet.protocol.recut import Recut
from fleet.simulation.groups import SimGroup
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.sharded import SimChunks
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 60


def run(*troubles: Trouble, sharding: str = "fsdp", copies: int = 1, seed: int = 1, spares: int = 0) -> Outcome:
    """Three nodes of two ranks."""
    settings = dataclasses.replace(small(6, spares, nodes=3), optimizer_sharding=sharding, optimizer_copies=copies)
    return completed(Plan(seed=seed, settings=settings, steps=16, capacity=6, save_every_s=0.3), *troubles)


def turned(outcome: Outcome) -> list[int]:
    """The steps behind which ranks turned to another cut."""
    return [int(line.split("step=")[1].rstrip(")")) for line in outcome.trace if " turned " in line]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_chunks_move_beside_the_steps_that_follow_a_loss(sharding: str, spares: int, monkeypatch: Patch) -> None:
    exchanged: list[str] = []
    right = SimGroup.exchange

    def exchange(self: SimGroup, member: object, what: object, value: object, *among: object) -> object:
        exchanged.append(f"{what} {self.view.generation}")
        return right(self, member, what, value, *among)  # type: ignore[arg-type]

    monkeypatch.setattr(SimGroup, "exchange", exchange)
    outcome = run(Trouble(kind="kill", point="reducing", step=5), sharding=sharding, spares=spares)
    assert rollbacks(outcome) == 0
    assert {what for what in exchanged if what.startswith("pieces")} == {"pieces 1"}, "all at once only where the history begins"
    steps = turned(outcome)
    assert steps and min(steps) >= 7, "the step of the loss and one more are taken before anything is in its new place"
    later = [step for step in steps if step == min(steps)]
    assert len(later) >= 5, "all members turn behind one step"


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
@pytest.mark.parametrize("step", [6, 7, 8])
@pytest.mark.parametrize("point", ["slices", "ready", "decided", "mutating", "committed"])
def test_another_rank_lost_while_chunks_move_costs_no_state_where_there_are_two_copies(point: str, step: int, sharding: str) -> None:
    """Slices in place are stepped like a copy. So a view begins from them, or from the chunks that were there before."""
    first = Trouble(kind="kill", point="compute", step=5, slot=1)
    for seed in range(2):
        second = Trouble(kind="kill", point=point, step=step, slot=0)
        outcome = run(first, second, sharding=sharding, copies=2, seed=seed, spares=1)
        assert rollbacks(outcome) == 0


def test_without_a_copy_more_a_second_loss_goes_back_to_a_checkpoint_only_until_chunks_are_in_place() -> None:
    """One copy: the guard of the lost rank's chunk is lost too. Before it was copied anew nobody has it; afterwards somebody has."""
    first = Trouble(kind="kill", point="compute", step=4, slot=1)
    early = [rollbacks(run(first, Trouble(kind="kill", point="gathering", step=5, slot=slot))) for slot in (0, 2, 3, 4, 5)]
    late = [rollbacks(run(first, Trouble(kind="kill", point="gathering", step=12, slot=slot))) for slot in (0, 2, 3, 4, 5)]
    assert any(early) and not any(late)


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def sums_do_not_come_to_new_places(patch: Patch) -> None:
    right = SimChunks.put_back

    def wrong(self: SimChunks, value: int, at: object, *, turns: bool) -> None:
        self._summed = ()
        right(self, value, at, turns=turns)  # type: ignore[arg-type]

    patch.setattr(SimChunks, "put_back", wrong)


def turns_before_all_is_in_place(patch: Patch) -> None:
    patch.setattr(Recut, "over", property(lambda recut: recut.done > 0))


def slices_are_those_of_the_state_before(patch: Patch) -> None:
    right = SimGroup.exchange
    last: dict[object, object] = {}

    def wrong(self: SimGroup, member: object, what: object, value: object, *among: object) -> object:
        if isinstance(what, tuple) and what[0] == "slices":
            value, last[member] = last.get(member, value), value
        return right(self, member, what, value, *among)  # type: ignore[arg-type]

    patch.setattr(SimGroup, "exchange", wrong)


def turns_alone(patch: Patch) -> None:
    """Also where the rank takes a step that the others have taken before, when its claim has named what it held until then."""
    right = SimChunks.put_back
    patch.setattr(SimChunks, "put_back", lambda self, value, at, *, turns: right(self, value, at, turns=True))


def nothing_ever_comes(patch: Patch) -> None:
    patch.setattr(Recut, "begin", lambda recut: False)


MUTATIONS = {
    sums_do_not_come_to_new_places: ("two-phase",),
    turns_before_all_is_in_place: ("two-phase", "copies", "serves"),
    slices_are_those_of_the_state_before: ("two-phase",),
    nothing_ever_comes: ("recuts",),
}


@pytest.mark.parametrize(("mutation", "names"), MUTATIONS.items(), ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], names: tuple[str, ...], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    found = next((broken for seed in range(MOST) if (broken := simulate_seed("gathers", seed).broken)), "")
    assert found in names, f"{mutation.__name__}: {found or 'nothing'} was broken first, in up to {MOST} runs"


def test_a_rank_that_takes_a_step_later_than_others_does_not_turn_behind_it(monkeypatch: Patch) -> None:
    """It has claimed the chunks that it held before that step, and the others count on them."""
    turns_alone(monkeypatch)
    settings = dataclasses.replace(small(6, nodes=3), optimizer_sharding="fsdp", optimizer_copies=2)
    found = ""
    for seed, step, slot in itertools.product(range(4), range(6, 10), range(4)):
        plan = Plan(seed=seed, settings=settings, steps=16, capacity=6, save_every_s=0.3)
        first, second = Trouble(kind="kill", point="compute", step=5, slot=5), Trouble(kind="kill", point="decided", step=step, slot=slot)
        found = found or simulate(with_troubles(plan, (first, second))).broken or ""
    assert found == "two-phase"
