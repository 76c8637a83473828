"""The decision core of a run, with its policies. The coordinator's process loads this module, and no other of ``fleet.app``'s roots."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.app.policy_choice import make
from fleet.machine.core import FleetMachine
from fleet.protocol.decisions import Decision
from fleet.protocol.ports import RecoveryPolicy
from fleet.protocol.types import Build
from fleet.settings.run import RunSettings
from policies.corruption import MajorityRules
from policies.interval import CheckpointInterval, LevelRates
from policies.recovery import Delayed
from policies.timeouts import ProgressTimeout
from storage.checkpoint.manifest import parse_checkpoint_id
from storage.checkpoint.parts import newest_checkpoint


def make_machine(
    settings: RunSettings, store_url: str, run: str, rates: LevelRates, resume: bool, now_s: float,
    lemons: Mapping[int, Decision], origin: str = "", build: Build | None = None,
) -> FleetMachine:  # fmt: skip
    """The decision core with its policies. A resumed run begins from its newest durable checkpoint. ``origin``, ``build``: see
    ``RunPlan``."""
    recovery: RecoveryPolicy = make("recovery", settings)
    if settings.form_delay_s:
        recovery = Delayed(recovery, settings.form_delay_s)
    peers = CheckpointInterval.of_copies(settings)
    newest = newest_checkpoint(store_url, run) if resume else None
    if origin and newest is None:
        newest = origin, parse_checkpoint_id(origin.rpartition("/")[2])[0]
    return FleetMachine(
        settings, recovery, make("placement", settings), make("checkpoint", settings), build=build, straggler=make("straggler", settings),
        progress=ProgressTimeout.of(settings), corruption=MajorityRules(), lemons=lemons, checkpoint=newest, peers=peers,
        rates=rates, now_s=now_s,
    )  # fmt: skip
