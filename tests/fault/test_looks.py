"""Looks at a run that goes on, each ended by another signal at another moment: its journal has no trace of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

import pytest

import fleet
from fleet.app.cluster.local import LocalCluster
from fleet.protocol.decisions import Stopping
from fleet.protocol.events import NodeLeaves, NodeStays, SettingChanged, StopRequested
from fleet.protocol.exit_codes import Exit
from fleet.protocol.records import Committed, DecisionMade, Received, Record, RefusedLines, RunEnded
from fleet.settings.run import RunSettings
from tests.support import trains
from tests.support.journals import NAME, records
from tests.support.plain import PlainFleet
from tests.support.processes import begin
from tests.support.waiting import until
from tests.zoo.harness import PATIENT

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
FROM_OUTSIDE = {each.__name__ for each in (StopRequested, SettingChanged, NodeLeaves, NodeStays)}
"""What reaches a run that somebody wants something of."""
FAST = "fast"
SCRIPT = f"""
import time
from pathlib import Path

import torch


def train(run):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fast = Path(run.options["flags"], "{FAST}")
    print("trains", flush=True)
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=100_000):
        for batch in step.batches(torch.ones(64, 8), batch_size=16):
            step.backward(model(batch).square().mean())
        time.sleep(0.1)
        if step.commit() and run.once(fast.exists):
            run.stop("it was looked at")
"""


class Looks:
    """Looks at the run whose journal lies in ``folder`` from the folder ``here``, where it is called ``run``."""

    def __init__(self, folder: Path, here: Path) -> None:
        self._folder, self._here = folder, here
        self._moment = 0

    def steps(self) -> int:
        kept = records(self._folder) if (self._folder / NAME).exists() else []
        return max((record.state.step for record in kept if isinstance(record, Committed)), default=0)

    def end_each(self, looks: Sequence[tuple[Sequence[str], signal.Signals]], at_once: int) -> None:
        """Begin so many at once, and end them one by one, each some steps of the run later than the one before."""
        rest = iter(looks)
        while some := list(islice(rest, at_once)):
            going = [(number, self._begin(words)) for words, number in some]
            for number, process in going:
                self._moment = self.steps() + 2 + self._moment % 3
                until(lambda: self.steps() >= self._moment, f"step {self._moment}", 120)
                process.send_signal(number)
                process.communicate(timeout=120)  # how it ends is told by tests/unit/test_looks.py: here Python itself may still begin

    def _begin(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return begin([sys.executable, "-m", "fleet", *words], self._here, os.environ | {"PYTHONPATH": str(ROOT)})


def check_untouched(kept: Sequence[Record]) -> None:
    """The run went to the end that its own loop has set, and nothing reached it from elsewhere."""
    assert not [
        record for record in kept if isinstance(record, RefusedLines) or (isinstance(record, Received) and record.what in FROM_OUTSIDE)
    ]
    assert not [record for record in kept if isinstance(record, DecisionMade) and isinstance(record.payload, Stopping)]
    [ended] = [record for record in kept if isinstance(record, RunEnded)]
    assert ended.status == "completed"


def plays(run: fleet.Run) -> None:
    """Until it is told by a file that it was looked at often enough. One rank looks for it, so that all end at one step."""
    fast = Path(run.options["flags"], FAST)
    model, optimizer, _ = trains.build(16, "layer")
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=100_000):
        for x, y in step.batches(trains.Numbers(), batch_size=32):
            step.backward((model(x) - y).square().mean())
        if step.commit() and run.once(fast.exists):
            run.stop("it was looked at")


def test_a_run_of_this_machine_goes_on_as_if_nobody_had_looked(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    settings = RunSettings(world=2, shards=8, options={"flags": str(tmp_path)}, timeouts=PATIENT)
    commands = (("watch", "run"), ("logs", "run", "--follow"), ("status", "run"), ("report", "run"))
    with PlainFleet(plays, settings, tmp_path / "runs" / "run") as one:
        looks = Looks(tmp_path / "runs" / "run", tmp_path)
        until(looks.steps, "a step", 60)
        looks.end_each([(words, number) for number, words in product(SIGNALS, commands)], at_once=len(commands))
        (tmp_path / FAST).touch()
        one.wait()
        check_untouched(one.records())


@pytest.mark.timeout(900)
def test_twenty_looks_at_a_run_of_a_cluster_leave_no_trace(cluster: LocalCluster, tmp_path: Path) -> None:
    here, store = tmp_path / "here", tmp_path / "store"
    here.mkdir()
    (here / "job.py").write_text(SCRIPT)
    address = ("--address", cluster.address)
    options = ("--world", "2", "--spares", "0", "--shards", "4", "--set", f"flags={tmp_path}", "--storage", str(store), "--no-trial")
    patient = [word for name in ("heartbeat_s=20", "node_s=30", "quiesce_s=40", "form_s=60") for word in ("--config", f"timeouts.{name}")]
    looks = Looks(store / "run", here)
    code, said = typed(here, "run", "job.py", "--name", "run", *options, *patient, *address, "--detach")
    assert code == Exit.DONE, said
    starting = begin([sys.executable, "-m", "fleet", "attach", "run", *address], here, os.environ | {"PYTHONPATH": str(ROOT)})
    until(looks.steps, "a step", 240)
    commands = (("attach", "run", *address), ("logs", "run", "--follow", *address), ("watch", "run"), ("report", "run"))
    more = (("status", *address), ("attach", "run", *address))
    looks.end_each([(words, number) for number in SIGNALS for words in (*commands, *more)], at_once=3)
    starting.send_signal(signal.SIGHUP)
    said, _ = starting.communicate(timeout=60)
    assert starting.returncode == Exit.UNSEEN and "fleet stop run" in said, said
    assert "goes on" in typed(here, "status", *address)[1]
    (tmp_path / FAST).touch()
    code, said = typed(here, "attach", "run", *address)
    assert code == Exit.DONE, said
    check_untouched(records(store / "run"))


def typed(folder: Path, *words: str) -> tuple[int, str]:
    process = begin([sys.executable, "-m", "fleet", *words], folder, os.environ | {"PYTHONPATH": str(ROOT)})
    said, _ = process.communicate(timeout=240)
    return process.returncode, said
