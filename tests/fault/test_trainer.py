"""``fleet.Trainer``: ports of Ray Train's examples through a kill, reports that count once, and each row of the table of its API."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import ROOT, facts, kill_trace
from tests.support.ray_train_rows import ROWS

EXAMPLES = ("digits", "text", "table")

PORTED = """
import importlib, time
import ray.train
from ray.train import RunConfig, ScalingConfig
module = importlib.import_module("examples.ray_train.NAME_fleet")
from fleet.data import Parquet, ShardedDataset

def slowed(config):
    commit = fleet.Step.commit
    def slow(step):
        time.sleep(0.03)
        return commit(step)
    fleet.Step.commit = slow
    module.train_func(config)

datasets = {}
if hasattr(module, "write_table"):
    (FLAGS / "table").mkdir()
    datasets["train"] = ShardedDataset(module.write_table(FLAGS / "table"), Parquet())
result = fleet.Trainer(
    slowed, train_loop_config=module.CONFIG, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="ported", storage_path=str(FLAGS / "runs")), datasets=datasets,
    nodes=2, spares=1, chaos={"trace": str(FLAGS / "trace.csv")}, twin=True,
).fit()
assert isinstance(result, ray.train.Result)
told(
    status=result.fleet.status, faults=result.fleet.faults, equal=result.fleet.twin.equal, metrics=result.metrics,
    reports=len(result.metrics_dataframe), epochs=module.CONFIG["epochs"], checkpoint=result.checkpoint and result.checkpoint.path,
)
"""

THREE_KILLS = """
import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from actors import ray_internals, train_session
from tests.support.ray_train_rows import probed

STEPS = 24

def die(name):
    if first(name):
        os.kill(os.getpid(), signal.SIGKILL)

def loop():
    run = fleet.current_run()
    own = ray_internals.own_context()
    if not run.is_twin:
        (FLAGS / f"probed-{run.slot}.json").write_text(json.dumps(probed(run, own)))
    put = train_session.Reported.put
    taken_by_two = set()  # what one rank alone has taken, nobody else can report once it is lost
    def dying(reported, folders, step):
        name = put(reported, folders, step)
        if step >= 8 and step in taken_by_two and not run.is_twin:
            die("in the report")
        return name
    train_session.Reported.put = dying
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=STEPS):
        for x, y in step.batches(ray.train.get_dataset_shard("train"), batch_size=32):
            if step.number >= 12 and run.rank == 1 and (FLAGS / "in the report").exists() and not run.is_twin:
                die("in a batch")
            step.backward(((model(x) - y) ** 2).mean())
        if run._joined and len(run._joined[0].members) == 2:
            taken_by_two.add(step.number + 1)
        ray.train.report({"before": step.number})
        time.sleep(0.1)
        if not step.commit():
            continue
        if step.number == 4 and run.rank == 0 and not run.is_twin:
            die("behind the commit")
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            (Path(folder) / "deep").mkdir()
            (Path(folder) / "deep" / "step").write_text(str(step.number))
            ray.train.report({"step": step.number, "loss": torch.tensor(step.loss)}, checkpoint=Checkpoint.from_directory(folder))

def sample(i):
    x = torch.sin(torch.arange(8.0) * (i + 1))
    return x, x.sum().reshape(1)

result = fleet.Trainer(
    loop, scaling_config=ScalingConfig(num_workers=2), datasets={"train": [sample(i) for i in range(256)]},
    run_config=RunConfig(
        name="kills", storage_path=str(FLAGS / "runs"),
        checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="step"),
    ),
    nodes=2, spares=2, twin=True,
).fit()
with result.checkpoint.as_directory() as folder:
    last = (Path(folder) / "deep" / "step").read_text()
    weights = torch.load(Path(folder, "model.pt"), weights_only=True)
state = result.fleet.state()["model"]
told(
    status=result.fleet.status, equal=result.fleet.twin.equal, losses=len(result.fleet.report["losses"]),
    metrics=[each for each in result.metrics_dataframe.to_dict("records")], last=last,
    kept=[metrics["step"] for _, metrics in result.best_checkpoints], folders=len(os.listdir(FLAGS / "runs" / "kills" / "reported")),
    same=all(torch.equal(state[name], weights[name]) for name in state), killed=[name for name in os.listdir(FLAGS) if " " in name],
)
"""

NEWCOMER = """
import ray.train
from ray.train import RunConfig, ScalingConfig

def loop():
    run = fleet.current_run()
    model = torch.nn.Linear(1, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(state, total=60):
        for (x,) in step.batches(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=16):
            step.backward(model(x).mean() ** 2)
        deadline_s = time.monotonic() + 60
        while step.number == 10 and not (FLAGS / "back").exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        time.sleep(0.05)
        committed = step.commit()
        if run.slot == 0 and not committed and (FLAGS / "killed").exists():
            (FLAGS / "back").touch()
        if run.slot == 0 and step.number == 4 and first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        ray.train.report({"step": step.number})

result = fleet.Trainer(
    loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=str(FLAGS / "runs")), nodes=1,
).fit()
told(
    steps=[int(step) for step in result.metrics_dataframe["step"]], views=[view["members"] for view in result.fleet.report["views"]],
)
"""

RESUMED = """
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig

def loop(config):
    run = fleet.current_run()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            (FLAGS / f"began-{run.slot}").write_text(Path(folder, "step").read_text())
    model = torch.nn.Linear(1, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(state, total=12):
        for (x,) in step.batches(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=16):
            step.backward(model(x).mean() ** 2)
        if step.number == 8 and not (FLAGS / "again").exists():
            journal, deadline_s = run.folder / "journal.jsonl", time.monotonic() + 30
            while b'"durable"' not in journal.read_bytes() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            raise ValueError("a bug of the user's")
        time.sleep(0.1)
        if step.commit():
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step.number))
                ray.train.report({"step": step.number}, checkpoint=Checkpoint.from_directory(folder))

def fit():
    trainer = fleet.Trainer(
        loop, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="again", storage_path=str(FLAGS / "runs")), nodes=1,
        checkpoint={"policy": "fixed", "interval_s": 0.3},
    )
    return trainer.fit()

try:
    fit()
except ray.train.TrainingFailedError as error:
    failed = [str(error), error.result.fleet.status, error.result.error is error]
(FLAGS / "again").touch()
result = fit()
try:
    fit()
except fleet.errors.ConfigError as error:
    third = str(error)
told(
    failed=failed, status=result.fleet.status, steps=[one["step"] for one in result.metrics_dataframe.to_dict("records")], third=third,
    began=[int((FLAGS / f"began-{slot}").read_text()) for slot in (0, 1)],
)
"""


def lines_changed(before: str, after: str) -> int:
    """Lines that differ, whatever their indentation: one that takes another's place counts once."""
    one, other = ([line.strip() for line in (ROOT / path).read_text().splitlines()] for path in (before, after))
    parts = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(end - begin, till - start) for kind, begin, end, start, till in parts if kind != "equal")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_port_changes_five_lines(name: str) -> None:
    assert 0 < lines_changed(f"examples/ray_train/{name}_ray.py", f"examples/ray_train/{name}_fleet.py") <= 5


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_port_goes_through_a_kill_and_ends_with_the_bits_of_its_twin(name: str, tmp_path: Path) -> None:
    kill_trace(tmp_path, (0.6, 1))
    found = facts(tmp_path, PORTED.replace("NAME", name))
    assert found["status"] == "completed" and found["faults"] == 1
    assert found["equal"]
    assert found["reports"] == found["epochs"]
    assert (found["checkpoint"] is not None) == (name == "text")


@pytest.fixture(scope="module")
def through_three_kills(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("kills")
    return facts(folder, THREE_KILLS), folder


def test_each_report_counts_once_through_three_kills(through_three_kills: tuple[dict[str, Any], Path]) -> None:
    found, _ = through_three_kills
    assert found["status"] == "completed" and found["equal"]
    assert sorted(found["killed"]) == ["behind the commit", "in a batch", "in the report"] and found["losses"] >= 3
    metrics = found["metrics"][1:]  # the first is the probe's, before the loop
    assert [each["before"] for each in metrics[::2]] == list(range(24))
    assert [each["step"] for each in metrics[1::2]] == list(range(24))


def test_the_last_report_is_in_the_result_with_as_many_checkpoints_as_are_to_be_kept(
    through_three_kills: tuple[dict[str, Any], Path],
) -> None:
    found, _ = through_three_kills
    assert found["last"] == "23" and found["same"]
    assert found["kept"] == [22, 23] and found["folders"] == 2


def test_no_report_is_left_out_where_a_newcomer_is_the_first_rank_of_its_view(tmp_path: Path) -> None:
    found = facts(tmp_path, NEWCOMER)
    assert ["0.1", "1.0"] in found["views"]
    assert found["steps"] == list(range(60))


def test_the_table_of_ray_trains_api_is_true(through_three_kills: tuple[dict[str, Any], Path]) -> None:
    _, folder = through_three_kills
    page, form = (ROOT / "docs/from-ray-train.md").read_text(), r"^\| `ray\.train\.(.+?)` \| (as in Ray Train|another meaning|refused) \|"
    rows = dict(re.findall(form, page, re.MULTILINE))
    assert rows == {row: verdict for row, (verdict, _) in ROWS.items()}
    seen = [json.loads(path.read_text()) for path in folder.glob("probed-*.json")]
    assert len(seen) == 4
    assert [row for probes in seen for row, holds in probes.items() if not holds] == []


def test_a_trainer_of_the_same_name_goes_on_from_what_was_reported(tmp_path: Path) -> None:
    found = facts(tmp_path, RESUMED)
    said, status, same = found["failed"]
    assert "a bug of the user's" in said and status == "failed" and same
    assert found["status"] == "completed"
    assert [int(step) for step in found["steps"]] == list(range(12))
    assert len(set(found["began"])) == 1 and 0 <= found["began"][0] < 8
    assert "completed" in found["third"]
