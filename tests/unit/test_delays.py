"""A recovery policy that is slow on purpose."""

from __future__ import annotations

from fleet.protocol.types import Candidate, Member, Situation, StateId
from fleet.settings.run import Budgets
from policies.recovery import Delayed, ReformPromoteRegrow


def test_a_delay_holds_survivors_back_and_no_first_view() -> None:
    policy = Delayed(ReformPromoteRegrow(Budgets(), 60.0), 5.0)
    survivor, fresh = (Candidate(Member(0, 0), "n", StateId(0, 3) if in_view else None, False, in_view) for in_view in (True, False))
    waiting = policy.form(Situation((survivor,), 1, 1, 10.0, 0, None), 12.0).decision
    assert (waiting.action, waiting.valid_until_s) == ("wait", 15.0)
    assert policy.form(Situation((survivor,), 1, 1, 10.0, 0, None), 15.0).decision.action == "form"
    assert policy.form(Situation((fresh,), 1, 1, 10.0, 0, None), 12.0).decision.action == "form"
    assert policy.grow(Situation((fresh,), 1, 1, 10.0, 0, None), 12.0).decision.action == "grow"
    assert policy.judge((), 0.0).action == "go_on"
