"""Models in chunks with parity in the place of copies, on real processes: one lost rank of a family is made again, in place, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import LineageBegun, ViewPublished
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through, undisturbed
from tests.support import trains
from tests.support.plain import PlainFleet

STEPS = {"width": "1021", "units": "yes", "steps": "14", "pause_s": "0.01"}


def cut(folder: Path, **changes: Any) -> RunSettings:
    options = {**STEPS, **changes.pop("options", {})}
    return settings(folder, **{"optimizer_sharding": "fsdp", "parity": 3, "world": 4, "options": options, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an undisturbed run of whole replicas, of another world size."""
    folder = tmp_path_factory.mktemp("whole")
    return undisturbed(cut(folder, world=1, optimizer_sharding="none", parity=0), folder)


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
