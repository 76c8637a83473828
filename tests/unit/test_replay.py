"""`make replay`: equal commits are equal in every process, and a decision that changed is shown at its place."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.protocol.causes import Cause, ProcessEnded
from fleet.protocol.facts import FaultRecord, ProcessLost
from fleet.protocol.records import Received
from fleet.protocol.types import Fault, Member
from tests.replay import __main__ as replay
from tests.replay import transcript
from tests.simulation.runs import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
MEMBER, ENDED = Member(1, 0), ProcessEnded(-9)
FAULT, OTHER = (Fault(name, 1.0, "gpu", "kill_rank", slot=1) for name in ("gpu-1", "gpu-2"))
TRANSCRIPT = [sys.executable, "-m", "tests.replay.transcript"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of each family."""
    path = tmp_path_factory.mktemp("drawn") / "plans.jsonl"
    subprocess.run([*TRANSCRIPT, "draw", str(path), "--seeds", str(len(FAMILIES))], cwd=ROOT, check=True, timeout=120)
    return path


def test_a_run_is_the_same_in_every_process(drawn: Path, tmp_path: Path) -> None:
    """Whatever Python's hash of a text is there."""
    for number in (1, 2):
        command = [*TRANSCRIPT, "core", str(tmp_path / str(number)), "--plans", str(drawn)]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": str(number)}, check=True, timeout=240)
    assert list(replay.different([tmp_path / "1", tmp_path / "2"])) == []


def changed_checkout(folder: Path) -> Path:
    """This checkout, in which a rank that is killed at the very first loss ends the run: a planted change of one decision."""
    place = folder / "changed"
    for part in ("fleet", "policies", "actors", "chaos", "tests"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    policy = place / "policies/recovery.py"
    text = policy.read_text()
    planted = text.replace("ranks left,", "ranks are left,")
    assert planted != text
    policy.write_text(planted)
    return place


def test_a_changed_decision_is_shown_with_the_place(drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = (ROOT, changed_checkout(tmp_path))
    assert replay.compared(sides, tmp_path, "golden", "[]")
    assert not replay.compared(sides, tmp_path, "core", "[]", "--plans", str(drawn))
    said = capsys.readouterr().out
    assert "golden: 12 transcripts, 0 differ" in said and f"core: {len(FAMILIES)} transcripts, " in said
    assert "  - " in said and "ranks left," in said and "ranks are left," in said


def test_what_was_renamed_on_purpose_is_no_difference(drawn: Path, tmp_path: Path) -> None:
    renames = '[["ranks are left,", "ranks left,"]]'
    assert replay.compared((ROOT, changed_checkout(tmp_path)), tmp_path, "core", renames, "--plans", str(drawn))


def test_an_event_is_shown_alike_whether_its_record_is_another_class_or_the_same() -> None:
    """As commits before version 3 of the journal had it, and as it is since."""

    @dataclasses.dataclass(frozen=True)
    class Lost:
        member: Member
        cause: Cause
        at_s: float
        step: int
        shard: int
        detail: str

    before, now = Lost(MEMBER, ENDED, 1.5, 7, 3, "x"), ProcessLost(MEMBER, ENDED, step=7, shard=3, detail="x", at_s=1.5)
    assert transcript.shown_event(before) == transcript.shown_event(now)
    assert transcript.shown_event(now) != transcript.shown_event(dataclasses.replace(now, step=8))
    assert transcript.shown(Received(4, "Lost", 1.0)) == transcript.shown(Received(4, "ProcessLost", 1.0))


def test_a_record_is_shown_with_all_that_says_something() -> None:
    lost = ProcessLost(MEMBER, ENDED, "gpu-1", 2, 7, 3, "x", at_s=1.5, event=9)
    changed = (("fault", None), ("generation", 3), ("at_s", 1.6), ("event", 8), ("member", Member(2, 0)), ("detail", ""))
    assert all(transcript.shown(lost) != transcript.shown(dataclasses.replace(lost, **{name: value})) for name, value in changed)
    assert transcript.shown_event(FaultRecord(FAULT, "healed", ())) != transcript.shown_event(FaultRecord(OTHER, "healed", ()))


def test_the_table_of_renames_has_a_pattern_and_what_takes_its_place() -> None:
    assert replay.renames_of("# why\n\nOldName\\( => NewName(\n, field=\\d+ =>\n") == [("OldName\\(", "NewName("), (", field=\\d+", "")]
    assert all(pattern and re.compile(pattern) for pattern, _ in replay.renames_of(replay.RENAMES.read_text()))


def test_a_commit_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["replay", "no-such-commit"])
    assert replay.main() == 2
    assert "no-such-commit: git knows no such commit" in capsys.readouterr().err
