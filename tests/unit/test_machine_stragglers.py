"""What the machine keeps of ranks' times until a policy has seen them, and what it knows again after a restart."""

from __future__ import annotations

from fleet.machine.stragglers import LATE_S, Stragglers
from fleet.protocol.decisions import Prices
from fleet.protocol.events import StepsTimed
from fleet.protocol.records import DecisionMade
from fleet.protocol.slowness import Circumstances, RankTimes, Remedy
from fleet.protocol.types import Member, StateId, View
from policies.straggler.mitigation import Mitigator

A, B = Member(0, 0), Member(1, 0)


def view(generation: int = 1) -> View:
    return View(generation, (A, B), ((0, 8), (8, 16)), 0, (), StateId(0, 0), "127.0.0.1:1")


def report(member: Member, *steps: int, generation: int = 1) -> StepsTimed:
    each = tuple(1000 + step for step in steps)
    same = tuple(8 for _ in steps)
    return StepsTimed(f"node-{member.slot}", generation, 100, (RankTimes(member, steps, same, each, each, each, each),))


def judged() -> Stragglers:
    return Stragglers(Mitigator())


def test_a_step_is_judged_once_all_ranks_have_reported_it() -> None:
    kept = judged()
    kept.take(report(A, 0, 1, 2), view(), 0.0)
    assert kept.timings(view(), 0.1) is None
    kept.take(report(B, 0, 1), view(), 0.2)
    timings = kept.timings(view(), 0.3)
    assert timings is not None and timings.steps == (0, 1) and timings.members == (A, B)
    assert [[time.compute_s for time in row if time] for row in timings.rows] == [[0.001, 0.001001]] * 2
    assert kept.timings(view(), 0.4) is None


def test_a_rank_that_does_not_report_holds_nothing_up_for_long() -> None:
    kept = judged()
    kept.take(report(A, 0), view(), 0.0)
    timings = kept.timings(view(), LATE_S)
    assert timings is not None and timings.rows[1] == (None,)
    kept.take(report(B, 0), view(), LATE_S)
    assert kept.timings(view(), 3 * LATE_S) is None, "a step is judged once"


def test_times_of_another_view_do_not_count() -> None:
    kept = judged()
    kept.take(report(A, 0), view(), 0.0)
    kept.take(report(B, 0, generation=2), view(), 0.0)
    assert kept.timings(view(2), 5.0) is None
    kept.take(report(A, 5, generation=2), view(2), 6.0)
    timings = kept.timings(view(2), 8.0)
    assert timings is not None and (timings.generation, timings.steps) == (2, (5,))


def test_without_a_policy_nothing_is_kept() -> None:
    kept = Stragglers(None)
    kept.take(report(A, *range(32)), view(), 0.0)
    assert kept.timings(view(), 9.0) is None


def test_decisions_are_known_again_after_a_restart() -> None:
    kept = judged()
    kept.replay(DecisionMade("straggler", "rebalance", "", Prices({"rebalance": 3.0}, speeds=(((1, 0), 0.5),)), 10.0))
    kept.replay(DecisionMade("straggler", "tolerate", "", Prices({}, speeds=(((0, 0), 0.5),)), 11.0))
    kept.replay(DecisionMade("straggler", "evict", "", Prices({}, shunned=(("node-3", 50.0),)), 12.0))
    assert kept.speeds == {B: 0.5}
    assert not kept.admits("node-3", 49.0) and kept.admits("node-3", 50.0) and kept.admits("node-1", 0.0)
    assert kept.acted_s == [10.0, 12.0]


def test_a_policy_that_crashes_accuses_nobody() -> None:
    policy, steps = Mitigator(), judged()
    steps.take(report(A, 0), view(), 0.0)
    torn = Circumstances(view(), (), 16, (), 100.0, 0, 0.0)
    policy._answer = None  # type: ignore[assignment,method-assign]
    remedy = policy.look(steps.timings(view(), 2.0), torn, 2.0)
    assert [finding.action for finding in remedy.findings] == ["unknown"] and remedy.decision is None
    assert policy.look(None, torn, 3.0) == Remedy(), "it is said once"
