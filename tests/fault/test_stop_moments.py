"""Runs with long steps, long evaluations and slow saves are told to stop at random moments, in each way that there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.stops import GRACE_S, WAYS, stop_once

FIRST = int(os.environ.get("FLEET_FIRST_MOMENT", "0"))
COUNTS = {"signal": 30, "pause": 10, "run_s": 10, "budget": 10}
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("way", "number"), [(way, number) for way in WAYS for number in range(COUNTS[way])])
def test_the_last_commit_is_kept_and_all_processes_are_gone(tmp_path: Path, way: str, number: int) -> None:
    """The grace is a promise of time: a machine that is busy with other things breaks it."""
    found = stop_once(tmp_path / "run", way, FIRST + number)
    assert found.in_order, found
    assert found.took_s < GRACE_S, found
