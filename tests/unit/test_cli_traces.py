"""``fleet traces``, and the commands that take its file as ``--faults``."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.catalogue import Topology, fitted, load_catalogue
from chaos.settings import ChaosSettings, parse_chaos
from fleet.app.cli import rehearse
from fleet.app.cli.main import app
from fleet.app.configuration import configured
from fleet.app.rehearsal import target_of
from fleet.app.scenarios import asked_with
from fleet.errors import ConfigError
from fleet.laws.law import HOUR_S
from fleet.planning.inputs import PlanInput
from fleet.planning.traces.faults import ComponentFaults, FittedFaults, load_faults
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT
from tests.support.blocks import blocks_of
from tests.support.logs import LANL_SYSTEMS, SACCT, lanl

RUNNER = CliRunner()


def fleet(*arguments: str) -> str:
    done = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        RUNNER.invoke(app, arguments, catch_exceptions=False)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of that form, the trace that it becomes, and what was fitted to it."""
    where = tmp_path_factory.mktemp("traces")
    (where / "log.csv").write_text(lanl(4000, seed=2, shape=0.7))
    (where / "slurm.txt").write_text(SACCT)
    fleet("experiment", "import", str(where / "log.csv"), "--output", str(where / "trace.csv"))
    fleet("experiment", "fit", str(where / "trace.csv"), "--output", str(where / "faults.json"))
    return where


# ---- import and fit ----------------------------------------------------------------------------------------------------------------------


def test_import_shows_what_it_understood_and_what_is_wrong(folder: Path) -> None:
    shown = fleet("experiment", "import", str(folder / "log.csv"))
    assert "4,000 faults of 2,790 nodes in 7 clusters" in shown and "start     Prob Started" in shown
    assert "unknown cause, counted as host_parts" in shown and "month first" in shown
    answer = json.loads(fleet("experiment", "import", str(folder / "slurm.txt"), "--json", "-"))
    assert answer["faults"] == 3 and answer["found"]["step of a job, left out"] == 1
    assert len(answer["lines"]) == sum(answer["found"].values()), "every line that something was found in is named"
    assert answer["mapping"]["mapping"] == "sacct"


def test_a_log_is_fitted_as_it_is_and_as_its_trace(folder: Path) -> None:
    one, other = (json.loads(fleet("experiment", "fit", str(folder / name), "--json", "-")) for name in ("log.csv", "trace.csv"))
    assert one["rates"] == other["rates"] and one["total"]["faults"] == 4000
    assert one["between"]["all"]["laws"][0]["law"] == "weibull"
    assert one["repairs"]["laws"][0]["law"] == "lognormal" and one["trend"]["verdict"] == "steady"
    shown = fleet("experiment", "fit", str(folder / "log.csv"))
    assert "Repair: mean" in shown and "Bursts: none beyond chance" in shown and "host_parts" in shown


def test_a_mapping_of_ones_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('start = "t"\nnode = "n"\n[components]\n')
    (tmp_path / "site.csv").write_text("t,n\n2024-01-01,a\n2024-01-03,b\n")
    shown = fleet("experiment", "import", str(tmp_path / "site.csv"), "--map", str(tmp_path / "site.toml"), "--nodes", "40")
    assert "2 faults of 40 nodes" in shown and "No column names the failed part" in shown


def test_a_picture_is_drawn(folder: Path, tmp_path: Path) -> None:
    fleet("experiment", "fit", str(folder / "log.csv"), "--plot", str(tmp_path / "faults.png"))
    assert (tmp_path / "faults.png").read_bytes().startswith(b"\x89PNG")
    fleet("experiment", "fit", str(folder / "slurm.txt"), "--plot", str(tmp_path / "few.svg"))
    assert "<svg" in (tmp_path / "few.svg").read_text()


def test_a_picture_needs_matplotlib_and_the_error_names_the_extra(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest))
    said = refused("experiment", "fit", str(folder / "log.csv"), "--plot", str(tmp_path / "faults.png"))
    assert "fleet-train[traces]" in said and not (tmp_path / "faults.png").exists()


def test_neither_fleet_nor_its_command_line_imports_what_only_fits_need() -> None:
    names = ("scipy", "matplotlib", "numpy", "fleet.planning.traces.fit")
    code = f"import sys, fleet, fleet.app.cli.main; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fit", "{}/none.csv"), "cannot be read"),
        (("fit", "{}/log.csv", "--plot", "faults.txt"), "no form of picture"),
        (("fit", "{}/log.csv", "--map", "{}/none.toml"), "cannot be read"),
        (("fit", "{}/log.csv", "--nodes", "-1"), "must be at least 1"),
        (("fit", "{}/log.csv", "--nodes", "5000"), "7 clusters"),
        (("fit", "{}/log.csv", "--output", "{}/none/x.json"), "cannot be written"),
        (("fit", "{}/trace.csv", "--nodes", "5000"), "said when it was imported"),
        (("import", "{}/log.csv", "--since", "2030-01-01"), "no row of it is a fault"),
        (("import", "{}/faults.json"), "no column looks like a time"),
    ],
)
def test_bad_input_is_refused(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("experiment", *(each.format(folder) for each in arguments))


def test_the_example_of_the_page_is_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, mapping, commands, printed, walk = blocks_of("docs/incidents.md")[:6]
    (tmp_path / "incidents.jsonl").write_text(log.text)
    (tmp_path / "site.toml").write_text(mapping.text)
    monkeypatch.chdir(tmp_path)
    assert fleet(*shlex.split(commands.text)[1:]) == printed.text
    assert "no column looks like a time" in refused("experiment", "import", "incidents.jsonl")
    fit, plan, run = (shlex.split(line)[1:] for line in walk.text.splitlines())
    assert "written to faults.json" in fleet(*fit)
    assert "a fault every  7.6 days" in fleet(*plan)
    planned = parse_chaos(run[run.index("--chaos") + 1]).plan(seed=1, world=4, nodes=2)
    assert {fault.component for fault in planned} == set(load_faults("faults.json").components)


# ---- the file of faults ------------------------------------------------------------------------------------------------------------------

SEEN = FittedFaults(
    source="hall-7.csv", nodes=100, node_hours=1e6, repair_hours=6.0, burst=0.3, lemon_share=0.02, lemon_factor=8.0,
    components={
        "gpu": ComponentFaults(faults=80, mttf_hours=12_500.0, low_hours=10_000.0, high_hours=15_700.0, shape=0.7),
        "software": ComponentFaults(faults=20, mttf_hours=50_000.0, low_hours=32_000.0),
    },
)  # fmt: skip


def test_the_file_comes_back_and_travels_as_text(tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text(SEEN.to_json())
    assert load_faults(tmp_path / "faults.json") == load_faults(SEEN.to_json()) == SEEN
    assert SEEN.mttf_hours == pytest.approx(10_000.0)
    there = ChaosSettings(mtbf_s=20.0, faults=str(tmp_path / "faults.json"))
    carried, planned = there.carried(), there.plan(seed=1, world=4, nodes=2)
    (tmp_path / "faults.json").unlink()
    assert carried.plan(seed=1, world=4, nodes=2) == planned and planned


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fleet_faults": 2}, "no version"),
        ({"components": {}}, "names no component"),
        ({"components": {"sun": {"mttf_hours": 5}}}, "no component of the fault catalogue"),
        ({"components": {"gpu": {"mttf_hours": 0}}}, "greater than 0"),
        ({"components": {"gpu": {"mttf_hours": "often"}}}, "it takes a number"),
        ({"components": {"gpu": {"mttf_hours": 5, "shape": 0.01}}}, "at least 0.1"),
        ({"components": {"gpu": 5}}, "must be an object"),
        ({"repair_hours": -1}, "greater than 0"),
        ({"burst": 1.5}, "at most 1"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_faults(json.dumps(json.loads(SEEN.to_json()) | change, indent=1))


def test_what_is_no_such_file_is_refused(folder: Path) -> None:
    for name in ("log.csv", "none.json"):
        assert "--faults" in refused("plan", "--faults", str(folder / name))


# ---- who takes it ------------------------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_with_the_rates_of_the_log(folder: Path) -> None:
    faults = load_faults(folder / "faults.json")
    plan = json.loads(fleet("plan", "--gpus", "1024", "--faults", str(folder / "faults.json"), "--json", "-"))
    nodes = 1024 // 8
    assert plan["faults"]["mtbf_s"] == pytest.approx(faults.mttf_hours * HOUR_S / nodes)
    assert plan["asked"]["repair_hours"] == pytest.approx(faults.repair_hours)
    assert "--faults says it" in refused("plan", "--faults", str(folder / "faults.json"), "--set", "gpu_mttf_hours=1000")
    own = json.loads(fleet("plan", "--gpus", "1024", "--faults", str(folder / "faults.json"), "--set", "repair_hours=2", "--json", "-"))
    assert own["asked"]["repair_hours"] == 2


def test_a_job_that_software_ends_needs_more_than_its_peers() -> None:
    asked = asked_with(PlanInput(gpus=1024), SEEN)
    assert asked.in_place_share == pytest.approx(0.8) and asked.durable_share == 0.0


def test_a_fleet_is_simulated_with_the_rates_of_the_log(folder: Path) -> None:
    answer = json.loads(fleet("simulate", "--gpus", "4096", "--days", "20", "--faults", str(folder / "faults.json"), "--json", "-"))
    faults, hours = load_faults(folder / "faults.json"), 20 * 24 * 512
    assert answer["expected_faults"] == pytest.approx(hours / faults.mttf_hours)
    assert set(answer["counts"]) == set(faults.components)


def test_the_fleet_that_is_rehearsed_is_that_of_the_log(folder: Path) -> None:
    count, seen = rehearse.said_of_faults([str(folder / "faults.json"), "6"])
    assert count == 6 and seen is not None
    target = target_of(1024, 10.0, "in-place", seen=seen)
    assert target.model.rate_per_s == pytest.approx(128 / (seen.mttf_hours * HOUR_S))
    assert rehearse.said_of_faults([]) == (rehearse.FAULTS, None)
    for twice in (["6", "7"], ["a.json", "b.json"]):
        with pytest.raises(ConfigError, match="one number and one file"):
            rehearse.said_of_faults(twice)


def test_chaos_has_the_mix_the_shapes_and_the_bursts_of_the_log(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_text(SEEN.to_json())
    planned = parse_chaos(f"mtbf=2s,duration=2000s,faults={tmp_path / 'seen.json'}").plan(seed=4, world=8, nodes=4)
    counts = {name: sum(fault.component == name for fault in planned) for name in KIND_OF_COMPONENT}
    assert {name for name, count in counts.items() if count} == {"gpu", "software"}
    assert counts["gpu"] / len(planned) == pytest.approx(0.8, abs=0.06) and len(planned) == pytest.approx(1000, rel=0.2)
    assert {row.name: row.shape for row in fitted(SEEN).components if row.name in SEEN.components} == {"gpu": 0.7, "software": None}
    lost = json.loads(SEEN.to_json())
    lost["components"] = {"host_parts": {"mttf_hours": 9_000.0}}
    (tmp_path / "lost.json").write_text(json.dumps(lost, indent=1))
    settings = parse_chaos(f"mtbf=5s,duration=500s,faults={tmp_path / 'lost.json'}")
    assert any("+" in fault.id for fault in settings.plan(seed=1, world=8, nodes=4)), "a lost node draws others along"


def test_a_component_that_the_log_does_not_have_adds_nothing() -> None:
    catalogue = fitted(SEEN)
    assert catalogue.rate(Topology(gpus=800), ("gpu", "nic")) == pytest.approx(100 / (12_500 * HOUR_S))
    assert load_catalogue().rate(Topology(), ("nic",)) > 0


def test_fleet_run_takes_the_file_beside_its_chaos(folder: Path) -> None:
    path = str(folder / "faults.json")
    found = configured({"chaos": "mtbf=15s"}, over={"chaos.faults": path})
    assert found.chaos.faults == path and found.chaos.plan(seed=1, world=4, nodes=2)
    assert "nothing says how many" in refused("run", "examples/gpt.py", "--config", f"chaos.faults={path}")
    assert "no JSON" in refused("run", "examples/gpt.py", "--chaos", f"mtbf=15s,faults={folder / 'log.csv'}")
    assert "contradicts trace" in refused("run", "examples/gpt.py", "--chaos", f"trace={folder / 'trace.csv'},faults={path}")


def test_the_log_counts_all_its_systems(folder: Path) -> None:
    assert load_faults(folder / "faults.json").nodes == sum(LANL_SYSTEMS.values())
