"""Files that are nested without end are refused in one line, by each command that reads such a file; nothing is started for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app import experiment
from fleet.app.cli.main import app
from fleet.app.experiment_probes import train
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.journal import decode_line
from storage import nodes
from storage.checkpoint.manifest import CheckpointDamaged, decode_manifest

DEEP = "[" * 20_000 + "]" * 20_000
SHALLOW = "[" * 400 + "]" * 400
FILES = {
    "deep.json": DEEP, "shallow.json": SHALLOW, "deep.yaml": DEEP, "itself.yaml": "title: &a [*a]\n", "list.json": "[1]",
    "torn.json": '{"a"', "deep.toml": f"world = {DEEP}\n", "shallow.toml": f"world = {SHALLOW}\n", "map.toml": f"start = {DEEP}\n",
    "cluster.toml": f"x = {DEEP}\n",
    "tokens.toml": f"token = {DEEP}\n", "log.jsonl": '{"time": ' + DEEP + "}\n", "log.csv": "time,node\n2026-01-01 00:00,a\n",
    "manifest.yaml": DEEP, "train.py": "def train(run):\n    pass\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tokens.toml").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "experiment run deep.json", "experiment run shallow.json", "experiment run deep.yaml", "experiment run itself.yaml",
        "experiment run list.json", "experiment run torn.json", "doctor deep.toml", "doctor shallow.toml",
        f"run train.py --config world={SHALLOW}", "run train.py --config deep.toml", "experiment import log.csv --map map.toml",
        "experiment import log.jsonl", "experiment fit log.jsonl", "plan --faults deep.json", "plan --measured deep.json",
        "simulate --faults deep.json", "cluster write out --target slurm --spec cluster.toml", "cluster up --tokens tokens.toml",
    ],
)  # fmt: skip
def test_it_is_refused_in_one_line(folder: Path, command: str) -> None:
    done = CliRunner().invoke(app, command.split())
    assert isinstance(done.exception, ConfigError), done.exception
    said = str(done.exception)
    assert "\n" not in said and len(said) < 1000, said[:2000]
    assert {path.name for path in folder.iterdir()} == set(FILES), "nothing was made"


def test_a_manifest_of_kubernetes_is_refused_too(folder: Path) -> None:
    done = CliRunner().invoke(app, ["cluster", "check", "manifest.yaml"])
    assert done.exit_code == 2 and "cannot be read" in done.output


def test_an_experiment_may_have_a_hundred_levels(folder: Path) -> None:
    whole = json.loads((Path(__file__).parents[2] / "experiments" / "rank-dies.json").read_text())
    inside: object = []
    for _ in range(experiment.DEEPEST - 2):
        inside = [inside]
    (folder / "many.json").write_text(json.dumps(whole | {"extensions": [], "note": inside}))
    assert experiment.load("many.json")["title"]
    (folder / "more.json").write_text(json.dumps(whole | {"note": [[inside]]}))
    with pytest.raises(ConfigError, match="at most 100 levels"):
        experiment.load("more.json")


@pytest.mark.parametrize("fault", [[["hang"]], {"kind": "hang", "at_s": [[1]]}])
def test_a_fault_of_an_experiment_is_a_table_of_single_values(fault: object) -> None:
    with pytest.raises(ConfigError, match="no table of single values"):
        train("no-such-script.py", faults=[fault])  # type: ignore[list-item]


def test_what_fleet_wrote_itself_may_be_damaged_so_as_well(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="nested without end"):
        decode_line(DEEP.encode() + b"\n")
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        decode_manifest("1", DEEP.encode())
    (tmp_path / "nodes.jsonl").write_text(DEEP + "\n")
    with pytest.raises(ConfigError, match=r"nodes\.jsonl:1"):
        nodes.load(tmp_path / "nodes.jsonl")
