"""A rank that takes its seat in a new view while it computes promises what it will bring. The sum has the bits of the whole step."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.state.tracked import TrackedState
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.protocol.types import Column, Member, StateId, View
from fleet.settings.run import RunSettings
from policies.placement import ranges
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, START, compute, take, tracked

COMPUTED = {1: (8,), 3: (3, 1, 1)}
"""By world size: how many of its shards each rank has computed when the view breaks."""

Begun = tuple[TrainStep, TrackedState]


def column_of(generation: int, size: int) -> Column:
    view = View(generation, tuple(Member(slot, 0) for slot in range(size)), ranges(SHARDS, size), 0, (), START, "")
    return view.column_of(Member(0, 0))


def begun(group: Group, folder: Path) -> Begun:
    """A rank that sits in its first view."""
    state, size = tracked(), group.size
    train = TrainStep(state, RunSettings(world=size, shards=SHARDS), Recorder(folder / f"{size}-{group.rank}", 0), 0.5)
    train.join(group, column_of(1, size), group.rank, START, False)
    return train, state


def ended(train: TrainStep, state: TrackedState) -> str:
    compute(train, state, 0, train.assigned)
    take(train)
    return train.layout.digest(1)


def speculates(train: TrainStep, column: Column, member: Member, here: StateId) -> bool:
    """As the rank machine asks."""
    return train.duties.speculate(column, member, here, column.idle) and bool(train.assigned)


def one_step(size: int, folder: Path) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(digest, shards that each had to begin with, shards that each had yet to compute in the second view): ranks 0 and 1 promised."""

    def rank(group: Group) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        train, state = begun(group, folder)
        first = train.assigned
        compute(train, state, 0, first[: COMPUTED[size][group.rank]])
        train.hold()
        if group.rank < 2:
            train.promise(group, train.duties.promised)
        train.join(group, column_of(1, size), group.rank, START, True)
        second = train.assigned
        return ended(train, state), first, second

    return with_groups(size, rank)  # type: ignore[return-value]


def test_what_is_promised_is_brought_and_the_rest_is_dealt_at_once(tmp_path: Path) -> None:
    ((whole, *_),) = one_step(1, tmp_path)
    found = one_step(3, tmp_path)
    assert [digest for digest, *_ in found] == [whole] * 3
    (_, first, more), (_, promised, rest), (_, cut, last) = found
    assert set(first).isdisjoint(more)  # it had all that it promised
    assert set(promised[1:]) <= set(rest)
    assert cut[0] not in {*more, *rest, *last}
    assert sorted([*first, *promised[:1], *cut[:1], *more, *rest, *last]) == list(range(SHARDS))


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_lost_rank_had_is_computed_before_the_others_meet_again(tmp_path: Path, knows: bool) -> None:
    """Nothing is left to be dealt then. Where one of them foresees nothing, it is dealt what the other one has not computed."""

    def first(group: Group) -> Begun:
        train, state = begun(group, tmp_path)
        compute(train, state, 0, train.assigned)
        train.hold()
        return train, state

    ranks: list[Begun] = with_groups(3, first)  # type: ignore[assignment]
    had = [set(range(*span)) for span in ranges(SHARDS, 3)]

    def second(group: Group) -> tuple[str, set[int], set[int]]:
        train, state = ranks[group.rank]
        column, speculative = column_of(2, 2), set[int]()
        member = column.members[group.rank]
        assert train.assigned == () and not speculates(train, column, member, StateId(0, 1))  # of another state it knows nothing
        if knows or group.rank == 0:
            assert speculates(train, column, member, START)
            speculative = set(train.assigned)
            compute(train, state, 0, train.assigned)
            assert not speculates(train, column, member, START)
        train.promise(group, train.duties.promised)
        train.join(group, column, group.rank, START, True)
        expected = set(train.assigned)
        return ended(train, state), speculative, expected

    (one, speculative, expected), (other, others, rest) = with_groups(2, second)  # type: ignore[misc]
    ((whole, *_),) = one_step(1, tmp_path)
    assert one == other == whole
    assert speculative | others | expected | rest == had[2] and len(speculative) + len(others) + len(expected) + len(rest) == len(had[2])
    assert speculative and bool(others) == knows and bool(expected | rest) != knows


def test_a_view_that_breaks_before_it_is_known_who_brings_what_changes_nothing_of_that(tmp_path: Path) -> None:
    ranks: list[Begun] = with_groups(3, lambda group: begun(group, tmp_path))  # type: ignore[assignment]

    def rank(group: Group) -> set[int]:
        train, _ = ranks[group.rank]
        group.interrupt("a member is lost")
        with pytest.raises(GroupBroken):
            train.join(group, column_of(2, 2), group.rank, START, True)
        column = column_of(3, 2)
        assert speculates(train, column, column.members[group.rank], START)
        return set(train.assigned)

    own, other = with_groups(2, rank)
    assert own | other == set(range(SHARDS)) and not own & other  # type: ignore[operator]
