"""The rank's half of the protocol."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.protocol.causes import Departure, Engaged
from fleet.protocol.events import Finished, Formed, Joined, Quiesced, Ready
from fleet.protocol.instructions import Cancel, EndAt, Fence, Halt, Propose, Publish, Quiesce, Release, SaveCheckpoint, Welcome
from fleet.protocol.member import INTERRUPT, LAST_STEP, NOTHING, MemberProtocol
from fleet.protocol.types import Member, Process, StateId, View

ME, PEER, NEW = Member(0, 2), Member(1, 0), Member(2, 0)
HERE = StateId(0, 7)


def view(generation: int, *members: Member) -> View:
    ranges = tuple((i, i + 1) for i in range(len(members)))
    return View(generation, members, ranges, 0, (), HERE, "host:1")


@pytest.fixture
def rank() -> MemberProtocol:
    """Welcomed, and built."""
    protocol = MemberProtocol(0, "token", Process("n0", 1, 1), "host:1")
    protocol.receive(Welcome(0, "token", 2))
    protocol.ready()
    protocol.outbox.clear()
    return protocol


@pytest.fixture
def joined(rank: MemberProtocol) -> MemberProtocol:
    """Steps in generation 5."""
    rank.receive(Publish(view(5, ME, PEER)))
    assert rank.next_view() is not None
    rank.formed(HERE)
    rank.outbox.clear()
    return rank


def test_a_history_that_began_here_is_held_although_its_group_broke(rank: MemberProtocol) -> None:
    """The chunks of the others were on their way. A checkpoint that it came from may be gone by now."""
    rank.receive(Publish(view(5, ME, PEER)))
    assert rank.next_view() is not None
    rank.receiving()
    rank.begun(HERE)
    rank.broken("peer 1.0 is gone")
    assert rank.outbox[-1] == Quiesced(ME, 5, HERE, False, Departure.BROKEN, "peer 1.0 is gone")


def test_it_has_no_name_before_it_is_welcomed() -> None:
    protocol = MemberProtocol(0, "token", Process("n0", 1, 1), "host:1")
    assert protocol.status() == [Joined(0, "token", Process("n0", 1, 1), "host:1", None)]
    protocol.receive(Welcome(0, "another", 3))
    with pytest.raises(RuntimeError, match="not yet welcomed"):
        _ = protocol.member
    protocol.receive(Welcome(0, "token", 3))
    assert protocol.member == Member(0, 3)


def test_it_repeats_its_status_with_its_hello(rank: MemberProtocol) -> None:
    assert [type(event) for event in rank.status()] == [Joined, Ready]
    assert rank.waits


def test_it_forms_a_published_view(rank: MemberProtocol) -> None:
    rank.receive(Publish(view(5, ME, PEER)))
    assert rank.called
    assert rank.next_view() == view(5, ME, PEER)
    assert rank.next_view() is None
    rank.receiving()
    assert rank.dirty
    rank.formed(HERE)
    assert rank.outbox == [Formed(ME, 5, HERE)]
    assert not rank.dirty
    assert not rank.waits


def test_a_view_without_it_or_from_before_it_parked_is_refused(rank: MemberProtocol) -> None:
    rank.receive(Publish(view(5, PEER, NEW)))
    assert not rank.called
    rank.receive(Quiesce((ME,), 6))
    rank.receive(Publish(view(6, ME, PEER)))
    assert not rank.called
    rank.receive(Publish(view(7, ME, PEER)))
    assert rank.called


def test_a_view_repeated_to_a_seated_rank_makes_it_repeat_that_it_is_there(joined: MemberProtocol) -> None:
    joined.receive(Publish(view(5, ME, PEER)))
    assert joined.outbox == [Formed(ME, 5, HERE)]
    assert not joined.called


def test_park_interrupts_and_the_rank_says_where_it_stands(joined: MemberProtocol) -> None:
    assert joined.receive(Quiesce((ME,), 4)) == NOTHING
    assert joined.receive(Quiesce((PEER,), 9)) == NOTHING
    assert joined.receive(Quiesce((ME,), 5)) == INTERRUPT
    assert joined.interrupted
    joined.broken("told to leave")
    assert joined.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave")]
    assert not joined.interrupted


def test_a_rank_that_is_aside_is_answered_for_and_can_sit_down_again(joined: MemberProtocol) -> None:
    joined.detach()
    assert joined.receive(Quiesce((ME,), 5)) == INTERRUPT
    assert joined.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave", engaged=Engaged.COMPUTES)]
    assert not joined.interrupted
    joined.receive(Publish(view(6, ME, PEER)))
    assert joined.next_view() == view(6, ME, PEER)


def test_a_rank_that_may_hang_has_to_come_in_person(joined: MemberProtocol) -> None:
    joined.detach()
    assert joined.receive(Quiesce((ME,), 5, in_person=True)) == INTERRUPT
    assert joined.outbox == []
    assert joined.interrupted


def test_a_rank_called_out_before_it_stepped_aside_is_answered_for_then(joined: MemberProtocol) -> None:
    joined.receive(Quiesce((ME,), 5))
    assert joined.outbox == []
    joined.detach()
    assert joined.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave", engaged=Engaged.COMPUTES)]


def test_the_loop_is_needed_where_its_state_changes_or_has_to_hold_still(joined: MemberProtocol) -> None:
    plain = dataclasses.replace(view(6, ME, PEER), donor=1, receivers=())
    assert joined.settles_detached(plain, steady=False)
    giving = dataclasses.replace(plain, donor=0, receivers=(1,))
    assert joined.gives(giving)
    assert joined.settles_detached(giving, steady=True)
    assert not joined.settles_detached(giving, steady=False)
    assert not joined.settles_detached(dataclasses.replace(plain, receivers=(0,)), steady=True)
    assert not joined.settles_detached(dataclasses.replace(plain, checkpoint="c1"), steady=True)
    assert not joined.settles_detached(dataclasses.replace(plain, state=StateId(HERE.history + 1, HERE.step)), steady=True)


def test_park_of_an_idle_rank_is_answered_at_once(rank: MemberProtocol) -> None:
    rank.receive(Publish(view(5, ME, PEER)))
    rank.receive(Quiesce((ME,), 5))
    assert rank.outbox == [Quiesced(ME, 5, None, False, Departure.IDLE)]
    assert rank.next_view() is None


def test_it_is_dirty_from_mutation_to_commit(joined: MemberProtocol) -> None:
    joined.mutating()
    joined.broken("a peer is gone")
    assert joined.outbox == [Quiesced(ME, 5, HERE, True, Departure.BROKEN, "a peer is gone")]


def test_commit_takes_the_state_one_step_further(joined: MemberProtocol) -> None:
    joined.mutating()
    assert joined.committed() == StateId(0, 8)
    assert not joined.dirty


def test_a_proposal_is_entered_when_all_offer_it(joined: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    joined.receive(Propose(proposal))
    assert joined.proposal() == proposal
    assert joined.offer() == (-1, 0, 0)
    assert joined.agree([(-1, 0, 0), (6, 0, 0)]) == (None, None)
    joined.proposal_formed(6)
    assert joined.proposal() is None
    assert joined.offer() == (6, 0, 0)
    assert joined.agree([(6, 0, 0), (-1, 0, 0)]) == (None, None)
    assert joined.offer() == (6, 0, 0)
    assert joined.agree([(6, 0, 0), (6, 0, 0)]) == (proposal, None)
    joined.enter(proposal)
    joined.formed(HERE)
    assert joined.outbox == [Formed(ME, 6, HERE)]


def test_a_proposal_that_was_entered_and_comes_again_is_answered(joined: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    joined.receive(Propose(proposal))
    joined.proposal_formed(6)
    joined.enter(proposal)
    joined.formed(HERE)
    joined.outbox.clear()
    joined.receive(Propose(proposal))
    assert joined.outbox == [Formed(ME, 6, HERE)]
    assert joined.proposal() is None


def test_a_cancelled_proposal_is_dropped_unless_it_was_offered(joined: MemberProtocol) -> None:
    joined.receive(Propose(view(6, ME, PEER, NEW)))
    joined.receive(Cancel((ME,), 6))
    assert not joined.holds_proposal(6)
    assert joined.offer() == (-1, 0, 0)


def test_an_offer_counts_although_the_cancellation_came_meanwhile(joined: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    joined.receive(Propose(proposal))
    joined.proposal_formed(6)
    joined.offer()
    joined.receive(Cancel((ME,), 6))
    assert joined.agree([(6, 0, 0), (6, 0, 0)]) == (proposal, None)


def test_a_cancelled_offer_that_was_not_taken_is_dropped(joined: MemberProtocol) -> None:
    for answer in (lambda: joined.agree([(6, 0, 0), (-1, 0, 0)]), joined.withdraw):
        joined.receive(Propose(view(6, ME, PEER, NEW)))
        joined.proposal_formed(6)
        joined.offer()
        joined.receive(Cancel((ME,), 6))
        answer()
        assert not joined.holds_proposal(6)


def test_a_newer_proposal_does_not_push_out_one_that_is_offered(joined: MemberProtocol) -> None:
    joined.receive(Propose(view(6, ME, PEER, NEW)))
    joined.proposal_formed(6)
    joined.offer()
    joined.receive(Propose(view(7, ME, PEER, NEW)))
    assert joined.agree([(6, 0, 0), (6, 0, 0)])[0] == view(6, ME, PEER, NEW)
    joined.withdraw()
    joined.receive(Propose(view(7, ME, PEER, NEW)))
    assert joined.holds_proposal(7)


def test_a_newcomer_is_called_by_a_proposal(rank: MemberProtocol) -> None:
    rank.receive(Propose(view(6, ME, PEER)))
    assert rank.called
    assert rank.next_view() is None
    assert rank.proposal() == view(6, ME, PEER)


def test_checkpoint_requests_are_served_once_and_only_when_all_have_them(joined: MemberProtocol) -> None:
    joined.receive(SaveCheckpoint((ME,), 5, 4))
    assert joined.offer() == (-1, 4, 0)
    assert joined.agree([(-1, 4, 0), (-1, 0, 0)]) == (None, None)
    assert joined.agree([(-1, 4, 0), (-1, 4, 0)]) == (None, 4)
    joined.receive(SaveCheckpoint((ME,), 5, 4))
    assert joined.offer() == (-1, 0, 0)


def test_requests_of_both_levels_are_served_one_after_the_other_and_neither_waits_for_the_other(joined: MemberProtocol) -> None:
    for request in (4, 3, 5):
        joined.receive(SaveCheckpoint((ME,), 5, request))
    assert joined.offer() == (-1, 4, 5), "the newest of each level"
    assert joined.agree([(-1, 4, 5), (-1, 0, 5)]) == (None, 5), "the peer has not heard of the store's"
    assert joined.agree([(-1, 4, 0), (-1, 4, 0)]) == (None, 4)
    assert joined.offer() == (-1, 0, 0)


def test_a_rank_halts_when_all_say_so_and_enters_nothing_then(joined: MemberProtocol) -> None:
    joined.receive(Propose(view(6, ME, PEER, NEW)))
    joined.proposal_formed(6)
    assert joined.agree([joined.offer(), (6, 0, 0)])[0] is not None and not joined.halted
    joined.receive(Halt((ME,), 4))
    assert joined.offer() == (6, 0, 0), "another generation was meant"
    joined.receive(Halt((ME,), 5))
    assert joined.offer() == (LAST_STEP, 0, 0)
    assert joined.agree([(LAST_STEP, 0, 0), (6, 0, 0)]) == (None, None) and not joined.halted
    assert joined.agree([(LAST_STEP, 0, 0), (LAST_STEP, 0, 0)]) == (None, None) and joined.halted
    joined.finished("digest")
    assert joined.outbox[-1] == Finished(ME, 5, HERE, "digest", halted=True)


def test_who_has_halted_goes_on_in_the_next_view(joined: MemberProtocol) -> None:
    joined.receive(Halt((ME,), 5))
    joined.agree([joined.offer()])
    joined.broken("a peer is gone")
    joined.receive(Publish(view(6, ME)))
    joined.next_view()
    joined.formed(HERE)
    assert not joined.halted and joined.offer() == (-1, 0, 0)


def test_a_checkpoint_request_of_another_generation_is_refused(joined: MemberProtocol) -> None:
    joined.receive(SaveCheckpoint((ME,), 4, 4))
    assert joined.offer() == (-1, 0, 0)


def test_a_checkpoint_request_dies_with_its_view(joined: MemberProtocol) -> None:
    joined.receive(SaveCheckpoint((ME,), 5, 4))
    joined.broken("a peer is gone")
    joined.receive(Publish(view(6, ME)))
    joined.next_view()
    joined.formed(HERE)
    assert joined.offer() == (-1, 0, 0)


def test_release_and_fence_interrupt(joined: MemberProtocol) -> None:
    assert joined.receive(Release((PEER,), "done")) == NOTHING
    assert joined.receive(Fence(0, "another", "stale")) == NOTHING
    assert joined.receive(Release((ME,), "done")) == INTERRUPT
    assert joined.released == "done"
    assert joined.receive(Fence(0, "token", "stale")) == INTERRUPT
    assert joined.fenced == "stale"


def test_it_waits_at_the_finish(joined: MemberProtocol) -> None:
    joined.finished("digest")
    assert joined.outbox == [Finished(ME, 5, HERE, "digest")]
    assert joined.waits


def test_where_a_loop_has_ended_the_run_outlives_views_and_another_word_of_that_state_changes_nothing(joined: MemberProtocol) -> None:
    joined.receive(EndAt((ME,), HERE, PEER, "flat"))
    assert joined.ends_here and joined.ended is not None and not joined.ended.own
    joined.receive(EndAt((ME,), HERE, NEW, "as flat"))
    assert joined.ended.by == PEER
    joined.broken("its group broke")
    assert joined.ends_here
    joined.receive(EndAt((ME,), StateId(1, 7), PEER, "flat"))
    assert not joined.ends_here, "of another history"


def test_a_rank_that_ends_the_run_says_why_and_of_another_state_it_says_nothing(joined: MemberProtocol) -> None:
    joined.end("flat")
    joined.mutating()
    assert not joined.ends_here, "half changed"
    joined.committed()
    joined.finished("digest")
    assert joined.outbox[-1] == Finished(ME, 5, StateId(0, 8), "digest")
    joined.end("flat")
    joined.finished("digest")
    assert joined.outbox[-1] == Finished(ME, 5, StateId(0, 8), "digest", ended="flat")
