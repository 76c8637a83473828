"""``fleet runs prune``: what goes by a rule, what stays and why, and that nothing that goes on is touched."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app import prune
from fleet.app.cli.main import app
from fleet.app.prune import PruneRule, duration_s, judge, remove
from fleet.errors import ConfigError
from fleet.protocol import records as r
from fleet.protocol.journal import encode_line

NOW_S = 1.8e9
DAY_S = 86_400.0


def kept(root: Path, name: str, age_days: float, status: r.EndStatus | None = "completed", **config: object) -> Path:
    """A run that was written ``age_days`` ago; without a status it has no end."""
    folder = root / name
    folder.mkdir(parents=True)
    records: list[r.Record] = [r.RunStarted(r.VERSION, name, 0.0, 1.7e9, 2, 0, 4, json.dumps(config))]
    if status is not None:
        records.append(r.RunEnded(status, "as told", 10.0, "", ""))
    journal = folder / "journal.jsonl"
    journal.write_bytes(b"".join(map(encode_line, records)))
    (folder / "step-5").write_bytes(b"x" * 100_000)
    os.utime(journal, (NOW_S - age_days * DAY_S,) * 2)
    return folder


def fates(root: Path, rule: PruneRule) -> dict[str, str]:
    return {run.name: run.stays for run in judge(root, rule, NOW_S)}


def going(root: Path, rule: PruneRule) -> list[str]:
    return [name for name, stays in fates(root, rule).items() if not stays]


def test_a_run_goes_when_all_of_the_rule_fits(tmp_path: Path) -> None:
    for name, age, status in (("a", 1, "completed"), ("b", 40, "completed"), ("c", 50, "failed"), ("d", 60, "completed"), ("e", 70, None)):
        kept(tmp_path, name, age, status)  # type: ignore[arg-type]
    old_s = 30 * DAY_S
    assert going(tmp_path, PruneRule(old_s)) == ["b", "c", "d", "e"]
    assert fates(tmp_path, PruneRule(old_s))["a"] == "it is not that old"
    assert going(tmp_path, PruneRule(statuses=("failed", "silent"))) == ["c", "e"]
    rule = PruneRule(old_s, keep=1, statuses=("completed",))
    assert going(tmp_path, rule) == ["d"]
    assert fates(tmp_path, rule)["b"] == "it is one of the newest 1"
    assert fates(tmp_path, rule)["c"] == "it is failed"
    assert going(tmp_path, PruneRule(keep=0)) == ["a", "b", "c", "d", "e"]


def test_what_goes_on_is_never_touched(tmp_path: Path) -> None:
    writes, fresh, twin = kept(tmp_path, "writes", 40), kept(tmp_path, "fresh", 10 / DAY_S, None), kept(tmp_path, "twin", 40)
    kept(twin, "twin", 40)
    with (writes / "journal.jsonl").open("rb") as one, (twin / "twin" / "journal.jsonl").open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        assert fates(tmp_path, PruneRule(keep=0)) == dict.fromkeys(["fresh", "writes", "twin"], "it is going on")
        assert remove(judge(tmp_path, PruneRule(keep=0), NOW_S), NOW_S) == []
    assert writes.is_dir() and fresh.is_dir() and twin.is_dir()
    assert fates(tmp_path, PruneRule(keep=0)) == {"fresh": "it is going on", "writes": "", "twin": ""}


def test_a_run_that_begins_to_go_on_meanwhile_stays(tmp_path: Path) -> None:
    folder = kept(tmp_path, "one", 40)
    judged = judge(tmp_path, PruneRule(keep=0), NOW_S)
    with (folder / "journal.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove(judged, NOW_S) == []
    assert [run.name for run in remove(judged, NOW_S)] == ["one"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_checkpoint_another_one_needs_stays(tmp_path: Path) -> None:
    first = kept(tmp_path, "first", 60)
    kept(tmp_path, "second", 1, origin=f"file://{first}/step-5")
    assert fates(tmp_path, PruneRule(30 * DAY_S))["first"] == "second goes on from its checkpoint"
    assert going(tmp_path, PruneRule(keep=0)) == ["second", "first"]


def test_what_is_no_run_and_what_lies_elsewhere_stays(tmp_path: Path) -> None:
    (tmp_path / "runs" / "odd").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / "journal.jsonl").write_text("[]\n")
    outside = kept(tmp_path / "outside", "far", 40)
    (tmp_path / "runs" / "link").symlink_to(outside)
    found = fates(tmp_path / "runs", PruneRule(keep=0))
    assert found == {"odd": "its journal cannot be read", "link": "its folder is a link to elsewhere"}


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * DAY_S), ("12h", 43_200.0), ("90m", 5_400.0), ("1.5w", 10.5 * DAY_S)])
def test_times_have_a_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("asked", "reason"),
    [((), "no rule"), (("--older-than", "30"), "a unit"), (("--keep", "-1"), "number of runs"), (("--status", "done"), "no run ends so")],
)
def test_a_rule_that_says_nothing_is_refused(tmp_path: Path, asked: tuple[str, ...], reason: str) -> None:
    kept(tmp_path, "one", 40)
    done = CliRunner().invoke(app, ["runs", "prune", *asked, "--storage", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and reason in str(done.exception)
    assert (tmp_path / "one").is_dir()


def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    for name, age in (("new", 1), ("old", 40)):
        kept(tmp_path, name, age, settings={"storage": "s3://key:secret@bucket/runs"})
    asked = ["runs", "prune", "--older-than", "30d", "--storage", str(tmp_path)]
    reported = CliRunner().invoke(app, [*asked, "--dry-run"], catch_exceptions=False).output
    assert "1 of 2 runs would go, and free 0.1 MB" in reported and "stays: it is not that old" in reported
    assert "checkpoints of old stay in s3://" in reported and "secret" not in reported
    assert (tmp_path / "old").is_dir()
    reported = CliRunner().invoke(app, asked, catch_exceptions=False).output
    assert "1 of 2 runs went, and freed 0.1 MB" in reported
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert "new" in CliRunner().invoke(app, ["runs", "--storage", str(tmp_path)], catch_exceptions=False).output


def test_the_size_is_that_on_the_disk(tmp_path: Path) -> None:
    assert 100_000 <= prune.size_bytes(kept(tmp_path, "one", 1)) <= 200_000
