"""A rank is killed at every moment of a step of a model that is spread over the ranks: nothing is lost, and no bit is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import moments
from tests.support.moments import MOMENTS, Moment
from tests.support.undisturbed import Undisturbed

STEPS = {"width": "1021", "units": "yes", "steps": "14", "pause_s": "0.01"}
SPARE = 3
"""The slot behind those of three ranks."""
CHECKPOINTS = ("in-a-checkpoint", "writes-a-checkpoint")


def cut(folder: Path, moment: str = "", **changes: Any) -> RunSettings:
    return settings(folder, **{"optimizer_sharding": "fsdp", "options": {**STEPS, "moment": moment}, **changes})


@pytest.fixture(scope="module")
def whole(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run of whole replicas, of another world size."""
    return undisturbed(lambda folder: cut(folder, world=1, optimizer_sharding="none"))


def held(train: Callable[[Any], None], chosen: RunSettings, folder: Path, truth: str, injected: str = "second") -> None:
    """It was struck, went on in another view, and lost no state."""
    outcome, records, digest = train_through(train, chosen, folder)
    assert (Path(chosen.options["flags"]) / injected).exists(), "no rank ever came to the moment"
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert len(of(ViewPublished, records)) >= 2
    assert not of(HistoryBegun, records)


@pytest.mark.parametrize(("name", "moment"), [(name, moment) for name, moment in MOMENTS.items() if not moment.second])
def test_a_rank_is_killed(name: str, moment: Moment, tmp_path: Path, whole: str) -> None:
    changes = {"checkpoint": CheckpointSettings(policy="fixed", interval_s=0.05)} if name in CHECKPOINTS else {}
    held(moments.dies_at, cut(tmp_path, name, world=3, nodes=1, **changes), tmp_path, whole)


def test_an_owner_is_lost_that_an_evaluation_asks_and_its_guard_has_yet_to_take_the_step(tmp_path: Path, whole: str) -> None:
    """The evaluation begins again in the next view. It waited for the guard, which waited for its rank to come there."""
    held(moments.first_evaluates, cut(tmp_path, world=3, nodes=1), tmp_path, whole, "lost")


@pytest.mark.parametrize("name", [name for name, moment in MOMENTS.items() if moment.second])
def test_a_second_one_is_killed_in_the_view_that_follows(name: str, tmp_path: Path, whole: str) -> None:
    """Two copies: of what both kept there is a third."""
    held(moments.dies_at, cut(tmp_path, name, world=4, optimizer_copies=2), tmp_path, whole)


def test_a_process_is_killed_that_takes_the_place_of_a_lost_one(tmp_path: Path, whole: str) -> None:
    """Steps take long enough that another process is up before the last."""
    chosen = cut(tmp_path, world=3, optimizer_copies=2)
    held(moments.a_joining_rank_dies, dataclasses.replace(chosen, options={**chosen.options, "pause_s": "0.25"}), tmp_path, whole)


COPIED = [name for name, moment in MOMENTS.items() if moment.second]
"""Moments from which a spare comes into the view until it has all of its part."""
KEPT = (
    "serves-a-stretch", "a-gradient-has-come", "before-the-sum", "means-travel", "before-ready", "behind-ready", "before-apply", "in-apply",
    "behind-apply", "at-the-end",
)  # fmt: skip
"""Moments of a spare that keeps a part, and computes no shard."""


@pytest.mark.parametrize(
    ("victim", "name"), [*((SPARE, name) for name in (*COPIED, *KEPT)), *((1, name) for name in COPIED), (0, "gives-the-rest")]
)
def test_a_spare_gets_or_keeps_its_part_as_a_rank_is_killed(victim: int, name: str, tmp_path: Path, whole: str) -> None:
    """Slot 0 gives the spare all but its chunks."""
    options = {**STEPS, "moment": name, "victim": str(victim)}
    held(moments.dies_beside_a_spare, cut(tmp_path, world=SPARE, spares=1, options=options), tmp_path, whole)
