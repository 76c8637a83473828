"""The room of a Ray cluster that was there before, for a queue: the resources of its nodes, and those that each run holds.

A process of its own connects to the cluster, and answers questions by lines. Ray ends such a process when the cluster goes away, and the
queue has to outlive that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from fleet.app.cluster.joined import SLOT, nodes
from fleet.app.cluster.queue import Job
from fleet.app.cluster.ray_internals import free_by_node, held_by_run
from fleet.app.cluster.reach import reached
from fleet.errors import ConfigError, RunFailed
from fleet.host.clock import MonotonicClock
from fleet.host.processes import calling
from fleet.protocol.queueing import Node
from fleet.settings.per_rank import meets

JOIN_S = 60.0
"""Seconds for the process to start and to join the cluster."""
LOOK_S = 10.0
AGAIN_S = 10.0
"""Seconds until the next try to join a cluster after one that failed."""
FRESH_S = 0.5
"""Seconds for which one look answers all questions."""
Look = Mapping[str, Any]
"""``total`` and ``free``: node -> resources; ``labels``: node -> its labels; ``held``: run -> node -> resources."""


def look() -> Look:
    """A look at the cluster that this process is connected to."""
    held = held_by_run()  # first: a run that takes its room meanwhile then seems to hold too little, and not too much
    alive, free = nodes(), free_by_node()
    names = _names(alive)
    return {
        "total": {names[str(node["NodeID"])]: _of(node["Resources"]) for node in alive},
        "free": {names[str(node["NodeID"])]: _of(free.get(node["NodeID"], {})) for node in alive},
        "labels": {names[str(node["NodeID"])]: dict(node["Labels"]) for node in alive},
        "held": {run: {names[node]: dict(has) for node, has in places.items() if node in names} for run, places in held.items()},
    }


def _names(alive: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Ray's id of each node -> its address, made unique where several nodes have one."""
    addresses = [str(node["NodeManagerAddress"]) for node in alive]
    return {
        str(node["NodeID"]): address if addresses.count(address) == 1 else f"{address}:{node['NodeID'][:6]}"
        for node, address in zip(alive, addresses, strict=True)
    }


def _of(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in resources.items() if not name.startswith("node:")}


def serve() -> None:
    """Answer each line of stdin with a look, until stdin closes. The first line out says whether the cluster was joined."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray's prints are no answers
    try:
        with reached(sys.argv[1]):
            _say(out, {"joined": True})
            for _ in sys.stdin:
                _say(out, look())
    except ConfigError as error:
        _say(out, {"refused": [error.field, str(error.value), error.reason, error.way_out]})


def _say(out: TextIO, answer: Look) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


class ClusterRoom:
    """``fleet.app.cluster.queue.QueueRoom`` of the cluster at ``address``. Use as a context manager; safe from any thread.

    Raises ConfigError when the first join fails. Later it joins again by itself; until then RunFailed says why there is no answer.
    """

    def __init__(self, address: str, shape: Mapping[str, float] = SLOT) -> None:
        self._address, self.shape = address, dict(shape)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._clock, self._retry_s, self._trouble = MonotonicClock(), 0.0, ""
        self._seen: tuple[float, Look] | None = None

    def __enter__(self) -> ClusterRoom:
        with self._lock:
            self._join()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._leave()

    def nodes(self, jobs: Sequence[Job]) -> tuple[list[Node], list[Job]]:
        return shares(self._look(), jobs)

    def most(self) -> list[Node]:
        seen = self._look()
        return [Node(name, resources, seen["labels"][name]) for name, resources in seen["total"].items()]

    def _look(self) -> Look:
        with self._lock:
            if self._process is None:
                self._rejoin()
            if self._seen is not None and self._clock.now_s() < self._seen[0] + FRESH_S:
                return self._seen[1]
            try:
                self._seen = self._clock.now_s(), self._ask()
                return self._seen[1]
            except (OSError, ValueError) as error:
                self._leave()
                raise self._gone(f"the cluster at {self._address} does not answer any more: {error}") from error

    def _ask(self) -> Look:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return _line(self._process, LOOK_S)

    def _rejoin(self) -> None:
        if self._clock.now_s() < self._retry_s:
            raise RunFailed(self._trouble)
        try:
            self._join()
        except ConfigError as error:
            raise self._gone(str(error)) from error

    def _gone(self, trouble: str) -> RunFailed:
        self._retry_s, self._trouble = self._clock.now_s() + AGAIN_S, trouble
        return RunFailed(trouble)

    def _join(self) -> None:
        self._process = subprocess.Popen(
            calling("fleet.app.cluster.cluster_room", "serve", self._address), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            answer = _line(self._process, JOIN_S)
        except (OSError, ValueError) as error:
            self._leave()
            raise ConfigError("--address", self._address, f"the cluster could not be joined: {error}") from error
        if "refused" in answer:
            self._leave()
            raise ConfigError(*answer["refused"])

    def _leave(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str], limit_s: float) -> Look:
    """The next answer. Raises OSError, ValueError."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit_s)[0]:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    found: Look = json.loads(process.stdout.readline())
    return found


# ---- the room of each run ----------------------------------------------------------------------------------------------------------------


def shares(seen: Look, jobs: Sequence[Job]) -> tuple[list[Node], list[Job]]:
    """(nodes with the resources that the queue may give out, ``jobs`` with their slots by node). Pure.

    A run that is about to start, or has lost a node, lacks slots. Free room is put aside for them.
    """
    free = {name: Counter(resources) for name, resources in seen["free"].items()}
    there = {name: Counter(resources) for name, resources in seen["free"].items()}
    total, labels = seen["total"], seen["labels"]
    placed = []
    for job in jobs:
        has = _slots(seen["held"].get(job.name, {}), job)
        for node, slots in has.items():
            there[node].update(_amounts(job, slots))
        missing = job.slots - sum(has.values())
        for node in [*job.placed, *free]:
            if missing > 0 and node in free and meets(labels[node], job.selector):
                here = min(missing, *(int(free[node][name] / amount + 1e-9) for name, amount in job.shape.items()))
                free[node].subtract(_amounts(job, here))
                has[node] = has.get(node, 0) + here
                missing -= here
        placed.append(dataclasses.replace(job, placed={node: slots for node, slots in has.items() if slots > 0}))
    # Ray tells free resources a moment later than held ones: the sum may exceed the node's total
    most = {name: {each: min(has, total[name].get(each, 0.0)) for each, has in own.items()} for name, own in there.items()}
    return [Node(name, own, labels[name]) for name, own in most.items()], placed


def _slots(held: Mapping[str, Mapping[str, float]], job: Job) -> dict[str, int]:
    """Node -> how many slots of the run are there."""
    return {node: min(int(amounts.get(name, 0.0) / each + 1e-9) for name, each in job.shape.items()) for node, amounts in held.items()}


def _amounts(job: Job, slots: int) -> dict[str, Any]:
    return {name: amount * slots for name, amount in job.shape.items()}
