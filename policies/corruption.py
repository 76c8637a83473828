"""Silent corruption: who is wrong when results differ, and which state is still good.

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
from dataclasses import dataclass
from typing import Self

from fleet.protocol.decisions import Decision, Figures
from fleet.protocol.types import Member, StateId, Verdict
from fleet.settings.fields import setting, within
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


def after_vote(outcome: Vote) -> Decision:
    """What a vote leads to: ``carry_on``, ``evict``, ``retry`` or ``stop``.

    A tie is no reason to go on: a state is known that may be wrong. With two results all go back to what was the same for all (``retry``);
    more of them are a mistake of the loop (``stop``).
    """
    votes = Figures({"digests": float(len(outcome.votes)), "voters": float(sum(count for _, count in outcome.votes)), "idle": 0.0})
    if outcome.outcome == AGREED:
        return Decision("carry_on", "all results are equal", votes)
    if outcome.outcome == OUTVOTED:
        names = ", ".join(map(str, outcome.guilty))
        guilty = Figures({**votes.values, "guilty": float(len(outcome.guilty))})
        return Decision("evict", f"{names} differ from the majority, bit for bit", guilty)
    if len(outcome.votes) > 2:
        return Decision("stop", f"{len(outcome.votes)} different results, and no majority, which is more than a flipped bit does", votes)
    return Decision("retry", "two different results, and no majority names who is wrong: nobody is accused, and all go back", votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteSettings:
    """What the vote over corruption can be told."""

    hit: float = setting(1.0, "Probability that a verification of a rank finds that it computes wrongly.", above=0, most=1)

    def __post_init__(self) -> None:
        within(self, "corruption.settings.")


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
            return Verdict(after_vote(Vote(TIE, (), "", tuple(Counter(held.values()).most_common()))))
        judged = Vote(OUTVOTED if wrong else AGREED, wrong, outcome.digest, outcome.votes)
        return Verdict(after_vote(judged), wrong)

    def go_back(self, found: StateId, cleared: StateId, kept: Sequence[StateId]) -> tuple[Decision, StateId | None]:
        """The newest of the ``kept`` states that is good; None where the run has to begin anew.

        All up to ``cleared`` was compared and was alike. If that is no earlier than ``found``, the weights of one replica are wrong:
        digests are compared before each sum, so what the others hold is good, and nothing is taken back. Else a computation is wrong:
        every step since the guilty rank's last passed verification is in doubt, since its gradients are in all replicas. States up to
        that verification are good but for ``residual``, 1 - hit: sampling bounds the risk, it removes none.
        """
        if cleared >= found:
            reason = "the weights of one replica differ from the majority's, and were not used yet"
            return Decision("carry_on", reason, Figures({"steps_lost": 0.0, "residual": 0.0})), found
        passed = cleared.history == found.history
        residual = float((1 - self.hit) ** passed)
        sure = Figures({"steps_lost": float(found.step), "residual": residual, "passed": float(passed), "hit": self.hit})
        good = [state for state in kept if passed and state.history == cleared.history and state <= cleared]
        if good:
            newest = max(good)
            sure = Figures({**sure.values, "steps_lost": float(found.step - newest.step), "step": float(newest.step)})
            reason = f"step {newest.step} is the newest kept state before step {cleared.step}, where the rank that is wrong last passed"
            return Decision("go_back", reason, sure), newest
        before = [state for state in kept if state.history < cleared.history]  # what is kept of older histories led to this one
        if before:
            reason = f"step {max(before).step} of history {max(before).history} is the newest kept state before step {cleared.step}"
            return Decision("go_back", reason, sure), max(before)
        why = "no state that is kept is old enough" if passed else "the rank that is wrong never passed a verification"
        return Decision("begin_anew", f"{why}: nothing is cleared", sure), None
