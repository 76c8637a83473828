"""Composition root: puts cluster, coordinator, agents, chaos, trainer and report together into one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray

from actors import fork_server
from actors.hosts import CoordinatorSpec, start_agent, start_coordinator
from actors.rank.environment import RANK_ENVIRONMENT
from actors.rank.once import Home
from actors.targets import RemoteProcesses
from actors.trainer import FitOutcome, fit
from actors.worker import RankSpec, rank_main
from chaos.arrivals import compression_for
from chaos.catalogue import Topology, load_catalogue
from chaos.conductor import JOB_WIDE, ChaosView, Conductor, Occupant
from chaos.controls import ChaosControls
from chaos.live import LiveChaos
from chaos.nodes import ClusterNodes
from chaos.processes import LocalProcesses
from chaos.settings import ChaosSettings, parse_chaos
from fleet.app.plans import RunPlan, RunResult, describe, store_url
from fleet.app.policy_choice import make, own_settings
from fleet.app.rank_logs import logs_of
from fleet.cluster import twin_folder
from fleet.cluster.clock import MonotonicClock, unix_time_s
from fleet.cluster.local import LocalCluster, node_resource
from fleet.cluster.ports import free_port
from fleet.cluster.provenance import code_of
from fleet.errors import RunFailed
from fleet.laws.reliability import all_lost_rate_per_s
from fleet.ledger.expectation import REFILL_S
from fleet.ledger.health import HOUR_S, histories
from fleet.machine.core import FleetMachine
from fleet.protocol.decisions import Decision
from fleet.protocol.events import FaultReported
from fleet.protocol.fault_kinds import Operation, Performer, kind_of
from fleet.protocol.instructions import EndRun
from fleet.protocol.journal import read_journal
from fleet.protocol.ports import RecoveryPolicy
from fleet.protocol.records import VERSION, RunStarted
from fleet.settings.run import RunSettings
from policies.delays import Delayed
from policies.interval import CheckpointInterval, IntervalSettings, checkpoint_rate_per_s
from policies.preflight import FATAL_XIDS, admit, judge
from storage import nodes
from storage.manifest import parse_checkpoint_id
from storage.mirror import JournalMirror
from storage.parts import Parts, RetainingStore, newest_checkpoint
from storage.peers import PeerMemory
from storage.trial import LIMIT_S, Failure, try_store

log = logging.getLogger("fleet.app.recipes")

HEAD_COMPONENTS = ("host_parts", "host_maintenance")
NODE_COMPONENTS = (*HEAD_COMPONENTS, "switch_or_cable")
NODE_REPAIR_S = 3600.0
CONTROLLER_RESTARTS = 8
"""After so many losses of Ray Train's controller the next one ends the run."""

HOST = "127.0.0.1"
STOP_S = 20.0


def slots_per_node(settings: RunSettings) -> int:
    """Room for all slots, also when one node is lost: a placement group without room keeps the cluster's control plane busy."""
    homes = max(1, settings.nodes - 1)
    return -(-settings.slots // homes)


@contextmanager
def local_cluster(settings: RunSettings, script: str = "") -> Iterator[LocalCluster]:
    """A cluster for runs of these settings, with this process connected to it; it ends with the context.

    What ``script`` imports from its own folder, ranks find there, too.
    """
    with LocalCluster(nodes=settings.nodes, slots_per_node=slots_per_node(settings)) as cluster:
        cluster.connect(imports_from=[str(Path(script).resolve().parent)] if script else [])
        yield cluster


def make_machine(
    settings: RunSettings, store_url: str, run: str, rates_per_s: tuple[float, float], resume: bool, now_s: float,
    lemons: Mapping[int, Decision], origin: str = "",
) -> FleetMachine:  # fmt: skip
    """The decision core with its policies. A resumed run begins from its newest durable checkpoint. ``origin``: see ``RunPlan``."""
    recovery: RecoveryPolicy = make("recovery", settings)
    if settings.form_delay_s:
        recovery = Delayed(recovery, settings.form_delay_s)
    own = own_settings("checkpoint", settings)
    peers = CheckpointInterval.of_copies(settings, own if isinstance(own, IntervalSettings) else IntervalSettings())
    newest = newest_checkpoint(store_url, run) if resume else None
    if origin and newest is None:
        newest = origin, parse_checkpoint_id(origin.rpartition("/")[2])[0]
    return FleetMachine(
        settings, recovery, make("placement", settings), make("checkpoint", settings), straggler=make("straggler", settings),
        progress=make("progress", settings), corruption=make("corruption", settings), lemons=lemons, checkpoint=newest, peers=peers,
        rates_per_s=rates_per_s, now_s=now_s,
    )  # fmt: skip


def preflight() -> Decision:
    """Whether the node that this runs on may train: quick checks of its host and its GPUs."""
    from actors.preflight import measure

    return admit(judge(measure(FATAL_XIDS, gather=False)))


def lasting_name(index: int) -> str:
    """The name under which a local cluster's node is known from run to run."""
    return f"{socket.gethostname()}/{index}"


def node_id(index: int, limit_s: float = 30.0) -> str:
    """Ray's id of a worker node of the cluster, once Ray knows it. Raises RunFailed."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for node in ray.nodes():
            if node["Alive"] and node_resource(index) in node["Resources"]:
                return str(node["NodeID"])
        time.sleep(0.1)
    raise RunFailed(f"node {index} of the local cluster is not known to Ray after {limit_s:g} s")


def home_of(plan: RunPlan) -> Home:
    """Where the files of a run belong. A twin gets a working directory of its own, with links to what the run has read and not written."""
    if plan.twin_since_s is None:
        return Home(plan.folder.resolve())
    work = plan.folder.resolve() / "work"
    twin_folder.make(work, Path.cwd(), plan.twin_since_s, [plan.folder.parent.parent])
    return Home(plan.folder.resolve(), True, work)


class LiveRun:
    """A run on a cluster, from its first process to its report."""

    def __init__(self, plan: RunPlan, cluster: LocalCluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.shm = Path(tempfile.mkdtemp(prefix="fleet-", dir="/dev/shm"))
        self.store_url, self.home = store_url(plan), home_of(plan)
        self.port = free_port(HOST)
        self.address = f"{HOST}:{self.port}"
        self.coordinator = start_coordinator(self._spec())
        self.agents: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        for index in cluster.alive():
            self.add_agent(index, functools.partial(try_store, self.store_url))
        self.nodes = _Nodes(self)
        self._stop = threading.Event()
        self._done = threading.Event()
        self.controls = ChaosControls(plan.settings.slots, plan.settings.nodes, plan.chaos.on)

    def _spec(self) -> CoordinatorSpec:
        plan, url, name = self.plan, self.store_url, self.plan.name
        settings, resume, rates_per_s, lemons, origin = plan.settings, plan.resume, level_rates_per_s(plan), self._lemons(), plan.origin
        code = code_of(plan.script)
        if not resume:
            code.keep(plan.folder)
        config, slots = describe(plan, code), (settings.world, settings.spares, settings.shards)
        first = RunStarted(VERSION, plan.name, 0.0, 0.0, *slots, config)
        return CoordinatorSpec(
            journal=plan.journal,
            host=HOST,
            port=self.port,
            cluster=plan.name if not resume else f"{plan.name}-{secrets.token_hex(4)}",
            machine=lambda now_s: make_machine(settings, url, name, rates_per_s, resume, now_s, lemons, origin),
            store=lambda: RetainingStore(url, settings.checkpoint.keep, name),
            started=lambda now_s: dataclasses.replace(first, at_s=now_s, unix_time_s=unix_time_s()),
            mirror=(lambda: JournalMirror(url).copy) if not url.startswith("file://") else None,
        )

    def _lemons(self) -> dict[int, Decision]:
        """Nodes that stay out for what they did in the runs that lie beside this one."""
        bad = self.plan.lemons.keep_out(nodes.load(self.plan.folder.parent / nodes.NAME), unix_time_s() / HOUR_S)
        return {index: bad[lasting_name(index)] for index in self.cluster.alive() if lasting_name(index) in bad}

    def _remember_nodes(self) -> None:
        names = {node: lasting_name(index) for index, node in self._nodes.items()}
        nodes.append(self.plan.folder.parent / nodes.NAME, histories(read_journal(self.plan.journal, spans=False), names))

    def add_agent(self, index: int, trial: Callable[[], Failure | None] | None = None) -> None:
        node = self._nodes[index] = node_id(index)
        memory = functools.partial(PeerMemory, HOST) if self.plan.settings.peer_copies else None
        check = preflight if self.plan.settings.preflight else None
        processes = functools.partial(LocalProcesses, node)
        self.agents[index] = start_agent(node, index, self.shm, self.address, processes, memory, check, trial)

    def name_of(self, index: int) -> str:
        """Ray's id of worker node ``index``; empty while it has no agent."""
        return self._nodes.get(index, "")

    def node_of(self, pid: int) -> int:
        """Index of the node on which rank process ``pid`` lives. Raises KeyError."""
        _, ranks, _ = ray.get(self.coordinator.census.remote(), timeout=30)
        names = {process.pid: process.node for _, process, _ in ranks}
        return next(index for index, name in self._nodes.items() if name == names[pid])

    def execute(self) -> RunResult:
        """Train to the end, under chaos. Raises ConfigError, before any rank is started, when a node cannot use the store."""
        ray.get([self.coordinator.census.remote(), *(agent.ready.remote() for agent in self.agents.values())], timeout=60)
        self._check_store()
        chaos = threading.Thread(target=self._conduct, name="fleet-chaos", daemon=True)
        watch = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        chaos.start()
        watch.start()
        try:
            fitted = self._fit_to_the_end()
        finally:
            self._stop.set()
            self.controls.close()
            chaos.join(STOP_S)
        outcome = self._outcome() or self._give_up(fitted)
        self._close()
        if outcome is None:
            return RunResult(plan=self.plan, status="failed", reason="Ray Train ended before the run did", detail=fitted.error or "")
        return RunResult(plan=self.plan, status=outcome.status, reason=outcome.reason, detail=outcome.detail)

    def _check_store(self) -> None:
        """Each node's agent has tried it since it was started. Of a run that cannot begin nothing is left."""
        answers = ray.get([agent.tried.remote() for agent in self.agents.values()], timeout=LIMIT_S + STOP_S)
        failures = {index: failure for index, failure in zip(self.agents, answers, strict=True) if failure is not None}
        if not failures:
            return
        index, failure = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} of the other {len(answers) - 1})" if len(failures) > 1 else ""
        refusal = failure.refusal(f"node {index}{others}")
        if self.plan.resume:
            ray.get(self.coordinator.stop_run.remote(str(refusal)), timeout=STOP_S)
            self._close()
        else:
            self._kill_actors()
            shutil.rmtree(self.plan.folder, ignore_errors=True)
        raise refusal

    def _give_up(self, fitted: FitOutcome) -> EndRun | None:
        """Ray Train ended before the run did: have that written down. None when the coordinator is gone too."""
        self.coordinator.stop_run.remote("Ray Train ended before the run did", fitted.error or "")
        return self._outcome()

    def _fit_to_the_end(self) -> FitOutcome:
        """Ray Train's controller may die, and takes its ranks along. Coordinator and agents live on: new ranks begin from their memory."""
        for attempt in range(CONTROLLER_RESTARTS):
            fitted = self._fit(f"train-{attempt}")
            if not fitted.lost_controller or self._outcome(0.0) is not None:
                return fitted
            log.warning("Ray Train's controller was lost (%s); it is started again.", fitted.error)
        return self._fit("train")

    def _fit(self, name: str) -> FitOutcome:
        from ray import cloudpickle

        settings = self.plan.settings
        # Ranks get the user's module with the function: they need not find its file.
        cloudpickle.register_pickle_by_value(sys.modules[self.plan.train.__module__])
        parts = functools.partial(Parts, self.store_url, self.plan.name)
        spec = RankSpec(settings, self.shm, HOST, self.plan.train, parts, self.home, logs_of(self.plan.folder.resolve()))
        return fit(
            rank_main,
            {"spec": spec},
            slots=settings.slots,
            resources_per_slot={"fleet_rank": 1},
            storage_path=str(self.plan.folder / "ray"),
            name=name,
            done=self._done.is_set,
            runtime_env=fork_server.runtime_env(self.shm, RANK_ENVIRONMENT),
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
        try:
            return cast("EndRun | None", ray.get(self.coordinator.wait.remote(timeout_s), timeout=timeout_s + 10.0))
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def _close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self.coordinator.close.remote(), timeout=STOP_S)
        self._kill_actors()
        self._remember_nodes()

    def _kill_actors(self) -> None:
        for actor in [*self.agents.values(), self.coordinator]:
            ray.kill(actor, no_restart=True)
        shutil.rmtree(self.shm, ignore_errors=True)

    def _conduct(self) -> None:
        """Strike as planned, and as an operator orders, until the run is over."""
        settings, chaos = self.plan.settings, self.plan.chaos
        plan = functools.partial(ChaosSettings.plan, seed=settings.seed, world=settings.slots, nodes=settings.nodes)
        sharded = settings.optimizer_sharding != "none"
        conductor = Conductor(plan(chaos), min_ranks=settings.min_ranks, repair_s=chaos.repair_s, lose_all=chaos.lose_all, sharded=sharded)
        live = LiveChaos(conductor, self.controls, _World(self), lambda: plan(parse_chaos("storm")))
        live.run(MonotonicClock(), lambda seconds: self._stop.wait(seconds) or self._done.is_set())


class _World:
    """The run as chaos sees it, and reaches into it."""

    def __init__(self, run: LiveRun) -> None:
        self._run, self._processes, self._nodes = run, RemoteProcesses(run.coordinator), ClusterNodes(run.nodes)

    def see(self) -> ChaosView:
        run = self._run
        phase, ranks, restorable = ray.get(run.coordinator.census.remote(), timeout=30)
        slots = {member.slot: Occupant(member, process, seated) for member, process, seated in ranks}
        nodes: dict[int, list[int]] = {index: [] for index in run.cluster.alive()}
        by_name = {run.name_of(index): index for index in nodes}
        for slot, occupant in slots.items():
            if occupant.process.node in by_name:
                nodes[by_name[occupant.process.node]].append(slot)
        return ChaosView(slots, {index: tuple(found) for index, found in nodes.items()}, phase == "run", restorable)

    def operate(self, order: Operation) -> str | None:
        return (self._nodes if kind_of(order.kind).performer is Performer.LAUNCHER else self._processes).operate(order)

    def report(self, event: FaultReported) -> None:
        ray.get(self._run.coordinator.report_fault.remote(event), timeout=30)


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


def level_rates_per_s(plan: RunPlan) -> tuple[float, float]:
    """Rates of the faults that need the durable checkpoint, and of those that need copies in memory.

    From the fault catalogue for this run's world, and as compressed as its chaos is. A rank lost in place needs neither. Without copies the
    store is for all ranks lost together, and for the node of the control plane. With them it is for that node, and for so many nodes at a
    time that copies are lost; and memory is for all ranks, by bad luck or by software that takes them all where chaos may do that.
    """
    settings, chaos = plan.settings, plan.chaos
    catalogue, fleet = load_catalogue(), Topology(gpus=chaos.fleet_gpus, gpus_per_node=chaos.gpus_per_node)
    compression = chaos.compression or 1.0
    if chaos.mtbf_s is not None:
        compression = compression_for(catalogue.chosen(None, chaos.kinds), fleet, settings.nodes, chaos.mtbf_s)
    ranks = Topology(gpus=settings.world, gpus_per_node=max(1, settings.world // settings.nodes))
    faults_per_s = (chaos.mtbf_s and 1.0 / chaos.mtbf_s) or compression * sum(catalogue.rates(ranks).values())
    head_per_s = compression * sum(catalogue.rates(Topology(gpus=1, gpus_per_node=1), HEAD_COMPONENTS).values())
    if settings.recovery.policy == "restart":
        return faults_per_s + head_per_s, faults_per_s if settings.peer_copies else 0.0
    whole_s = compression * catalogue.rates(ranks, (JOB_WIDE,))[JOB_WIDE] if chaos.lose_all else 0.0
    all_ranks = functools.partial(checkpoint_rate_per_s, fault_rate_per_s=faults_per_s, ranks_per_fault=1, repair_s=REFILL_S)
    if settings.nodes == 1 or not settings.peer_copies:
        return all_ranks(world=settings.world, whole_run_rate_per_s=head_per_s + whole_s), 0.0
    nodes_per_s = compression * sum(catalogue.rates(ranks, NODE_COMPONENTS).values())
    down_s = chaos.repair_s or NODE_REPAIR_S
    copies_lost_per_s = all_lost_rate_per_s(nodes_per_s, min(settings.nodes, settings.peer_copies + 1), down_s)
    return head_per_s + copies_lost_per_s, all_ranks(world=settings.world, whole_run_rate_per_s=whole_s)
