"""A node is taken away after a notice: no step is lost, and the run ends with the bits of one that nothing happened to."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from chaos.arrivals import save_trace
from chaos.settings import ChaosSettings
from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan, RunResult, final_digest
from fleet.app.recipes import LiveRun
from fleet.app.report import build_report
from fleet.errors import ConfigError
from fleet.host.processes import NODE_VARIABLE
from fleet.protocol.causes import TakenAway
from fleet.protocol.decisions import Notice
from fleet.protocol.records import Committed, DecisionMade, FaultRecord, HistoryBegun, ProcessLost, ProcessUp, Record, ViewPublished
from fleet.protocol.types import Fault
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import FAST, settings
from tests.support import trains
from tests.support.journals import NAME, records
from tests.support.processes import command_of
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import until

OPTIONS = {"steps": "80", "norm": "layer"}
NOTICE_S = 8


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    return undisturbed(lambda folder: settings(folder, world=1, options=OPTIONS))


def plan(folder: Path, spares: int = 1) -> RunPlan:
    chosen = RunSettings(
        world=2, spares=spares, nodes=3, shards=8, timeouts=FAST, checkpoint=CheckpointSettings(policy="fixed", interval_s=60.0),
        options=OPTIONS | {"flags": str(folder), "pause_s": "0.4"},
    )  # fmt: skip
    return RunPlan(name="run", folder=folder / "run", settings=chosen, train=trains.plain)


def test_maintenance_comes_with_its_notice_and_costs_no_step(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    """As chaos has it: each node of the three in turn could be the one; its slots are empty for maintenance, and nobody is missed."""
    save_trace((Fault("m1", 2.0, "host_maintenance", "maintenance", node=0, duration_s=6.0),), tmp_path / "trace.csv")
    chosen = dataclasses.replace(plan(tmp_path), chaos=ChaosSettings(trace=str(tmp_path / "trace.csv"), repair_s=3.0))
    result = LiveRun(chosen, cluster).execute()
    assert result.status == "completed" and final_digest(chosen.folder) == truth
    kept = records(chosen.folder)
    assert [one.phase for one in kept if isinstance(one, FaultRecord)] == ["planned", "announced", "executed", "healed"]
    lost = [one for one in kept if isinstance(one, ProcessLost)]
    assert lost and all(isinstance(one.cause, TakenAway) and one.generation == -1 for one in lost)
    assert not any(isinstance(one, HistoryBegun) for one in kept)
    report = build_report(kept).to_dict()
    assert report["closes"] and report["categories"]["maintenance"] > 0.0


class Going:
    """A run in a thread, up to its end."""

    def __init__(self, chosen: RunPlan, cluster: LocalCluster) -> None:
        self.live, self.folder, self.results = LiveRun(chosen, cluster), chosen.folder, list[RunResult]()
        self.thread = threading.Thread(target=lambda: self.results.append(self.live.execute()), daemon=True)
        self.thread.start()
        self.wait(lambda kept: sum(isinstance(one, Committed) for one in kept) >= 5 and self.spare_is_there(kept), "it trains")

    def spare_is_there(self, kept: list[Record]) -> bool:
        return sum(isinstance(one, ProcessUp) for one in kept) >= self.live.plan.settings.slots

    def wait(self, condition: Callable[[list[Record]], bool], what: str) -> None:
        until(lambda: (self.folder / NAME).exists() and condition(records(self.folder)), what, 90)

    def reported(self) -> list[str]:
        return [one.action for one in records(self.folder) if isinstance(one, DecisionMade) and isinstance(one.payload, Notice)]

    def index_of_a_trainer(self) -> int:
        kept = records(self.folder)
        view = [one.view for one in kept if isinstance(one, ViewPublished)][-1]
        homes = {one.member: one.process.node for one in kept if isinstance(one, ProcessUp)}
        return next(index for index, place in self.live.places.items() if place.id == homes[view.members[-1]])

    def end(self) -> RunResult:
        self.thread.join(120)
        return self.results[0]


def drain_by_ray(cluster: LocalCluster, node: str) -> None:
    words = ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, *words]
    done = subprocess.run(
        [*command, "--deadline-remaining-seconds", str(NOTICE_S)], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_node_that_ray_drains_costs_no_step(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    going = Going(plan(tmp_path), cluster)
    index = going.index_of_a_trainer()
    drain_by_ray(cluster, going.live.places[index].id)
    drained_s = time.monotonic()
    going.wait(lambda kept: "released" in going.reported(), "its ranks leave")
    until(lambda: time.monotonic() > drained_s + NOTICE_S + 2, "Ray Train ends nobody when the time is up", NOTICE_S + 10)
    assert cluster.lose(index) is None
    cluster.add()
    result = going.end()
    assert result.status == "completed", result
    assert final_digest(going.folder) == truth
    kept = records(going.folder)
    lost = [one for one in kept if isinstance(one, ProcessLost)]
    assert lost and all(isinstance(one.cause, TakenAway) for one in lost)
    assert not [one for one in kept if isinstance(one, HistoryBegun)]
    sizes = [len(one.view.members) for one in kept if isinstance(one, ViewPublished)]
    assert sizes[:2] == [2, 2], "the spare came as the rank left"


def test_fleet_drain_announces_withdraws_and_refuses_by_name(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    from fleet.app.cli.drain import drain

    going = Going(plan(tmp_path, spares=0), cluster)
    run, index = str(going.folder), str(going.index_of_a_trainer())
    with pytest.raises(ConfigError, match=r"NODE = 'nobody': no node of this run\. Its nodes: "):
        drain(run, "nobody")
    with pytest.raises(ConfigError, match=r"its departure is not announced"):
        drain(run, index, withdraw=True)
    with pytest.raises(ConfigError, match=r"--notice = 'soon'"):
        drain(run, index, notice="soon")
    drain(run, index, notice="5m")
    drain(run, index, notice="6m")
    drain(run, index, withdraw=True)
    result = going.end()
    assert result.status == "completed" and final_digest(going.folder) == truth
    assert going.reported() == ["leave", "leave", "stay"]
    assert [len(one.view.members) for one in records(going.folder) if isinstance(one, ViewPublished)] == [2]


def agent_of(going: Going, cluster: LocalCluster, index: int) -> int:
    """The pid of a node's agent: on the same node of the cluster as its ranks."""
    home = going.live.places[index].id
    ranks = [one.process.pid for one in records(going.folder) if isinstance(one, ProcessUp) and one.process.node == home]
    node = int(psutil.Process(ranks[-1]).environ()[NODE_VARIABLE])
    [agent] = [pid for pid in cluster.pids(node) if b"AgentHost" in command_of(pid)]
    return agent


def came_again(kept: list[Record], node: str) -> bool:
    """Whether a process has come up on a node from which one was lost before."""
    lost_s = min((one.at_s for one in kept if isinstance(one, ProcessLost)), default=float("inf"))
    return any(isinstance(one, ProcessUp) and one.process.node == node and one.at_s > lost_s for one in kept)


def test_sigterm_to_an_agent_is_its_nodes_notice_and_costs_no_step(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    chosen = plan(tmp_path)
    limits = dataclasses.replace(FAST, notice_s=NOTICE_S)
    going = Going(dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, timeouts=limits)), cluster)
    index = going.index_of_a_trainer()
    agent = agent_of(going, cluster, index)
    os.kill(agent, signal.SIGTERM)
    os.kill(agent, signal.SIGTERM)
    going.wait(lambda kept: "released" in going.reported(), "its ranks leave")
    assert psutil.pid_exists(agent), "it serves until the notice is over"
    until(lambda: not psutil.pid_exists(agent), "it ends in order", NOTICE_S + 30)
    home = going.live.places[index].id
    going.wait(lambda kept: came_again(kept, home), "the node has not gone after all, and is in the run again")
    result = going.end()
    assert result.status == "completed", result
    assert final_digest(going.folder) == truth
    kept = records(going.folder)
    assert going.reported() == ["leave", "released"]
    lost = [one for one in kept if isinstance(one, ProcessLost)]
    assert lost and all(isinstance(one.cause, TakenAway) and one.generation == -1 for one in lost)
    assert not [one for one in kept if isinstance(one, HistoryBegun)]
    views = [one.view.members for one in kept if isinstance(one, ViewPublished)]
    assert len(views) > 1 and {len(members) for members in views} == {2}, "a spare comes in the step in which the rank leaves"
    report = build_report(kept).to_dict()
    assert report["closes"] and report["categories"]["maintenance"] > 0.0


def test_agents_that_a_run_ends_with_announce_nothing(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    chosen = plan(tmp_path)
    going = Going(dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, steps=20)), cluster)
    agents = [agent_of(going, cluster, going.index_of_a_trainer())]
    assert going.end().status == "completed"
    until(lambda: not any(psutil.pid_exists(pid) for pid in agents), "its agents have ended")
    assert going.reported() == []
