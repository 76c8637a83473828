"""The policy to compare with, on the live machine: one loss ends every rank, and the run goes on from the newest checkpoint."""

from __future__ import annotations

from fleet.machine.core import FleetMachine
from fleet.protocol.records import HistoryBegun, ProcessLost, ViewPublished
from fleet.settings.run import RunSettings
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import World
from policies.interval import CheckpointInterval
from policies.recovery import RestartAll
from tests.simulation.runs import Placement


def machine(settings: RunSettings, plan: Plan, now_s: float) -> FleetMachine:
    recovery = RestartAll(settings.budgets, settings.timeouts.start_s)
    return FleetMachine(settings, recovery, Placement(), CheckpointInterval(law="fixed", interval_s=plan.save_every_s), now_s=now_s)


def test_one_loss_restarts_everyone() -> None:
    plan = Plan(seed=3, settings=small(4), steps=60, shard_s=0.05, save_every_s=0.5, troubles=(Trouble(kind="kill", at_s=6.0, slot=1),))
    outcome = World(plan, machine).run()
    journal = outcome.world.journal
    assert outcome.broken == "" and outcome.status == "completed", outcome.report()
    lost = [record for record in journal if isinstance(record, ProcessLost)]
    assert len(lost) == 4 and sum("start again" in str(record.cause) for record in lost) == 3
    views = [record.view for record in journal if isinstance(record, ViewPublished)]
    assert views[-1].checkpoint is not None and len(views[-1].members) == 4
    assert all(member.incarnation == 1 for member in views[-1].members)
    assert sum(isinstance(record, HistoryBegun) for record in journal) == 1
