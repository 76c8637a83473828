"""Composition root: puts cluster, coordinator, agents, chaos, trainer and report together into one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from actors import control_store, fork_server
from actors.hosts import CoordinatorSpec, start_agent, start_coordinator, start_head_forks, start_zygote
from actors.rank.environment import RANK_ENVIRONMENT
from actors.rank.home import Home
from actors.rank.script import Script
from actors.rank.shipped import Shipped
from actors.targets import RemoteProcesses
from actors.worker import RankSpec, rank_main
from chaos.catalogue import Topology
from chaos.controls import ChaosControls
from chaos.daemons import Daemons
from chaos.injector import JOB_WIDE, ChaosView, Occupant
from chaos.links import LocalLinks
from chaos.live import live_chaos
from chaos.nodes import ClusterNodes
from chaos.processes import LocalProcesses
from fleet.app.cluster import ray_internals
from fleet.app.cluster.gpus import gpus_for
from fleet.app.cluster.joined import JoinedCluster, check_group
from fleet.app.cluster.local import LocalCluster
from fleet.app.foreign import Caretaker
from fleet.app.holding import RunHold
from fleet.app.machines import make_machine
from fleet.app.notices import SAID_BY_RAY, Notices
from fleet.app.plans import RunPlan, RunResult, describe, store_url
from fleet.app.tracking import tracked
from fleet.errors import ConfigError, JournalError, RunFailed
from fleet.host import secret, twin_folder
from fleet.host.clock import MonotonicClock, unix_time_s
from fleet.host.journal import read_journal
from fleet.host.provenance import Code, code_of
from fleet.host.rank_logs import logs_of
from fleet.laws.reliability import all_lost_rate_per_s
from fleet.ledger.forecast import REFILL_S
from fleet.ledger.health import HOUR_S, histories
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import Decision
from fleet.protocol.domains import HOST, VARIABLE, check_labels, locate
from fleet.protocol.events import FloorReached
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import Cost, Performer, kind_of
from fleet.protocol.instructions import EndRun
from fleet.protocol.operations import HEAD, START, Operation
from fleet.protocol.provider import Cluster, NodePlace
from fleet.protocol.records import COMPLETED, UNSAVED, VERSION, RunStarted
from fleet.settings.run import RunSettings
from policies.interval import LevelRates
from policies.lemons import Lemons
from policies.preflight import FATAL_XIDS, admit, judge
from storage import nodes
from storage.backends.files import addresses_of
from storage.backends.trial import LIMIT_S, Failure, leave_mark, remove_mark, try_store
from storage.checkpoint.parts import Parts, RetainingStore
from storage.mirror import JournalMirror
from storage.peers.memory import PeerMemory

if TYPE_CHECKING:
    from actors.trainer import FitOutcome

log = logging.getLogger("fleet.app.recipes")
TRAINER = "actors.trainer"
"""It imports Ray Train, which takes a second: beside the start of a cluster, or before ranks start."""

HEAD_COMPONENTS = ("host_parts", "host_maintenance")
NODE_COMPONENTS = (*HEAD_COMPONENTS, "switch_or_cable")
NODE_REPAIR_S = 3600.0
BACK_S = 30.0
"""Seconds for a node that chaos has cut off to be told again."""
CONTROLLER_RESTARTS = 8
"""Losses of Ray Train's controller after which the next loss ends the run."""

ANSWER_S = 90.0
"""Seconds for the coordinator's answer to the injector of chaos: longer than any fault that stops the coordinator (``STOPPED``)."""
START_S = 60.0
STOP_S = 20.0
NOTICES_S = 1.0
LEAVE_S = 2.0
"""Seconds for ranks of a run that was stopped, or has failed, to end by themselves: a loop that computes does not hear of it. Then agents
end them. Agents may take as long where other processes tidy up after them, too."""
LEFT_S = 5.0
"""Seconds for threads that ask a lost cluster. No thread may be in Ray when this process leaves it, else Ray ends the process."""


def slots_per_node(settings: RunSettings) -> int:
    """Room for all slots, also when one node is lost: a placement group without room keeps the cluster's control plane busy."""
    homes = max(1, settings.nodes - 1)
    return -(-settings.slots // homes)


@contextmanager
def local_cluster(settings: RunSettings, imports_from: Sequence[str] = ()) -> Iterator[LocalCluster]:
    """A cluster for runs of these settings, with this process connected to it; it ends with the context.

    Ranks, too, find modules in the folders ``imports_from``.
    """
    gpus, slots = gpus_for(settings), slots_per_node(settings)
    check_group(settings.group, slots)
    threading.Thread(target=importlib.import_module, args=(TRAINER,), name="fleet-import").start()
    with LocalCluster(
        nodes=settings.nodes, slots_per_node=slots, gpus=gpus, gpus_per_rank=settings.per_rank.gpus, zygote=start_zygote
    ) as cluster:
        cluster.connect(imports_from=imports_from)
        yield cluster


def preflight() -> Decision:
    """Decides by quick checks of this host and its GPUs whether the node may train."""
    from actors.preflight import measure

    return admit(judge(measure(FATAL_XIDS, gather=False)))


def imports_of(plan: RunPlan) -> Sequence[str]:
    """Import statements that every rank of the run executes, and that a process may execute ahead of them."""
    return plan.train.imports if isinstance(plan.train, Script) else ()


def _check_domains(levels: Sequence[str], cluster: Cluster) -> None:
    """Raises ConfigError when no node has a label of a failure domain, and no variable names the domains."""
    if any(level != HOST for level in levels) and VARIABLE not in os.environ:
        check_labels(levels, [cluster.place(index).labels for index in cluster.alive()])


def agents_at_first(settings: RunSettings) -> int:
    """Number of nodes that get an agent before a rank is placed there: for all slots, and for their places after losses."""
    return 2 * settings.slots + 2


def home_of(plan: RunPlan) -> Home:
    """The folders of a run's files. A twin gets its own working directory, with links to files that the run has not written."""
    if plan.twin_since_s is None:
        return Home(plan.folder.resolve())
    work = plan.folder.resolve() / "work"
    twin_folder.make(work, Path.cwd(), plan.twin_since_s, [plan.folder.parent.parent, plan.folder.parent])
    return Home(plan.folder.resolve(), True, work)


@dataclasses.dataclass(slots=True)
class RunSignals:
    """Signals between the threads of a run: to ``stop``; the run is ``done``; its cluster is ``forsaken``; ranks have ``left``."""

    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    forsaken: threading.Event = dataclasses.field(default_factory=threading.Event)
    left: bool = False


class LiveRun:
    """A run on a cluster, from its first process to its report. Ranks of nodes that are ``unfit`` join no view."""

    def __init__(self, plan: RunPlan, cluster: Cluster, unfit: Mapping[int, Decision] | None = None) -> None:
        if cluster.shares_folders and plan.settings.tls:  # it was begun on other hosts, and is resumed on this machine alone
            plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, tls=""))
        self.plan, self.cluster, self._unfit = plan, cluster, unfit or {}
        if not plan.resume:  # nodes that are lost by now may have had the labels
            _check_domains(plan.settings.domains, cluster)
        self.shm = cluster.folder()
        self.home = home_of(plan) if cluster.shares_folders else Home(plan.folder, base=f"{store_url(plan)}/saved")
        self._secret = secret.fresh()
        self._head_forks: fork_server.ForkServer | None = None
        self.hold = RunHold(plan, cluster.address if isinstance(cluster, JoinedCluster) else "")
        with self.hold.closed_on_error():
            self._start()

    def _start(self) -> None:
        """The coordinator, and an agent on each node."""
        plan, cluster = self.plan, self.cluster
        if isinstance(cluster, LocalCluster):
            self._head_forks = start_head_forks(self.shm, cluster.head_environment, cluster.head_raylet)
        self.coordinator = start_coordinator(self._spec(), self._head_env)
        self.address, self._begun = "", self.coordinator.begin.remote(self._secret)
        self.agents: dict[int, Any] = {}
        self.places: dict[int, NodePlace] = {}
        self.domains: dict[int, str] = {}
        self._cut_until_s: dict[str, float] = {}
        alive = cluster.alive()
        self._mark = "" if cluster.shares_folders or not self.hold.url.startswith("file://") else leave_mark(self.hold.url)
        for index in alive if cluster.shares_folders else alive[: agents_at_first(plan.settings)]:
            self.add_agent(index, functools.partial(try_store, self.hold.url, self._mark))
        self.address = str(ray.get(self._begun, timeout=START_S))
        self.nodes = _Nodes(self)
        self._clock = MonotonicClock()
        self._signals = RunSignals()
        if isinstance(cluster, JoinedCluster):
            cluster.lose_node = self._fell
        self.controls = ChaosControls(plan.settings.slots, plan.settings.nodes, plan.chaos.on)

    @property
    def _head_env(self) -> Mapping[str, Any]:
        """Runtime environment of actors on the head."""
        return fork_server.runtime_env(self.shm, {}) if self._head_forks is not None else {}

    def _spec(self) -> CoordinatorSpec:
        plan, url, name, tenure = self.plan, self.hold.url, self.plan.name, self.hold.tenure
        settings, resume, rates, lemons = plan.settings, plan.resume, level_rates(plan), self._lemons()
        origin, build = plan.origin, plan.build
        code = code_of(plan.script) if plan.made_of is None else Code()
        if not resume:
            code.keep(plan.folder)
        config, slots = describe(plan, code), (settings.world, settings.slots - settings.world, settings.shards)
        first = RunStarted(VERSION, plan.name, 0.0, 0.0, *slots, config)
        return CoordinatorSpec(
            journal=plan.journal,
            host=self.cluster.head,
            cluster=plan.name if not resume else f"{plan.name}-{secrets.token_hex(4)}",
            machine=lambda now_s: make_machine(settings, url, name, rates, resume, now_s, lemons, origin, build),
            store=lambda: RetainingStore(url, settings.checkpoint.keep, name, tenure),
            started=lambda now_s: dataclasses.replace(first, at_s=now_s, unix_time_s=unix_time_s()),
            mirror=(lambda: JournalMirror(url, tenure).copy) if not url.startswith("file://") else None,
            daemons=functools.partial(Daemons, url, self.cluster.shares_folders),
            answers=ray_internals.answers,
            back=plan.back,
            tls=settings.tls,
        )

    def _lemons(self) -> dict[int, Decision]:
        """Nodes that stay out for their faults in the runs that lie beside this one."""
        bad = Lemons().keep_out(nodes.load(self.plan.folder.parent / nodes.NAME), unix_time_s() / HOUR_S)
        names = {index: self.cluster.place(index).name for index in self.cluster.alive()}
        return {index: bad[name] for index, name in names.items() if name in bad}

    def _remember_nodes(self) -> None:
        names = {place.id: place.name for place in self.places.values()}
        try:
            nodes.append(self.plan.folder.parent / nodes.NAME, histories(read_journal(self.plan.journal, spans=False), names))
        except (OSError, JournalError) as error:
            log.warning("the history of this run's nodes is not kept: %s", error)

    def add_agent(self, index: int, trial: Callable[[], Failure | None] | None = None) -> None:
        place = self.places[index] = self.cluster.place(index)
        self._cut_until_s.pop(place.id, None)
        memory = functools.partial(PeerMemory, place.host) if self.plan.settings.peer_copies else None
        decision = self._unfit.get(index)  # another process has judged it
        check = (lambda: decision) if decision is not None else preflight if self.plan.settings.preflight else None
        processes = functools.partial(LocalProcesses, place.id)
        levels = self.plan.settings.domains
        links = functools.partial(LocalLinks, store=functools.partial(addresses_of, self.hold.url))
        self.domains[index] = locate(place.labels, place.name, levels).path
        notice_s = self.plan.settings.timeouts.notice_s
        self.agents[index] = start_agent(
            place.id,
            index,
            self.shm,
            processes,
            memory,
            check,
            trial,
            levels,
            links,
            Daemons,
            notice_s,
            ray_internals.take_sigterm,
            imports_of(self.plan),
            self.plan.settings.tls,
        )
        self.agents[index].begin.remote(self._secret, self.address or self._begun)  # Ray waits for the address

    def cut_off(self, order: Operation) -> None:
        """Note that chaos cuts off a node, or all of them, for a while, or lets its agent start again."""
        kind = kind_of(order.kind)
        unreachable = order.is_target or kind.performer is Performer.HOST or Cost.WAIT in kind.may_cost
        if unreachable and order.phase == START and order.node is not None:
            self._cut_until_s[self.name_of(order.node)] = self._clock.now_s() + order.duration_s + BACK_S

    def comes_back(self, index: int) -> None:
        """Note that a node that chaos has lost has an agent again. It takes a moment to be told."""
        self._cut_until_s[self.name_of(index)] = self._clock.now_s() + BACK_S

    def is_cut_off(self, name: str) -> bool:
        """Whether chaos has lost or cut off Ray's node ``name``, now or a moment ago: the node is there, and comes back."""
        return self._clock.now_s() < self._cut_until_s.get(name, 0.0)

    def name_of(self, index: int) -> str:
        """Ray's id of worker node ``index``; empty while it has no agent."""
        return self.places[index].id if index in self.places else ""

    def execute(self) -> RunResult:
        """Train to the end, under chaos. Raises ConfigError, before any rank is started, when a node cannot use the store."""
        with self.hold.kept(self._taken_over):
            self._await_agents()
            self._check_store()
            with tracked(self.plan.folder, self.plan.settings.track):
                return self._train()

    def _taken_over(self, reason: str) -> None:
        """Another process holds the run: this one ends at once, and keeps nothing."""
        self.coordinator.stop_run.remote(reason, reason, EndWhy.TAKEN_OVER)

    def _train(self) -> RunResult:
        chaos = threading.Thread(target=self._inject, name="fleet-chaos", daemon=True)
        watch = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        notices = threading.Thread(target=self._report_notices, name="fleet-notices", daemon=True)
        chaos.start()
        watch.start()
        notices.start()
        caretaker = self._caretaker()
        try:
            fitted = self._fit_to_the_end() if self._outcome(0.0) is None else None  # it may have been stopped before it began
        finally:
            self._signals.stop.set()
            self.controls.close()
            patience_s = LEFT_S if self._signals.forsaken.is_set() else STOP_S
            chaos.join(patience_s)
            watch.join(patience_s)  # both threads ask Ray, which this process may leave next
            notices.join(patience_s)
            if caretaker is not None:
                caretaker.close()
        error = fitted.error or "" if fitted is not None else ""
        outcome = self._outcome() or self._give_up(error)
        self._close()
        if outcome is None:
            why = "the cluster was lost" if self._signals.forsaken.is_set() else "Ray Train ended before the run did"
            return RunResult(plan=self.plan, status="failed", reason=why, detail=error)
        return RunResult(plan=self.plan, status=outcome.status, reason=outcome.reason, detail=outcome.detail)

    def _await_agents(self) -> None:
        """Wait for agents, and give up those that do not come: their node may be lost already. Raises RunFailed when none comes."""
        for index, answer in self._ask_agents("ready", START_S).items():
            if isinstance(answer, Exception):
                log.warning("node %d has no agent: %s", index, " ".join(str(answer).split())[:300])
                del self.agents[index]
        if not self.agents:
            raise RunFailed(f"no node's agent came up within {START_S:g} s")

    def _ask_agents(self, method: str, limit_s: float) -> dict[int, Any]:
        """Node -> the answer of its agent, or the error in its place."""
        calls = {index: getattr(agent, method).remote() for index, agent in self.agents.items()}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s)
        answers: dict[int, Any] = {}
        for index, call in calls.items():
            try:
                answers[index] = ray.get(call, timeout=0.1)
            except (ray.exceptions.RayError, TimeoutError) as error:
                answers[index] = error
        return answers

    def _caretaker(self) -> Caretaker | None:
        """The caretaker of a run on a joined cluster; None on a local one."""
        if not isinstance(self.cluster, JoinedCluster):
            return None
        settings = self.plan.settings
        return Caretaker(self, self.cluster, self.plan.folder, self._signals.stop.is_set, agents_at_first(settings), settings.ask_for_nodes)

    def _fell(self, index: int) -> str | None:
        """End all processes of this run on a node at once: ranks end with the process that forked them, and that one with the agent."""
        if index not in self.agents:
            return f"node {index} has no agent"
        self.release(index)
        return None

    def release(self, index: int) -> None:
        """End the agent of a node that the run gives up: Ray counts an agent as work, and an autoscaler removes no node that works."""
        self._cut_until_s[self.name_of(index)] = math.inf  # Ray's node lives, and is not ours to take out
        ray.kill(self.agents.pop(index), no_restart=True)

    def _check_store(self) -> None:
        """Raises ConfigError when an agent could not use the store. A run that cannot begin leaves nothing."""
        answers = self._ask_agents("tried", LIMIT_S + STOP_S)
        if self._mark:
            remove_mark(self.hold.url, self._mark)
        failures = {index: failure for index, failure in answers.items() if isinstance(failure, Failure)}
        refusal = self._refusal(failures, len(answers)) if failures else self.hold.refusal
        if refusal is None:
            return
        if self.plan.resume:
            ray.get(self.coordinator.stop_run.remote(str(refusal)), timeout=STOP_S)
            self._close()
        else:
            self._kill_actors()
            self.hold.forget()
            shutil.rmtree(self.plan.folder, ignore_errors=True)
        raise refusal

    def _refusal(self, failures: Mapping[int, Failure], asked: int) -> ConfigError:
        index, failure = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} of the other {asked - 1})" if len(failures) > 1 else ""
        where = f"node {index}" if self.cluster.shares_folders else f"node {self.places[index].host}"
        return failure.refusal(f"{where}{others}")

    def _give_up(self, error: str) -> EndRun | None:
        """Let the coordinator record that Ray Train ended before the run did. None when the coordinator is gone, too."""
        self.coordinator.stop_run.remote("Ray Train ended before the run did", error)
        return self._outcome()

    def _fit_to_the_end(self) -> FitOutcome:
        """Train, with a new controller of Ray Train after each loss of one. Its ranks die with it; new ones begin from the agents'
        memory."""
        for attempt in range(CONTROLLER_RESTARTS):
            fitted = self._fit(f"train-{attempt}")
            if not fitted.lost_controller or self._outcome(0.0) is not None:
                return fitted
            log.warning("Ray Train's controller was lost (%s); it is started again.", fitted.error)
        return self._fit("train")

    def _fit(self, name: str) -> FitOutcome:
        from ray import cloudpickle

        from actors.trainer import BACKSTOP_S, fit

        settings = self.plan.settings
        train = self.plan.train
        # Ranks get a function's module by value: they need not find its file. A function without a module is sent so anyway.
        if not isinstance(train, Script | Shipped) and (module := sys.modules.get(train.__module__)) is not None:
            cloudpickle.register_pickle_by_value(module)
        parts = functools.partial(Parts, self.hold.url, self.plan.name, self.hold.tenure)
        shared = self.cluster.shares_folders
        logs = logs_of(self.plan.folder.resolve() if shared else self.shm)
        spec = RankSpec(settings, self.shm, self.cluster.head if shared else None, train, parts, self.home, logs)
        return fit(
            rank_main,
            {"spec": spec},
            slots=settings.slots,
            resources_per_slot=dict(self.cluster.slot),
            selector=self.cluster.selector,
            storage_path=str(self.plan.folder / "ray"),
            name=name,
            done=self._signals.done.is_set,
            forsaken=self._signals.forsaken.is_set,
            backstop_s=lambda: BACKSTOP_S if self._signals.left else LEAVE_S,
            runtime_env=fork_server.runtime_env(self.shm, RANK_ENVIRONMENT, same_paths=shared),
            controller_runtime=self._head_env,
        )

    def stop(self, reason: str) -> None:
        """End the run in order; ``execute`` returns soon after."""
        self.coordinator.stop_run.remote(reason)

    def _watch(self) -> None:
        """Notice the end of the run, or of its cluster, so that this process does not wait for Ray Train much longer."""
        address, silence = ray.get_runtime_context().gcs_address, control_store.Silence()
        while not self._signals.stop.is_set():
            outcome = self._outcome(timeout_s=1.0)
            ended, self._signals.left = outcome is not None, outcome is not None and outcome.status in (COMPLETED, UNSAVED)
            silent_s = silence.note(ray_internals.answers(address, control_store.ASK_S), self._clock.now_s())
            if silent_s >= (0.0 if ended else control_store.LOST_S + control_store.END_S) and silence.since_s is not None:
                log.warning("%s; this process leaves it.", control_store.why_lost(address, silent_s))
                self._signals.forsaken.set()
            if ended or self._signals.forsaken.is_set():
                self._signals.done.set()
                return

    def _report_notices(self) -> None:
        """Tell the coordinator of nodes that Ray will take away."""
        notices = Notices()
        while not self._signals.stop.wait(NOTICES_S):
            try:
                draining = ray_internals.draining()
            except OSError as error:
                log.debug("%s", error)
                continue
            for node, notice_s in notices.news(draining, [place.id for place in self.places.values()], unix_time_s()):
                self.coordinator.announce.remote(node, notice_s, SAID_BY_RAY)

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
        if self._signals.forsaken.is_set():  # actors end with the cluster, and cannot be reached
            shutil.rmtree(self.shm, ignore_errors=True)
            return
        alive = self.cluster.alive()  # the agent of a node that is lost waits for it to come back
        closing = [agent.close.remote() for index, agent in self.agents.items() if index in alive]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=LEAVE_S if self.cluster.shares_folders else STOP_S)
        for actor in [*self.agents.values(), self.coordinator]:
            ray.kill(actor, no_restart=True)
        if self._head_forks is not None:
            self._head_forks.close()
        shutil.rmtree(self.shm, ignore_errors=True)

    def _inject(self) -> None:
        """Inject the planned faults, and those that an operator orders, until the run is over."""
        live = live_chaos(self.plan.settings, self.plan.chaos, self.controls, _World(self))
        live.run(MonotonicClock(), lambda seconds: self._signals.stop.wait(seconds) or self._signals.done.is_set())


class _World:
    """The run as chaos sees it and acts on it."""

    def __init__(self, run: LiveRun) -> None:
        self._run, self._processes, self._nodes = run, RemoteProcesses(run.coordinator), ClusterNodes(run.nodes)

    def see(self) -> ChaosView:
        run = self._run
        phase, ranks, restorable = ray.get(run.coordinator.census.remote(), timeout=ANSWER_S)
        slots = {member.slot: Occupant(member, process, joined) for member, process, joined in ranks}
        nodes: dict[int, list[int]] = {index: [] for index in run.cluster.alive()}
        by_name = {run.name_of(index): index for index in nodes}
        for slot, occupant in slots.items():
            if occupant.process.node in by_name:
                nodes[by_name[occupant.process.node]].append(slot)
        hosts = {HEAD: run.address.rpartition(":")[0], **{index: run.places[index].host for index in nodes if index in run.agents}}
        return ChaosView(
            slots, {index: tuple(found) for index, found in nodes.items()}, phase == "run", restorable, dict(run.domains), hosts
        )

    def operate(self, order: Operation) -> str | None:
        self._run.cut_off(order)
        return (self._nodes if kind_of(order.kind).performer is Performer.LAUNCHER else self._processes).operate(order)

    def learned(self, fault: str) -> str:
        return "; ".join(self._processes.said.pop(fault, []))

    def committed_step(self) -> int | None:
        step: int | None = ray.get(self._run.coordinator.committed_step.remote(), timeout=ANSWER_S)
        return step

    def report_floor(self, event: FloorReached) -> None:
        ray.get(self._run.coordinator.report.remote(event), timeout=ANSWER_S)

    def report(self, event: FaultRecord) -> None:
        ray.get(self._run.coordinator.report.remote(event), timeout=ANSWER_S)


class _Nodes:
    """The cluster's nodes as chaos sees them. A node that comes back gets an agent."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def lose(self, index: int) -> str | None:
        return self._run.cluster.lose(index)

    def add(self) -> int:
        index = self._run.cluster.add()
        self._run.add_agent(index)
        self._run.comes_back(index)
        return index

    def alive(self) -> list[int]:
        return list(self._run.cluster.alive())

    def announce(self, index: int, notice_s: float | None) -> str | None:
        name = self._run.name_of(index)
        if not name:
            return f"node {index} has no agent"
        ray.get(self._run.coordinator.announce.remote(name, notice_s, "maintenance, as chaos has it"), timeout=ANSWER_S)
        return None


def level_rates(plan: RunPlan) -> LevelRates:
    """Rates of the faults that need the durable checkpoint, and of those that need copies in memory, before the run has met any.

    They come from the fault catalogue of the run's chaos, for its world, and at its compression. A rank lost in place needs neither.
    Without copies in memory, the run needs the store after the loss of all ranks together, or of the control plane's node. With copies, it
    needs the store after the loss of that node, or of so many nodes at a time that copies are lost. It needs memory after the loss of all
    ranks: by chance, or by software that takes them all, where chaos may do that.
    """
    settings, chaos = plan.settings, plan.chaos
    catalogue, compression = chaos.catalogue(), chaos.compression_in(settings.nodes)
    ranks = Topology(gpus=settings.world, gpus_per_node=max(1, settings.world // settings.nodes))
    faults_per_s = (chaos.mtbf_s and 1.0 / chaos.mtbf_s) or compression * sum(catalogue.rates(ranks).values())
    head_per_s = compression * catalogue.rate(Topology(gpus=1, gpus_per_node=1), HEAD_COMPONENTS)
    whole_s = compression * catalogue.rate(ranks, (JOB_WIDE,)) if chaos.lose_all else 0.0
    copies_lost_per_s = None
    if settings.nodes > 1 and settings.peer_copies:
        nodes_per_s = compression * catalogue.rate(ranks, NODE_COMPONENTS)
        copies = min(settings.nodes, settings.peer_copies + 1)
        copies_lost_per_s = all_lost_rate_per_s(nodes_per_s, copies, chaos.repair_s or NODE_REPAIR_S)
    return LevelRates(
        faults_per_s=faults_per_s, head_per_s=head_per_s, whole_per_s=whole_s, copies_lost_per_s=copies_lost_per_s,
        restarts=settings.recovery.policy == "restart", world=settings.world, copied=bool(settings.peer_copies), refill_s=REFILL_S,
    )  # fmt: skip
