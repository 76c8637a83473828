"""Digests of chunks: whose own word convicts, and what two keepers that differ prove."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleet.protocol.chunk_check import CHANGED, KEPT, REFUTED, SOUND, ChunkCheck, Said
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


def compared(made: Sequence[ChunkCheck], digests: Sequence[Sequence[str]], here: StateId = HERE) -> list[bool]:
    rows = [(entered(rank, check, digests[rank], here), digests[rank]) for rank, check in enumerate(made)]
    return [check.differ(rank, KEEPERS, rows) for rank, check in enumerate(made)]


def entered(rank: int, check: ChunkCheck, digests: Sequence[str], here: StateId = HERE) -> Said:
    return check.enter(here, digests, KEEPERS[rank], len(KEEPERS))


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
    assert entered(0, check, ("x", "a"), here) is Said.SOUND


def test_what_was_digested_in_an_earlier_view_proves_no_change() -> None:
    """Chunks may have come to other places since."""
    check = checks()[0]
    check.join(2, HERE)
    assert entered(0, check, ("x", "a")) is Said.SOUND


# ---- the step is taken again -------------------------------------------------------------------------------------------------------------

AGAIN = StateId(1, 4)


def tied() -> list[ChunkCheck]:
    """Ranks 1 and 2 keep chunk 2. They differed on it at HERE; rank 2 was wrong. All have gone back."""
    made = checks()
    made[2].settle(HERE, ("x", "a"))
    compared(made, [("a", "a"), ("a", "a"), ("x", "a")])
    for check in made:
        check.join(2, StateId(1, 3))
    return made


def test_the_step_taken_again_says_which_rank_was_wrong() -> None:
    made = tied()
    assert compared(made, [("a", "a")] * 3, AGAIN) == [True] * 3
    assert [check.open and (check.open.what, check.open.digest) for check in made] == [(KEPT, ""), (KEPT, SOUND), (KEPT, REFUTED)]
    for check in made:
        check.join(3, AGAIN)
    assert compared(made, [("a", "a")] * 3, AGAIN) == [False] * 3, "once is enough"


def test_it_proves_nothing_where_no_keeper_has_its_bits_again() -> None:
    """The step depends on something that is not in the state: that is no rank's fault."""
    assert compared(tied(), [("b", "b")] * 3, AGAIN) == [False] * 3


def test_keepers_that_differ_again_are_not_judged_by_their_words() -> None:
    made = tied()
    assert compared(made, [("a", "a"), ("a", "a"), ("x", "a")], AGAIN) == [True] * 3
    assert [check.open and check.open.what for check in made] == ["chunk 2 of 3"] * 3


def test_other_chunks_other_steps_and_the_same_history_prove_nothing() -> None:
    for rank, check in enumerate(tied()):
        for here in (HERE, StateId(1, 3)):
            assert entered(rank, check, ("b", "b"), here) is Said.SOUND
        assert check.enter(AGAIN, ("b", "b"), KEEPERS[rank], 4) is Said.SOUND


def test_nothing_is_proven_where_a_view_begins_at_that_state() -> None:
    """A rank may have its chunk from the one that was wrong, and was wrong again."""
    made = tied()
    for check in made:
        check.join(3, AGAIN)
    assert compared(made, [("a", "a"), ("a", "x"), ("x", "a")], AGAIN) == [False] * 3


def test_the_step_taken_again_is_compared_however_seldom_steps_are() -> None:
    [check, *_] = tied()
    check.every = 64
    assert check.due(AGAIN) and not check.due(StateId(1, 5))
