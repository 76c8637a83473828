"""What a loop does of its own behind a commit may take long: it is no hang, and does not last for ever either."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.machine.core import FleetMachine
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Gathering
from fleet.protocol.records import DecisionMade, ProcessLost
from fleet.simulation.plan import FAST, Plan, Trouble, small
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, simulate

LIMITS = replace(FAST, progress_s=40.0, collective_s=60.0)
LEARNED_S = 2 * FAST.form_s
"""Steps take some milliseconds: the time-out has fallen to its floor before anything takes long."""


def plan(world: int, between_s: float, seed: int = 1, sharding: str = "none") -> Plan:
    settings = replace(small(world, nodes=1), timeouts=LIMITS, optimizer_sharding=sharding)
    return Plan(seed=seed, settings=settings, steps=300, capacity=4, between_s=(140, between_s), save_every_s=30.0, quiet_s=200.0)


def called_out(outcome: Outcome) -> list[DecisionMade]:
    return [each for each in outcome.world.journal if isinstance(each, DecisionMade) and isinstance(each.payload, Gathering)]


@pytest.mark.parametrize("sharding", ["none", "zero1"])
@pytest.mark.parametrize("world", [1, 3])
def test_what_takes_long_behind_a_commit_is_no_hang(world: int, sharding: str) -> None:
    outcome = completed(plan(world, 3 * LEARNED_S, sharding=sharding))
    assert not called_out(outcome)
    assert not [each for each in outcome.world.journal if isinstance(each, ProcessLost)]


def test_a_loss_meanwhile_costs_no_other_rank() -> None:
    outcome = completed(plan(3, 3 * LEARNED_S), Trouble(kind="kill", point="between", step=140, slot=1))
    assert len([each for each in outcome.world.journal if isinstance(each, ProcessLost)]) == 1


def test_it_is_one_when_it_takes_as_long_as_no_step_may() -> None:
    [first, *_] = called_out(simulate(plan(2, 2 * LIMITS.progress_s)))
    assert isinstance(first.payload, Gathering) and first.payload.why is GatherWhy.STUCK


def test_the_time_out_of_a_step_stays_as_short_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show nothing: where a rank does not say that it is behind a commit, it is called out."""
    right = FleetMachine.handle

    def deaf(self: FleetMachine, event: object, now_s: float) -> object:
        pulses = getattr(event, "pulses", None)
        if pulses is not None:
            event = replace(event, pulses=tuple(replace(pulse, between=False) for pulse in pulses))  # type: ignore[type-var]
        return right(self, event, now_s)  # type: ignore[arg-type]

    monkeypatch.setattr(FleetMachine, "handle", deaf)
    assert called_out(simulate(plan(3, 3 * LEARNED_S)))
