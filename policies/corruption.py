"""Silent corruption: the wrong rank when results differ, and the newest good state.

A flipped bit hits one rank, once. So the train loop is wrong when ranks hold three different results without a majority, or when ranks
differ again right after they went on. Then no rank is accused. With two results and no majority, no rank is accused either. All ranks go
back to a state that was the same everywhere, and compute again.

There are two checks. Replicas hold the same weights, so ranks compare their digests before every reduction: a difference shows in the step
in which it arises. A wrong *computation* leaves the weights of all replicas equally wrong. So now and then each rank computes one shard of
another rank again, before the commit, and compares bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.protocol.decisions import Decision, Figures
from fleet.protocol.types import Member, StateId, Verdict

AGREED, OUTVOTED, TIE = "agreed", "outvoted", "tie"


@dataclass(frozen=True, slots=True)
class Vote:
    """``outcome``: agreed, outvoted (``guilty`` differ from a strict majority of all), or tie: these digests name no wrong rank."""

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
    """The decision after a vote: ``carry_on``, ``evict``, ``retry`` or ``stop``.

    After a tie the run must not simply go on: its state may be wrong. With two results all ranks go back to a state that was the same for
    all (``retry``). More results are a mistake of the loop (``stop``).
    """
    votes = Figures({"digests": float(len(outcome.votes)), "voters": float(sum(count for _, count in outcome.votes)), "idle": 0.0})
    if outcome.outcome == AGREED:
        return Decision("carry_on", "all results are equal", votes)
    if outcome.outcome == OUTVOTED:
        names = ", ".join(map(str, outcome.guilty))
        guilty = Figures({**votes.values, "guilty": float(len(outcome.guilty))})
        return Decision("evict", f"{names} differ from the majority, bit for bit", guilty)
    if len(outcome.votes) > 2:
        return Decision("stop", f"{len(outcome.votes)} different results, and no majority: a flipped bit does not cause that", votes)
    return Decision("retry", "two different results, and no majority names the wrong rank: no rank is accused, and all go back", votes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityRules:
    """The ``CorruptionPolicy`` of live runs: a strict majority names the wrong rank; without one, no rank is accused.

    ``hit``: probability that a verification of a rank finds that it computes wrongly.
    """

    hit: float = 1.0

    def judge(self, votes: Mapping[Member, str], others: Mapping[Member, str], again: bool = False) -> Verdict:
        """``others`` are wrong when they differ from the result of the votes, and another rank holds that result, too.

        ``again``: the ranks differed right before, in the same way. Raises ValueError without any vote.
        """
        held = {**votes, **others}
        outcome = vote(votes)
        wrong = tuple(sorted(member for member, digest in held.items() if digest != outcome.digest))
        if again and wrong:
            return Verdict(Decision("stop", "the ranks differ again in the same step, and a flipped bit does not come back"))
        if outcome.outcome == TIE or (wrong and list(held.values()).count(outcome.digest) == 1):
            return Verdict(after_vote(Vote(TIE, (), "", tuple(Counter(held.values()).most_common()))))
        judged = Vote(OUTVOTED if wrong else AGREED, wrong, outcome.digest, outcome.votes)
        return Verdict(after_vote(judged), wrong)

    def go_back(self, found: StateId, cleared: StateId, kept: Sequence[StateId]) -> tuple[Decision, StateId | None]:
        """The newest good state of the ``kept`` ones; None where the run has to begin anew.

        All states up to ``cleared`` were compared and were equal. If ``cleared`` is not earlier than ``found``, the weights of one replica
        are wrong. Ranks compare digests before each sum, so the other ranks' state is good, and no step is taken back. Else a computation
        is wrong: every step since the guilty rank's last passed verification is in doubt, since its gradients are in all replicas. States
        up to that verification are good but for ``residual``, 1 - hit: sampling bounds the risk, and does not remove it.
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
            reason = f"step {newest.step} is the newest kept state before step {cleared.step}, where the wrong rank last passed"
            return Decision("go_back", reason, sure), newest
        before = [state for state in kept if state.history < cleared.history]  # kept states of older histories led to this one
        if before:
            reason = f"step {max(before).step} of history {max(before).history} is the newest kept state before step {cleared.step}"
            return Decision("go_back", reason, sure), max(before)
        why = "no kept state is old enough" if passed else "the wrong rank never passed a verification"
        return Decision("begin_anew", f"{why}: no state is cleared", sure), None
