"""The ranks that train on after a loss, those that join later, and the limit of a crash loop. Also a policy that delays recovery."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fleet.protocol.decisions import Decision, Figures
from fleet.protocol.domains import SEPARATOR
from fleet.protocol.ports import RecoveryPolicy
from fleet.protocol.topology import WINDOW_S
from fleet.protocol.types import Candidate, Formation, Loss, Member, Situation, in_words, outnumbered
from fleet.settings.run import WINDOW_S as BUDGET_S
from fleet.settings.run import Budgets, RunSettings
from policies import groups
from policies.topology import joining, ordered

SETTLE_S = 0.4
"""After a view has formed no rank joins for so long: first comes the step that broke."""


class ReformPromoteRegrow:
    """Re-form at once with the survivors, promote spares at the next step boundary, regrow when replacements are up.

    Newcomers are in the survivors' own view only where the view cannot go on without them: see ``_first``. With fewer than ``min_ranks`` it
    waits. Without any rank that holds a clean state it waits up to ``start_s`` for the full world. All ranks start from a checkpoint then,
    and a fuller world costs only the wait.
    """

    def __init__(self, budgets: Budgets, start_s: float) -> None:
        self.budgets, self.start_s = budgets, start_s

    @classmethod
    def of(cls, run: RunSettings, own: None) -> Self:
        """The policy of a run."""
        return cls(run.budgets, run.timeouts.start_s)

    def form(self, situation: Situation, now_s: float) -> Formation:
        chosen = _first(situation)
        size = len(situation.coordinates)
        there = Figures({"candidates": float(len(situation.candidates)), "world": float(situation.world)})
        if len(chosen) < situation.min_ranks:
            absent = groups.lacking(situation.candidates, situation.coordinates) if size > 1 else []
            lack = f", and none at {', '.join(map(in_words, absent))}" if absent else ""
            reason = f"{len(chosen)} ranks are there{' in whole groups' if size > 1 else ''}, min_ranks is {situation.min_ranks}{lack}"
            return Formation(Decision("wait", reason, there))
        if not any(_holds_state(candidate) for candidate in chosen):
            waited_s = now_s - situation.since_s
            if len(chosen) < situation.world and waited_s < self.start_s:
                reason = f"no rank holds a state: waiting up to {self.start_s:g} s for the full world before starting from a checkpoint"
                return Formation(Decision("wait", reason, there, situation.since_s + self.start_s))
        survivors = sum(candidate.in_view for candidate in chosen)
        reason = f"{survivors} ranks left, {len(chosen) - survivors} promoted or new"
        return Formation(Decision("form", reason, there), _in_order(chosen, situation))

    def grow(self, situation: Situation, now_s: float) -> Formation:
        """Newcomers fill the world beside the ranks that stay. Then ranks leave whose nodes go, and those beyond the world's size.

        At least one member stays, and gives its state to the newcomers. Without ``min_ranks`` others, no rank leaves in time.
        """
        if len(situation.coordinates) > 1:
            return self._grow_by_groups(situation, now_s)
        present = _preferred([candidate for candidate in situation.candidates if candidate.in_view], situation.replica_size)
        waiting = [candidate for candidate in situation.candidates if not candidate.in_view]
        staying = [candidate for candidate in present if math.isinf(candidate.goes_in_s)]
        going = sorted((one for one in present if not math.isinf(one.goes_in_s)), key=lambda one: -one.goes_in_s)
        least = max(1, len(present) - situation.may_leave)
        whole = situation.world + situation.spares
        room = int(min(whole - len(staying), situation.most + situation.spares - least))
        newcomers = _newcomers(waiting, staying, room, situation) if waiting and room > 0 else []
        needed = max(0, int(max(least, situation.world - len(newcomers))) - len(staying))  # none stays for the seat of a spare
        kept = [*staying, *[candidate for candidate in going if candidate.goes_in_s > situation.margin_s][:needed]]
        if not kept or len(kept) + len(newcomers) < situation.min_ranks:
            kept = [*staying, *going]
        kept = kept[: int(max(least, whole - len(newcomers)))]
        return self._changed(situation, present, kept, newcomers, now_s)

    def _grow_by_groups(self, situation: Situation, now_s: float) -> Formation:
        """As :meth:`grow`, for groups that compute together: they come and leave whole."""
        ranked = _preferred(situation.candidates, 1)
        staying, joining = groups.grown(situation, ranked)
        present = [candidate for candidate in ranked if candidate.in_view]
        kept, come = ([candidate for group in each for candidate in group] for each in (staying, joining))
        return self._changed(situation, present, kept, come, now_s)

    @staticmethod
    def _changed(
        situation: Situation, present: Sequence[Candidate], kept: Sequence[Candidate], come: Sequence[Candidate], now_s: float
    ) -> Formation:  # fmt: skip
        """The view of the ``kept`` members and those that ``come``, once the survivors of a loss have taken the step that broke."""
        chosen = [*kept, *come]
        newcomers = [candidate for candidate in come if not candidate.in_view]
        leaving = sum(candidate not in chosen for candidate in present)
        left = len(present) - leaving
        missing = max(0, situation.world - left)
        reshared = situation.compute != situation.computing and not newcomers and not leaving
        if not newcomers and not leaving and not reshared:
            return Formation(Decision("wait", "no rank to add" if left < situation.world + situation.spares else "the world is full"))
        if now_s < (settled_s := situation.since_s + SETTLE_S):
            return Formation(Decision("wait", "the survivors first take the step that broke", valid_until_s=settled_s))
        ready = [f"{min(missing, len(newcomers))} of {missing} missing ranks are ready"] if newcomers and missing else []
        if (spares := len(newcomers) - missing) > 0:
            ready.append(f"{spares} spare{'s get parts' if spares > 1 else ' gets a part'} of the state")
        gone = [f"{leaving} of {len(present)} ranks leave"] if leaving else []
        again = [f"{situation.compute} ranks compute from now on, and {situation.computing} did"] if reshared else []
        grows = newcomers or (reshared and situation.compute > situation.computing)
        return Formation(Decision("grow" if grows else "shrink", ", ".join(ready + gone + again)), _in_order(chosen, situation))

    def judge(self, losses: Sequence[Loss], now_s: float) -> Decision:
        recent = [loss for loss in losses if not loss.injected and now_s - loss.at_s <= BUDGET_S]
        if not recent:
            return Decision("go_on", "no loss that chaos did not inject")
        for what, count, limit in self._counts(recent):
            if count >= limit:
                often = f"{count} times in {BUDGET_S:g} s (limit {limit})"
                reason = f"crash loop: {what} was lost {often}; last error: {recent[-1].detail}"
                return Decision("give_up", reason, Figures({"count": float(count), "limit": float(limit)}))
        return Decision("go_on", "within all budgets")

    def _counts(self, recent: Sequence[Loss]) -> list[tuple[str, int, int]]:
        """(loss, its number, its limit), the most telling first."""
        budgets = self.budgets
        shards = Counter((loss.step, loss.shard) for loss in recent if loss.shard >= 0)
        slots = Counter(loss.slot for loss in recent)
        nodes = Counter(loss.node for loss in recent)
        last = recent[-1]
        fruitless = sum(1 for loss in recent if loss.slot == last.slot and loss.committed == last.committed)
        out = [(f"the rank that computed shard {shard} of step {step}", n, budgets.shard) for (step, shard), n in shards.most_common(1)]
        out.append((f"slot {last.slot}, with no step committed in between,", fruitless, budgets.slot_fruitless))
        out += [(f"slot {slot}", n, budgets.slot) for slot, n in slots.most_common(1)]
        out += [(f"a rank of node {node}", n, budgets.node) for node, n in nodes.most_common(1)]
        return [*out, ("a rank", len(recent) - _lost_together(recent), budgets.total)]


def _lost_together(recent: Sequence[Loss]) -> int:
    """Losses that add nothing to the total: a domain that is lost with all of its ranks is one loss."""
    last_s, repeats = dict[str, float](), 0
    for loss in recent:
        widest = loss.domain.partition(SEPARATOR)[0]
        if widest:
            repeats += loss.at_s - last_s.get(widest, -math.inf) <= WINDOW_S
            last_s[widest] = loss.at_s
    return repeats


class RestartAll(ReformPromoteRegrow):
    """After any loss all ranks start again from the newest durable checkpoint, as most training systems do: for comparisons."""

    def form(self, situation: Situation, now_s: float) -> Formation:
        """Action ``restart`` names the survivors, which have to go. Later it is the base class, which waits for the full world."""
        left = tuple(candidate.member for candidate in situation.candidates if candidate.in_view)
        if left:
            survivors = Figures({"survivors": float(len(left)), "world": float(situation.world)})
            return Formation(Decision("restart", f"a rank was lost: the {len(left)} survivors start again with it", survivors), left)
        return super().form(situation, now_s)


RECOVERIES: dict[str, type[ReformPromoteRegrow]] = {"in-place": ReformPromoteRegrow, "restart": RestartAll}
"""Policies by the names in settings and commands."""


def _holds_state(candidate: Candidate) -> bool:
    return candidate.state is not None and not candidate.dirty


def _in_order(chosen: Sequence[Candidate], situation: Situation) -> tuple[Member, ...]:
    """The members in the order of view ranks."""
    size = len(situation.coordinates)
    if size > 1:
        of_stage = size // len(groups.by_stage(situation.coordinates))
        return tuple(candidate.member for candidate in groups.in_order(groups.in_groups(chosen, of_stage)))
    return ordered(chosen, situation.replica_size, replicated=situation.replicated)


def _first(situation: Situation) -> list[Candidate]:
    """Ranks that go on at once. A newcomer has no state for its first step, which would wait for it: it joins beside the next step.

    There are two exceptions: too few ranks without it, or a gain from it. It helps when newcomers are more than half of the view, or each
    rank holds a part of the state.
    """
    if len(situation.coordinates) > 1:
        ranked = _preferred(situation.candidates, 1)
        return groups.first(situation, ranked, [candidate for candidate in ranked if _holds_state(candidate)])
    size = situation.replica_size
    known = [candidate for candidate in _preferred(situation.candidates, size) if candidate.in_view or _holds_state(candidate)]
    fresh = [candidate for candidate in situation.candidates if not candidate.in_view and not _holds_state(candidate)]
    chosen = known[: situation.world + situation.spares] + joining(fresh, known, situation.world - len(known), size)
    left = [candidate for candidate in chosen if candidate.in_view or _holds_state(candidate)]
    enough = len(left) >= situation.min_ranks and not outnumbered(len(chosen) - len(left), len(chosen)) and any(map(_holds_state, left))
    return left if situation.replicated and enough else chosen


def _newcomers(waiting: Sequence[Candidate], staying: Sequence[Candidate], room: int, situation: Situation) -> list[Candidate]:
    """Up to ``room`` of ``waiting``: first those that compute, then spares that can keep a part of the state."""
    size, most = situation.replica_size, max(0, situation.world - len(staying))
    computing = joining(waiting, staying, min(room, most), size)
    spares = [candidate for candidate in waiting if candidate.keeps and candidate not in computing]
    return computing + joining(spares, [*staying, *computing], room - len(computing), size)


def _preferred(candidates: Sequence[Candidate], size: int) -> list[Candidate]:
    """Holders of the newest clean state first, then other survivors. Among equals, ranks whose nodes go come last, and the first groups and
    lower slots first."""

    def rank(candidate: Candidate) -> tuple[bool, int, int, bool, bool, int, int]:
        state = candidate.state
        held = (-state.history, -state.step) if state is not None and _holds_state(candidate) else (0, 0)
        group = candidate.view_rank // size if size > 1 and candidate.view_rank >= 0 else 0
        goes = not math.isinf(candidate.goes_in_s)
        return (not _holds_state(candidate), *held, not candidate.in_view, goes, group, candidate.member.slot)

    return sorted(candidates, key=rank)


@dataclass(frozen=True, slots=True)
class Delayed:
    """As ``policy``, but survivors wait ``delay_s`` from the loss before they form a view. A first view is not delayed."""

    policy: RecoveryPolicy
    delay_s: float

    def form(self, situation: Situation, now_s: float) -> Formation:
        """See ``RecoveryPolicy``."""
        until_s = situation.since_s + self.delay_s
        if now_s < until_s and any(candidate.in_view for candidate in situation.candidates):
            reason = f"like a fleet that takes {self.delay_s:g} s longer to detect a loss and to form groups"
            return Formation(Decision("wait", reason, Figures({"delay_s": self.delay_s}), until_s))
        return self.policy.form(situation, now_s)

    def grow(self, situation: Situation, now_s: float) -> Formation:
        """See ``RecoveryPolicy``."""
        return self.policy.grow(situation, now_s)

    def judge(self, losses: Sequence[Loss], now_s: float) -> Decision:
        """See ``RecoveryPolicy``."""
        return self.policy.judge(losses, now_s)
