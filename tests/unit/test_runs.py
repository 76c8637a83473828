"""The registry of runs: what each was made of, in what two differ, and how one is run again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.rank.script_loading import load_train
from chaos.settings import ChaosSettings
from fleet.app import plans, recipes
from fleet.app.cli import main as cli
from fleet.app.cli import run as cli_run
from fleet.app.cli.runs import differences, list_runs, record_of
from fleet.app.policy_choice import completed
from fleet.errors import ConfigError
from fleet.host import provenance as provenance_of
from fleet.host.journal import JournalWriter
from fleet.host.provenance import code_of, provenance
from fleet.protocol.records import VERSION, ProcessUp, RunEnded, RunStarted
from fleet.protocol.types import Member, Process
from fleet.settings.run import CheckpointSettings, RunSettings, Timeouts

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
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
    again = plans.repeated_plan(plan.folder, plans.Executed(), tmp_path)
    assert again.name != plan.name
    assert again.folder.parent == tmp_path
    assert not again.resume
    assert (again.settings, again.chaos, again.script) == (completed(plan.settings), plan.chaos, plan.script)
    faults = [p.chaos.plan(seed=p.settings.seed, world=4, nodes=2) for p in (plan, again)]
    assert faults[0] == faults[1]


def repeat(root: Path, name: str, *more: str, how: str = "--repeat") -> tuple[list[str], str]:
    """Scripts of the runs that the command would have made, and what it said."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_run, "_execute", lambda plan, *rest: made.append(plan.script) or 0)
        done = CliRunner().invoke(cli.app, ["run", how, name, "--storage", str(root), *more])
    return made, " ".join(f"{done.output} {done.exception}".split())


def committed(root: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*GIT, *words], cwd=root, check=True)


def test_a_run_keeps_its_patch_when_it_begins_and_not_when_it_goes_on(tmp_path: Path) -> None:
    plan = planned(tmp_path, "first")
    committed(tmp_path)
    (tmp_path / "model.py").write_text("LAYERS = 2\n")
    live: Any = SimpleNamespace(
        plan=plan,
        store_url="file:///x",
        cluster=SimpleNamespace(head="127.0.0.1", shares_folders=True),
        _lemons=dict,
        hold=SimpleNamespace(tenure=None, url="file:///x"),
    )
    first: Any = recipes.LiveRun._spec(live).started(0.0)
    kept = (plan.folder / "code.patch").read_bytes()
    assert b"LAYERS = 2" in kept
    assert json.loads(first.config)["made_of"]["diff_sha256"] == hashlib.sha256(kept).hexdigest()
    (tmp_path / "model.py").write_text("LAYERS = 3\n")
    live.plan = dataclasses.replace(plan, resume=True)
    recipes.LiveRun._spec(live)
    assert (plan.folder / "code.patch").read_bytes() == kept


def test_the_same_code_is_repeated_without_a_word(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"))
    made, said = repeat(tmp_path, "first")
    assert made == [plan.script]
    assert "not as in" not in said


def test_other_code_is_refused_by_name_with_the_way_back(tmp_path: Path) -> None:
    plan = planned(tmp_path, "first")
    committed(tmp_path)
    (tmp_path / "model.py").write_text("LAYERS = 2\n")
    code_of(plan.script).keep(plan.folder)
    recorded(plan)
    (tmp_path / "report.html").write_text("came later\n")
    assert repeat(tmp_path, "first")[0] == [plan.script]
    (tmp_path / "model.py").unlink()
    assert repeat(tmp_path, "first")[0] == []
    (tmp_path / "model.py").write_text("LAYERS = 3\n")
    made, said = repeat(tmp_path, "first")
    assert made == []
    assert "what differs from the commit was" in said
    assert "the script was" not in said
    assert f"git apply {plan.folder / 'code.patch'}" in said
    (tmp_path / "job.py").write_text(GOOD + "# changed\n")
    assert "the script was" in repeat(tmp_path, "first")[1]


def test_other_code_is_repeated_when_the_user_says_so(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"))
    (tmp_path / "job.py").write_text(GOOD + "# changed\n")
    assert repeat(tmp_path, "first")[0] == []
    made, said = repeat(tmp_path, "first", "--changed-code")
    assert made == [plan.script]
    assert "not as in first: the script was" in said


def test_a_resume_tells_that_the_script_is_another_one(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"), "stopped")
    made, said = repeat(tmp_path, "first", how="--resume")
    assert made == [plan.script] and "not as in" not in said
    (tmp_path / "job.py").write_text(GOOD + "# changed\n")
    made, said = repeat(tmp_path, "first", how="--resume")
    assert made == [plan.script] and "not as in first: the script was" in said


def test_other_versions_and_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(planned(tmp_path, "first"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(provenance_of, "_version", lambda name: "99.0" if name == "torch" else "")
    made, said = repeat(tmp_path, "first")
    assert len(made) == 1
    assert "torch was" in said
    assert "and is 99.0" in said
    assert f"and is {tmp_path / 'elsewhere'}" in said


def test_a_script_is_found_from_the_folder_that_the_run_was_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, "first")
    monkeypatch.chdir(tmp_path)
    recorded(dataclasses.replace(plan, script="job.py"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "job.py").write_text("def train(run):\n    raise ValueError\n")
    assert plans.repeated_plan(plan.folder, plans.Executed(), tmp_path).script == str(tmp_path / "job.py")
    assert plans.resumed_plan(plan.folder, plans.Executed()).script == str(tmp_path / "job.py")


def test_a_record_without_provenance_is_repeated_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, "first")
    content = json.loads(plans.describe(plan))
    del content["made_of"]
    monkeypatch.setattr(plans, "describe", lambda plan: json.dumps(content))
    recorded(plan)
    assert repeat(tmp_path, "first")[0] == [plan.script]


def test_changed_code_is_about_a_run_that_is_repeated(tmp_path: Path) -> None:
    plan = planned(tmp_path, "first")
    done = CliRunner().invoke(cli.app, ["run", plan.script, "--changed-code"])
    assert "--changed-code" in str(done.exception)


def test_two_runs_differ_in_what_was_changed(tmp_path: Path) -> None:
    plan = recorded(planned(tmp_path, "first"))
    changed = dataclasses.replace(plan.settings, seed=8)
    other = recorded(planned(tmp_path, "second", settings=changed), status="failed")
    found = {name: (a, b) for name, a, b in differences(record_of(plan.folder), record_of(other.folder))}
    assert found["settings.seed"] == (7, 8)
    assert found["outcome.status"] == ("completed", "failed")
    assert set(found) == {"run", "settings.seed", "outcome.status"}


def test_a_record_says_of_what_the_run_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "job.py"
    script.write_text(GOOD)
    committed(tmp_path)
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
    list_runs(str(tmp_path), json_=True)
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["status"], row["world"], row["spares"]) == ("first", "completed", 3, 1)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "journal.jsonl").write_text("no journal\n")
    list_runs(str(tmp_path), json_=False)
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [(["--name", "other"], "--name = other"), (["--resume", "other"], "--resume = other")])
def test_a_run_is_begun_or_gone_on_with_by_one_name(tmp_path: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["run", "train.py", "--storage", str(tmp_path), "--resume-or-start", "job", *words])
    assert said in str(done.exception) and "Give one of them." in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_may_have_to_begin_has_a_name_and_no_path(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["run", "train.py", "--storage", str(tmp_path), "--resume-or-start", "runs/job"])
    assert "--resume-or-start = 'runs/job': it is a path" in str(done.exception)


def test_the_ranks_of_a_run_are_listed_with_their_processes(tmp_path: Path) -> None:
    plan = planned(tmp_path, "listed")
    writer = JournalWriter(plan.journal)
    writer.append(RunStarted(VERSION, plan.name, 0.0, 1.7e9, 2, 0, 16, plans.describe(plan)))
    for slot in range(2):
        writer.append(ProcessUp(Member(slot, 0), Process("node-a", 4000 + slot, 1), f"token-{slot}", 1.0))
    writer.close()

    def asked(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["status", *arguments, "--storage", str(tmp_path)])

    rows = [line.split()[:3] for line in asked("listed").output.splitlines()[1:]]
    assert rows == [["0.0", "starts", "4000"], ["1.0", "starts", "4001"]]
    answer = json.loads(asked("listed", "--json").output)
    assert answer["run"] == "listed" and [rank["pid"] for rank in answer["ranks"]] == [4000, 4001]
    assert isinstance(asked("--json").exception, ConfigError)
    assert isinstance(asked("listed", "--address", "auto").exception, ConfigError)
