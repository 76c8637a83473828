"""Silent corruption: who is wrong when results differ, how often to look, how long until it shows, and which state is still good.

A flipped bit hits one rank, once. So ranks that hold three different things without a majority, and ranks that differ again right after
they went on, run a loop that is wrong; nobody is accused then. Nor is anybody when two things are held and no majority tells which one is
wrong: all go back to what was the same everywhere, and compute it again.

Two nets, of different mesh. Replicas hold the same weights, so their digests are compared before every reduction: a difference shows in the
step in which it arises. A wrong *computation* leaves the weights of all replicas equally wrong; so now and then each rank computes one
shard of another rank again, before the commit, and compares bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fleet.errors import ConfigError
from fleet.protocol.decisions import Cleared, Decision, Votes
from fleet.protocol.types import Member, StateId, Verdict
from fleet.settings.fields import setting
from fleet.settings.run import RunSettings

AGREED, OUTVOTED, TIE = "agreed", "outvoted", "tie"


@dataclass(frozen=True, slots=True)
class Vote:
    """``outcome``: agreed, outvoted (``guilty`` differ from a strict majority of all), or tie: nobody can be named from these digests."""

    outcome: str
    guilty: tuple[Member, ...] = ()
    digest: str = ""
    votes: tuple[tuple[str, int], ...] = ()


def vote(digests: Mapping[Member, str]) -> Vote:
    """Majority over replicas. Without a strict majority it is a tie, also when one digest has more votes than each other one.

    Raises ValueError without any digest.
    """
    if not digests:
        raise ValueError("a vote needs at least one digest")
    votes = tuple(Counter(digests.values()).most_common())
    digest, most = votes[0]
    if most == len(digests):
        return Vote(AGREED, (), digest, votes)
    if 2 * most > len(digests):
        return Vote(OUTVOTED, tuple(sorted(member for member, value in digests.items() if value != digest)), digest, votes)
    return Vote(TIE, (), "", votes)


def after_vote(outcome: Vote, idle: Sequence[Member]) -> Decision:
    """What a vote leads to: ``carry_on``, ``evict``, ``recompute`` on one of ``idle`` (members that have not voted), ``retry`` or ``stop``.

    A tie that nobody is left to break is no reason to go on: a state is known that may be wrong. With two results all go back to what was
    the same for all (``retry``); more of them are a mistake of the loop (``stop``).
    """
    votes = Votes(float(len(outcome.votes)), float(sum(count for _, count in outcome.votes)), float(len(idle)))
    if outcome.outcome == AGREED:
        return Decision("carry_on", "all results are equal", votes)
    if outcome.outcome == OUTVOTED:
        names = ", ".join(map(str, outcome.guilty))
        return Decision("evict", f"{names} differ from the majority, bit for bit", replace(votes, guilty=float(len(outcome.guilty))))
    if idle:
        return Decision("recompute", f"no majority: {min(idle)} computes it again", replace(votes, slot=float(min(idle).slot)))
    if len(outcome.votes) > 2:
        return Decision("stop", f"{len(outcome.votes)} different results, and no majority, which is more than a flipped bit does", votes)
    return Decision("retry", "two different results, and no majority names who is wrong: nobody is accused, and all go back", votes)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when corruption is found.

    Attributes:
        found: the state on which the wrong result was computed; the step that it belongs to is not committed.
        weights: replicas' digests differed, and the majority is known: what is wrong never entered a sum.
        passed: states of the last verifications that the guilty rank passed, oldest first.
        hit: probability that a verification would have found it.
    """

    found: StateId
    weights: bool
    passed: tuple[StateId, ...] = ()
    hit: float = 1.0


@dataclass(frozen=True, slots=True)
class Return:
    """Where the run goes on. ``state`` is None when nothing that is kept is cleared: then it begins anew."""

    decision: Decision
    state: StateId | None


def newest_cleared(evidence: Evidence, kept: Sequence[StateId]) -> Return:
    """The newest of the ``kept`` states that the evidence clears.

    Wrong weights of one replica: digests are compared before each sum, so what the others hold is good, and nothing is taken back. A wrong
    computation: every step since the guilty rank's last passed verification is in doubt, since its gradients are in all replicas. States up
    to that verification are cleared but for ``residual``, at most (1 - p)^n after n of them: sampling bounds the risk, it removes none.
    """
    if evidence.weights:
        reason = "the weights of one replica differ from the majority's, and were not used yet"
        return Return(Decision("carry_on", reason, Cleared(steps_lost=0.0, residual=0.0)), evidence.found)
    passed = [state for state in evidence.passed if state.history == evidence.found.history and state <= evidence.found]
    residual = float((1 - evidence.hit) ** len(passed))
    good = [state for state in kept if passed and state.history == passed[-1].history and state <= passed[-1]]
    if not good:
        sure = Cleared(float(evidence.found.step), residual, float(len(passed)), evidence.hit)
        why = "no state that is kept is old enough" if passed else "the rank that is wrong never passed a verification"
        return Return(Decision("begin_anew", f"{why}: nothing is cleared", sure), None)
    newest = max(good)
    sure = Cleared(float(evidence.found.step - newest.step), residual, float(len(passed)), evidence.hit, float(newest.step))
    reason = f"step {newest.step} is the newest kept state before step {passed[-1].step}, where the rank that is wrong last passed"
    return Return(Decision("go_back", reason, sure), newest)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSettings:
    """What the vote over corruption can be told."""

    hit: float = setting(1.0, "Probability that a verification of a rank finds that it computes wrongly.")

    def __post_init__(self) -> None:
        if not 0 < self.hit <= 1:
            raise ConfigError("corruption.settings.hit", self.hit, "is a probability greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityRules:
    """The ``CorruptionPolicy`` of live runs: a strict majority names who is wrong, and without one nobody is.

    ``hit``: see :class:`VoteSettings`.
    """

    Settings = VoteSettings
    hit: float = VoteSettings().hit

    @classmethod
    def of(cls, run: RunSettings, own: VoteSettings) -> Self:
        """A run's."""
        return cls(hit=own.hit)

    def judge(self, votes: Mapping[Member, str], others: Mapping[Member, str], again: bool = False) -> Verdict:
        """``others`` are wrong when they differ from what the votes come to, and somebody else holds that too.

        ``again``: the ranks differed right before, in the same way. Raises ValueError without any vote.
        """
        held = {**votes, **others}
        outcome = vote(votes)
        wrong = tuple(sorted(member for member, digest in held.items() if digest != outcome.digest))
        if again and wrong:
            return Verdict(Decision("stop", "the ranks differ again, right where they went on, and a flipped bit does not come back"))
        if outcome.outcome == TIE or (wrong and list(held.values()).count(outcome.digest) == 1):
            return Verdict(after_vote(Vote(TIE, (), "", tuple(Counter(held.values()).most_common())), ()))
        judged = Vote(OUTVOTED if wrong else AGREED, wrong, outcome.digest, outcome.votes)
        return Verdict(after_vote(judged, ()), wrong)

    def go_back(self, found: StateId, cleared: StateId, kept: Sequence[StateId]) -> tuple[Decision, StateId | None]:
        """All up to ``cleared`` was compared and was alike; so was ``found``, if that is no later: then nothing has to be taken back."""
        chosen = newest_cleared(Evidence(found, weights=cleared >= found, passed=(cleared,), hit=self.hit), kept)
        before = [state for state in kept if state.history < cleared.history]  # what is kept of older histories led to this one
        if chosen.state is None and before:
            reason = f"step {max(before).step} of history {max(before).history} is the newest kept state before step {cleared.step}"
            return Decision("go_back", reason, chosen.decision.payload), max(before)
        return chosen.decision, chosen.state
