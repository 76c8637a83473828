"""Experiments: what is refused before anything starts, what each probe says, and what the whole comes to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.app import experiment as runner
from fleet.app import experiment_probes
from fleet.app.experiment import HELD, UNKNOWN, VIOLATED, ExperimentOutcome, ProbeVerdict
from fleet.app.result import Result, Twin
from fleet.app.twins import Sameness
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.protocol.decisions import Figures
from fleet.protocol.exit_codes import Exit
from fleet.protocol.records import VERSION, Committed, DecisionMade, RunStarted
from fleet.protocol.types import StateId

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "experiments").glob("*.json"))
HERE = __name__


def gives(value: Any) -> Any:
    """A probe of a user's own."""
    return value


def fails() -> None:
    raise RuntimeError("no answer")


def probe(func: str, tolerance: Any, module: str = HERE, **arguments: Any) -> dict[str, Any]:
    provider = {"type": "python", "module": module, "func": func, "arguments": arguments}
    return {"type": "probe", "name": func, "tolerance": tolerance, "provider": provider}


def written(folder: Path, *probes: dict[str, Any], **more: Any) -> str:
    action = {
        "type": "action",
        "name": "nothing",
        "provider": {"type": "python", "module": HERE, "func": "gives", "arguments": {"value": 1}},
    }
    data = {"title": "t", "description": "d", "steady-state-hypothesis": {"title": "h", "probes": list(probes)}, "method": [action], **more}
    path = folder / "experiment.json"
    path.write_text(json.dumps(data))
    return str(path)


# ---- files -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_is_an_experiment_that_says_what_must_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_STORAGE", "s3://bucket/runs")
    found = runner.load(str(path))
    assert found["title"].endswith("?") and found["runtime"]["hypothesis"]["strategy"] == "after-method-only"
    [action] = found["method"]
    arguments = action["provider"]["arguments"]
    experiment_probes._check_limits(arguments["faults"], arguments["limits"])
    injected = [one for one in found["steady-state-hypothesis"]["probes"] if one["provider"]["func"] == "faults_injected"]
    assert injected, "a fault that was suppressed has shown nothing"
    assert (ROOT / arguments["script"]).is_file()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ({"title": "t"}, "it cannot be read as an experiment"),
        ({"probes": ()}, "has no probe"),
        ({"probes": (probe("figure", 1, "fleet.app.experiment_probes", name="godput"),)}, r"figure\.name = 'godput'"),
        ({"probes": (probe("check", True, "fleet.app.experiment_probes", name="luck"),)}, r"check\.name = 'luck'"),
        ({"probes": (probe("nobody", True),)}, "it cannot be read as an experiment"),
        (
            {"probes": (probe("gives", True, value=1),), "configuration": {"s": {"type": "env", "key": "NOT_SET_ANYWHERE"}}},
            "NOT_SET_ANYWHERE",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(tmp_path: Path, content: Any, words: str) -> None:
    path = str(tmp_path / "none.json")
    if content is not None and "probes" in content:
        path = written(tmp_path, *content["probes"], **{key: value for key, value in content.items() if key != "probes"})
    elif content is not None:
        (tmp_path / "none.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        runner.run(runner.load(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"faults": [{"kind": "hang", "at_s": 1, "slot": 1}], "chaos": "storm"}, "are given, and chaos too"),
        ({"faults": [{"kind": "hang", "at_s": 1, "slot": s} for s in (1, 2)], "limits": {"ranks": 1}}, "the faults hit 2"),
        ({"faults": [{"kind": "lose_node", "at_s": 1, "node": 1}], "limits": {"nodes": 0}}, "the faults hit 1"),
        ({"chaos": "storm", "limits": {"racks": 1}}, "is no limit"),
        ({"limits": {"racks": 1}}, "there is no such limit"),
        ({"faults": [{"kind": "rack", "at_s": 1, "node": 0}], "limits": {"nodes": 1}}, "the size of a rack"),
        ({"faults": [{"kind": "rack", "at_s": 1, "node": 0}] * 2, "limits": {"domains": 1}}, "the faults hit 2"),
        ({"faults": [{"kind": "kill_controller", "at_s": 1}], "limits": {"ranks": 1}}, "takes all ranks"),
        ({"chaos": "storm", "limits": {"domains/h": 1.5}}, "1.5 is no whole number of domains"),
        ({"faults": [{"kind": "hang", "when": 1}]}, "a fault has no such field"),
    ],
)
def test_a_run_that_would_hit_more_than_it_may_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment_probes.train("no-such-script.py", **arguments)


def test_what_the_action_refuses_ends_the_experiment_before_it_begins(tmp_path: Path) -> None:
    arguments = {"script": "s.py", "chaos": "storm", "limits": {"nodes": -1}}
    action = {
        "type": "action",
        "name": "a",
        "provider": {"type": "python", "module": "fleet.app.experiment_probes", "func": "train", "arguments": arguments},
    }
    with pytest.raises(ConfigError, match="-1 is no whole number of nodes"):
        runner.run(runner.load(written(tmp_path, probe("gives", 1, value=1), method=[action])))


# ---- verdicts ----------------------------------------------------------------------------------------------------------------------------


def between(low: float, high: float) -> dict[str, Any]:
    return {"type": "range", "range": [low, high]}


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        (probe("gives", True, value=True), HELD),
        (probe("gives", True, value=False), VIOLATED),
        (probe("gives", between(0.5, 1.0), value=0.7), HELD),
        (probe("gives", between(0.5, 1.0), value=0.2), VIOLATED),
        (probe("gives", "completed", value="failed"), VIOLATED),
        (probe("gives", True, value=None), UNKNOWN),
        (probe("gives", between(0.5, 1.0), value="half"), UNKNOWN),
        (probe("fails", True), UNKNOWN),
    ],
)
def test_a_probe_is_held_violated_or_cannot_be_told(asked: dict[str, Any], verdict: str) -> None:
    assert runner.judge(asked, {}).verdict == verdict


def test_only_an_experiment_whose_probes_were_all_held_is_held(tmp_path: Path) -> None:
    held, wrong, unknown = (ProbeVerdict("p", verdict, None, None) for verdict in (HELD, VIOLATED, UNKNOWN))
    codes = {ExperimentOutcome("t", verdicts).exit_code for verdicts in ((), (held, wrong), (held, unknown), (unknown,))}
    assert codes == {Exit.FAILED} and ExperimentOutcome("t", (held, held)).exit_code == Exit.DONE
    assert ExperimentOutcome("t", (held,), failed="the method failed").exit_code == Exit.FAILED
    failing = {"type": "action", "name": "a", "provider": {"type": "python", "module": HERE, "func": "fails"}}
    outcome = runner.run(runner.load(written(tmp_path, probe("gives", 1, value=1), method=[failing])))
    assert "no answer" in outcome.failed and outcome.to_dict()["exit_code"] == 1


# ---- Fleet's probes ----------------------------------------------------------------------------------------------------------------------


REPORT = {"goodput": 0.9, "counts": {"faults_by_kind": {"hang": {"planned": 2, "executed": 1}}, "in_view_losses": 1}, "measurements": {}}


def result(folder: Path, *, status: str = "completed", equal: bool | None = True, checks: dict[str, str] | None = None) -> Result:
    same: dict[str, Any] = {
        "name": "r", "status": status, "reason": "", "folder": folder, "store": "", "digest": "", "steps": 3, "goodput": 0.9, "wall_s": 1.0,
        "saved_step": None, "median_step_s": None, "faults": 1, "ranks_lost": 0, "views": 1, "rolled_back_steps": 0, "loss": None,
        "checks": checks or {}, "report": REPORT,
    }  # fmt: skip
    one = Result(**same)
    verdict = Sameness.EQUAL if equal else Sameness.DIFFERENT
    return Result(**same, twin=Twin(verdict=verdict, world=4, result=one)) if equal is not None else one


@pytest.fixture(autouse=True)
def no_runs(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    runs = list[Result]()
    monkeypatch.setattr(experiment_probes, "_runs", runs)
    return runs


def verdict(func: str, tolerance: Any, **arguments: Any) -> str:
    return runner.judge(probe(func, tolerance, "fleet.app.experiment_probes", **arguments), {}).verdict


def test_before_any_run_nothing_can_be_told() -> None:
    asked = [("status", "completed", {}), ("same_bits", True, {}), ("stall_s", between(0, 9), {}), ("faults_injected", 1, {})]
    asked += [("figure", between(0, 1), {"name": "goodput"}), ("check", True, {"name": "bits"})]
    assert {verdict(func, tolerance, **arguments) for func, tolerance, arguments in asked} == {UNKNOWN}


def test_each_probe_can_be_held_violated_and_untold(no_runs: list[Result], tmp_path: Path) -> None:
    no_runs.append(result(tmp_path, checks={"bits": "ok"}))
    assert verdict("status", "completed") == verdict("same_bits", True) == verdict("check", True, name="bits") == HELD
    assert (
        verdict("figure", between(0.8, 1), name="goodput")
        == verdict("faults_injected", 1, kind="hang")
        == verdict("faults_injected", 1)
        == HELD
    )
    no_runs.append(result(tmp_path, status="failed", equal=False, checks={"bits": "violated"}))
    assert verdict("status", "completed") == verdict("same_bits", True) == verdict("check", True, name="bits") == VIOLATED
    assert verdict("figure", between(0.95, 1), name="goodput") == verdict("faults_injected", 1, kind="slow") == VIOLATED
    no_runs.append(result(tmp_path, equal=None, checks={"bits": "unknown"}))
    assert verdict("same_bits", True) == verdict("check", True, name="bits") == verdict("check", True, name="goes_on") == UNKNOWN
    assert verdict("figure", between(0, 9), name="loss") == UNKNOWN


def test_a_twin_that_came_to_no_end_says_nothing_of_the_bits(no_runs: list[Result], tmp_path: Path) -> None:
    """It was called violated."""
    one = result(tmp_path, equal=None, checks={"bits": "unknown"})
    no_runs.append(replace(one, twin=Twin(verdict=Sameness.NOT_COMPLETED, world=4, result=one)))
    assert verdict("same_bits", True) == verdict("check", True, name="bits") == UNKNOWN


def test_an_experiment_that_was_cut_off_has_violated_nothing(
    no_runs: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(experiment_probes, "stopped_by_floor", lambda: False)
    no_runs.append(replace(result(tmp_path, status="stopped", equal=None), reason="Ctrl-C"))
    probes = [probe("status", "completed", "fleet.app.experiment_probes"), probe("faults_injected", 1, "fleet.app.experiment_probes")]
    outcome = runner.run(runner.load(written(tmp_path, *probes)))
    assert [one.verdict for one in outcome.verdicts] == [UNKNOWN, HELD]
    assert outcome.verdicts[0].reason == "the run was stopped: Ctrl-C" and outcome.exit_code == Exit.FAILED
    no_runs.append(result(tmp_path, status="running", equal=None))
    lost = runner.run(runner.load(written(tmp_path, *probes)))
    assert lost.verdicts[0].verdict == UNKNOWN and "no end" in lost.verdicts[0].reason, "its driver was lost"
    no_runs.append(result(tmp_path, status="failed", equal=None))
    assert runner.run(runner.load(written(tmp_path, *probes))).verdicts[0].verdict == VIOLATED, "it failed by itself"
    failing = {"type": "action", "name": "a", "provider": {"type": "python", "module": HERE, "func": "fails"}}
    assert runner.run(runner.load(written(tmp_path, *probes, method=[failing]))).verdicts[0].verdict == UNKNOWN


def test_the_stall_is_the_longest_gap_between_two_commits(no_runs: list[Result], tmp_path: Path) -> None:
    no_runs.append(result(tmp_path))
    journal = JournalWriter(tmp_path / "journal.jsonl")
    journal.append(RunStarted(VERSION, "r", 0.0, 0.0, 4, 0, 8, "{}"))
    journal.append(Committed(StateId(0, 1), 1.0))
    journal.flush()
    assert verdict("stall_s", between(0, 9)) == UNKNOWN, "one step has no gap"
    for step, at_s in ((2, 1.5), (3, 6.5), (4, 7.0)):
        journal.append(Committed(StateId(0, step), at_s))
    journal.close()
    assert experiment_probes.stall_s() == 5.0
    assert (verdict("stall_s", between(0, 9)), verdict("stall_s", between(0, 2))) == (HELD, VIOLATED)


def test_faults_that_were_called_off_hold_nothing(no_runs: list[Result], tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal.jsonl")
    journal.append(RunStarted(VERSION, "r", 0.0, 0.0, 4, 0, 8, "{}"))
    journal.flush()
    assert not experiment_probes.stopped_by_floor()
    no_runs.append(result(tmp_path))
    assert verdict("floor_kept", True) == HELD and not experiment_probes.stopped_by_floor()
    journal.append(DecisionMade("floor", "stop", "", Figures({"kept": 0.1, "floor": 0.3}), 9.0))
    journal.close()
    assert verdict("floor_kept", True) == VIOLATED
    outcome = runner.run(runner.load(written(tmp_path, probe("gives", 1, value=1))))
    assert outcome.verdicts[0].verdict == HELD and outcome.exit_code == Exit.CALLED_OFF
