"""The rank's half of the protocol."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.protocol.causes import Departure, Engaged
from fleet.protocol.events import Finished, Formed, Joined, Quiesced, Ready
from fleet.protocol.instructions import Cancel, Fence, Halt, Propose, Publish, Quiesce, Release, SaveCheckpoint, Welcome
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
def seated(rank: MemberProtocol) -> MemberProtocol:
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


def test_a_view_repeated_to_a_seated_rank_makes_it_repeat_that_it_is_there(seated: MemberProtocol) -> None:
    seated.receive(Publish(view(5, ME, PEER)))
    assert seated.outbox == [Formed(ME, 5, HERE)]
    assert not seated.called


def test_park_interrupts_and_the_rank_says_where_it_stands(seated: MemberProtocol) -> None:
    assert seated.receive(Quiesce((ME,), 4)) == NOTHING
    assert seated.receive(Quiesce((PEER,), 9)) == NOTHING
    assert seated.receive(Quiesce((ME,), 5)) == INTERRUPT
    assert seated.interrupted
    seated.broken("told to leave")
    assert seated.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave")]
    assert not seated.interrupted


def test_a_rank_that_is_aside_is_answered_for_and_can_sit_down_again(seated: MemberProtocol) -> None:
    seated.detach()
    assert seated.receive(Quiesce((ME,), 5)) == INTERRUPT
    assert seated.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave", engaged=Engaged.COMPUTES)]
    assert not seated.interrupted
    seated.receive(Publish(view(6, ME, PEER)))
    assert seated.next_view() == view(6, ME, PEER)


def test_a_rank_that_may_hang_has_to_come_in_person(seated: MemberProtocol) -> None:
    seated.detach()
    assert seated.receive(Quiesce((ME,), 5, in_person=True)) == INTERRUPT
    assert seated.outbox == []
    assert seated.interrupted


def test_a_rank_called_out_before_it_stepped_aside_is_answered_for_then(seated: MemberProtocol) -> None:
    seated.receive(Quiesce((ME,), 5))
    assert seated.outbox == []
    seated.detach()
    assert seated.outbox == [Quiesced(ME, 5, HERE, False, Departure.CALLED, "told to leave", engaged=Engaged.COMPUTES)]


def test_the_loop_is_needed_where_its_state_changes_or_has_to_hold_still(seated: MemberProtocol) -> None:
    plain = dataclasses.replace(view(6, ME, PEER), donor=1, receivers=())
    assert seated.settles_detached(plain, steady=False)
    giving = dataclasses.replace(plain, donor=0, receivers=(1,))
    assert seated.gives(giving)
    assert seated.settles_detached(giving, steady=True)
    assert not seated.settles_detached(giving, steady=False)
    assert not seated.settles_detached(dataclasses.replace(plain, receivers=(0,)), steady=True)
    assert not seated.settles_detached(dataclasses.replace(plain, checkpoint="c1"), steady=True)
    assert not seated.settles_detached(dataclasses.replace(plain, state=StateId(HERE.history + 1, HERE.step)), steady=True)


def test_park_of_an_idle_rank_is_answered_at_once(rank: MemberProtocol) -> None:
    rank.receive(Publish(view(5, ME, PEER)))
    rank.receive(Quiesce((ME,), 5))
    assert rank.outbox == [Quiesced(ME, 5, None, False, Departure.IDLE)]
    assert rank.next_view() is None


def test_it_is_dirty_from_mutation_to_commit(seated: MemberProtocol) -> None:
    seated.mutating()
    seated.broken("a peer is gone")
    assert seated.outbox == [Quiesced(ME, 5, HERE, True, Departure.BROKEN, "a peer is gone")]


def test_commit_takes_the_state_one_step_further(seated: MemberProtocol) -> None:
    seated.mutating()
    assert seated.committed() == StateId(0, 8)
    assert not seated.dirty


def test_a_proposal_is_entered_when_all_offer_it(seated: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    seated.receive(Propose(proposal))
    assert seated.proposal() == proposal
    assert seated.offer() == (-1, 0, 0)
    assert seated.agree([(-1, 0, 0), (6, 0, 0)]) == (None, None)
    seated.proposal_formed(6)
    assert seated.proposal() is None
    assert seated.offer() == (6, 0, 0)
    assert seated.agree([(6, 0, 0), (-1, 0, 0)]) == (None, None)
    assert seated.offer() == (6, 0, 0)
    assert seated.agree([(6, 0, 0), (6, 0, 0)]) == (proposal, None)
    seated.enter(proposal)
    seated.formed(HERE)
    assert seated.outbox == [Formed(ME, 6, HERE)]


def test_a_proposal_that_was_entered_and_comes_again_is_answered(seated: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    seated.receive(Propose(proposal))
    seated.proposal_formed(6)
    seated.enter(proposal)
    seated.formed(HERE)
    seated.outbox.clear()
    seated.receive(Propose(proposal))
    assert seated.outbox == [Formed(ME, 6, HERE)]
    assert seated.proposal() is None


def test_a_cancelled_proposal_is_dropped_unless_it_was_offered(seated: MemberProtocol) -> None:
    seated.receive(Propose(view(6, ME, PEER, NEW)))
    seated.receive(Cancel((ME,), 6))
    assert not seated.holds_proposal(6)
    assert seated.offer() == (-1, 0, 0)


def test_an_offer_counts_although_the_cancellation_came_meanwhile(seated: MemberProtocol) -> None:
    proposal = view(6, ME, PEER, NEW)
    seated.receive(Propose(proposal))
    seated.proposal_formed(6)
    seated.offer()
    seated.receive(Cancel((ME,), 6))
    assert seated.agree([(6, 0, 0), (6, 0, 0)]) == (proposal, None)


def test_a_cancelled_offer_that_was_not_taken_is_dropped(seated: MemberProtocol) -> None:
    for answer in (lambda: seated.agree([(6, 0, 0), (-1, 0, 0)]), seated.withdraw):
        seated.receive(Propose(view(6, ME, PEER, NEW)))
        seated.proposal_formed(6)
        seated.offer()
        seated.receive(Cancel((ME,), 6))
        answer()
        assert not seated.holds_proposal(6)


def test_a_newer_proposal_does_not_push_out_one_that_is_offered(seated: MemberProtocol) -> None:
    seated.receive(Propose(view(6, ME, PEER, NEW)))
    seated.proposal_formed(6)
    seated.offer()
    seated.receive(Propose(view(7, ME, PEER, NEW)))
    assert seated.agree([(6, 0, 0), (6, 0, 0)])[0] == view(6, ME, PEER, NEW)
    seated.withdraw()
    seated.receive(Propose(view(7, ME, PEER, NEW)))
    assert seated.holds_proposal(7)


def test_a_newcomer_is_called_by_a_proposal(rank: MemberProtocol) -> None:
    rank.receive(Propose(view(6, ME, PEER)))
    assert rank.called
    assert rank.next_view() is None
    assert rank.proposal() == view(6, ME, PEER)


def test_checkpoint_requests_are_served_once_and_only_when_all_have_them(seated: MemberProtocol) -> None:
    seated.receive(SaveCheckpoint((ME,), 5, 4))
    assert seated.offer() == (-1, 4, 0)
    assert seated.agree([(-1, 4, 0), (-1, 0, 0)]) == (None, None)
    assert seated.agree([(-1, 4, 0), (-1, 4, 0)]) == (None, 4)
    seated.receive(SaveCheckpoint((ME,), 5, 4))
    assert seated.offer() == (-1, 0, 0)


def test_requests_of_both_levels_are_served_one_after_the_other_and_neither_waits_for_the_other(seated: MemberProtocol) -> None:
    for request in (4, 3, 5):
        seated.receive(SaveCheckpoint((ME,), 5, request))
    assert seated.offer() == (-1, 4, 5), "the newest of each level"
    assert seated.agree([(-1, 4, 5), (-1, 0, 5)]) == (None, 5), "the peer has not heard of the store's"
    assert seated.agree([(-1, 4, 0), (-1, 4, 0)]) == (None, 4)
    assert seated.offer() == (-1, 0, 0)


def test_a_rank_halts_when_all_say_so_and_enters_nothing_then(seated: MemberProtocol) -> None:
    seated.receive(Propose(view(6, ME, PEER, NEW)))
    seated.proposal_formed(6)
    assert seated.agree([seated.offer(), (6, 0, 0)])[0] is not None and not seated.halted
    seated.receive(Halt((ME,), 4))
    assert seated.offer() == (6, 0, 0), "another generation was meant"
    seated.receive(Halt((ME,), 5))
    assert seated.offer() == (LAST_STEP, 0, 0)
    assert seated.agree([(LAST_STEP, 0, 0), (6, 0, 0)]) == (None, None) and not seated.halted
    assert seated.agree([(LAST_STEP, 0, 0), (LAST_STEP, 0, 0)]) == (None, None) and seated.halted
    seated.finished("digest")
    assert seated.outbox[-1] == Finished(ME, 5, HERE, "digest", halted=True)


def test_who_has_halted_goes_on_in_the_next_view(seated: MemberProtocol) -> None:
    seated.receive(Halt((ME,), 5))
    seated.agree([seated.offer()])
    seated.broken("a peer is gone")
    seated.receive(Publish(view(6, ME)))
    seated.next_view()
    seated.formed(HERE)
    assert not seated.halted and seated.offer() == (-1, 0, 0)


def test_a_checkpoint_request_of_another_generation_is_refused(seated: MemberProtocol) -> None:
    seated.receive(SaveCheckpoint((ME,), 4, 4))
    assert seated.offer() == (-1, 0, 0)


def test_a_checkpoint_request_dies_with_its_view(seated: MemberProtocol) -> None:
    seated.receive(SaveCheckpoint((ME,), 5, 4))
    seated.broken("a peer is gone")
    seated.receive(Publish(view(6, ME)))
    seated.next_view()
    seated.formed(HERE)
    assert seated.offer() == (-1, 0, 0)


def test_release_and_fence_interrupt(seated: MemberProtocol) -> None:
    assert seated.receive(Release((PEER,), "done")) == NOTHING
    assert seated.receive(Fence(0, "another", "stale")) == NOTHING
    assert seated.receive(Release((ME,), "done")) == INTERRUPT
    assert seated.released == "done"
    assert seated.receive(Fence(0, "token", "stale")) == INTERRUPT
    assert seated.fenced == "stale"


def test_it_waits_at_the_finish(seated: MemberProtocol) -> None:
    seated.finished("digest")
    assert seated.outbox == [Finished(ME, 5, HERE, "digest")]
    assert seated.waits
