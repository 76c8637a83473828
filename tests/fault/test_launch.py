"""``fleet.launch`` where users call it: in a test, in a running event loop, in a thread, in a script, and in a driver of Ray's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import fleet
from fleet.app.cluster.local import LocalCluster
from fleet.errors import ConfigError
from tests.support.journals import NAME, wait_for_checkpoint
from tests.support.launched import LIMIT_S, facts, kill_trace, start
from tests.support.waiting import until

IN_A_TEST = """
import asyncio, logging, ray

lr = 0.05

def sample(i):
    x = torch.sin(torch.arange(8.0) * (i + 1))
    return x, x.sum().reshape(1)

def make(width):
    def train(run):
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = [sample(i) for i in range(256)]
        for step in fleet.current_run().steps(run.track(model=model, optimizer=optimizer), total=60):
            for x, y in step.batches(data, batch_size=64):
                step.backward(((model(x) - y) ** 2).mean())
            time.sleep(0.05)
            step.commit()
        run.save(FLAGS / "model.pt")
    return train

def test_a_closure_trains_in_a_running_event_loop(caplog):
    seen, before = [], (set(sys.path), signal.getsignal(signal.SIGINT))
    def report(progress):
        seen.append(progress)
        raise ValueError("a bug of the user's")
    async def main():
        beside = asyncio.create_task(asyncio.sleep(0.01, "went on"))
        result = fleet.launch(
            make(16), world=2, spares=1, nodes=2, storage=str(FLAGS / "runs"), chaos={"trace": str(FLAGS / "trace.csv")},
            progress=report, twin=True,
        )
        assert await beside == "went on"
        return result
    result = asyncio.run(main())
    assert (set(sys.path), signal.getsignal(signal.SIGINT)) == before
    assert not ray.is_initialized()
    saved = torch.load(FLAGS / "model.pt", weights_only=True)
    state = result.state()["model"]
    told(
        status=result.status, steps=result.steps, saved=result.saved_step, faults=result.faults, lost=result.ranks_lost,
        equal=result.twin.equal, digests=[result.digest, result.twin.result.digest], checks=dict(result.checks),
        same=sorted(state) == sorted(saved["model"] if "model" in saved else saved),
        progress=[[one.step, one.total, one.ended] for one in seen], events=[one.event for one in seen],
        errors=sum("progress=" in record.getMessage() for record in caplog.records),
    )
"""

IN_THREADS = """
import ray

def train(run):
    model = torch.nn.Linear(1, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(state, total=5):
        (FLAGS / "trains").touch()
        raise ValueError("a bug of the user's")

outcomes = {}

def launch():
    try:
        fleet.launch(train, world=1, nodes=1, storage=str(FLAGS / "runs"), name="fails")
    except fleet.errors.RunFailed as error:
        outcomes.update(reason=str(error), status=error.result.status, folder=str(error.result.folder))

thread = threading.Thread(target=launch)
thread.start()
deadline_s = time.monotonic() + 120
while not (FLAGS / "runs" / "fails").exists() and time.monotonic() < deadline_s:
    time.sleep(0.02)
try:
    fleet.launch(train, world=1, nodes=1, storage=str(FLAGS / "runs"))
except fleet.errors.ConfigError as error:
    outcomes["second"] = str(error)
thread.join()
result = fleet.launch(train, world=1, nodes=1, storage=str(FLAGS / "runs"), name="fails-too", check=False)
told(**outcomes, unchecked=result.status)
"""

IN_A_SCRIPT = """
def train(run):
    model = torch.nn.Linear(1, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(state, total=100_000):
        for (x,) in step.batches(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=16):
            step.backward(model(x).mean() ** 2)
        time.sleep(0.05)
        step.commit()

result = fleet.launch(
    lambda run: train(run), world=2, nodes=1, storage=str(FLAGS / "runs"), name="stops",
    checkpoint={"policy": "fixed", "interval_s": 1},
)
told(status=result.status, reason=result.reason, steps=result.steps, saved=result.saved_step)
"""


@pytest.fixture(scope="module")
def in_a_test(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("in_a_test")
    kill_trace(folder, (1.0, 1))
    return facts(folder, IN_A_TEST, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_a_closure_goes_through_a_kill_and_its_twin_has_the_same_bits(in_a_test: dict[str, Any]) -> None:
    assert in_a_test["status"] == "completed" and in_a_test["steps"] == in_a_test["saved"] == 60
    assert in_a_test["faults"] == 1
    assert in_a_test["equal"] and len(set(in_a_test["digests"])) == 1
    assert in_a_test["same"]
    assert "violated" not in in_a_test["checks"].values()


def test_progress_is_told_to_the_end_and_its_errors_once(in_a_test: dict[str, Any]) -> None:
    progress = in_a_test["progress"]
    assert progress[-1] == [60, 60, True]
    assert [step for step, _, _ in progress] == sorted(step for step, _, _ in progress)
    assert any(event for event in in_a_test["events"])
    assert in_a_test["errors"] == 1


def test_a_failed_run_raises_in_a_thread_and_a_second_one_beside_it_is_refused(tmp_path: Path) -> None:
    found = facts(tmp_path, IN_THREADS)
    assert "ValueError: a bug of the user's" in found["reason"]
    assert found["status"] == found["unchecked"] == "failed"
    assert Path(found["folder"], NAME).is_file()
    assert "another run" in found["second"]


def test_ctrl_c_stops_a_script_in_order_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process, folder = start(tmp_path, IN_A_SCRIPT), tmp_path / "runs" / "stops"
    until(lambda: (folder / NAME).exists() or process.poll() is not None, "there is a journal", 60)
    wait_for_checkpoint(folder)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "SIGINT: stopping in order" in said
    facts_file = (tmp_path / "facts.json").read_text()
    assert '"status": "stopped"' in facts_file
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_driver_of_rays_is_refused_and_keeps_its_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{cluster.address}.*ray\.shutdown"):
        fleet.launch(lambda run: None, storage=str(tmp_path / "runs"))
    assert ray.is_initialized() and ray.get(ray.put(os.getpid())) == os.getpid()
    assert not (tmp_path / "runs").exists()
