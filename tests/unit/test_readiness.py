"""Who is asked for a stretch of the parameters, and what becomes of a request."""

from __future__ import annotations

from collections import Counter

import pytest

from fleet.protocol.chunks import Readiness, can_serve, cut_of, guards, servers
from fleet.protocol.types import StateId

AT = StateId(2, 7)
VIEWS = [(size, copies, nodes) for size in range(1, 8) for copies in range(4) for nodes in (1, 2, 3)]


def guarded(size: int, copies: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    return guards([(rank % nodes,) for rank in range(size)], copies)


@pytest.mark.parametrize(("size", "copies", "nodes"), VIEWS)
def test_every_keeper_is_asked_once_and_nobody_else(size: int, copies: int, nodes: int) -> None:
    """And a rank that has to ask is none of them: it keeps nothing of that chunk."""
    placed = guarded(size, copies, nodes)
    for owner in range(size):
        keepers = {rank for rank in range(size) if (size, owner) in cut_of(placed).kept(rank)}
        for rank in range(size):
            asked = servers((owner, *placed[owner]), rank)
            assert len(asked) == len(set(asked)) and set(asked) == keepers
            assert (rank in asked) == (rank in keepers)


def test_ranks_begin_with_different_keepers() -> None:
    """So that no keeper serves to all."""
    placed = guarded(6, 2, 3)
    for owner in range(6):
        first = Counter(servers((owner, *placed[owner]), rank)[0] for rank in range(6))
        assert set(first.values()) == {2}


@pytest.mark.parametrize(
    ("here", "becomes"),
    [
        (AT, Readiness.NOW),
        (StateId(2, 6), Readiness.LATER),
        (StateId(2, 5), Readiness.NEVER),
        (StateId(2, 8), Readiness.NEVER),
        (StateId(1, 7), Readiness.NEVER),
        (StateId(3, 7), Readiness.NEVER),
        (StateId(1, 6), Readiness.NEVER),
        (None, Readiness.NEVER),
    ],
    ids=str,
)
def test_only_what_is_committed_is_lent_and_to_whoever_is_a_step_ahead_soon(here: StateId | None, becomes: Readiness) -> None:
    assert can_serve(here, AT) is becomes


@pytest.mark.parametrize("here", [AT, StateId(2, 6), StateId(1, 7), None], ids=str)
def test_nothing_is_said_while_what_is_held_changes(here: StateId | None) -> None:
    """It is neither the old nor the new; and a rank that is about to have its chunks is asked by those who have theirs."""
    assert can_serve(here, AT, still=False) is Readiness.LATER


def test_keepers_that_are_not_evenly_spread_are_each_asked_once() -> None:
    assert {frozenset(servers((0, 1, 2), rank)) for rank in range(5)} == {frozenset({0, 1, 2})}
    assert {servers((0, 1, 2), rank)[0] for rank in range(3)} == {0, 1, 2}
    assert servers((2,), 7) == (2,)
