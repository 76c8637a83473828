"""Bits that flip in what simulated ranks hold: what is wrong gets into no sum while another rank can tell, and each safeguard is needed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest

from fleet.machine import views
from fleet.protocol.causes import EndWhy
from fleet.protocol.chunk_check import ChunkCheck, Row, Said
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import StateId
from fleet.simulation.plan import Plan, Trouble, flipped_plan, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation import plans
from tests.simulation.runs import simulate
from tests.simulation.test_bad_luck import completed, of, run

Patch = pytest.MonkeyPatch


def test_a_flipped_rank_is_evicted_and_the_run_goes_on_where_it_is() -> None:
    outcome = completed(Trouble(kind="flip", point="compute", step=5, slot=1))
    [lost] = of(ProcessLost, outcome)
    assert lost.member.slot == 1
    assert "silent corruption: weights at step 5" in str(lost.cause)


def test_two_that_differ_go_back_once_and_nobody_is_accused() -> None:
    outcome = completed(Trouble(kind="flip", point="compute", step=5, slot=1), world=2)
    assert next(record.action for record in of(DecisionMade, outcome) if record.policy == "corruption") == "retry"
    assert not [lost for lost in of(ProcessLost, outcome) if "corruption" in str(lost.cause)]


def test_two_that_differ_again_where_they_went_on_run_a_loop_that_is_wrong() -> None:
    outcome = run(*(Trouble(kind="flip", point="compute", step=5 + slot, slot=slot) for slot in (0, 1)), world=4)
    assert outcome.status == "failed"
    assert outcome.world.ended is not None and outcome.world.ended.why is EndWhy.LOOP_WRONG
    assert "differ again" in outcome.reason


def test_a_flip_at_the_finish_barrier_is_outvoted() -> None:
    outcome = completed(Trouble(kind="flip", point="committed", step=30, slot=2))
    assert [lost.member.slot for lost in of(ProcessLost, outcome)] == [2]


def flipped(mode: str, point: str, world: int, seed: int) -> Outcome:
    settings = dataclasses.replace(small(world), optimizer_sharding=mode)
    plan = Plan(seed=seed, settings=settings, steps=14, capacity=4, save_every_s=0.3)
    outcome = simulate(with_troubles(plan, (Trouble(kind="flip", point=point, step=5, slot=1),)))
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return outcome


def accused(outcome: Outcome) -> list[int]:
    return [lost.member.slot for lost in of(ProcessLost, outcome) if "corruption" in str(lost.cause)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("point", ["compute", "gathering", "reducing", "reduced", "committed", "saving"])
def test_a_rank_whose_chunks_have_changed_convicts_itself(point: str, world: int) -> None:
    """Two ranks are enough: no majority is needed."""
    for seed in range(4):
        outcome = flipped("fsdp", point, world, seed)
        assert accused(outcome) == [1] and not of(HistoryBegun, outcome)


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_a_flip_within_the_commit_takes_all_back_and_the_step_taken_again_names_its_rank(mode: str) -> None:
    for world, seed in itertools.product((2, 4), range(4)):
        outcome = flipped(mode, "decided", world, seed)
        actions = [one.action for one in of(DecisionMade, outcome) if one.policy == "corruption"]
        if mode == "zero1" and not actions:
            continue  # the commit wrote that copy of whole parameters anew
        anew = actions == ["retry", "begin_anew"]  # processes that knew of the step are gone
        assert anew or actions == ["retry", "go_back", "evict"]
        assert accused(outcome) == ([] if anew else [1]) and len(of(HistoryBegun, outcome)) == 1
        assert len(of(ViewPublished, outcome)) <= 4, "one rank that has seen the digests is enough"


@pytest.mark.parametrize("point", ["compute", "reducing", "committed"])
def test_with_whole_parameters_a_wrong_copy_of_them_is_outvoted(point: str) -> None:
    for seed in range(4):
        assert accused(flipped("zero1", point, 4, seed)) == [1]


def no_rank_looks_at_its_own_chunks(patch: Patch) -> None:
    patch.setattr(ChunkCheck, "settle", lambda self, here, digests: None)


def keepers_do_not_compare(patch: Patch) -> None:
    right = ChunkCheck.differ

    def wrong(self: ChunkCheck, me: int, kept: Sequence[Sequence[int]], rows: Sequence[Row]) -> bool:
        return right(self, me, kept, [(changed, [0 for _ in digests]) for changed, digests in rows])

    patch.setattr(ChunkCheck, "differ", wrong)


def nothing_is_known_of_the_step_before(patch: Patch) -> None:
    patch.setattr(ChunkCheck, "_again", lambda self, own: Said.SOUND)


@pytest.mark.parametrize(
    ("mutation", "test"),
    [
        (no_rank_looks_at_its_own_chunks, lambda: test_a_rank_whose_chunks_have_changed_convicts_itself("compute", 4)),
        (keepers_do_not_compare, lambda: test_a_flip_within_the_commit_takes_all_back_and_the_step_taken_again_names_its_rank("fsdp")),
        (
            nothing_is_known_of_the_step_before,
            lambda: test_a_flip_within_the_commit_takes_all_back_and_the_step_taken_again_names_its_rank("fsdp"),
        ),
    ],
)
def test_a_mutation_of_the_chunks_check_is_caught(mutation: Callable[[Patch], None], test: Callable[[], None], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def differences_go_unseen(patch: Patch) -> None:
    right = ReplicaCheck.differ
    patch.setattr(ReplicaCheck, "differ", lambda self, digests: right(self, [0 for _ in digests]))


def whoever_was_given_a_state_votes(patch: Patch) -> None:
    right = ReplicaCheck.join

    def wrong(self: ReplicaCheck, generation: int, here: StateId, receiver: bool) -> None:
        right(self, generation, here, receiver)
        self.witness = True

    patch.setattr(ReplicaCheck, "join", wrong)


def nobody_judges(patch: Patch) -> None:
    patch.setattr(views, "judge", lambda machine, now_s: None)


@pytest.mark.parametrize(
    ("mutation", "names"),
    [
        (differences_go_unseen, ("corruption",)),
        (whoever_was_given_a_state_votes, ("corruption",)),
        (nobody_judges, ("ends",)),
    ],
)
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], names: tuple[str, ...], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    met = []
    kept = [plans.read(path).plan for path in sorted(plans.KEPT.glob("flips-*.json"))]
    for plan in itertools.chain(kept, map(flipped_plan, range(400))):
        met.append(simulate(plan).broken)
        if met[-1] in names:
            return
    pytest.fail(f"{mutation.__name__} broke none of {names}; it broke {sorted(set(met))}")
