"""What a user sees of a run: what its ranks print, on real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet import cli
from fleet.rank_logs import REHEARSAL, REHEARSED, RunLogs, found, logs_of
from fleet.types import Member
from tests.fault.test_bad_luck import settings, train_through
from tests.support import trains


def test_what_ranks_print_is_kept_and_told_by_rank_also_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, _, _ = train_through(trains.talks, settings(tmp_path, world=2, spares=1), tmp_path)
    assert outcome.status == "completed"
    files = found(logs_of(tmp_path))
    assert {member.slot for member in files} == {0, 1, 2}
    killed = files[Member(1, 0)].read_text().splitlines()
    assert killed[0] == "slot 1 builds its model"
    assert killed[-1] == "last words"
    assert {"mine: logged in step 5", "written past Python"} <= set(killed)
    assert "step 39 shard " in files[Member(0, 0)].read_text(), "to its last step"
    spare = files[Member(2, 0)].read_text().splitlines()
    assert spare.index(REHEARSAL) < spare.index("step 0 shard 0") < spare.index(REHEARSED)
    live = list(RunLogs(logs_of(tmp_path), 2).poll(10_000))
    assert "[rank 2] slot 2 builds its model" in live and "[rank 2] step 0 shard 0" not in live

    monkeypatch.setattr(sys, "argv", ["fleet", "logs", str(tmp_path), "--rank", "1", "--follow"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code in (0, None)
    assert said[0] == "[rank 1] slot 1 builds its model" and "[rank 1] last words" in said
    assert "[rank 1.1] slot 1 builds its model" in said
