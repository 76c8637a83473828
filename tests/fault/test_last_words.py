"""What ranks did last is in the journal before the run's end is: nobody listens to their agents then."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fleet.protocol.records import COMMIT, RunEnded, Spans
from tests.fault.test_bad_luck import settings, train_through
from tests.support import plain, trains

SELDOM_S, STEPS = 0.3, 30


def test_steps_that_were_not_told_yet_are_told_as_a_rank_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent tells what a rank does less often than its last steps take."""
    monkeypatch.setattr(plain, "REPORT_S", SELDOM_S)
    chosen = settings(tmp_path, world=1, nodes=1, options={"pause_s": "0.001", "steps": str(STEPS)})
    outcome, records, _ = train_through(trains.plain, chosen, tmp_path)
    assert outcome.status == "completed"
    reported = itertools.takewhile(lambda one: not isinstance(one, RunEnded), records)
    assert sum(one.codes.count(COMMIT) for one in reported if isinstance(one, Spans)) == STEPS
