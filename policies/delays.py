"""A recovery policy that takes its time: what a large fleet would need, put into a small one on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.protocol.decisions import Decision, Delay
from fleet.protocol.ports import RecoveryPolicy
from fleet.protocol.types import Formation, Loss, Situation


@dataclass(frozen=True, slots=True)
class Delayed:
    """As ``policy``, but survivors wait ``delay_s`` from the loss before they form a view. A first view is not delayed."""

    policy: RecoveryPolicy
    delay_s: float

    def form(self, situation: Situation, now_s: float) -> Formation:
        """See ``RecoveryPolicy``."""
        until_s = situation.since_s + self.delay_s
        if now_s < until_s and any(candidate.in_view for candidate in situation.candidates):
            reason = f"as a fleet would that takes {self.delay_s:g} s longer to detect a loss and to form groups"
            return Formation(Decision("wait", reason, Delay(self.delay_s), until_s))
        return self.policy.form(situation, now_s)

    def grow(self, situation: Situation, now_s: float) -> Formation:
        """See ``RecoveryPolicy``."""
        return self.policy.grow(situation, now_s)

    def judge(self, losses: Sequence[Loss], now_s: float) -> Decision:
        """See ``RecoveryPolicy``."""
        return self.policy.judge(losses, now_s)
