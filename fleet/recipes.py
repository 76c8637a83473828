"""Composition root: puts cluster, coordinator, agents, chaos, trainer and report together into one run."""

from __future__ import annotations

import dataclasses
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.hosts import CoordinatorSpec, start_agent, start_coordinator
from actors.targets import RemoteProcesses
from actors.trainer import FitOutcome, fit
from actors.worker import RankSpec, rank_main
from chaos.conductor import Action, ChaosView, Conductor, Occupant, perform
from chaos.processes import LocalProcesses
from chaos.settings import ChaosSettings
from fleet.config import RunSettings
from fleet.errors import ConfigError
from fleet.events import FaultReported
from fleet.instructions import EndRun
from fleet.journal import read_journal
from fleet.launch.local import LocalCluster
from fleet.machine import FleetMachine
from fleet.records import VERSION, RunStarted
from fleet.clock import unix_time_s
from policies.interval import CheckpointInterval
from policies.placement import ranges
from policies.recovery import ReformPromoteRegrow
from storage.parts import Parts, RetainingStore, newest_checkpoint

CHAOS_POLL_S = 0.05
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run to be made: what to train, with which settings, under which faults, and where its journal goes."""

    name: str
    folder: Path
    settings: RunSettings
    train: Callable[[Any], None]
    chaos: ChaosSettings = field(default_factory=ChaosSettings)
    resume: bool = False

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``error`` is what Ray Train said, when the run ended without the coordinator's word."""

    plan: RunPlan
    status: str
    reason: str
    detail: str


def new_name(script: str) -> str:
    return f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def slots_per_node(settings: RunSettings) -> int:
    """Room for all slots, also when one node is lost: a placement group without room keeps the cluster's control plane busy."""
    homes = max(1, settings.nodes - 1)
    return -(-settings.slots // homes)


@contextmanager
def local_cluster(settings: RunSettings) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=settings.nodes, slots_per_node=slots_per_node(settings)) as cluster:
        yield cluster


def make_machine(settings: RunSettings, store_url: str, rate_per_s: float, resume: bool, now_s: float) -> FleetMachine:
    """The decision core with its policies; the newest durable checkpoint is looked up when a run is resumed."""
    law = settings.checkpoint
    recovery = ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s)
    interval = CheckpointInterval(law=law.policy, interval_s=law.interval_s)
    newest = newest_checkpoint(store_url) if resume else None
    return FleetMachine(settings, recovery, _Placement(), interval, checkpoint=newest, checkpoint_rate_per_s=rate_per_s, now_s=now_s)


class _Placement:
    """``policies.placement`` as the port that the machine takes."""

    @staticmethod
    def ranges(shards: int, ranks: int) -> tuple[tuple[int, int], ...]:
        return ranges(shards, ranks)


class LiveRun:
    """A run on a cluster, from its first process to its report."""

    def __init__(self, plan: RunPlan, cluster: LocalCluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.shm = Path(tempfile.mkdtemp(prefix="fleet-", dir="/dev/shm"))
        self.store_url = store_url(plan)
        self.port = cluster.free_port()
        self.address = f"{cluster.host}:{self.port}"
        self.coordinator = start_coordinator(self._spec())
        self.agents: dict[int, Any] = {}
        for index in cluster.alive():
            self.add_agent(index)
        self._stop = threading.Event()
        self._done = threading.Event()

    def _spec(self) -> CoordinatorSpec:
        plan, url = self.plan, self.store_url
        settings, resume = plan.settings, plan.resume
        first = RunStarted(VERSION, plan.name, 0.0, unix_time_s(), settings.world, settings.spares, settings.shards, _describe(plan))
        return CoordinatorSpec(
            journal=plan.journal,
            host=self.cluster.host,
            port=self.port,
            cluster=plan.name if not resume else f"{plan.name}-{secrets.token_hex(4)}",
            machine=lambda now_s: make_machine(settings, url, 0.0, resume, now_s),
            store=lambda: RetainingStore(url, settings.checkpoint.keep),
            started=lambda now_s: dataclasses.replace(first, at_s=now_s),
        )

    def add_agent(self, index: int) -> None:
        node = self.cluster.node_id(index)
        self.agents[index] = start_agent(node, index, self.shm, self.address, lambda: LocalProcesses(node))

    def execute(self) -> RunResult:
        """Train to the end, under chaos; always returns."""
        import ray

        ray.get([self.coordinator.census.remote(), *(agent.ready.remote() for agent in self.agents.values())], timeout=60)
        chaos = threading.Thread(target=self._conduct, name="fleet-chaos", daemon=True)
        watch = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        chaos.start()
        watch.start()
        try:
            fitted = self._fit()
        finally:
            self._stop.set()
            chaos.join(STOP_S)
        outcome = self._outcome()
        self._close()
        if outcome is None:
            return RunResult(plan=self.plan, status="failed", reason="Ray Train ended before the run did", detail=fitted.error or "")
        return RunResult(plan=self.plan, status=outcome.status, reason=outcome.reason, detail=outcome.detail)

    def _fit(self) -> FitOutcome:
        settings = self.plan.settings
        spec = RankSpec(settings, self.shm, self.cluster.host, self.plan.train, lambda: Parts(self.store_url))
        return fit(
            rank_main,
            {"spec": spec},
            slots=settings.slots,
            resources_per_slot={"fleet_rank": 1},
            storage_path=str(self.plan.folder / "ray"),
            name="train",
            done=self._done.is_set,
        )

    def stop(self, reason: str) -> None:
        """End the run in order; ``execute`` returns soon after."""
        self.coordinator.stop_run.remote(reason)

    def _watch(self) -> None:
        """Notice the end of the run, so that Ray Train is not waited for much longer."""
        while not self._stop.is_set():
            if self._outcome(timeout_s=1.0) is not None:
                self._done.set()
                return

    def _outcome(self, timeout_s: float = 5.0) -> EndRun | None:
        import ray

        try:
            return ray.get(self.coordinator.wait.remote(timeout_s), timeout=timeout_s + 10.0)
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def _close(self) -> None:
        import shutil

        import ray

        for actor in [*self.agents.values(), self.coordinator]:
            ray.kill(actor, no_restart=True)
        shutil.rmtree(self.shm, ignore_errors=True)

    # ---- chaos -------------------------------------------------------------------------------------------------------------------------

    def _conduct(self) -> None:
        """Carry out the plan of faults, counted from the first view on."""
        settings, chaos = self.plan.settings, self.plan.chaos
        plan = chaos.plan(seed=settings.seed, world=settings.slots, nodes=settings.nodes)
        if not plan:
            return
        conductor = Conductor(plan, min_ranks=settings.min_ranks, repair_s=chaos.repair_s)
        origin_s = self._await_training()
        if origin_s is None:
            return
        for report in conductor.planned(0.0):
            self._report(report, origin_s)
        while not self._stop.wait(CHAOS_POLL_S) and not self._done.is_set():
            now_s = time.monotonic() - origin_s
            if now_s >= conductor.next_s():
                self._strike(conductor, conductor.due(now_s, self._see()), origin_s)
        self._strike(conductor, conductor.end(time.monotonic() - origin_s, self._see()), origin_s)

    def _await_training(self) -> float | None:
        while not self._stop.wait(CHAOS_POLL_S):
            if self._see().running:
                return time.monotonic()
        return None

    def _see(self) -> ChaosView:
        import ray

        phase, ranks = ray.get(self.coordinator.census.remote(), timeout=30)
        slots = {member.slot: Occupant(member, process, seated) for member, process, seated in ranks}
        alive = self.cluster.alive()
        by_node = {self.cluster.node_id(index): index for index in alive}
        nodes: dict[int, list[int]] = {index: [] for index in alive}
        for slot, occupant in slots.items():
            if occupant.process.node in by_node:
                nodes[by_node[occupant.process.node]].append(slot)
        return ChaosView(slots, {index: tuple(found) for index, found in nodes.items()}, phase == "run")

    def _strike(self, conductor: Conductor, actions: list[Action], origin_s: float) -> None:
        processes = RemoteProcesses(self.coordinator)
        for action in actions:
            if action.operations:
                self._report(dataclasses.replace(action.report, phase="aimed"), origin_s)
            refusals = [perform(operation, processes, _Nodes(self)) for operation in action.operations]
            self._report(conductor.outcome(action, refusals, time.monotonic() - origin_s), origin_s)

    def _report(self, report: FaultReported, origin_s: float) -> None:
        import ray

        event = dataclasses.replace(report, at_s=report.at_s + origin_s)
        ray.get(self.coordinator.report_fault.remote(event), timeout=30)


class _Nodes:
    """The cluster's nodes as chaos sees them: one that comes back gets an agent."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def lose(self, index: int) -> str | None:
        return self._run.cluster.lose(index)

    def add(self) -> int:
        index = self._run.cluster.add()
        self._run.add_agent(index)
        return index

    def alive(self) -> list[int]:
        return list(self._run.cluster.alive())


def store_url(plan: RunPlan) -> str:
    """Where the run's checkpoints lie: beside the journal, or under the storage that was asked for."""
    storage = plan.settings.storage
    return f"{storage.rstrip('/')}/{plan.name}" if "://" in storage else f"file://{plan.folder.resolve()}"


def _describe(plan: RunPlan) -> str:
    return json.dumps({"settings": dataclasses.asdict(plan.settings), "chaos": dataclasses.asdict(plan.chaos)}, default=str)


def find_run(name: str, root: Path) -> Path:
    """The folder of run ``name``: a path, or a name under ``root``. Raises ConfigError."""
    for folder in (Path(name), root / name):
        if (folder / "journal.jsonl").is_file():
            return folder
    raise ConfigError("RUN", name, f"no journal.jsonl in it, nor in {root / name}", "Name a run's folder, or a run under --storage.")


def twin_of(plan: RunPlan, world: int | None = None) -> RunPlan:
    """The same run without faults and spares, perhaps at another world size: it must end with the same bits."""
    settings = dataclasses.replace(plan.settings, world=world or plan.settings.world, spares=0)
    return dataclasses.replace(
        plan, name=f"{plan.name}-twin", folder=plan.folder / "twin", settings=settings, chaos=ChaosSettings(), resume=False
    )  # fmt: skip


def final_digest(folder: Path) -> str:
    """SHA-256 of the final state, from the journal; empty when the run did not complete."""
    from fleet.records import RunEnded

    ends = [record for record in read_journal(folder / "journal.jsonl", spans=False) if isinstance(record, RunEnded)]
    return ends[-1].digest if ends else ""


__all__ = ["LiveRun", "RunPlan", "RunResult", "final_digest", "find_run", "local_cluster", "new_name", "twin_of"]
