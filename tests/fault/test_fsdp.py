"""Models that ``fully_shard`` has cut, on real processes: through losses that leave a copy they end with the bits of whole replicas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.fault.test_bit_identity import inject, storm
from tests.fault.test_sharded_optimizer import goes_back_to_the_checkpoint
from tests.support import moments, native_fsdp, trains
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

CUT = {"width": "1021", "units": "yes"}


def cut(folder: Path, world: int = 4, **changes: Any) -> RunSettings:
    return settings(folder, world=world, **{"optimizer_sharding": "fsdp", "options": CUT, **changes})


@pytest.fixture(scope="module")
def whole(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run of whole replicas, of another world size."""
    return undisturbed(lambda folder: cut(folder, world=2, optimizer_sharding="none"))


@pytest.mark.parametrize("units", ["none", "first"])
def test_a_rank_is_lost_where_units_have_none_or_some_of_the_parameters(units: str, tmp_path: Path, whole: str) -> None:
    """All other parameters are whole on each rank, and the optimizer's state of all is in chunks, which move after the loss."""

    def misfortune(fleet: PlainFleet) -> None:
        for step, slot in ((6, 1), (20, 2)):
            fleet.wait_for(lambda step=step: fleet.step >= step)
            fleet.kill(slot)

    options = {"width": CUT["width"], "pause_s": "0.1"} | ({"units": units} if units != "none" else {})
    outcome, records, digest = train_through(trains.plain, cut(tmp_path, world=3, options=options), tmp_path, misfortune)
    survived(outcome, records, digest, whole)
    assert not of(HistoryBegun, records), "the chunks of the second one had come to others"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_loss_costs_the_shards_of_the_lost_rank_and_not_the_step(copies: int, tmp_path: Path, whole: str) -> None:
    """Gradients of each shard have gone to a guard, too, and a shard that is begun goes on when a server of its units is lost."""
    chosen = cut(tmp_path, world=3, optimizer_copies=copies)
    outcome, records, digest = train_through(moments.dies_in_its_second_shard, chosen, tmp_path)
    survived(outcome, records, digest, whole)
    notes = [path.read_text().splitlines() for path in (tmp_path / "flags").glob("shards-*")]
    noted = Counter(int(shard) for lines in notes for number, shard in map(str.split, lines) if number == "10")
    assert sorted(noted.values()) == [1] * 6 + [2] * 2, f"the lost rank had begun two shards, and the others keep theirs: {noted}"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_no_world_size_changes_a_bit(world: int, tmp_path: Path, whole: str) -> None:
    outcome, records, digest = train_through(trains.plain, cut(tmp_path, world=world), tmp_path)
    survived(outcome, records, digest, whole)


def test_the_native_reduction_of_fsdp2_is_not_bit_identical(tmp_path: Path) -> None:
    """The control: the same script of plain PyTorch has the bits of its world. So the equality above is no property of the model."""
    two, again, four = (native_fsdp.digest_of(world, tmp_path / name) for world, name in ((2, "one"), (2, "two"), (4, "three")))
    assert two == again, "it is not even the same twice, so that it says nothing about worlds"
    assert two != four


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_changes_no_bit(seed: int, tmp_path: Path, whole: str) -> None:
    kills = storm(seed, 4)
    outcome, records, digest = train_through(trains.plain, cut(tmp_path), tmp_path, lambda fleet: inject(fleet, kills))
    survived(outcome, records, digest, whole)
    assert len(of(ViewPublished, records)) >= 2, "no kill changed the view"
    guard_too = any(other != slot and later - step <= 1 for (step, slot), (later, other) in itertools.pairwise(kills))
    assert guard_too or not of(HistoryBegun, records), "state was lost although a copy was left"


@pytest.mark.parametrize("train", [trains.dies_in_forward, trains.dies_in_backward, trains.dies_between_sums_and_commit])
def test_a_rank_lost_at_a_moment_of_the_step(train: Callable[[Any], None], tmp_path: Path, whole: str) -> None:
    """Its peers gather from its guard, or take the step that it has taken: nothing is lost."""
    outcome, records, digest = train_through(train, cut(tmp_path, world=3), tmp_path)
    survived(outcome, records, digest, whole)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(HistoryBegun, records)


def test_an_owner_lost_with_its_guard_goes_back_to_the_checkpoint(tmp_path: Path, whole: str) -> None:
    """No copy is left. All ranks find so, and begin again from the parts that all had written."""
    chosen = cut(tmp_path, nodes=1, checkpoint=CheckpointSettings(policy="fixed", interval_s=0.2))
    goes_back_to_the_checkpoint(chosen, tmp_path, whole)


def test_with_two_copies_two_may_be_lost_at_once(tmp_path: Path, whole: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.step >= 10)
        for slot in (0, 1):
            fleet.kill(slot)

    chosen = cut(tmp_path, nodes=1, optimizer_copies=2)
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, whole)
    assert not of(HistoryBegun, records)


def test_a_second_backward_of_a_shard_is_not_lost(tmp_path: Path) -> None:
    """What has left at the first one is half of it: the step is computed anew, and gradients wait for the end of a shard."""
    digests = []
    for sharding in ("none", "fsdp"):
        folder = tmp_path / sharding
        folder.mkdir()
        outcome, records, digest = train_through(trains.in_halves, cut(folder, world=3, optimizer_sharding=sharding), folder)
        assert outcome.status == "completed", outcome.reason
        digests.append(digest)
    assert digests[0] == digests[1] != ""
    assert len(of(ViewPublished, records)) >= 2
