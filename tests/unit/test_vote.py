"""The vote that commits a step: who is asked, what is decided, and who keeps its sums until it is clear what became of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.chunks import Claim
from fleet.protocol.types import StateId
from fleet.protocol.vote import CommitVote, Doubt, VotePhase, Words

HERE, NEXT = StateId(2, 7), StateId(2, 8)
FINE = Words((True, True))
BAD = Doubt(3, "its loss is nan", True)
norms = st.one_of(st.floats(min_value=0.0), st.just(math.nan))


@st.composite
def words(draw: st.DrawFn, ranks: int = 0) -> Words:
    finite = tuple(draw(st.lists(st.booleans(), min_size=ranks or 1, max_size=ranks or 6)))
    return Words(finite, draw(norms), draw(st.floats(0.0, 1.0)), draw(st.booleans()))


def voting(*, spread: bool = True) -> CommitVote:
    vote = CommitVote(spread=spread)
    vote.ready()
    return vote


def committed() -> CommitVote:
    vote = voting()
    assert vote.decide(FINE, math.inf) is None
    return vote


def rejected() -> CommitVote:
    vote = CommitVote(spread=True)
    assert vote.reject(BAD) is BAD
    return vote


MADE: dict[VotePhase, Callable[[], CommitVote]] = {
    VotePhase.OPEN: lambda: CommitVote(spread=True),
    VotePhase.READY: voting,
    VotePhase.COMMIT: committed,
    VotePhase.AGAIN: rejected,
}
LEGAL: dict[str, tuple[Callable[[CommitVote], object], dict[VotePhase, VotePhase]]] = {
    "begin": (CommitVote.begin, dict.fromkeys(VotePhase, VotePhase.OPEN)),
    "ready": (CommitVote.ready, {VotePhase.OPEN: VotePhase.READY}),
    "reject": (lambda vote: vote.reject(BAD), {VotePhase.OPEN: VotePhase.AGAIN, VotePhase.READY: VotePhase.AGAIN}),
    "decide": (lambda vote: vote.decide(FINE, math.inf), {VotePhase.READY: VotePhase.COMMIT}),
    "lost": (
        CommitVote.lost,
        {phase: phase if phase in (VotePhase.READY, VotePhase.COMMIT) else VotePhase.OPEN for phase in VotePhase},
    ),
}


@pytest.mark.parametrize("phase", VotePhase)
@pytest.mark.parametrize("what", LEGAL)
def test_each_phase_leads_to_those_that_it_may_lead_to(what: str, phase: VotePhase) -> None:
    call, leads = LEGAL[what]
    vote = MADE[phase]()
    assert vote.phase is phase
    if phase in leads:
        call(vote)
        assert vote.phase is leads[phase]
    else:
        with pytest.raises(AssertionError, match=phase):
            call(vote)


def test_sums_are_kept_from_the_word_that_they_are_here_until_the_step_is_over() -> None:
    assert {phase for phase, make in MADE.items() if make().keeps} == {VotePhase.READY, VotePhase.COMMIT}


def test_all_of_a_view_are_asked_where_each_has_sums_of_its_own_and_nobody_else_is() -> None:
    assert CommitVote(spread=True).voters(3) == (0, 1, 2)
    assert CommitVote(spread=True).voters(1) == (0,)
    assert CommitVote(spread=False).voters(3) == ()


@given(words(), norms)
def test_a_step_is_taken_where_all_of_it_is_finite_or_will_be_skipped_and_is_not_too_large(said: Words, limit: float) -> None:
    vote = voting()
    doubt, usable = vote.decide(said, limit), all(said.finite) or said.skips
    assert (doubt is None) == (usable and not said.norm > limit)
    assert vote.phase is (VotePhase.COMMIT if doubt is None else VotePhase.AGAIN)
    if doubt is None:
        assert math.isnan(vote.factor) == (not all(said.finite))
        assert vote.factor == said.factor or not all(said.finite)
    else:
        assert doubt.shard == -1 and doubt.hopeless == (not usable) and vote.factor == 1.0


@given(words(), norms)
def test_all_who_have_the_same_words_decide_alike_in_whatever_order_they_came(said: Words, limit: float) -> None:
    turned = Words(said.finite[::-1], said.norm, said.factor, said.skips)
    one, other = voting(), voting()
    assert one.decide(said, limit) == other.decide(turned, limit)
    assert one.phase is other.phase and (one.factor == other.factor or (math.isnan(one.factor) and math.isnan(other.factor)))


@given(st.data(), st.integers(1, 5))
def test_a_rank_that_is_lost_within_the_vote_ends_where_the_others_do(data: st.DataObject, size: int) -> None:
    """Some have the words of all, and the others find their group gone. The next view has all of them at one state."""
    said = data.draw(words(size))
    informed = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    votes = [voting() for _ in range(size)]
    doubts = [vote.decide(said, math.inf) if all_came else vote.lost() for vote, all_came in zip(votes, informed, strict=True)]
    takes = all(said.finite) or said.skips
    states = [NEXT if takes and all_came else HERE for all_came in informed]
    for vote, state in zip(votes, states, strict=True):
        if state == NEXT or vote.phase is VotePhase.AGAIN:  # who has stepped, or computes anew, says nothing of the next attempt yet
            vote.begin()
    claims = [Claim(state, vote.keeps, vote.factor) for vote, state in zip(votes, states, strict=True)]
    target = max(states)
    followed = [vote.follow(claims, me, target) for me, vote in enumerate(votes)]
    ends = [NEXT if follows else state for follows, state in zip(followed, states, strict=True)]
    assert ends == [target] * size
    assert any(doubts) == (any(informed) and not takes)
    if target == NEXT:
        assert len({str(vote.factor) for vote in votes}) == 1, "all have clipped alike"


def test_whoever_may_take_a_step_alone_claims_no_chunks_that_came_for_another_view() -> None:
    own, beside, vote = ((2, 0),), ((3, 1),), CommitVote(spread=True)
    assert vote.claim(None, own, beside, complete=True, node=4) == Claim(None, node=4)
    assert vote.claim(HERE, own, beside, complete=True, node=4) == Claim(HERE, complete=True, node=4, chunks=own + beside)
    assert voting().claim(HERE, own, beside, complete=False, node=4) == Claim(HERE, ready=True, node=4, chunks=own)
    assert vote.follow([Claim(HERE, ready=True), Claim(NEXT, factor=0.25)], 0, NEXT)
    assert vote.claim(HERE, own, beside, complete=True, node=4).factor == 0.25


def test_nobody_follows_where_nobody_has_stepped_or_without_sums_or_into_another_history() -> None:
    ready = Claim(HERE, ready=True)
    for claims, target in (
        ([ready, ready], HERE),
        ([Claim(HERE), Claim(NEXT)], NEXT),
        ([ready, Claim(StateId(3, 8))], StateId(3, 8)),
        ([ready, Claim(StateId(2, 9))], StateId(2, 9)),
        ([Claim(None), Claim(NEXT)], NEXT),
    ):
        vote = voting()
        assert not vote.follow(claims, 0, target)
        assert vote.phase is VotePhase.READY and vote.factor == 1.0


def test_who_follows_takes_the_factor_of_those_who_have_stepped_and_passes_it_on() -> None:
    vote = voting()
    assert vote.follow([Claim(HERE, ready=True, factor=0.5), Claim(NEXT, factor=0.25)], 0, NEXT)
    vote.begin()
    assert vote.factor == 0.25 and not vote.keeps
