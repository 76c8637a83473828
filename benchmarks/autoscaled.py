"""How soon is a lost node replaced on a cluster that grows by itself? Ray's autoscaler (version 2), with its provider of fake nodes.

A run has two ranks on two nodes, and loses one node: its raylet and all processes below it are killed at once. The figure is the time from
the kill to the first commit with a rank on the new node. Beside it, on another such cluster, two plain actors of Ray are in a placement
group. Their figure is the time from the same kill to the first answer of the lost actor, which Ray restarts on the new node.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import Form, on_the_way, run
from fleet.errors import FleetError
from fleet.host.clock import unix_time_s
from fleet.host.journal import read_journal
from fleet.protocol.decisions import OfView
from fleet.protocol.records import Committed, DecisionMade, ProcessUp, Record, RunStarted, ViewPublished
from tests.support.autoscaled import Autoscaled, autoscaled

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/gpt.py"
LIMIT_S, END_S, LOOK_S, WARM_STEPS, STEPS = 150.0, 60.0, 0.1, 10, 1_000
"""Limits in seconds: until a run trains or a node is replaced, and until a run has ended in order. Seconds between looks. Steps before a
node is killed, and steps of the run, which is stopped once the node is replaced."""

PLAIN = """
import json, os, sys, time
import psutil, ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class Plain:
    def where(self):
        return os.getppid(), ray.get_runtime_context().get_node_id()

ray.init(sys.argv[1], log_to_driver=False)
group = placement_group([{"CPU": 1.0}] * 2, strategy="SPREAD")
assert group.wait(120)
always = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
plain = ray.remote(Plain)
actors = [plain.options(**always, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote() for index in range(2)]
(_, _), (raylet, node) = ray.get([actor.where.remote() for actor in actors])
victim = psutil.Process(raylet)
for process in [victim, *victim.children(recursive=True)]:
    process.kill()
began_s = time.monotonic()
_, after = ray.get(actors[1].where.remote(), timeout=120)
assert after != node
print(json.dumps({"replaced_s": time.monotonic() - began_s}))
"""


def plain(cluster: Autoscaled) -> float:
    """Seconds until a plain actor of Ray, whose node is killed, answers from another node."""
    command = [sys.executable, "-c", PLAIN, cluster.address]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **cluster.env}, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["replaced_s"])


def _records(journal: Path) -> list[Record]:
    try:
        return list(read_journal(journal, spans=False)) if journal.exists() else []
    except FleetError:  # its last line is being written
        return []


def _homes(found: Sequence[Record]) -> list[str]:
    """The nodes of the newest view's ranks."""
    view = [one.view for one in found if isinstance(one, ViewPublished)][-1]
    up = {one.member: one.process.node for one in found if isinstance(one, ProcessUp)}
    return [up[member] for member in view.members]


def replaced_s(found: Sequence[Record], killed_unix_s: float) -> float:
    """Seconds from the kill to the first commit with a rank on a node that the run did not have before. Raises StopIteration without
    one."""
    started = next(one for one in found if isinstance(one, RunStarted))
    killed_s = started.at_s + killed_unix_s - started.unix_time_s
    up = {one.member: one.process.node for one in found if isinstance(one, ProcessUp)}
    before = {one.process.node for one in found if isinstance(one, ProcessUp) and one.at_s < killed_s}
    views = [one for one in found if isinstance(one, ViewPublished) and one.at_s >= killed_s]
    new = next(one for one in views if any(up[member] not in before for member in one.view.members))
    entered = next(
        one.at_s if isinstance(one, DecisionMade) else new.at_s
        for one in found
        if (not new.graceful and one is new)
        or (isinstance(one, DecisionMade) and one.action == "enter" and one.payload == OfView(new.view.generation))
    )
    return next(one.at_s for one in found if isinstance(one, Committed) and one.at_s > entered) - killed_s


def replacement(cluster: Autoscaled, folder: Path) -> dict[str, float]:
    """One run that loses a node, and is stopped once the node is replaced. Raises RuntimeError when the run ends before, and TimeoutError
    when the replacement takes too long."""
    folder.mkdir(parents=True)
    places = ("--address", cluster.address, "--storage", str(folder), "--copy-to", str(folder / "copies"), "--name", "lost")
    sizes = ("--world", "2", "--spares", "0", "--steps", str(STEPS), "--seed", "7", "--labels", "kind=rank", "--config", "ask_for_nodes=on")
    command = [sys.executable, "-m", "fleet", "run", SCRIPT, *places, *sizes]
    journal = folder / "lost" / "journal.jsonl"
    with (folder / "output.txt").open("ab") as output:
        child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **cluster.env}, stdout=output, stderr=output)

    def wait_for(condition: Callable[[Sequence[Record]], bool], what: str) -> list[Record]:
        end_s = time.monotonic() + LIMIT_S
        while not condition(found := _records(journal)):
            if child.poll() is not None:
                raise RuntimeError(f"the run ended before {what}: {(folder / 'output.txt').read_text()[-2000:]}")
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s: {(folder / 'output.txt').read_text()[-2000:]}")
            time.sleep(LOOK_S)
        return found

    try:
        before = wait_for(lambda found: sum(isinstance(one, Committed) for one in found) >= WARM_STEPS, "it trained")
        cluster.kill_node(_homes(before)[-1])
        killed_s = unix_time_s()
        found = wait_for(lambda found: _replaced(found, killed_s), "the node was replaced")
        child.terminate()
        child.wait(END_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    return {"replaced_s": replaced_s(found, killed_s), "came_s": _came_s(found)[0]}


def _replaced(found: Sequence[Record], killed_unix_s: float) -> bool:
    with suppress(StopIteration):
        return replaced_s(found, killed_unix_s) > 0.0 and bool(_came_s(found))
    return False


def _came_s(found: Sequence[Record]) -> list[float]:
    """Seconds that the run waited for each node that it had asked for, and that came."""
    asked = [one.fields for one in found if isinstance(one, DecisionMade) and one.policy == "nodes"]
    return [one["waited_s"] for one in asked if "waited_s" in one]


def measure(form: Form) -> dict[str, Any]:
    """Measure Fleet and Ray in turn, each time on a new cluster: an old one would already have an idle node."""
    fleets, rays = list[dict[str, float]](), list[float]()
    turns = [(system, number) for number in range(form.of(5, 1, 1)) for system in ("fleet", "ray")]
    for system, _ in on_the_way("autoscaled", turns, lambda turn: f"{turn[0]}, time {turn[1] + 1}"):
        with tempfile.TemporaryDirectory(prefix="fleet-", dir="/tmp") as name:
            (folder := Path(name, "a")).mkdir()
            labels = {"kind": "rank"} if system == "fleet" else None
            with autoscaled(folder, slots=1, most=4, labels=labels) as cluster:
                if system == "fleet":
                    fleets.append(replacement(cluster, Path(name, "run")))
                else:
                    rays.append(plain(cluster))
    figures = {
        "fleet_autoscaled_replacement_s_median": statistics.median(one["replaced_s"] for one in fleets),
        "ray_autoscaled_replacement_s_median": statistics.median(rays),
        "fleet_node_came_s_median": statistics.median(one["came_s"] for one in fleets),
    }
    samples = {"autoscaled_replacement_s": [one["replaced_s"] for one in fleets], "ray_autoscaled_replacement_s": rays}
    return {"settings": {}, "figures": figures, "samples": samples | {"node_came_s": [one["came_s"] for one in fleets]}, "notes": []}


if __name__ == "__main__":
    run("autoscaled", measure)
