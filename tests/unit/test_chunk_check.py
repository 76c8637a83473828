"""Digests of chunks: whose own word convicts, and what two keepers that differ prove."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleet.protocol.chunk_check import CHANGED, KEPT, SOUND, ChunkCheck
from fleet.protocol.types import StateId

KEEPERS = [[0, 1], [1, 2], [2, 0]]
"""By rank, its own chunk and the one that it guards."""
HERE, NEXT = StateId(0, 4), StateId(0, 5)


def checks() -> list[ChunkCheck]:
    made = [ChunkCheck() for _ in KEEPERS]
    for check in made:
        check.join(1, HERE)
        check.settle(HERE, ("a", "a"))
    return made


def compared(made: Sequence[ChunkCheck], digests: Sequence[Sequence[str]]) -> list[bool]:
    rows = [(check.enter(HERE, each), each) for check, each in zip(made, digests, strict=True)]
    return [check.differ(rank, KEEPERS, rows) for rank, check in enumerate(made)]


def test_chunks_that_are_alike_clear_the_state() -> None:
    made = checks()
    assert compared(made, [("a", "a")] * 3) == [False] * 3
    assert all(check.open is None and check.cleared == NEXT for check in made)


def test_a_rank_whose_chunks_have_changed_since_the_commit_says_so_and_no_other_does() -> None:
    made = checks()
    assert compared(made, [("a", "a"), ("a", "x"), ("a", "a")]) == [True] * 3
    assert [check.open and (check.open.what, check.open.digest) for check in made] == [(KEPT, SOUND), (KEPT, CHANGED), (KEPT, SOUND)]


def test_keepers_that_differ_though_none_has_changed_tell_of_that_chunk_and_the_others_have_no_word() -> None:
    made = checks()
    made[2].settle(HERE, ("x", "a"))  # its step was wrong
    assert compared(made, [("a", "a"), ("a", "a"), ("x", "a")]) == [True] * 3
    assert [check.open and (check.open.what, check.open.digest) for check in made] == [
        ("chunk 2 of 3", ""), ("chunk 2 of 3", "a"), ("chunk 2 of 3", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize("here", [StateId(0, 5), StateId(1, 4)])
def test_digests_of_another_state_prove_no_change(here: StateId) -> None:
    check = checks()[0]
    assert not check.enter(here, ("x", "a"))


def test_what_was_digested_in_an_earlier_view_proves_no_change() -> None:
    """Chunks may have come to other places since."""
    check = checks()[0]
    check.join(2, HERE)
    assert not check.enter(HERE, ("x",))
