"""A real run with trackers: one that is killed and comes back, one that is there, and one that comes when the run has ended."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.trackers.session import standing
from fleet.host.processes import calling
from fleet.protocol.records import Committed, Measurement, RunStarted
from tests.support.journals import records
from tests.support.launched import kill_trace
from tests.support.processes import begin
from tests.support.trackers import ARTEFACTS, MlflowServer, OtlpReceiver, expected, read_mlflow, read_tensorboard, singles
from tests.support.waiting import until

SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))

def train(run):
    model = nn.Linear(8, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for step in run.steps(state, total=int(run.options["total"])):
        for x, y in step.batches(DATA, 64, tokens=8):
            step.backward(nn.functional.mse_loss(model(x), y))
        if not Path(run.options["hurry"]).exists():
            time.sleep(0.2)
        step.log(mine=step.number / 2)
        step.commit()
"""
EVERY_S, END_S, LIMIT_S = 1.0, 3.0, 400.0


def started(folder: Path, url: str, otlp: str, total: int) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    trackers = [word for name in ("mlflow", "tensorboard", "otel") for word in ("--track", name)]
    reported = {"track.every_s": EVERY_S, "track.end_s": END_S, "cost.usd_per_rank_hour": 2.0}
    config = [word for name, value in reported.items() for word in ("--config", f"{name}={value}")]
    chaos, options = f"trace={kill_trace(folder, (2.0, 1))}", ["--set", f"total={total}", "--set", f"hurry={folder / 'hurry'}"]
    command = calling("fleet.app.cli.main", "main", "run", "script.py", "--name", "seen", "--world", "2", "--shards", "4", "--chaos", chaos)
    environment = {
        **os.environ, "MLFLOW_TRACKING_URI": url, "MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }  # fmt: skip
    return begin([*command, *options, *config, *trackers], folder, environment)


def wait(process: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
    """While the run goes on. Raises AssertionError with what it has said when it has ended before."""
    until(lambda: condition() or process.poll() is not None, what, LIMIT_S, 0.1)
    assert condition(), process.communicate(timeout=LIMIT_S)[0]


def tracked(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = calling("fleet.app.cli.main", "main", "runs", "track", "seen")
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, text=True, capture_output=True, timeout=LIMIT_S, check=False
    )


def steps(run: Path) -> int:
    return sum(isinstance(record, Committed) for record in records(run))


def away(run: Path, outage_s: float) -> Callable[[], bool]:
    """Whether the tracker has been missed while the run went on: for so long by its clock, and by 20 steps at least."""
    before, since_s = steps(run), max(record.at_s for record in records(run) if isinstance(record, Committed))

    def passed() -> bool:
        now = [record for record in records(run) if isinstance(record, Committed)]
        return bool(standing(run, "mlflow").away) and len(now) >= before + 20 and now[-1].at_s >= since_s + outage_s

    return passed


@pytest.mark.parametrize(("outage_s", "total"), [(0.0, 300), (60.0, 900)])
def test_a_run_goes_on_without_its_trackers_and_they_get_all_of_it(
    tmp_path: Path, mlflow: MlflowServer, outage_s: float, total: int
) -> None:
    receiver, run = OtlpReceiver(), tmp_path / "runs" / "seen"
    process = started(tmp_path, mlflow.url, receiver.url, total)
    try:
        wait(process, lambda: standing(run, "mlflow").sent > 20, "figures have come to MLflow")
        mlflow.kill()
        wait(process, away(run, outage_s), "the run has gone on without MLflow")
        mlflow.start()
        (tmp_path / "hurry").touch()
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert f"fleet runs track {run} --track otel" in " ".join(said.split()), said

    assert not receiver.spans, "nobody was there"
    receiver.start()
    try:  # what there was no time for, on a slow machine also of the others
        later = tracked(tmp_path, {"MLFLOW_TRACKING_URI": mlflow.url, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
    finally:
        receiver.kill()
    assert later.returncode == 0, later.stderr
    assert all(standing(run, name).done for name in ("mlflow", "tensorboard", "otel"))

    kept = records(run)
    first = kept[0]
    assert isinstance(first, RunStarted)
    want = expected(kept, EVERY_S)
    reported = read_mlflow(mlflow.url, f"seen@{first.unix_time_s:.3f}", tmp_path)
    assert reported.figures == want.figures, "each figure once"
    assert reported.marks == want.marks
    assert {kind for kind, _, _ in reported.marks} >= {"fault", "loss"}
    assert (
        want.facts.items() <= {**reported.facts, **{name.removeprefix("fleet."): value for name, value in reported.facts.items()}}.items()
    )
    assert (reported.status, reported.files.keys()) == ("FINISHED", ARTEFACTS)
    assert json.loads(reported.files["report.json"])["steps"] == total
    seen = read_tensorboard(run / "tensorboard")
    assert seen.figures == singles(want.figures)
    assert (seen.marks, seen.files.keys()) == (want.marks, ARTEFACTS)
    names = {name for name, _, _ in reported.figures}
    measured = {record.name for record in kept if isinstance(record, Measurement)}
    assert names >= measured >= {"loss", "mine", "grad_norm"}
    assert names >= {"fleet_goodput_ratio", "fleet_cost_usd_total/compute", "fleet_losses_total"}

    spans = receiver.reported()
    assert (spans.spans, spans.status, receiver.services) == (want.spans, "completed", {"fleet"})
    assert {name for name, _, _ in spans.spans} >= {"run", "view", "fault", "checkpoint"}
