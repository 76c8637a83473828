"""Ranks that compute a shard together wait for each other: the ledger has that time by itself."""

from __future__ import annotations

import pytest

from fleet.ledger.apart import Apart
from fleet.protocol import records as r
from fleet.protocol.records import GROUP_WAIT, REFORM
from fleet.protocol.types import Member
from tests.golden.journals import Story
from tests.unit.test_goodput import STEPS, check_closes, fold, incident, spent


def test_a_rank_waits_until_its_group_is_whole_and_the_loss_pays() -> None:
    """Rank 1 is lost at 150 ms. Its group, of ranks 0 and 1, is out from 200 ms to 1000 ms, and the other group trains."""
    story = Story(world=4)
    story.view(1, [(0, 0), (1, 0), (2, 0), (3, 0)], 0, group=2)
    for slot in (0, 2, 3):
        story.spans(slot, 0, STEPS + "c50 A")
    story.spans(1, 0, STEPS)
    story.committed(1, 100)
    story.lost(1, 0, 150)
    story.view(2, [(2, 0), (3, 0)], 200, 1, causes=("1.0",), group=2)
    story.spans(1, 1, "i700 s50", generation=-1, at=200)
    story.spans(0, 0, "f300")
    for slot in (2, 3):
        story.spans(slot, 0, "f60 " + STEPS * 10, generation=2, step=1)
    story.view(3, [(2, 0), (3, 0), (0, 0), (1, 1)], 1000, 8, graceful=True, group=2)
    story.spans(0, 0, "f700", step=1)
    story.spans(0, 0, "r100 " + STEPS, generation=3, step=11)
    story.spans(1, 1, "f150 r150 " + STEPS, generation=3, step=11)
    for slot in (2, 3):
        story.spans(slot, 0, "x40 " + STEPS, generation=3, step=11)
    story.committed(12, 1350)
    story.ended(1350)
    summary = fold(story)
    check_closes(summary)
    assert spent(summary.slots[0]) == {
        "compute": 120, "exposed_comm": 80, "rework": 50, "reform": 50 + 150, "group_wait": 800, "restore": 100
    }  # fmt: skip
    assert summary.categories["group_wait"] == pytest.approx(0.8)
    assert incident(summary, "loss-1.0").cost["group_wait"] == pytest.approx(0.8)


def test_a_span_is_cut_where_the_wait_begins_and_ends() -> None:
    """Also one that began before, and ends behind a second wait."""
    apart, member = Apart(), Member(0, 0, (("tensor", 0),))
    both, others = (member, Member(1, 0, (("tensor", 1),))), (Member(2, 0, (("tensor", 0),)), Member(3, 0, (("tensor", 1),)))
    before: tuple[Member, ...] = ()
    for at_us, members in ((0, (*both, *others)), (100, others), (200, (*others, *both)), (300, others), (400, (*others, *both))):
        apart.published(before, members, at_us)
        before = members
    found = apart.named(r.Spans(member, 1, 0, 0, 50, (10, 400, 5), "cfc"))
    assert (found.codes, found.durations_us) == (f"c{REFORM}{GROUP_WAIT}{REFORM}{GROUP_WAIT}{REFORM}c", (10, 40, 100, 100, 100, 60, 5))
    later = apart.named(r.Spans(member, 1, 0, 0, 465, (10,), REFORM))
    assert later.codes == REFORM, "it is over"


def test_without_groups_nobody_waits_for_one() -> None:
    apart, members = Apart(), (Member(0, 0), Member(1, 0))
    apart.published((), members, 0)
    apart.published(members, members[:1], 100)
    spans = r.Spans(members[1], 1, 0, 0, 0, (500,), REFORM)
    assert apart.named(spans) is spans
