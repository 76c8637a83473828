"""``fleet runs show`` and ``fleet runs diff`` on journals that were written by hand: decisions, artefacts, differences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.app.plans import find_run
from fleet.errors import ConfigError
from fleet.protocol import records as r
from fleet.protocol.decisions import Figures
from fleet.protocol.journal import encode_line
from tests.golden.journals import Story, one_loss

STORE = {"settings": {"seed": 7, "storage": "s3://key:secret@bucket/runs?X-Amz-Signature=abc"}}


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def reported(root: Path, name: str) -> dict[str, Any]:
    found = json.loads(call("runs", "show", name, "--storage", str(root)))
    assert isinstance(found, dict)
    return found


def kept(root: Path, name: str, story: Story, config: dict[str, Any] | None = None) -> Path:
    (root / name).mkdir()
    assert isinstance(story.records[0], r.RunStarted)
    story.records[0] = dataclasses.replace(story.records[0], config=json.dumps(config or {}))
    (root / name / "journal.jsonl").write_bytes(b"".join(map(encode_line, story.records)))
    return root / name


def decided(story: Story, *decisions: tuple[str, str]) -> Story:
    made = [r.DecisionMade(policy, action, f"reason {i}", Figures({"x": 1.0}), 5.0 + i) for i, (policy, action) in enumerate(decisions)]
    story.records[-1:-1] = made
    return story


def test_what_was_decided_is_counted_and_the_last_of_it_told(tmp_path: Path) -> None:
    kept(tmp_path, "one", decided(one_loss(), *[("interval", "save")] * 6, ("recovery", "shrink")))
    decisions = reported(tmp_path, "one")["decisions"]
    assert decisions["counts"] == {"interval": {"save": 6}, "recovery": {"shrink": 1}}
    assert len(decisions["last"]) == 5
    assert decisions["last"][-1] == {"at_s": 11.0, "policy": "recovery", "action": "shrink", "reason": "reason 6"}


def test_what_a_run_has_left_is_named_as_far_as_it_is_there(tmp_path: Path) -> None:
    story = one_loss()
    for path in ("evidence/hang-1.txt", "evidence/gone.txt"):
        story.records.insert(-1, r.EvidenceKept("hang-1", path, (), "no progress", "", at_s=5.0))
    folder = kept(tmp_path, "one", story, STORE)
    (folder / "evidence").mkdir()
    (folder / "evidence" / "hang-1.txt").write_text("stacks")
    (folder / "report.html").write_text("<p>")
    (folder / "twin").mkdir()
    left = reported(tmp_path, "one")["artefacts"]
    assert left["journal"] == str(folder / "journal.jsonl")
    assert left["evidence"] == [str(folder / "evidence" / "hang-1.txt")]
    assert left["reports"] == [str(folder / "report.html")]
    assert left["twin"] == str(folder / "twin")
    assert left["checkpoints"].startswith("s3://***@bucket/runs")
    assert "secret" not in left["checkpoints"]
    assert "abc" not in left["checkpoints"]
    assert not {"snapshot", "patch", "ray"} & set(left)


def test_two_runs_alike_do_not_differ_wherever_they_lie(tmp_path: Path) -> None:
    kept(tmp_path, "one", decided(one_loss(), ("interval", "save")))
    other = decided(one_loss(), ("interval", "save"))
    other.records[-2] = dataclasses.replace(other.records[-2], at_s=6.5)  # type: ignore[arg-type]
    kept(tmp_path, "two", other)
    assert call("runs", "diff", "one", "two", "--storage", str(tmp_path)).strip() == "They do not differ."


def test_two_runs_differ_in_settings_in_outcome_and_in_what_was_decided(tmp_path: Path) -> None:
    kept(tmp_path, "one", one_loss(), STORE)
    other = decided(one_loss(), ("interval", "save"))
    assert isinstance(other.records[-1], r.RunEnded)
    other.records[-1] = dataclasses.replace(other.records[-1], status="failed")
    kept(tmp_path, "two", other, {"settings": STORE["settings"] | {"seed": 8}})
    lines = call("runs", "diff", "one", "two", "--storage", str(tmp_path)).splitlines()
    found = {words[0]: words[1:] for line in lines[1:] if (words := line.split())}
    assert found == {
        "settings.seed": ["7", "8"],
        "outcome.status": ["completed", "failed"],
        "decisions.counts.interval.save": ["-", "1"],
    }  # fmt: skip


def test_two_runs_differ_in_their_data(tmp_path: Path) -> None:
    for name, sha256 in (("one", "aa"), ("two", "bb")):
        story = one_loss()
        story.records.insert(-1, r.DataRead(r.Member(0, 0), 1_000, 16, sha256, at_s=2.0))
        kept(tmp_path, name, story)
    assert reported(tmp_path, "one")["data"] == {"samples": 1_000, "batch_size": 16, "data_sha256": "aa"}
    assert call("runs", "diff", "one", "two", "--storage", str(tmp_path)).splitlines()[1].split() == ["data.data_sha256", "aa", "bb"]


def test_a_damaged_journal_is_told_of_as_far_as_it_is_good(tmp_path: Path) -> None:
    journal = kept(tmp_path, "one", one_loss()) / "journal.jsonl"
    assert json.loads(call("report", "one", "--storage", str(tmp_path), "--json"))["damage"] == ""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], b'["Meteor",[/bold] 1]\n', lines[-1]]))
    for options in ((), ("--diagnose",)):
        done = CliRunner().invoke(app, ["report", "one", "--storage", str(tmp_path), "--json", *options], catch_exceptions=False)
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        assert found["run"] == "story"
        assert f"{journal}:{len(lines)}:" in found["damage"]
        assert found["damage"] in done.stderr
    assert f"{journal}:{len(lines)}:" in reported(tmp_path, "one")["damage"]
    assert "goodput" in call("report", "one", "--storage", str(tmp_path))


def test_a_run_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["runs", "show", "nowhere", "--storage", str(tmp_path)])
    assert done.exit_code != 0
    assert "nowhere" in str(done.exception)


def test_no_name_is_cut_however_narrow_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a-name-" + "x" * 120
    kept(tmp_path, name, one_loss())
    other = one_loss()
    other.records[-1] = dataclasses.replace(other.records[-1], reason="why " * 40)  # type: ignore[arg-type]
    kept(tmp_path, "two", other)
    assert any(line.startswith(f"{name}  completed") for line in call("runs", "--storage", str(tmp_path)).splitlines())
    lines = call("runs", "diff", name, "two", "--storage", str(tmp_path)).splitlines()
    assert name in lines[0] and len(lines) == 2 and lines[1].count("why") == 40


def test_a_run_that_is_not_there_is_told_with_names_that_are_alike(tmp_path: Path) -> None:
    for name in ("yesterday", "gpt-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match=r"no run has this name: .* Did you mean yesterday\?"):
        find_run("yesterdy", tmp_path)
    with pytest.raises(ConfigError, match=r"has 2 runs; `fleet runs` lists them"):
        find_run("nothing-alike", tmp_path)
