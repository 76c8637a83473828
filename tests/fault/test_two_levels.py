"""Four ranks on two nodes that sum in two levels: the bits of one rank, also when one is killed at either level of a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import ProcessLost
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, settings, survived
from tests.support.plain import PlainFleet
from tests.support.two_levels import sums_in_levels

WIDE = {"width": "40000", "steps": "16", "pause_s": "0.01"}
"""So that there are several buckets."""


class InPairs(PlainFleet):
    """Slots 0 and 1 are on one node, 2 and 3 on the other."""

    def spawn(self, slot: int) -> None:
        self.spawn_on(slot, f"node{slot // 2}")


def train(chosen: RunSettings, folder: Path, kind: type[PlainFleet] = InPairs) -> tuple[Any, list[Any], str]:
    with kind(sums_in_levels, chosen, folder) as fleet:
        outcome = fleet.wait()
        digest = fleet.coordinator.machine.state.ending.record.digest
        return outcome, fleet.records(), digest


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one rank alone."""
    folder = tmp_path_factory.mktemp("alone")
    outcome, _, digest = train(settings(folder, world=1, nodes=1, options=WIDE), folder)
    assert outcome.status == "completed"
    return digest


@pytest.mark.parametrize("kind", [InPairs, PlainFleet], ids=["in pairs", "in turns"])
def test_two_levels_are_used_and_end_with_the_bits_of_one(kind: type[PlainFleet], tmp_path: Path, truth: str) -> None:
    for name, asked in (("two", True), ("one", False)):
        chosen = settings(tmp_path / name, world=4, options=WIDE, two_level_sums=asked)
        survived(*train(chosen, tmp_path / name, kind), truth, other_ratio=0.05)
        assert (tmp_path / name / "flags/levels").exists() == asked


@pytest.mark.parametrize("dies_in", ["_combined", "leaves", "pass_on"])
@pytest.mark.parametrize("chosen", [{}, {"optimizer_sharding": "zero1"}, {"overlap_cores": 0.0}], ids=["whole", "zero1", "overlap"])
def test_death_at_either_level_of_a_sum(dies_in: str, chosen: dict[str, Any], tmp_path: Path, truth: str) -> None:
    options = WIDE | {"dies_in": dies_in}
    outcome, records, digest = train(settings(tmp_path, world=4, two_level_sums=True, options=options, **chosen), tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert (tmp_path / "flags" / dies_in).exists()
    assert len(of(ProcessLost, records)) == 1
