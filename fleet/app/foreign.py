"""Care for a run on a joined cluster: agents for new nodes, the ranks' output, and the removal of lost nodes from Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import ray

from fleet.app.cluster import ray_internals
from fleet.app.cluster.joined import JoinedCluster, in_words, nodes
from fleet.app.nodes_wanted import NodeAsker, Tended
from fleet.host.mirroring import MirroredFiles
from fleet.host.rank_logs import FOLDER
from fleet.protocol.events import RoomMissing

log = logging.getLogger("fleet.app.foreign")
LOOK_S = 1.0
CALL_S = 5.0
PATIENCE = 5
"""Looks for which a rank may lack a place: it lacks one for a moment whenever a node is lost."""
SETTLE_S = 3.0
"""Seconds after which a node without its agent is taken out of Ray. Ray itself would wait for its raylet for a minute."""


class Caretaker:
    """Looks after a run once a second, in a thread of its own, until ``over`` says that it has ended.

    Args:
        folder: of the run; the output of all ranks is copied there.
        most_agents: nodes beyond so many get an agent only when a rank of the run is placed there.
        asks: the run asks the cluster's autoscaler for nodes. Then a node has an agent only while the run has a place there.
    """

    def __init__(
        self, run: Tended, cluster: JoinedCluster, folder: Path, over: Callable[[], bool], most_agents: int, asks: bool = False
    ) -> None:
        self._run, self._cluster, self._over, self._most = run, cluster, over, 0 if asks else most_agents
        self._asker = NodeAsker(run, cluster) if asks else None
        self._prints: dict[int, MirroredFiles] = {}
        self._folder = folder / FOLDER
        self._looks_without_room, self._reported = 0, 0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._tend_forever, name="fleet-caretaker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking, and fetch the last output."""
        self._wake.set()
        self._thread.join(CALL_S * 4)
        if self._asker is not None:
            self._asker.close()
        self._collect()

    def _tend_forever(self) -> None:
        while not self._over() and not self._wake.wait(LOOK_S):
            # _collect is last: it waits for agents that are gone
            for what in (self._greet, self._ask, self._dismiss, self._look_for_room, self._collect):
                try:
                    what()
                except (ray.exceptions.RayError, TimeoutError, OSError) as error:
                    log.warning("%s: %s", what.__name__.strip("_"), " ".join(str(error).split())[:300])

    def _greet(self) -> None:
        """Start an agent on each new node, and on each node with a rank of the run."""
        there = ray_internals.nodes_of_job() | (self._asker.kept() if self._asker is not None else set())
        indices = self._cluster.alive()
        placed = {index for node in there if (index := self._cluster.index_of(node)) is not None}
        for index in indices:
            if index not in self._run.agents and (index in placed or len(self._run.agents) < self._most):
                log.info("node %s gets an agent", self._cluster.place(index).host)
                self._run.add_agent(index)

    def _collect(self) -> None:
        """Fetch the ranks' output since the last time."""
        calls = {index: agent.printed.remote(self._copies(index).known) for index, agent in list(self._run.agents.items())}
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=CALL_S) if calls else ([], [])
        for index, call in calls.items():
            if call in done:
                try:
                    self._copies(index).take(ray.get(call))
                except ray.exceptions.RayError:
                    log.debug("the agent of node %d is not there", index)

    def _copies(self, index: int) -> MirroredFiles:
        return self._prints.setdefault(index, MirroredFiles(self._folder))

    def _dismiss(self) -> None:
        """Take out of Ray each node that the coordinator has lost, and that is alive to Ray."""
        lost: Mapping[str, float] = ray.get(self._run.coordinator.lost_nodes.remote(), timeout=CALL_S)
        known = {place.id for place in self._run.places.values()}
        for node in nodes():
            name = str(node["NodeID"])
            if name not in known or lost.get(name, 0.0) <= SETTLE_S or self._run.is_cut_off(name):
                continue
            if ray.get(self._run.coordinator.dismiss.remote(name), timeout=CALL_S):  # before Ray: nothing of it may slip in again
                log.warning("node %s is silent: it is taken out of Ray", node["NodeManagerAddress"])
                ray_internals.remove_node(self._cluster.address, name)

    def _ask(self) -> None:
        if self._asker is not None:
            self._asker.look()

    def _look_for_room(self) -> None:
        """Report once that ranks lack a place for more than a moment, and once that they have one."""
        lacking = ray_internals.unplaced()
        self._looks_without_room = self._looks_without_room + 1 if lacking else 0
        if lacking != self._reported and (not lacking or self._looks_without_room >= PATIENCE):
            self._reported = lacking
            there = in_words(self._cluster.slot, self._cluster.selector)
            detail = f"{lacking} ranks have no place: {there}" if lacking else "all ranks have a place again"
            ray.get(self._run.coordinator.report.remote(RoomMissing(lacking, detail)), timeout=CALL_S)
