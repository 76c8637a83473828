"""The ledger of a sharded run, whose spares are in the view."""

from __future__ import annotations

from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from tests.golden.journals import Story


def test_a_spare_in_the_view_of_a_sharded_run_stands_by_in_the_steps_of_the_others() -> None:
    """Its time is that of a spare, as outside of the view, and a step is as long as it is for the ranks that compute."""

    def ended(inside: int) -> LedgerSummary:
        story = Story(world=2, spares=1)
        story.view(1, [(0, 0), (1, 0), (2, 0)][: 2 + inside], 1000, spares=inside)
        for slot in range(2):
            story.spans(slot, 0, "i1000 " + "c60 x40 K " * 10)
        story.spans(2, 0, "i1000 " + ("c1 x99 K " * 10 if inside else "s1000"))
        for step in range(1, 11):
            story.committed(step, 1000 + 100 * step)
        story.ended(2000)
        return Ledger().apply_all(story.records).summary()

    inside, outside = ended(1), ended(0)
    assert inside.categories == outside.categories
    assert (inside.goodput, inside.rank_steps, inside.view_size) == (outside.goodput, 20, 2)
    assert inside.tallies.standing_by == outside.tallies.standing_by
