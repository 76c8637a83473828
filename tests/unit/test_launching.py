"""What ``fleet.launch`` and ``fleet.Trainer`` are told: settings, refusals before any process starts, functions on their way to ranks."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray import cloudpickle
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import fleet
import fleet.data
from actors.train_session import Retention
from chaos.settings import parse_chaos
from fleet.app import launching, plans
from fleet.app.launching import LaunchRequest
from fleet.app.ray_trainer import TrainingFailed, readable
from fleet.app.result import result_of
from fleet.app.shipping import ship
from fleet.errors import ConfigError, FleetError, LoopError, RunFailed
from fleet.ledger.reports import reports
from fleet.protocol.records import HistoryBegun, OnceRecord
from fleet.protocol.types import Member, StateId, View, rank_of_those_behind
from fleet.settings.per_rank import PerRankSettings
from storage.reported import ReportedFolders

FACTOR = 3
GOLDEN = Path(__file__).parents[1] / "golden" / "journal-v3.jsonl"


def helper(value: int) -> int:
    """Used by a function that is sent."""
    return FACTOR * value


def nothing(run: Any) -> None:
    """A train function that is never called."""


def configured(**given: Any) -> Any:
    return launching.configured(*launching.layers_of(given))


# ---- settings ----------------------------------------------------------------------------------------------------------------------------


def test_settings_have_their_names_and_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("world = 6\nseed = 1\n[timeouts]\nprogress_s = 30.0\n")
    found = configured(config=[file, "seed=2"], seed=3, spares=1, options={"lr": 0.1}, chaos="storm", timeouts={"heartbeat_s": 2.0})
    run = found.run
    assert (run.world, run.seed, run.spares, run.options["lr"]) == (6, 3, 1, "0.1")
    assert (run.timeouts.progress_s, run.timeouts.heartbeat_s) == (30.0, 2.0)
    assert found.chaos == parse_chaos("storm")
    assert configured(config={"chaos": "mtbf=15s"}).chaos.mtbf_s == 15.0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"wrold": 3}, "wrold"),
        ({"world": 0}, "world"),
        ({"world": "four"}, "world"),
        ({"recovery": {"policy": "no-such"}}, "recovery.policy"),
        ({"chaos": "mtbf=often"}, "chaos"),
        ({"name": "../up"}, "--name"),
        ({"resume": "no-such-run"}, "--resume"),
        ({"twin": "yes"}, "twin"),
        ({"twin": 64}, "shards"),
        ({"address": "auto"}, "address"),
    ],
)
def test_what_is_impossible_is_refused_by_name_and_leaves_nothing(tmp_path: Path, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet.launch(nothing, storage=str(tmp_path / "runs"), **given)
    assert field in refused.value.field
    assert not (tmp_path / "runs").exists()


def test_a_name_is_refused_when_there_is_such_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        fleet.launch(nothing, storage=str(tmp_path), name="mine")


def test_a_process_that_is_in_a_cluster_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"gcs_address": "127.0.0.1:6379"}))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:6379.*ray\.shutdown\(\)"):
        fleet.launch(nothing, storage=str(tmp_path))


def test_import_is_light_and_all_public_names_are_there() -> None:
    loaded = "print([name for name in ('torch', 'ray', 'numpy') if name in sys.modules])"
    code = f"import sys, fleet; {loaded}; fleet.data.Streams; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n['torch', 'numpy']\n"
    assert all(getattr(fleet, name) for name in fleet.__all__)


# ---- functions on their way --------------------------------------------------------------------------------------------------------------


def _elsewhere(shipped: Any, called: str) -> Any:
    """What comes of a function in a process that cannot find this module."""
    code = "import sys, pickle; found = []; pickle.loads(sys.stdin.buffer.read())(found); print(found[0], 'tests' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=shipped.pickled, capture_output=True, cwd="/", timeout=60, check=False)
    assert done.returncode == 0, (called, done.stderr.decode())
    return done.stdout.decode().split()


class Caller:
    """Its instances and methods are functions, too."""

    def __call__(self, found: Any) -> None:
        found.append(helper(2))

    def method(self, found: Any) -> None:
        found.append(helper(2))


def _module_level(found: Any) -> None:
    found.append(helper(2))


def _given_factor(factor: int, found: Any) -> None:
    found.append(helper(factor))


def test_any_function_reaches_a_process_that_has_not_its_module() -> None:
    two = 2

    def closure(found: Any) -> None:
        found.append(helper(two))

    kinds: dict[str, Callable[[Any], None]] = {
        "closure": closure,
        "lambda": lambda found: found.append(helper(two)),
        "module": _module_level,
        "partial": functools.partial(_given_factor, 2),
        "instance": Caller(),
        "method": Caller().method,
    }
    for called, train in kinds.items():
        assert _elsewhere(ship(train), called) == ["6", "False"]


def test_a_function_of_main_reaches_it_and_no_registry_is_left_changed() -> None:
    before = set(cloudpickle.list_registry_pickle_by_value())
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("base = 4\ndef helper(x): return base + x\ndef train(found): found.append(helper(2))", names)
    ship(_module_level)
    assert _elsewhere(ship(names["train"]), "main") == ["6", "False"]
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_what_cannot_be_sent_or_called_is_refused() -> None:
    lock = threading.Lock()

    async def asynchronous(run: Any) -> None:
        """No train function."""

    with pytest.raises(ConfigError, match="cannot be sent to ranks.*lock"):
        ship(lambda run: lock.acquire())
    with pytest.raises(ConfigError, match="cannot be called"):
        ship(lambda: None)
    for odd in (asynchronous, 3):
        with pytest.raises(ConfigError, match="no plain function"):
            ship(odd)  # type: ignore[arg-type]


def test_a_function_that_sets_torchs_backends_goes_by_value() -> None:
    import torch

    def train(run: Any) -> None:
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        run.append(torch.backends.cuda.matmul.allow_tf32)

    outcome: list[bool] = []
    ship(train)(outcome)
    assert outcome == [torch.backends.cuda.matmul.allow_tf32]


def test_current_run_is_refused_where_there_is_none() -> None:
    with pytest.raises(LoopError, match="outside of a train function"):
        fleet.current_run()


# ---- results -----------------------------------------------------------------------------------------------------------------------------


def test_a_result_has_the_figures_of_the_report(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    shutil.copy(GOLDEN, journal)
    result = result_of(tmp_path, f"file://{tmp_path}")
    report = result.report
    assert (result.name, result.status, result.digest, result.steps) == tuple(report[key] for key in ("run", "status", "digest", "steps"))
    assert (result.faults, result.ranks_lost) == (report["counts"]["executed"], report["counts"]["in_view_losses"])
    assert set(result.checks.values()) <= {"ok", "unknown", "violated"}
    assert result.twin is None
    with pytest.raises(FleetError, match="no sound checkpoint"):
        result.state()


def once(step: int, number: int, history: int = 0, phase: Any = "done", **outcome: Any) -> OnceRecord:
    return OnceRecord(phase, f"{history}.{step}/ray.train.report#{number}", Member(0, 0), 1.0, json.dumps(outcome))


def test_reports_of_steps_that_were_taken_back_do_not_count() -> None:
    records = [
        once(4, 1, a=1), once(4, 2, a=2), once(8, 1, a=3), once(8, 1, a=99), once(12, 1, phase="begun"),
        HistoryBegun(1, StateId(0, 4), 2.0, "all were lost"), once(8, 1, history=1, a=4),
        OnceRecord("done", "0.4/other#1", Member(0, 0), 1.0, "{}"),
        OnceRecord("done", "end/ray.train.report#1", Member(0, 0), 1.0, '{"a": 5}'),
    ]  # fmt: skip
    assert [each.outcome["a"] for each in reports(records, "ray.train.report")] == [1, 2, 4, 5]


def test_retention_keeps_the_best_and_always_the_newest() -> None:
    there = [("a", 0.1), ("b", 0.9), ("c", 0.5), ("d", 0.2)]
    kept = {most: [name for name, _ in Retention(most, "acc").chosen(there)] for most in (1, 2, 3, None)}
    assert kept == {1: ["d"], 2: ["b", "d"], 3: ["b", "c", "d"], None: ["a", "b", "c", "d"]}
    assert [name for name, _ in Retention(2, "acc", "min").chosen(there)] == ["a", "d"]
    assert [name for name, _ in Retention(2).chosen([("a", None), ("b", None), ("c", None)])] == ["b", "c"]


def test_reported_folders_are_kept_with_all_in_them(tmp_path: Path) -> None:
    folders, source = ReportedFolders(f"file://{tmp_path}/store"), tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "deep" / "b.txt").write_text("b")
    folders.put("1-x/checkpoint", source)
    path, files = folders.where("1-x/checkpoint")
    assert files is None and Path(path, "deep", "b.txt").read_text() == "b"
    assert folders.names() == ["1-x"] and folders.there("1-x/checkpoint")
    folders.remove("1-x/checkpoint")
    assert not folders.there("1-x/checkpoint") and folders.names() == []


def test_reported_folders_lie_in_other_stores_too(tmp_path: Path) -> None:
    folders = ReportedFolders("memory://test-reported/run")
    (tmp_path / "a.txt").write_text("a")
    folders.put("1-x/checkpoint", tmp_path)
    path, files = folders.where("1-x/checkpoint")
    with ray.train.Checkpoint(path, files).as_directory() as folder:
        assert Path(folder, "a.txt").read_text() == "a"
    folders.remove("1-x/checkpoint")
    assert not folders.there("1-x/checkpoint")


# ---- the trainer's arguments -------------------------------------------------------------------------------------------------------------


def loop(config: dict[str, Any]) -> None:
    """A train loop that is never called."""


@pytest.mark.parametrize(
    ("scaling", "per_rank"),
    [
        ({"use_gpu": True}, {"gpus": 1.0}),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 2, "CPU": 8, "NIC": 1}}, {"gpus": 2.0, "resources": ("NIC=1",)}),
        ({"label_selector": {"rack": "in(a,b)"}}, {"labels": ("rack=in(a,b)",)}),
        ({"resources_per_worker": {"CPU": 4}}, None),
    ],
)
def test_what_a_worker_takes_is_what_a_rank_takes(scaling: dict[str, Any], per_rank: dict[str, Any] | None) -> None:
    trainer = fleet.Trainer(loop, scaling_config=ScalingConfig(num_workers=2, **scaling))
    assert trainer._settings.get("per_rank") == per_rank
    assert per_rank is None or configured(per_rank=per_rank).run.per_rank == PerRankSettings(**per_rank)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"scaling_config": ScalingConfig(num_workers=2, label_selector=[{"rack": "a"}, {"rack": "b"}])}, "scaling_config.label_selector"),
        ({"scaling_config": ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK")}, "scaling_config.placement_strategy"),
        ({"scaling_config": ScalingConfig(num_workers=0)}, "scaling_config.num_workers"),
        ({"run_config": RunConfig(worker_runtime_env={"pip": ["x"]})}, "run_config.worker_runtime_env"),
        ({"run_config": RunConfig(storage_path="/tmp"), "storage": "x"}, "storage"),
        ({"dataset_config": 1}, "dataset_config"),
        ({"validation_config": 1}, "validation_config"),
        ({"metadata": {}}, "metadata"),
        ({"resume_from_checkpoint": 1}, "resume_from_checkpoint"),
        ({"world": 2}, "world"),
        ({"name": "x"}, "name"),
        ({"resume": "x"}, "resume"),
        ({"check": False}, "check"),
        ({"datasets": {"train": iter([1])}}, "datasets['train']"),
        ({"datasets": {"train": []}}, "datasets['train']"),
    ],
)
def test_arguments_of_ray_train_that_cannot_be_honoured_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet.Trainer(loop, **given)
    assert refused.value.field == field


def test_arguments_without_an_effect_are_listed() -> None:
    run = RunConfig(failure_config=FailureConfig(max_failures=3), checkpoint_config=CheckpointConfig(num_to_keep=2))
    trainer = fleet.Trainer(loop, scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}), run_config=run)
    assert [note.partition(":")[0] for note in trainer.notes] == ["scaling_config.resources_per_worker", "run_config.failure_config"]
    assert fleet.Trainer(loop).notes == []


def test_a_loop_has_one_parameter_or_none() -> None:
    fleet.Trainer(lambda: None)
    with pytest.raises(ConfigError, match="cannot be called"):
        fleet.Trainer(lambda one, two: None)


def test_a_failed_trainer_is_caught_by_code_for_either() -> None:
    error = TrainingFailed("because")
    assert isinstance(error, ray.train.TrainingFailedError) and isinstance(error, RunFailed) and str(error) == "because"
    assert pickle.loads(pickle.dumps(error)).reason == "because"


def test_datasets_become_what_batches_takes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "0.parquet")
    data = fleet.data.ShardedDataset(tmp_path, fleet.data.Parquet())
    assert readable("train", data) is data
    assert pickle.loads(cloudpickle.dumps(data))[2] == {"x": 3}
    assert readable("train", [5, 6])[1] == 6


def test_a_run_that_is_there_goes_on_only_if_it_has_not_come_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "done"
    folder.mkdir()
    shutil.copy(GOLDEN, folder / "journal.jsonl")
    assert plans.is_completed(folder)
    found = launching.configured({"storage": str(tmp_path)})
    with pytest.raises(ConfigError, match="completed"):
        launching.plan_of(nothing, found, LaunchRequest(resume="done"))
    with pytest.raises(ConfigError, match="has its name"):
        launching.plan_of(nothing, found, LaunchRequest(resume="done", name="other"))


# ---- who reports -------------------------------------------------------------------------------------------------------------------------


def test_behind_a_commit_those_count_that_took_the_step() -> None:
    """Slot 0 comes back at the boundary behind step 5, as the first of the new view: it owes nothing of that step."""
    members = tuple(Member(slot, 1) for slot in range(3))
    view = View(7, members, ((0, 1), (1, 2), (2, 3)), 1, (0,), StateId(0, 3), "127.0.0.1:1")
    assert [rank_of_those_behind(view, 5, 5, rank) for rank in (1, 2)] == [0, 1]
    assert [rank_of_those_behind(view, 5, 6, rank) for rank in (0, 1, 2)] == [0, 1, 2]
