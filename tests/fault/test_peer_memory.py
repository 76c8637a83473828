"""All ranks are lost, and the agents' memory holds the state: the run goes on from there, on real processes, to the bits of its twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.levels import PEERS
from fleet.protocol.records import UNSAVED, CheckpointRecord, HistoryBegun, ViewPublished
from fleet.settings.run import CheckpointSettings
from tests.fault.test_bad_luck import fault_free, of, settings, survived, train_through
from tests.support import trains
from tests.support.plain import PlainFleet

__all__ = ["fault_free"]

SELDOM = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=0.2)


def copies_made(fleet: PlainFleet) -> list[CheckpointRecord]:
    return [record for record in of(CheckpointRecord, fleet.records()) if record.level == PEERS and record.phase == "durable"]


def lose_all_ranks(fleet: PlainFleet) -> None:
    fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.newest_state.step > 0)
    for slot in range(fleet.settings.slots):
        fleet.kill(slot)


def views_from_memory(records: list[Any]) -> list[Any]:
    return [record for record in of(ViewPublished, records) if (record.view.checkpoint or "").startswith("peers://")]


@pytest.mark.parametrize("copies", [1, 2])
def test_all_ranks_are_lost_and_the_run_goes_on_from_memory(tmp_path: Path, fault_free: str, copies: int) -> None:
    chosen = settings(tmp_path, nodes=3, checkpoint=SELDOM, peer_copies=copies)
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path, lose_all_ranks)
    survived(outcome, records, digest, fault_free, other_ratio=0.05)
    [view] = views_from_memory(records)
    [rollback] = of(HistoryBegun, records)
    assert rollback.from_state.step == view.view.state.step > 0
    assert all(len(targets) == copies for targets in view.view.copies)
    stored = [index for index, record in enumerate(records) if isinstance(record, CheckpointRecord) and record.level != PEERS]
    assert min(stored) > records.index(rollback), "the store has the last step alone, and had nothing to do with it"


def test_a_store_that_takes_nothing_stops_nothing_and_every_failure_is_told(tmp_path: Path, fault_free: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where the store wants a folder")
    often = CheckpointSettings(policy="fixed", interval_s=0.2)
    outcome, records, digest = train_through(trains.plain, settings(tmp_path, checkpoint=often), tmp_path)
    survived(outcome, records, digest, fault_free, other_ratio=0.05, status=UNSAVED)
    failed = [record for record in of(CheckpointRecord, records) if record.phase == "failed"]
    assert failed and "checkpoints" in failed[0].detail
    assert not [record for record in of(CheckpointRecord, records) if record.phase == "durable"]
