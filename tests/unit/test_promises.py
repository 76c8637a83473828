"""A rank that takes its seat in a new view while it computes promises what it will bring. The sum has the bits of the whole step."""

from __future__ import annotations

from pathlib import Path

from actors.rank.engine import Engine
from actors.rank.process_group import Group
from actors.rank.recorder import Recorder
from fleet.config import RunSettings
from fleet.types import Member, View
from policies.placement import ranges
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, START, compute, tracked

COMPUTED = {1: (8,), 3: (3, 1, 1)}
"""By world size: how many of its shards each rank has computed when the view breaks."""


def one_step(size: int, folder: Path) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(digest, shards that each had to begin with, shards that each had yet to compute in the second view): ranks 0 and 1 promised."""

    def rank(group: Group) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        state = tracked()
        engine = Engine(state, RunSettings(world=size, shards=SHARDS), Recorder(folder / f"{size}-{group.rank}", 0), 0.5)
        members = tuple(Member(slot, 0) for slot in range(size))
        view = View(1, members, ranges(SHARDS, size), 0, (), START, "")
        engine.seat(group, view, group.rank, START, False)
        first = engine.due
        compute(engine, state, 0, first[: COMPUTED[size][group.rank]])
        engine.hold()
        if group.rank < 2:
            engine.promise(group)
        engine.seat(group, view, group.rank, START, True)
        second = engine.due
        compute(engine, state, 0, second)
        assert engine.reduce((-1, 0, 0)).culprit is None
        engine.apply()
        return engine.digest(1), first, second

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
