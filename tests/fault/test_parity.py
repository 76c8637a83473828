"""Models in chunks with parity in the place of copies, on real processes: one lost rank of a family is made again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import LineageBegun, ViewPublished
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import moments, trains
from tests.support.moments import IN_THE_FAMILY, MOMENTS, PARITY_MOMENTS
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed
from tests.unit.test_happenings import told

SOON = CheckpointSettings(policy="fixed", interval_s=0.1)
STEPS = {"width": "1021", "units": "yes", "steps": "14", "pause_s": "0.01"}


def cut(folder: Path, **changes: Any) -> RunSettings:
    options = {**STEPS, **changes.pop("options", {})}
    return settings(folder, **{"optimizer_sharding": "fsdp", "parity": 3, "world": 4, "options": options, **changes})


@pytest.fixture(scope="module")
def whole(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run of whole replicas, of another world size."""
    return undisturbed(lambda folder: cut(folder, world=1, optimizer_sharding="none", parity=0))


@pytest.mark.parametrize(("world", "parity"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 2)])
def test_parity_changes_no_bit(world: int, parity: int, tmp_path: Path, whole: str) -> None:
    outcome, records, digest = train_through(trains.plain, cut(tmp_path, world=world, parity=parity), tmp_path)
    survived(outcome, records, digest, whole, other_ratio=0.05)


@pytest.mark.parametrize("train", [trains.dies_in_forward, trains.dies_in_backward, trains.dies_between_sums_and_commit])
def test_a_rank_lost_at_a_moment_of_the_step(train: Callable[[Any], None], tmp_path: Path, whole: str) -> None:
    outcome, records, digest = train_through(train, cut(tmp_path), tmp_path)
    survived(outcome, records, digest, whole, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(LineageBegun, records)


def test_a_rank_is_killed_between_steps(tmp_path: Path, whole: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.step >= 5)
        fleet.kill(2)

    outcome, records, digest = train_through(trains.plain, cut(tmp_path), tmp_path, misfortune)
    survived(outcome, records, digest, whole, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(LineageBegun, records)


SINGLE = {name: one for name, one in (MOMENTS | PARITY_MOMENTS).items() if not one.second}
DOUBLE = {name: one for name, one in PARITY_MOMENTS.items() if one.second}
FEW = ("in-a-forward", "in-the-sum", "before-ready", "behind-ready", "before-apply", "behind-apply", "at-the-end")


def held(train: Callable[[Any], None], chosen: RunSettings, folder: Path, truth: str) -> None:
    """It was struck, went on in another view, and lost no state."""
    outcome, records, digest = train_through(train, chosen, folder)
    assert (Path(chosen.options["flags"]) / "second").exists(), "no rank ever came to the moment"
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(LineageBegun, records)


@pytest.mark.parametrize("name", [name for name in SINGLE if name in FEW or name in PARITY_MOMENTS])
def test_a_rank_is_killed(name: str, tmp_path: Path, whole: str) -> None:
    """Each is owner of its chunk, and keeps parity of the others'."""
    held(moments.dies_at, cut(tmp_path, world=3, parity=2, nodes=1, options={"moment": name}), tmp_path, whole)


@pytest.mark.parametrize("name", DOUBLE)
def test_a_second_one_of_another_family_is_killed_in_the_view_that_follows(name: str, tmp_path: Path, whole: str) -> None:
    held(moments.dies_at, cut(tmp_path, world=4, parity=1, options={"moment": name}), tmp_path, whole)


@pytest.mark.parametrize("name", IN_THE_FAMILY)
def test_a_second_one_of_the_family_in_recovery_goes_back_to_the_newest_checkpoint(name: str, tmp_path: Path, whole: str) -> None:
    outcome, records, digest = train_through(moments.dies_at, cut(tmp_path, checkpoint=SOON, options={"moment": name}), tmp_path)
    assert (tmp_path / "flags" / "second").exists(), "no rank ever came to the moment"
    survived(outcome, records, digest, whole, other_ratio=0.05)
    assert of(LineageBegun, records)


def both(*slots: int) -> Callable[[PlainFleet], None]:
    def misfortune(fleet: PlainFleet) -> None:
        fleet.wait_for(lambda: fleet.coordinator.machine.state.checkpoints.newest_id and fleet.step >= 6)
        for slot in slots:
            fleet.kill(slot)

    return misfortune


def test_two_of_different_families_may_be_lost_at_once(tmp_path: Path, whole: str) -> None:
    """Slots of one node are in different families, of which there are two of two ranks."""
    outcome, records, digest = train_through(trains.plain, cut(tmp_path, parity=1, checkpoint=SOON), tmp_path, both(0, 2))
    survived(outcome, records, digest, whole, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(LineageBegun, records)


@pytest.mark.parametrize("slots", [(0, 1), (0, 1, 3)])
def test_two_of_one_family_at_once_go_back_to_the_newest_checkpoint(slots: tuple[int, ...], tmp_path: Path, whole: str) -> None:
    chosen = cut(tmp_path, parity=1 if len(slots) == 2 else 3, checkpoint=SOON)
    outcome, records, digest = train_through(trains.plain, chosen, tmp_path, both(*slots))
    survived(outcome, records, digest, whole, other_ratio=0.05)
    why = "some of the parameters was lost: of one family more than one rank, and parity makes up for one"
    assert of(LineageBegun, records)[0].reason == why
    assert any("goes on from step" in line and line.endswith(why) for line in told(records)), "the terminal does not say why"


@pytest.mark.parametrize("train", [trains.dies_in_forward, trains.dies_in_backward, trains.dies_between_sums_and_commit])
def test_gradients_that_leave_in_the_backward(train: Callable[[Any], None], tmp_path: Path, whole: str) -> None:
    outcome, records, digest = train_through(train, cut(tmp_path, gradient_sync="shard"), tmp_path)
    survived(outcome, records, digest, whole, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(LineageBegun, records)
