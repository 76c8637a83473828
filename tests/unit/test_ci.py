"""Continuous integration runs what everybody runs, with nothing left out, and holds no secrets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiers

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
JOBS = [(path, name) for path in WORKFLOWS for name in yaml.safe_load(path.read_text())["jobs"]]
RUN = (ROOT / ".ci" / "run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.M))


def job_of(path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"][name]
    return found


def test_every_change_runs_what_ci_runs() -> None:
    always = [job for path, name in JOBS if "if" not in (job := job_of(path, name))]
    assert [step["run"] for job in always for step in job["steps"] if "run" in step] == [".ci/run"]


@pytest.mark.parametrize(("path", "job"), JOBS, ids=lambda part: getattr(part, "name", part))
def test_a_step_checks_the_project_out_or_runs_what_everybody_can_run(path: Path, job: str) -> None:
    first, *others = job_of(path, job)["steps"]
    assert re.fullmatch(r"actions/checkout@v\d+", first["uses"]) and first["with"]["persist-credentials"] is False
    commands = [step["run"] for step in others]
    assert commands and all(command == ".ci/run" or command.removeprefix("make ") in TARGETS for command in commands)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_no_more(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert "secrets." not in text and "pull_request_target" not in text


def test_every_python_that_is_promised_is_tested() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    [tested] = {tuple(job["strategy"]["matrix"]["python"]) for path, name in JOBS if "strategy" in (job := job_of(path, name))}
    assert list(tested) == promised


def test_the_oldest_and_the_newest_torch_that_is_promised_are_tested() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [oldest] = [each.removeprefix("torch>=") for each in dependencies if each.startswith("torch>=")]
    assert f"VERSIONS ?= torch=={oldest}.0 torch\n" in MAKEFILE
    assert f"| PyTorch | {oldest} and newer |" in (ROOT / "docs" / "compatibility.md").read_text()
    weekly = [job for path, name in JOBS if "schedule" in (job := job_of(path, name)).get("if", "")]
    assert "make versions" in [step.get("run") for job in weekly for step in job["steps"]]


def test_ci_is_the_tiers_of_every_change_with_nothing_left_out_and_no_second_try() -> None:
    lines = [line for line in RUN.splitlines() if line and not line.startswith("#")]
    assert lines[-1] == f"make --keep-going {' '.join(tiers.TIERS)} </dev/null"
    assert any(line.startswith("export CI=true") for line in lines)
    assert not re.search(r"AGAIN|last-failed|reruns", RUN + MAKEFILE)


def test_what_a_change_leaves_out_each_night_runs() -> None:
    nightly = [job for path, name in JOBS if "schedule" in (job := job_of(path, name)).get("if", "")]
    assert "make nightly" in [step.get("run") for job in nightly for step in job["steps"]]


def test_each_tier_is_a_target_and_each_nightly_part_is_one() -> None:
    parts = re.findall(r"^PARTS := (.*)$", MAKEFILE, re.M)[0].split()
    assert set(tiers.TIERS) <= TARGETS
    assert {part.removeprefix("night-") for part in tiers.NIGHTLY} <= set(parts)
    assert all(re.search(rf"^(\S+ )*night-{part}\b.*:", MAKEFILE, re.M) for part in parts)
