"""Links between hosts are cut: invariants hold, nobody steps on in a history that was left behind, and with `stall` all wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.machine.roster import Roster
from fleet.protocol.reach import Reach
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost
from fleet.simulation.links import Links
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import cut_plan
from tests.simulation.runs import simulate

MOST = 40


def test_these_seeds_hold_things_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above shows little."""
    right, held_up = Links.deliver, list[bool]()

    def deliver(self: Links, to: str, sources: set[str], arrive: object) -> None:
        held_up.append(not self._reach(to, sources))
        right(self, to, sources, arrive)  # type: ignore[arg-type]

    monkeypatch.setattr(Links, "deliver", deliver)
    waited = 0
    for seed in range(MOST):
        outcome = simulate(cut_plan(seed))
        waited += any(isinstance(one, DecisionMade) and one.policy == "partition" for one in outcome.world.journal)
    assert sum(held_up) > MOST and waited > MOST // 8


def cut(seed: int, on_partition: str, *, nodes: tuple[int, ...] = (1,), with_head: bool = False, duration_s: float = 14.0) -> Outcome:
    """Two ranks on two hosts, in the middle of a long run: some hosts are cut off, or the coordinator's host from both."""
    settings = replace(small(2, nodes=2), on_partition=on_partition)
    plan = Plan(seed=seed, settings=settings, steps=400, capacity=2, shard_s=0.02, save_every_s=2.0)
    trouble = Trouble(kind="cut", at_s=4.0, nodes=nodes, with_head=with_head, duration_s=duration_s)
    return simulate(with_troubles(plan, (trouble,)))


def lost(outcome: Outcome) -> int:
    return sum(isinstance(record, ProcessLost) for record in outcome.world.journal)


@pytest.mark.parametrize("seed", range(4))
def test_stall_loses_nobody_and_go_on_goes_on(seed: int) -> None:
    stalled, went_on = cut(seed, "stall"), cut(seed, "go-on")
    assert not stalled.broken and not went_on.broken, (stalled.complaint, went_on.complaint)
    assert (lost(stalled), stalled.status) == (0, "completed")
    assert lost(went_on) == 1 and went_on.status == "completed"
    assert went_on.world.clock.now_s < stalled.world.clock.now_s


@pytest.mark.parametrize("on_partition", ["go-on", "stall"])
@pytest.mark.parametrize("duration_s", [0.3, 3.0, 14.0])
def test_when_the_coordinator_is_cut_off_nothing_is_lost(on_partition: str, duration_s: float) -> None:
    for seed in range(4):
        outcome = cut(seed, on_partition, nodes=(), with_head=True, duration_s=duration_s)
        assert (outcome.broken, outcome.status, lost(outcome)) == ("", "completed", 0), outcome.complaint
        assert not any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


def test_one_history_is_broken_by_ranks_that_do_not_mind_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that gives everybody up begins anew, and those who are cut off would step on."""
    monkeypatch.setattr(Reach, "lapses", lambda self, now_s: False)
    monkeypatch.setattr("fleet.machine.partitions.look_around", lambda machine, now_s: None)
    assert {cut(seed, "go-on", nodes=(), with_head=True).broken for seed in range(4)} == {"one history"}


def test_ranks_that_mind_the_coordinator_step_in_no_other_history_although_it_gives_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.machine.partitions.look_around", lambda machine, now_s: None)
    for seed in range(4):
        outcome = cut(seed, "go-on", nodes=(), with_head=True)
        assert not outcome.broken, outcome.complaint
        assert any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


def test_all_wait_is_broken_by_a_machine_that_gives_up_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Roster.silent_ranks
    monkeypatch.setattr(Roster, "silent_ranks", lambda self, limits, now_s, by_its_agent=False: right(self, limits, now_s))
    assert {cut(seed, "stall").broken for seed in range(4)} == {"all wait"}
