"""The coordinator and agents stand still or are killed, and their words come late: every invariant holds, and old words change nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fleet.machine.roster import STOOD_STILL
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import daemons_plan
from tests.simulation.runs import simulate
from tests.simulation.test_mutations import first_broken, words_of_the_dead_count

MOST = 60


def test_in_these_seeds_coordinators_and_agents_stand_still_and_are_killed() -> None:
    """Else the test above shows little."""
    outcomes = [simulate(daemons_plan(seed), keep_trace=True) for seed in range(MOST)]
    fired = Counter(line.split()[2] for outcome in outcomes for line in outcome.trace if " TROUBLE " in line)
    assert all(fired[kind] > MOST // 10 for kind in ("stop_coordinator", "coordinator", "stop_agent", "kill_agent", "one_way")), fired


def run(*troubles: Trouble, seed: int = 1, on_partition: str = "go-on", **changes: Any) -> Outcome:
    """Four ranks on two hosts, in the middle of a long run."""
    settings = replace(small(4, nodes=2), on_partition=on_partition)
    plan = Plan(seed=seed, settings=settings, steps=150, capacity=4, shard_s=0.03, save_every_s=2.0)
    return simulate(with_troubles(replace(plan, **changes), troubles))


def lost(outcome: Outcome) -> int:
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return sum(isinstance(record, ProcessLost) for record in outcome.world.journal)


def views(outcome: Outcome) -> int:
    return sum(isinstance(record, ViewPublished) for record in outcome.world.journal)


@pytest.mark.parametrize("duration_s", [0.1, 0.4, 3.0, 8.0])
def test_training_goes_on_while_the_coordinator_stands_still(duration_s: float) -> None:
    for seed in range(2):
        outcome = run(Trouble(kind="stop_coordinator", at_s=3.0, duration_s=duration_s), seed=seed)
        assert (lost(outcome), views(outcome)) == (0, 1)
        excused = any(isinstance(record, DecisionMade) and record.action == "excuse" for record in outcome.world.journal)
        assert excused == (duration_s > STOOD_STILL * outcome.world.settings.timeouts.heartbeat_s)


@pytest.mark.parametrize("on_partition", ["go-on", "stall"])
def test_an_agent_that_stands_still_costs_its_ranks_only_where_nobody_waits(on_partition: str) -> None:
    for seed in range(2):
        assert lost(run(Trouble(kind="stop_agent", at_s=3.0, node=1, duration_s=0.5), seed=seed, on_partition=on_partition)) == 0
        gone = lost(run(Trouble(kind="stop_agent", at_s=3.0, node=1, duration_s=4.0), seed=seed, on_partition=on_partition))
        assert gone == (0 if on_partition == "stall" else 2)


def test_an_agent_that_is_killed_costs_the_ranks_of_its_node() -> None:
    for seed in range(2):
        outcome = run(Trouble(kind="kill_agent", at_s=3.0, node=1, duration_s=1.0), seed=seed)
        assert lost(outcome) == 2 and not any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.6])
def test_words_of_a_dead_coordinator_that_come_late_change_nothing(after_s: float) -> None:
    """What it has sent to a node that cannot hear it arrives when another coordinator has been at work for a while."""
    for seed in range(4):
        outcome = run(
            Trouble(kind="kill", at_s=2.9, slot=0), Trouble(kind="one_way", at_s=3.0, nodes=(1,), into=True, closes_s=0.3, duration_s=1.0),
            Trouble(kind="coordinator", at_s=3.0 + after_s, duration_s=0.1), seed=seed,
        )  # fmt: skip
        assert lost(outcome) <= 3 and outcome.world.deaths.count == 1


# ---- each invariant can fail -------------------------------------------------------------------------------------------------------------


def test_excused_is_broken_by_a_coordinator_that_counts_what_it_could_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.machine.ticks._excuse", lambda machine, gap_s, now_s: None)
    monkeypatch.setattr("fleet.machine.partitions.look_around", lambda machine, now_s: None)
    assert "excused" in {run(Trouble(kind="stop_coordinator", at_s=3.0, duration_s=4.0), seed=seed).broken for seed in range(6)}


def test_a_coordinator_that_believes_old_words_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent that stood still has kept is said after its ranks were given up and replaced."""
    words_of_the_dead_count(monkeypatch)
    caught, met = first_broken(range(MOST), ("stale",), lambda seed: simulate(daemons_plan(seed)))
    assert caught, met
