"""Silent corruption: who is wrong when results differ, how often to look, how long until it shows, and which state is still good.

Two nets, of different mesh. Replicas hold the same weights, so their digests are compared before every reduction: a difference shows in the
step in which it arises. A wrong *computation* leaves the weights of all replicas equally wrong; so now and then each rank computes one
shard of another rank again, before the commit, and compares bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.decisions import Decision
from fleet.errors import ConfigError
from fleet.types import Member, StateId

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
    """What a vote leads to: ``carry_on``, ``evict``, ``recompute`` on one of ``idle`` (members that have not voted), or ``stop``.

    A tie that nobody is left to break stops the run: going on would keep a state of which it is known that it may be wrong.
    """
    fields = {"digests": float(len(outcome.votes)), "voters": float(sum(count for _, count in outcome.votes)), "idle": float(len(idle))}
    if outcome.outcome == AGREED:
        return Decision("carry_on", "all results are equal", fields)
    if outcome.outcome == OUTVOTED:
        names = ", ".join(map(str, outcome.guilty))
        return Decision("evict", f"{names} differ from the majority, bit for bit", fields | {"guilty": float(len(outcome.guilty))})
    if idle:
        return Decision("recompute", f"no majority: {min(idle)} computes it again", fields | {"slot": float(min(idle).slot)})
    reason = "results differ, no majority names who is wrong, and no other rank is left to compute it again"
    return Decision("stop", reason, fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How often to compute again, from what it may cost.

    In a verified step every rank computes one shard of another rank again, all at the same time: one shard more, where the fullest rank has
    shards / ranks of them, whatever the number of ranks. ``chunks`` is what checking a chunk of the summation and of the optimizer step
    adds, as a share of a step's compute.
    """

    budget: float = 0.01
    chunks: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ConfigError("verify.budget", self.budget, "is a share of compute, from 0 (off) to 1")
        if not self.chunks >= 0:
            raise ConfigError("verify.chunks", self.chunks, "must not be below 0")

    def cost(self, shards: int, ranks: int) -> float:
        """Compute of one verification as a share of a step's: one shard of those that the fullest rank has, plus chunks."""
        if not 1 <= ranks <= shards:
            raise ConfigError("ranks", ranks, f"each rank needs at least one of the {shards} batch shards")
        return 1 / math.ceil(shards / ranks) + self.chunks

    def every(self, shards: int, ranks: int) -> int:
        """Steps from one verification to the next: the least that stays within the budget. 0 when it is off."""
        return math.ceil(self.cost(shards, ranks) / self.budget - 1e-9) if self.budget > 0 else 0

    @staticmethod
    def shard(verification: int, begin: int, end: int) -> int:
        """Which shard of ``begin..end`` the verification of this number samples: each in turn. Raises ValueError when there is none."""
        if not begin < end:
            raise ValueError(f"no shard lies in {begin}..{end}")
        return begin + verification % (end - begin)


def expected_steps_to_detection(every: int, hit: float) -> float:
    """Mean number of steps from the first corrupt step until a verification finds it, both counted: (k + 1) / 2 + k (1 - p) / p.

    Derivation: k = ``every``. The first corrupt step is equally likely anywhere between two verifications, so the next one is the 1st to
    k-th step from it: (k + 1) / 2 in the mean. Each finds the corruption with probability p = ``hit``, independently, so the number of
    those that fail before the first that finds it is geometric with mean (1 - p) / p, and each costs k steps. Never for p = 0 or k = 0.
    """
    _check_hit(hit)
    return math.inf if hit == 0 or every == 0 else (every + 1) / 2 + every * (1 - hit) / hit


def undetected_ratio(steps: int, every: int, hit: float) -> float:
    """Probability that a corruption which has lasted for ``steps`` steps is not found yet: (1 - p)^j, averaged over where it began.

    With k = ``every``, ``steps`` = q k + r and 0 <= r < k there were q + 1 verifications for r of the k beginnings, and q for the others.
    """
    _check_hit(hit)
    if every == 0:
        return 1.0
    whole, rest = divmod(steps, every)
    miss = 1 - hit
    return float((rest * miss ** (whole + 1) + (every - rest) * miss**whole) / every)


def hit_probability(corrupt_shards_ratio: float, ranks_corrupt: int = 1) -> float:
    """p of one verification in which each rank has one of its shards checked: 1 - (1 - q)^c, q the share of shards that come out wrong."""
    _check_hit(corrupt_shards_ratio)
    return float(1 - (1 - corrupt_shards_ratio) ** ranks_corrupt)


def _check_hit(hit: float) -> None:
    if not 0 <= hit <= 1:
        raise ValueError(f"{hit} is no probability")


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


def cleared(evidence: Evidence, kept: Sequence[StateId]) -> Return:
    """The newest of the ``kept`` states that the evidence clears.

    Wrong weights of one replica: digests are compared before each sum, so what the others hold is good, and nothing is taken back. A wrong
    computation: every step since the guilty rank's last passed verification is in doubt, since its gradients are in all replicas. States up
    to that verification are cleared but for ``residual``, at most (1 - p)^n after n of them: sampling bounds the risk, it removes none.
    """
    if evidence.weights:
        reason = "the weights of one replica differ from the majority's, and were not used yet"
        return Return(Decision("carry_on", reason, {"steps_lost": 0.0, "residual": 0.0}), evidence.found)
    passed = [state for state in evidence.passed if state.lineage == evidence.found.lineage and state <= evidence.found]
    residual = float((1 - evidence.hit) ** len(passed))
    good = [state for state in kept if passed and state.lineage == passed[-1].lineage and state <= passed[-1]]
    fields = {"passed": float(len(passed)), "residual": residual, "hit": evidence.hit}
    if not good:
        why = "no state that is kept is old enough" if passed else "the rank that is wrong never passed a verification"
        return Return(Decision("begin_anew", f"{why}: nothing is cleared", fields | {"steps_lost": float(evidence.found.step)}), None)
    newest = max(good)
    lost = float(evidence.found.step - newest.step)
    reason = f"step {newest.step} is the newest kept state before step {passed[-1].step}, where the rank that is wrong last passed"
    return Return(Decision("go_back", reason, fields | {"steps_lost": lost, "step": float(newest.step)}), newest)
