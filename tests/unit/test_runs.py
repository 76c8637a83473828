"""The registry of runs: what each was made of, in what two differ, and how one is run again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from chaos.settings import ChaosSettings
from fleet import plans
from fleet.cli_runs import differences, record_of, runs
from fleet.config import CheckpointSettings, RunSettings, Timeouts
from fleet.journal import JournalWriter
from fleet.launch.provenance import provenance
from fleet.records import VERSION, RunEnded, RunStarted
from fleet.scripts import load_train

GOOD = "def train(run):\n    pass\n"


def planned(root: Path, name: str, **changes: object) -> plans.RunPlan:
    (root / "job.py").write_text(GOOD)
    settings = RunSettings(
        world=3, spares=1, seed=7, timeouts=Timeouts(checkpoint_s=9.0), checkpoint=CheckpointSettings(policy="fixed", interval_s=2.0)
    )
    chaos = ChaosSettings(mtbf_s=5.0, kinds=("kill_rank", "hang"))
    script = str(root / "job.py")
    plan = plans.RunPlan(name=name, folder=root / name, settings=settings, train=load_train(script), script=script, chaos=chaos)
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def recorded(plan: plans.RunPlan, status: str = "completed") -> plans.RunPlan:
    writer = JournalWriter(plan.journal)
    writer.append(RunStarted(VERSION, plan.name, 0.0, 1.7e9, plan.settings.world, plan.settings.spares, 16, plans.describe(plan)))
    writer.append(RunEnded(status, "as told", 10.0, "ab" * 32, ""))
    writer.close()
    return plan


def test_a_run_is_repeated_from_its_record(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"))
    again = plans.repeated_plan(plan.folder, "", tmp_path)
    assert again.name != plan.name
    assert again.folder.parent == tmp_path
    assert not again.resume
    assert (again.settings, again.chaos, again.script) == (plan.settings, plan.chaos, plan.script)
    faults = [p.chaos.plan(seed=p.settings.seed, world=4, nodes=2) for p in (plan, again)]
    assert faults[0] == faults[1]


def test_two_runs_differ_in_what_was_changed(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"))
    changed = dataclasses.replace(plan.settings, seed=8)
    other = recorded(planned(tmp_path, "second", settings=changed), status="failed")
    found = {name: (a, b) for name, a, b in differences(record_of(plan.folder), record_of(other.folder))}
    assert found["settings.seed"] == (7, 8)
    assert found["outcome.status"] == ("completed", "failed")
    assert set(found) - {"expected_goodput"} == {"run", "settings.seed", "outcome.status"}  # other faults are expected with another seed


def test_a_record_says_of_what_the_run_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    script = tmp_path / "job.py"
    script.write_text(GOOD)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clean = provenance(str(script))
    assert len(clean["commit"]) == 40
    assert clean["diff_sha256"] == ""
    script.write_text(GOOD + "# changed\n")
    dirty = provenance(str(script))
    assert dirty["commit"] == clean["commit"]
    assert len(dirty["diff_sha256"]) == 64
    assert dirty["script_sha256"] != clean["script_sha256"]
    assert clean["versions"]["torch"]
    monkeypatch.setenv("PATH", "")
    assert provenance(str(script))["commit"] == ""


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(planned(tmp_path, "first"))
    runs(str(tmp_path), json_=True)
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["status"], row["world"], row["spares"]) == ("first", "completed", 3, 1)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "journal.jsonl").write_text("no journal\n")
    runs(str(tmp_path), json_=False)
    assert "damaged" in capsys.readouterr().out
