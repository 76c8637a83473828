"""A twin sees what the run saw, and not what it has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet.app.plans import RunPlan
from fleet.app.recipes import home_of
from fleet.host import twin_folder
from fleet.settings.run import RunSettings

OLD_S, BEGUN_S, NEW_S = 1_000.0, 2_000.0, 3_000.0


def put(path: Path, at_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (at_s, at_s))


def aged(folder: Path, at_s: float = OLD_S) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        os.utime(root, (at_s, at_s))


def test_what_the_run_has_written_is_not_there_and_the_rest_is(tmp_path: Path) -> None:
    seen = tmp_path / "project"
    for name in ("train.py", "data/a.bin", "data/b.bin", "out/config.json", ".git/HEAD", "runs/one/journal.jsonl"):
        put(seen / name, OLD_S)
    for name in ("ckpt.pt", "out/best.pt"):
        put(seen / name, NEW_S)
    aged(seen)
    work = seen / "runs" / "one" / "twin" / "work"
    twin_folder.make(work, seen, BEGUN_S, [seen / "runs"])
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*")) == [".git", "data", "out", "out/config.json", "train.py"]
    assert (work / "data").is_symlink() and (work / "data" / "a.bin").read_text() == "x"
    assert (work / ".git").is_symlink() and (work / "train.py").is_symlink()
    assert not (work / "out").is_symlink(), "the twin makes its own best.pt there"


def test_what_the_twin_writes_touches_nothing_of_the_run(tmp_path: Path) -> None:
    seen, work = tmp_path / "project", tmp_path / "runs" / "work"
    put(seen / "out" / "best.pt", NEW_S)
    put(seen / "log.txt", NEW_S)
    aged(seen)
    twin_folder.make(work, seen, BEGUN_S, [tmp_path / "runs"])
    (work / "out" / "best.pt").write_text("twin")
    (work / "log.txt").write_text("twin")
    assert (seen / "out" / "best.pt").read_text() == (seen / "log.txt").read_text() == "x"


def test_runs_may_be_kept_in_the_working_directory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "one/journal.jsonl"):
        put(tmp_path / name, OLD_S)
    aged(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = RunPlan(name="one", folder=Path("one/twin"), settings=RunSettings(world=1, storage="."), train=print, twin_since_s=BEGUN_S)
    home = home_of(plan)
    assert [path.name for path in home.folder.iterdir()] == ["work"]
    assert [path.name for path in (tmp_path / "one" / "twin" / "work").iterdir()] == ["train.py"]


def test_a_folder_with_very_many_files_is_linked_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_folder, "MOST_ENTRIES", 2)
    for number in range(5):
        put(tmp_path / "project" / "data" / "part" / f"{number}.bin", OLD_S)
    aged(tmp_path / "project")
    twin_folder.make(tmp_path / "work", tmp_path / "project", BEGUN_S, [])
    assert (tmp_path / "work" / "data").is_symlink()
