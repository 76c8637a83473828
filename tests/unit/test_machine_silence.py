"""Whom the machine gives up because nothing is heard of it, and whom it does not."""

from __future__ import annotations

from dataclasses import replace

from fleet.protocol.causes import ProcessEnded
from fleet.protocol.events import Heartbeat, Pulse, Tick
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Evict, Instruction, Quiesce
from fleet.protocol.records import DecisionMade
from fleet.protocol.types import StateId
from fleet.settings.run import Timeouts
from tests.unit.test_machine import STEP_3, Bench, member, only


def test_a_silent_rank_is_evicted_and_a_starting_one_may_be_silent_for_longer() -> None:
    bench = Bench().start(STEP_3)
    bench.join(9, "starting")
    limit_s = bench.settings.timeouts.heartbeat_s
    said = bench.through(limit_s + 0.1, 2, 9)
    assert [one.member for one in said if isinstance(one, Evict)] == [member(2)]


def test_after_the_coordinator_stood_still_nobodys_silence_counts() -> None:
    """Its machine was paused, and the ranks' with it: all were given up at once, as none had been heard of for longer than allowed."""
    bench = Bench().start(STEP_3)
    limits = bench.settings.timeouts
    still_s = limits.node_s + limits.heartbeat_s
    everyone = range(bench.settings.world)
    assert not [one for one in bench.after(still_s, *everyone) if isinstance(one, Evict | Quiesce)]
    assert "excuse" in {decision.action for decision in bench.of(DecisionMade)}
    assert not bench.through(limits.heartbeat_s - 0.5, 2, 3)
    assert {one.member.slot for one in bench.through(1.0, 2, 3) if isinstance(one, Evict)} == {2, 3}


def test_a_coordinator_that_stood_still_for_most_of_a_heartbeat_gives_nobody_up() -> None:
    """Found by the simulated run daemons 2078400198: it stood still for 0.87 s of 1 s, and a rank had been silent for 0.3 s before."""
    bench = Bench(timeouts=replace(Timeouts(), heartbeat_s=1.0)).start(STEP_3)
    bench.through(0.3, 2)
    assert not [one for one in bench.after(0.9, 2) if isinstance(one, Evict)]
    assert [one.member for one in bench.through(0.8, 2) if isinstance(one, Evict)] == [member(2)]


def test_the_time_to_leave_a_group_is_longer_by_what_the_coordinator_stood_still() -> None:
    bench = Bench().start(STEP_3)
    bench.send(ProcessLost(member(0), ProcessEnded(), at_s=bench.now_s))
    bench.quiesce([1, 2], STEP_3)
    assert not [one for one in bench.after(bench.settings.timeouts.quiesce_s + 1.0) if isinstance(one, Evict)]
    said = bench.through(bench.settings.timeouts.quiesce_s)
    assert [one.member for one in said if isinstance(one, Evict)] == [member(3)]


def test_when_nobody_moves_all_are_called_out_and_who_does_not_answer_is_evicted() -> None:
    bench = Bench().start(STEP_3)
    limits = bench.settings.timeouts
    bench.through(limits.progress_s + 1)
    pulses = tuple(Pulse(member(slot), 1, STEP_3, 0.0, limits.progress_s + 1) for slot in range(4))
    said = bench.send(Heartbeat("n0", pulses), Heartbeat("n1", ()), Tick())
    assert not [one for one in said if isinstance(one, Evict)]
    assert len(only(Quiesce, said).members) == 4
    bench.quiesce([0, 1, 3], STEP_3)
    assert only(Evict, bench.through(limits.quiesce_s + 0.1)).member == member(2)


def test_a_long_call_of_one_rank_is_no_hang_of_the_others() -> None:
    bench = Bench().start(STEP_3)
    late_s = bench.settings.timeouts.progress_s + 1
    bench.now_s += late_s
    pulses = tuple(Pulse(member(slot), 1, STEP_3, 0.0, late_s, stepping=slot != 0) for slot in range(4))
    assert not bench.send(Heartbeat("n0", pulses), Heartbeat("n1", ()), Tick())


def test_who_waited_in_the_last_view_has_its_time_in_the_next_one() -> None:
    """All answered, and trained on: agents still told of the wait before, and the first rank was evicted at once for it."""
    bench = Bench().start(STEP_3)
    late_s = bench.settings.timeouts.progress_s + 1
    bench.through(late_s)
    waited = lambda age_s: tuple(Pulse(member(slot), 1, STEP_3, 0.0, age_s) for slot in range(4))  # noqa: E731
    bench.send(Heartbeat("n0", waited(late_s)), Heartbeat("n1", ()), Tick())
    bench.quiesce([0, 1, 2, 3], STEP_3)
    bench.form([member(slot) for slot in range(4)], STEP_3)
    assert not bench.send(Heartbeat("n0", waited(late_s + 0.5)), Heartbeat("n1", ()), Tick())
    evicted, begun_s = list[Evict](), bench.now_s
    while not evicted and bench.now_s < begun_s + 2 * late_s:
        bench.now_s += 0.5
        said = bench.send(Heartbeat("n0", waited(late_s + bench.now_s - begun_s)), Heartbeat("n1", ()), Tick())
        evicted = [one for one in said if isinstance(one, Evict)]
    assert bench.now_s - begun_s > late_s - 2.0, "each view has the whole time"
    assert [one.member for one in evicted] == [member(0)], "one has to go when it comes to that again"


def test_a_first_step_is_waited_for_as_long_as_any_even_if_steps_are_quick() -> None:
    """The time-out had followed the steps of the others; a newcomer compiled for longer, and was evicted, as was each after it."""
    bench = Bench().start(STEP_3)
    ceiling_s = bench.settings.timeouts.progress_s
    bench.machine.state.progress.limit_s = ceiling_s / 3
    bench.through(ceiling_s)

    def stands(state: StateId, age_s: float) -> list[Instruction]:
        pulses = tuple(Pulse(member(slot), 1, state, 0.0, age_s) for slot in range(4))
        return bench.send(Heartbeat("n0", pulses), Heartbeat("n1", ()), Tick())

    assert not stands(STEP_3, ceiling_s / 2), "all are at their first step"
    later = StateId(STEP_3.history, STEP_3.step + 1)
    stands(later, 0.0)
    assert only(Quiesce, stands(later, ceiling_s / 2)), "a later one is to be quick"


def test_who_is_at_its_first_step_is_waited_for_where_a_fresh_process_has_to_begin() -> None:
    """Each was ended after ``start_s`` for the next one, which took as long."""
    bench = Bench(world=2).start(STEP_3)
    bench.send(ProcessLost(member(0), ProcessEnded(), at_s=bench.now_s))
    bench.quiesce([1], STEP_3, dirty=True)
    bench.join(0, "fresh")
    said = bench.through(3 * bench.settings.timeouts.start_s)
    assert not [one for one in said if isinstance(one, Evict)]
