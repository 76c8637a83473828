"""A real rank that is slowed by chaos is found, gets fewer shards, and no bit of the result shows it."""

from __future__ import annotations

from pathlib import Path

from actors.asking import ask
from actors.messages import SettingWanted
from fleet.app.report import build_report
from fleet.protocol.operations import START, Operation
from fleet.protocol.records import DecisionMade, ViewPublished
from fleet.settings.live import ADDRESS_FILE
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import trains
from tests.support.plain import PlainFleet

STEPS = "300"
SEVERITY, FOR_S = 3.0, 120.0
SLOW_SLOT = 2


def slow_down(fleet: PlainFleet) -> None:
    """From step 60 on: by then the detector knows how much times waver. Before that, a setting is changed as by ``fleet runs set``."""
    (fleet.folder / ADDRESS_FILE).write_text(f"127.0.0.1:{fleet.port}")
    assert not ask(fleet.folder, SettingWanted("straggler.gain", "0.05")).refused
    assert "cannot change while a run goes on" in ask(fleet.folder, SettingWanted("shards", "5")).refused
    fleet.wait_for(lambda: fleet.step >= 60)
    process = next(process for member, process, _ in fleet.census() if member.slot == SLOW_SLOT)
    answer = fleet.call(fleet.coordinator.operate(Operation("s", "slow", START, process, duration_s=FOR_S, severity=SEVERITY)))
    assert not answer.refused


def test_a_rank_that_is_slowed_gets_fewer_shards_and_no_bit_changes(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", options={"steps": STEPS, "pause_s": "0.002", "shard_s": "0.008"})
    twin = settings(tmp_path / "twin", world=1, options={"steps": STEPS, "pause_s": "0"})
    outcome, records, digest = train_through(trains.with_waits, chosen, tmp_path / "run", slow_down)
    truth = train_through(trains.with_waits, twin, tmp_path / "twin")[2]
    survived(outcome, records, digest, truth)
    assert [record.fields for record in of(DecisionMade, records) if record.policy == "settings"] == [{"straggler.gain": 0.05}]
    found = [record for record in of(DecisionMade, records) if record.policy == "straggler"]
    accused = {int(record.fields["slot"]) for record in found if record.action == "accuse" and "compute" in record.reason}
    assert SLOW_SLOT in accused, found
    assert any(record.action == "rebalance" and record.fields["cost_rebalance"] < record.fields["cost_tolerate"] for record in found)
    reported = build_report(records).to_dict()["stragglers"]
    assert any(action["action"] == "rebalance" and action["saved_rank_s"] is not None for action in reported["actions"])
    views = [record.view for record in of(ViewPublished, records)]
    loads = [{member.slot: end - begin for member, (begin, end) in zip(view.members, view.ranges, strict=True)} for view in views]
    assert any(load[SLOW_SLOT] == 1 for load in loads), loads
