"""A cluster with Ray's autoscaler: nodes come as they are asked for, a lost one is asked for again, and those without work go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fleet.protocol.records import Committed, DecisionMade, ProcessUp, Record, ViewPublished
from tests.support.autoscaled import Autoscaled, autoscaled
from tests.support.journals import NAME, records
from tests.support.waiting import until

SCRIPT = """
import time
import torch

def train(run):
    torch.manual_seed(run.seed)
    model = torch.nn.Linear(8, 1)
    data = torch.arange(8 * 512, dtype=torch.float32).reshape(512, 8) / 4096
    state = run.track(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    for step in run.steps(state, total=int(run.options["steps"])):
        for batch in step.batches(data, batch_size=64):
            time.sleep(float(run.options["pause_s"]))
            step.backward(model(batch).pow(2).mean())
        step.commit()
"""
HELD = ("--config", "per_rank.cpus=1", "--labels", "kind=rank", "--shards", "8", "--set", "pause_s=0.05")


@pytest.fixture
def cluster() -> Iterator[Autoscaled]:
    with (
        TemporaryDirectory(prefix="fleet-", dir="/tmp") as folder,
        autoscaled(Path(folder), slots=1, most=3, labels={"kind": "rank"}) as running,
    ):
        yield running


def begin(cluster: Autoscaled, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(SCRIPT)
    places = ("--address", cluster.address, "--storage", str(folder / "runs"), "--copy-to", str(folder / "copies"), "--name", "run")
    command = [sys.executable, "-m", "fleet", "run", "train.py", *places, *HELD, *options]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, env={**os.environ, **cluster.env}, stdout=output, stderr=output)


def kept(folder: Path) -> list[Record]:
    journal = folder / "runs" / "run"
    return records(journal) if (journal / NAME).exists() else []


def asked(found: list[Record]) -> list[DecisionMade]:
    return [one for one in found if isinstance(one, DecisionMade) and one.policy == "nodes"]


def sizes(found: list[Record]) -> list[int]:
    return [len(one.view.members) for one in found if isinstance(one, ViewPublished)]


def home_of_the_last(found: list[Record]) -> str:
    view = [one.view for one in found if isinstance(one, ViewPublished)][-1]
    homes = {one.member: one.process.node for one in found if isinstance(one, ProcessUp)}
    return homes[view.members[-1]]


class Going:
    """``fleet run`` in a process of its own."""

    def __init__(self, cluster: Autoscaled, folder: Path, *options: str) -> None:
        self.folder, self.child = folder, begin(cluster, folder, *options)

    def records(self) -> list[Record]:
        return kept(self.folder)

    def wait(self, condition: Callable[[list[Record]], bool], what: str, limit_s: float) -> None:
        until(lambda: condition(self.records()) or self.child.poll() is not None, what, limit_s)
        assert condition(self.records()), self.said()

    def said(self) -> str:
        driver = self.folder / "runs" / "run" / "driver.log"
        return (self.folder / "output.txt").read_text()[-3000:] + (driver.read_text()[-3000:] if driver.exists() else "")

    def end(self, limit_s: float) -> None:
        code = self.child.wait(limit_s)
        assert code == 0, self.said()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()


def trains(found: list[Record]) -> bool:
    return sum(isinstance(one, Committed) for one in found) >= 5


def test_a_lost_node_is_asked_for_again_and_all_go_at_the_end(cluster: Autoscaled, tmp_path: Path) -> None:
    """From no node at all: the run waits for two, loses one, gets a third in its place, and ends with the bits of its twin."""
    going = Going(
        cluster, tmp_path, "--world", "2", "--config", "ask_for_nodes=on", "--twin", "--json", "report.json", "--set", "steps=240"
    )
    try:
        going.wait(trains, "two nodes came, and it trains", 180)
        victim = home_of_the_last(going.records())
        cluster.kill_node(victim)
        going.wait(lambda found: [one.action for one in asked(found)] == ["ask", "came"], "another node came", 120)
        going.wait(lambda found: sizes(found)[:3] == [2, 1, 2], "its rank has joined", 120)
        going.end(300)
    finally:
        going.close()
    found = going.records()
    assert home_of_the_last(found) != victim
    assert json.loads((tmp_path / "report.json").read_text())["twin"]["equal"]
    until(lambda: len(cluster.raylets()) == 1, "nodes without work are let go", 90)
