"""Settings that change in a running run: checked as at the start, journalled, in force at once and after a restart."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.machine.core import FleetMachine
from fleet.protocol.events import SettingChanged, Tick
from fleet.protocol.instructions import EndRun, Write
from fleet.protocol.records import DecisionMade, Record
from fleet.settings.live import LIVE, changed, parsed
from fleet.settings.run import RunSettings, Timeouts
from policies import placement
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from policies.straggler.mitigation import Mitigator


def machine(settings: RunSettings | None = None) -> FleetMachine:
    settings = settings or RunSettings()
    recovery = ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s)
    return FleetMachine(settings, recovery, placement, CheckpointInterval(), straggler=Mitigator(settings.straggler))


def written(out: list[object]) -> list[Record]:
    return [instruction.record for instruction in out if isinstance(instruction, Write)]


def test_a_change_is_journalled_in_force_and_survives_the_coordinator() -> None:
    first = machine()
    records: list[Record] = []
    for key, value in (("straggler.enabled", 0.0), ("straggler.gain", 0.5), ("checkpoint.interval_s", 7.0)):
        records += written(list(first.handle(SettingChanged(key, value), 1.0)))
    assert [(record.policy, record.action) for record in records if isinstance(record, DecisionMade)] == [("settings", "set")] * 3
    second = machine()
    second.replay(records, 2.0)
    for one in (first, second):
        policy, interval = one.state.stragglers.policy, one.state.checkpoints.store.interval
        assert isinstance(policy, Mitigator) and isinstance(interval, CheckpointInterval)
        assert policy.settings.enabled is False and policy.settings.gain == 0.5
        assert (interval.law, interval.interval_s) == ("fixed", 7.0)


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("shards", "5", "cannot change while a run goes on"),
        ("max_world", "5", "cannot change while a run goes on"),
        ("straggler.nonsense", "5", "no such setting"),
        ("straggler.enabled", "perhaps", "on or off"),
        ("straggler.changes", "2.5", "a whole number"),
        ("straggler.gain", "much", "a number"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(key: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parsed(key, text)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("straggler.gain", 1.0), ("checkpoint.interval_s", 0.0), ("timeouts.progress_s", 900.0)],
)
def test_a_value_that_would_be_refused_at_the_start_is_refused_now(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key.rpartition(".")[2].replace("progress_s", "progress_s|collective_s")):
        changed(RunSettings(), key, value)


def test_every_live_setting_exists() -> None:
    settings = RunSettings()
    for key in LIVE:
        group, _, name = key.rpartition(".")
        assert hasattr(getattr(settings, group) if group else settings, name)


def test_a_run_ends_in_order_when_its_time_is_up() -> None:
    short = machine(RunSettings(timeouts=Timeouts(heartbeat_s=1, node_s=1, quiesce_s=2, form_s=3, progress_s=4, collective_s=5, run_s=6)))
    assert not [out for out in short.handle(Tick(), 5.9) if isinstance(out, EndRun)]
    ended = [out for out in short.handle(Tick(), 6.1) if isinstance(out, EndRun)]
    assert ended and ended[0].status == "stopped" and "run_s = 6" in ended[0].reason
