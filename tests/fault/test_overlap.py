"""Ranks whose gradients are on their way while they compute: one is lost then, or changes what it has sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.protocol.records import ProcessLost, ViewPublished
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import trains

WIDE = {"width": "40000", "steps": "16", "pause_s": "0.01"}
"""So that there are several buckets."""


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_death_in_a_backward_whose_first_buckets_were_sent(sharding: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", world=3, options=WIDE, optimizer_sharding=sharding)
    outcome, records, digest = train_through(trains.dies_after_its_first_buckets, chosen, tmp_path / "run")
    _, _, truth = train_through(trains.plain, settings(tmp_path / "twin", world=2, options=WIDE), tmp_path / "twin")
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert (tmp_path / "run/flags/first buckets").exists()
    assert len(of(ProcessLost, records)) == 1


def test_a_gradient_that_grows_after_it_was_sent_costs_a_view_and_no_bit(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", world=3, options=WIDE)
    outcome, records, digest = train_through(trains.grows_late, chosen, tmp_path / "run")
    _, others, truth = train_through(trains.grows_late, settings(tmp_path / "twin", world=1, options=WIDE), tmp_path / "twin")
    survived(outcome, records, digest, truth, other_ratio=0.05)
    assert not of(ProcessLost, records)
    assert len(of(ViewPublished, records)) > len(of(ViewPublished, others))
