"""A run that lost ranks ends with the bits of its fault-free twin, of any world size. The control: the native reduction does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fleet.protocol.records import ViewPublished
from fleet.settings.run import RunSettings
from fleet.simulation.rng import stream
from tests.fault.test_bad_luck import after, of, settings, train_through
from tests.support import trains
from tests.support.plain import PlainFleet


def storm(seed: int, world: int) -> list[tuple[int, int]]:
    """(step, slot) of two or three kills, drawn from the seed."""
    draw = stream(seed, "kills")
    return sorted((draw.randrange(3, 30), draw.randrange(world)) for _ in range(draw.randrange(2, 4)))


def inject(fleet: PlainFleet, kills: list[tuple[int, int]]) -> None:
    for step, slot in kills:
        after(step)(fleet)
        fleet.wait_for(lambda slot=slot: fleet.processes[slot].is_alive())  # it may be the replacement's turn, which is not up yet
        fleet.kill(slot)


def digests(seed: int, folder: Path, reduction: str = "tree") -> tuple[str, str, int]:
    """(digest under faults at world 4, digest of a fault-free twin at a world of 1, 2, 3 or 5, number of views of the first)."""
    norm = {"norm": ("batch", "layer")[seed % 2]}
    chosen: RunSettings = settings(folder / "run", world=4, seed=seed, reduction=reduction, options=norm)
    outcome, records, under_faults = train_through(trains.plain, chosen, folder / "run", lambda fleet: inject(fleet, storm(seed, 4)))
    assert outcome.status == "completed", outcome
    world = (1, 2, 3, 5)[seed % 4] if reduction == "tree" else 4
    twin = dataclasses.replace(settings(folder / "twin", world=world, options=norm), seed=seed, reduction=reduction)
    outcome, _, fault_free = train_through(trains.plain, twin, folder / "twin")
    assert outcome.status == "completed", outcome
    return under_faults, fault_free, len(of(ViewPublished, records))


@pytest.mark.parametrize("seed", range(20))
def test_faults_and_world_size_change_no_bit(seed: int, tmp_path: Path) -> None:
    under_faults, fault_free, views = digests(seed, tmp_path)
    assert views >= 2, "no kill changed the view"
    assert under_faults == fault_free


def test_the_native_reduction_is_not_bit_identical(tmp_path: Path) -> None:
    """The control: were the digest blind, or the faults harmless, this would be equal too."""
    under_faults, fault_free, views = digests(0, tmp_path, reduction="native")
    assert views >= 2
    assert under_faults != fault_free
