"""With the optimizer's state spread over the ranks, a run ends with the bits of an unsharded one, through any loss that leaves one copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import CheckpointRecord, DecisionMade, HistoryBegun, ViewPublished
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.fault.test_bit_identity import inject, storm
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed
from tests.unit.test_happenings import reported

WIDE = {"width": "1024"}
"""Thirteen blocks, so that every rank has some."""


def sharded(folder: Path, world: int = 4, **changes: Any) -> RunSettings:
    return settings(folder, world=world, optimizer_sharding="zero1", options=WIDE, **changes)


@pytest.fixture(scope="module")
def unsharded(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run without sharding, of another world size."""
    return undisturbed(lambda folder: settings(folder, world=2, options=WIDE))


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_changes_no_bit(seed: int, tmp_path: Path, unsharded: str) -> None:
    kills = storm(seed, 4)
    outcome, records, digest = train_through(trains.plain, sharded(tmp_path), tmp_path, lambda fleet: inject(fleet, kills))
    survived(outcome, records, digest, unsharded)
    assert len(of(ViewPublished, records)) >= 2, "no kill changed the view"
    guard_too = any(other != slot and later - step <= 1 for (step, slot), (later, other) in itertools.pairwise(kills))
    assert not [made for made in of(DecisionMade, records) if made.policy == "corruption"], "the first losses are large, and no jump"
    assert guard_too or not of(HistoryBegun, records), "state was lost although a copy was left"


@pytest.mark.parametrize("train", [trains.dies_between_sums_and_commit, trains.dies_beside_parameters])
def test_a_rank_lost_within_the_commit(train: Callable[[Any], None], tmp_path: Path, unsharded: str) -> None:
    """Its peers may have taken the step already, or not know that all could: they end up on one side, together."""
    chosen = sharded(tmp_path, world=3)
    outcome, records, digest = train_through(train, chosen, tmp_path)
    survived(outcome, records, digest, unsharded)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(HistoryBegun, records)
    advanced = (Path(chosen.options["flags"]) / "advanced").exists()
    assert advanced == (train is trains.dies_between_sums_and_commit)


@pytest.mark.parametrize(("norm", "keeps"), [("layer", True), ("batch", False)])
def test_a_spare_keeps_a_part_unless_a_forward_counts(norm: str, keeps: bool, tmp_path: Path) -> None:
    """BatchNorm counts batches, and a spare computes none. Its part or not, it takes the lost rank's place."""
    options = {**WIDE, "norm": norm, "pause_s": "0.1"}

    def misfortune(fleet: PlainFleet) -> None:
        def ready() -> bool:
            view, ranks = fleet.coordinator.machine.state.view, fleet.coordinator.machine.state.roster.by_slot.values()
            return view is not None and bool(view.spares if keeps else any(rank.phase == "standby" for rank in ranks))

        fleet.wait_for(lambda: fleet.step >= 4 and ready())
        fleet.kill(next(member.slot for member, _, computes in fleet.census() if computes))

    chosen = settings(tmp_path / "through", world=3, spares=1, optimizer_sharding="zero1", options=options)
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path / "through", misfortune)
    _, _, truth = train_through(trains.plain, settings(tmp_path / "calm", world=2, options=options), tmp_path / "calm")
    survived(outcome, records, digest, truth)
    assert any(one.view.spares for one in of(ViewPublished, records)) == keeps
    said = [made.reason for made in of(DecisionMade, records) if (made.policy, made.action) == ("recovery", "warn")]
    assert keeps != any("num_batches_tracked" in reason for reason in said)


def test_an_owner_lost_with_its_guard_goes_back_to_the_checkpoint(tmp_path: Path, unsharded: str) -> None:
    """No copy is left. All ranks find so, and begin again from the parts that all had written."""
    chosen = sharded(tmp_path, nodes=1, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.2))
    goes_back_to_the_checkpoint(chosen, tmp_path, unsharded)


def goes_back_to_the_checkpoint(chosen: RunSettings, folder: Path, truth: str) -> None:
    """Four ranks on one node, three of which are lost at once behind a checkpoint."""

    def misfortune(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.newest_id)
        for slot in range(3):  # of four ranks on one node, each guards one
            fleet.kill(slot)

    outcome, records, digest = train_through(trains.plain, chosen, folder, misfortune)
    survived(outcome, records, digest, truth)
    spread = "parameters" if chosen.optimizer_sharding == "fsdp" else "optimizer's state"
    why = f"some of the {spread} was lost with all ranks that kept it, its owner and its 1 copy"
    assert of(HistoryBegun, records)[0].reason == why
    assert any("goes on from step" in line and line.endswith(why) for line in reported(records)), "the terminal does not say why"
    assert any(record.phase == "durable" for record in of(CheckpointRecord, records))
