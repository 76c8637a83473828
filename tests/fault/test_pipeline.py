"""Ranks that have the layers of a model one after the other, as real processes: no number of stages or replicas changes a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import ViewPublished
from fleet.protocol.types import columns
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import after, of, settings, survived, train_through
from tests.support import stages
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed


def staged(folder: Path, world: int = 2, stage: int = 2, **changes: Any) -> RunSettings:
    options = {"steps": "10", **changes.pop("options", {})}
    chosen = {"nodes": 1, "shards": 4, "mesh": {"stage": stage}, "peer_copies": 0, "options": options}
    return settings(folder, world, **{**chosen, **changes})


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    """The digest of one rank with the whole model."""
    return undisturbed(lambda folder: staged(folder, 1, 1), stages.train)


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 2), (4, 2), (4, 4), (6, 2)])
def test_no_number_of_stages_or_replicas_changes_a_bit(world: int, stage: int, tmp_path: Path, truth: str) -> None:
    chosen = staged(tmp_path, world, stage)
    outcome, records, digest = train_through(stages.train, chosen, tmp_path)
    survived(outcome, records, digest, truth, other_ratio=0.05)
    (view,) = [one.view for one in of(ViewPublished, records)]
    assert [len(places) for places in columns(view.members).values()] == [world // stage] * stage


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_of_a_stage_is_killed(victim: int, tmp_path: Path, truth: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(4)(fleet)
        fleet.kill(victim)

    chosen = staged(tmp_path, 4, options={"pause_s": "0.2"})
    outcome, records, digest = train_through(stages.train, chosen, tmp_path, misfortune)
    survived(outcome, records, digest, truth, other_ratio=0.05)
