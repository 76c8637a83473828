"""Coordinator and node agents as Ray actors: thin classes around plain asyncio classes."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import control_store, domains, fork_server
from actors.coordinator import Coordinator, SpanEnd, span_end
from actors.messages import Operated
from actors.node import DaemonMaker, LinkMaker, NodeAgent
from actors.rank.environment import RANK_ENVIRONMENT
from fleet.host import leftovers, mirroring, processes, secret, tls
from fleet.host.clock import Clock, MonotonicClock, unix_time_s
from fleet.host.journal import JournalWriter, read_journal
from fleet.host.linux import die_with_parent
from fleet.host.ports import free_port
from fleet.host.rank_logs import FOLDER
from fleet.host.scheduling import be_prompt
from fleet.host.whole_files import write_whole
from fleet.machine.core import FleetMachine
from fleet.machine.state import Phase
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import Decision, GoneBack
from fleet.protocol.events import FloorReached, NodesWanted, RoomMissing
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import Performer, kind_of
from fleet.protocol.instructions import EndRun, Write
from fleet.protocol.operations import Operation
from fleet.protocol.ports import CheckpointPort, MemoryPort, ProcessPort
from fleet.protocol.provider import FOLDER_PREFIX
from fleet.protocol.records import Record, Resumed, RunStarted, Spans, configuration, section
from fleet.protocol.types import Member, Process
from fleet.settings.live import ADDRESS_FILE

log = logging.getLogger("fleet.hosts")
FORMAT = "storage.checkpoint.dcp"
"""The module that writes and commits parts. It imports torch, which takes 2 s."""
IMPORTED_ONCE = (
    "torch",
    "torch._dynamo",
    "torch.profiler",
    "actors.node",
    "actors.rank.main",
    "actors.rank.fsdp.layout",
    "storage.checkpoint.parts",
    FORMAT,
    "pydantic.v1",
    "pyarrow.json",
    *("pandas", "pyarrow.dataset", "requests", "jsonschema", "rich.console", "yaml", "google.protobuf.json_format", "click"),
)
"""The imports of a rank that do not import Ray; the last line is half of the time of ``ray.train``."""
IMPORTED = (*IMPORTED_ONCE, "ray.tune", "actors.worker")
"""The imports of a rank that has taken a step and saved a part. Otherwise each replacement would take a core from the other ranks for half
a second.

An optimizer's first step imports ``torch._dynamo``, which takes as long as ``torch``.
"""

COORDINATOR_FILE = "coordinator"
"""The file with the coordinator's address in the folder of a node's agent, for a restarted agent."""
PREPARE_S = 10.0
MIRROR_S = 5.0
RAYS_OWN_S = 0.5
"""Ray itself sends SIGTERM to a worker whose job or owner is gone, and SIGKILL a tenth of a second later. An agent that still lives after
this time got SIGTERM from elsewhere."""


@dataclass(frozen=True)
class CoordinatorSpec:
    """The arguments of a coordinator, for its start and for restarts after a kill.

    ``machine`` makes the decision core for a start time; ``store`` the checkpoint port; ``started`` the journal's first record for a time.
    ``mirror`` makes a function that copies the journal to the run's storage, where that is elsewhere. ``host`` is the address to listen on.
    ``cluster`` names this cluster: a journal of another cluster belongs to a run that is being resumed. ``daemons`` makes the object that
    injects faults into this process and its host. ``answers`` says whether the control store at an address answers within so many seconds.
    ``back``: the checkpoint to which a resumed run goes back; None: the newest. ``tls``: see :mod:`fleet.host.tls`.
    """

    journal: Path
    host: str
    cluster: str
    machine: Callable[[float], FleetMachine]
    store: Callable[[], CheckpointPort]
    started: Callable[[float], RunStarted]
    mirror: Callable[[], Callable[[Path], object]] | None
    daemons: DaemonMaker
    answers: Callable[[str, float], bool]
    back: GoneBack | None = None
    tls: str = ""


def _port_before(address_file: Path) -> int:
    """The port of the coordinator before this one, where agents look for it; 0: there was none."""
    return int(address_file.read_text().rpartition(":")[2]) if address_file.exists() else 0


def _history(path: Path) -> tuple[list[Record], dict[Member, SpanEnd]]:
    """(the journal's records without spans, the end of each member's time in it)."""
    records: list[Record] = []
    ends: dict[Member, SpanEnd] = {}
    for record in read_journal(path) if path.exists() else ():
        if isinstance(record, Spans):
            ends[record.member] = span_end(record)
        else:
            records.append(record)
    return records, ends


def _run_clock(records: list[Record]) -> MonotonicClock:
    """A clock that continues the journal's clock, also after a reboot of the host."""
    started = next((record for record in records if isinstance(record, RunStarted)), None)
    clock = MonotonicClock()
    if started is not None:
        drift_s = started.at_s + (unix_time_s() - started.unix_time_s) - clock.now_s()
        clock.offset_s = drift_s if abs(drift_s) > 60.0 else 0.0
    return clock


class CoordinatorHost:
    """The coordinator's actor. Each new process rebuilds it from the journal."""

    async def __init__(self, spec: CoordinatorSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        be_prompt(children=False)
        tls.hold(spec.tls)
        records, ends = _history(spec.journal)
        clock = _run_clock(records)
        self.outcome: EndRun | None = None
        self._done = asyncio.Event()
        restarted = bool(records) and _cluster_of(records) == spec.cluster
        journal = JournalWriter(spec.journal)
        machine = spec.machine(clock.now_s())
        self._rebuild(spec, machine, records, journal, clock)
        self._coordinator = Coordinator(
            machine, clock, journal, spec.store(), self._on_end, spec.journal.parent / "evidence", ends, round(clock.offset_s * 1e6)
        )
        self._coordinator.on_failure = lambda: os._exit(1)  # an exception would end Ray's loop here, but not the process
        self._spec, self._begun, self._daemons, self._clock = spec, asyncio.Event(), spec.daemons(), clock
        self._address_file, self._address = spec.journal.parent / ADDRESS_FILE, ""
        self._copy = spec.mirror() if spec.mirror is not None else None
        self._journal = spec.journal
        if restarted:
            await self._go_on()
        else:
            secret.forget(spec.journal.parent)  # a secret there belongs to a run that has ended
            self._address_file.unlink(missing_ok=True)
        self._mirroring = asyncio.create_task(self._mirror_forever())
        self._guarding = asyncio.create_task(self._end_before_ray_does())
        self._preparing = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        """Import the modules for checkpoints, else the first commit's time would include it. It waits until the ranks have started, as
        these need
        the cores."""
        await asyncio.sleep(PREPARE_S)
        await asyncio.to_thread(importlib.import_module, FORMAT)

    async def begin(self, run_secret: bytes) -> str:
        """Listen for clients that can prove ``run_secret``. Returns ``host:port``, which stays the same during the run.

        The secret comes by a call, as Ray keeps an actor's constructor arguments in a table.
        """
        secret.hold(run_secret)
        secret.keep(self._spec.journal.parent, run_secret)
        await self._listen()
        return self._address

    async def _go_on(self) -> None:
        """In a new process of a run that goes on: listen with the secret that the last process has kept. If there is none, it will come by
        a call."""
        try:
            secret.hold(secret.read(self._spec.journal.parent))
        except FileNotFoundError:
            return
        await self._listen()

    async def _listen(self) -> None:
        if not self._begun.is_set():
            self._begun.set()
            host = self._spec.host
            port = await self._coordinator.start(host, _port_before(self._address_file) or free_port(host))
            self._address = f"{host}:{port}"
            write_whole(self._address_file, self._address)

    async def _mirror_forever(self) -> None:
        while self._copy is not None:
            await asyncio.sleep(MIRROR_S)
            await self._mirror()

    async def _mirror(self) -> None:
        if self._copy is None:
            return
        try:
            await asyncio.to_thread(self._copy, self._journal)
        except OSError as error:
            log.warning("the journal was not mirrored, and will be in %g s: %s", MIRROR_S, error)

    async def _end_before_ray_does(self) -> None:
        """End the run when Ray's control store is lost, before Ray ends the cluster. Ranks still reach each other, and the checkpoint
        store."""
        address, silence, silent_s = ray.get_runtime_context().gcs_address, control_store.Silence(), 0.0
        while silent_s < control_store.LOST_S:
            await asyncio.sleep(control_store.ASK_S)
            answered = await asyncio.to_thread(self._spec.answers, address, control_store.ASK_S)
            silent_s = silence.note(answered, self._clock.now_s())
        self._coordinator.stop_run(control_store.why_lost(address, silent_s))

    def _rebuild(self, spec: CoordinatorSpec, machine: FleetMachine, records: list[Record], journal: JournalWriter, clock: Clock) -> None:
        now_s = clock.now_s()
        if not records:
            journal.append(spec.started(now_s))
        elif _cluster_of(records) != spec.cluster:
            script = section(configuration(spec.started(now_s).config), "made_of").get("script_sha256", "")
            again = Resumed(now_s, unix_time_s(), "resumed in a new cluster", spec.cluster, script_sha256=script)
            journal.append(again)
            for instruction in machine.resume([*records, again], now_s, spec.back):
                if isinstance(instruction, Write):
                    journal.append(instruction.record)
        else:
            journal.append(Resumed(now_s, unix_time_s(), "the coordinator was restarted", spec.cluster, gap=False))
            machine.replay(records, now_s)
            if (ended := machine.state.ending.record) is not None:
                self.outcome = EndRun(ended.status, ended.reason, ended.detail, ended.why)
        journal.flush()

    def _on_end(self, outcome: EndRun) -> None:
        self.outcome = outcome
        self._done.set()

    async def wait(self, timeout_s: float) -> EndRun | None:
        """The end of the run, or None when it has not ended within ``timeout_s``."""
        if self.outcome is None:
            try:
                await asyncio.wait_for(self._done.wait(), timeout_s)
            except TimeoutError:
                return None
        return self.outcome

    async def stop_run(self, reason: str, error: str = "", why: EndWhy = EndWhy.STOPPED) -> None:
        self._coordinator.stop_run(reason, error, why)

    async def report(self, event: FaultRecord | FloorReached | RoomMissing | NodesWanted) -> None:
        """Handle an event from the fault injection, or from the code that manages the run's nodes."""
        self._coordinator.report(event)

    async def announce(self, node: str, notice_s: float | None, why: str) -> None:
        """Announce that node ``node`` will be taken away in ``notice_s``; None: it stays after all."""
        self._coordinator.announce(node, notice_s, why)

    async def committed_step(self) -> int | None:
        """The newest step that is committed; None once the first rank has committed the last one."""
        state = self._coordinator.machine.state
        return None if state.attendance.finished or state.phase in (Phase.CONCLUDE, Phase.END) else state.committed.step

    async def census(self) -> tuple[str, list[tuple[Member, Process, bool]], bool]:
        """(phase, live ranks, whether a run that loses all of them could continue from a checkpoint)."""
        machine = self._coordinator.machine
        return machine.state.phase, self._coordinator.census(), machine.state.checkpoints.newest_id is not None

    @ray.method(max_task_retries=0)  # type: ignore[untyped-decorator]
    async def operate(self, order: Operation) -> Operated:
        """Carry out a fault. Ray does not retry the call: the first one may have killed this process."""
        if kind_of(order.kind).performer is Performer.COORDINATOR:
            return Operated(order, self._daemons.operate(order) or "", self._clock.now_s())
        return await self._coordinator.operate(order)

    async def lost_nodes(self) -> dict[str, float]:
        """Ray's ids of the nodes that the run has lost, and for how long they have been away, in seconds."""
        return self._coordinator.lost_nodes()

    async def going_nodes(self) -> list[str]:
        """Ray's ids of the nodes that the run has lost, or that were announced to be taken away."""
        return [*self._coordinator.lost_nodes(), *self._coordinator.machine.state.roster.leaving]

    async def dismiss(self, node: str) -> bool:
        """See :meth:`Coordinator.dismiss`."""
        return self._coordinator.dismiss(node)

    async def close(self) -> None:
        """End the coordinator: all events are in the journal, and the journal is mirrored."""
        self._daemons.close()
        self._mirroring.cancel()
        self._guarding.cancel()
        self._address_file.unlink(missing_ok=True)
        secret.forget(self._journal.parent)
        await self._coordinator.stop()
        await self._mirror()


Preflight = Callable[[], Decision]
StoreTrial = Callable[[], Any]
"""Tries the store from the calling process; returns the failure, or None."""


Listen = Callable[[Callable[[], object]], None]
"""Sets a function to call when this process gets SIGTERM, which then no longer ends it."""


class AgentHost:
    """The actor of one node's agent."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, node: str, index: int, folder: Path, processes: Callable[[], ProcessPort],
        memory: Callable[[], MemoryPort] | None, preflight: Preflight | None, trial: StoreTrial | None, levels: Sequence[str],
        links: LinkMaker, daemons: DaemonMaker, notice_s: float, on_sigterm: Listen, imports: Sequence[str], tls_folder: str = "",
    ) -> None:  # fmt: skip
        be_prompt(children=False)
        tls.hold(tls_folder)
        domains.settle(levels)
        self._trial = asyncio.create_task(asyncio.to_thread(trial or (lambda: None)))  # a run goes on without its store
        if not die_with_parent():
            log.warning("This agent could not be bound to its node's life.")
        self._folder, self._begun = secret.private(folder), asyncio.Event()
        leftovers.own(folder)
        leftovers.sweep(folder.parent, FOLDER_PREFIX)
        fork_server.write_call(folder)
        self._forks = await asyncio.to_thread(fork_server.ForkServer, folder, RANK_ENVIRONMENT, IMPORTED, imports)
        decision = await asyncio.to_thread(preflight) if preflight is not None else None
        unfit = decision.reason if decision is not None and decision.action == "keep_out" else ""
        kept = memory() if memory is not None else None

        def agent(coordinator: str) -> NodeAgent:
            return NodeAgent(node, index, folder, coordinator, processes(), links, daemons, kept, unfit)

        self._make = agent
        self._notice_s, self._going = notice_s, list[asyncio.Task[None]]()
        on_sigterm(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._on_sigterm))
        try:
            await self.begin(secret.read(folder), (folder / COORDINATOR_FILE).read_text())  # for a restarted agent
        except FileNotFoundError:
            log.debug("the secret of the run is still to come")

    async def begin(self, run_secret: bytes, coordinator: str) -> None:
        """Begin connections of the agent and this node's ranks, to processes that can prove ``run_secret``.

        :meth:`CoordinatorHost.begin` gives the address of the ``coordinator``.
        """
        secret.hold(run_secret)
        write_whole(self._folder / COORDINATOR_FILE, coordinator)  # written whole, as agents of one host share the folder
        secret.keep(self._folder, run_secret)
        if not self._begun.is_set():
            self._agent = self._make(coordinator)
            self._begun.set()
            await self._agent.start()
            self._leaving = asyncio.create_task(self._leave_when_dismissed())

    async def _leave_when_dismissed(self) -> None:
        """End this process once the node is dismissed. Ray restarts no actor on a removed node. It does not wait for Ray's daemon there."""
        await self._agent.dismissed.wait()
        await self.close()
        os._exit(0)

    def _on_sigterm(self) -> None:
        """On SIGTERM: a cloud, a scheduler or an operator takes this node away. A second SIGTERM has no effect."""
        if not self._going:
            self._going.append(asyncio.create_task(self._leave_in_time()))

    async def _leave_in_time(self) -> None:
        """Serve until the notice is over; meanwhile this node's ranks leave the view.

        If the node is still there then, Ray starts another agent, which needs the folder, and the node is in the run again.
        """
        await asyncio.sleep(min(RAYS_OWN_S, self._notice_s))
        if not self._begun.is_set():  # the run has no ranks here yet
            self._forks.close()
            os._exit(0)
        left_s = max(0.0, self._notice_s - RAYS_OWN_S)
        self._agent.leave_in(left_s)
        await asyncio.sleep(left_s)
        await self._agent.end_ranks(RAYS_OWN_S)
        await self._agent.stop()
        self._forks.close()
        os._exit(0)

    async def ready(self) -> str:
        """The agent's socket for the node's ranks, once it has begun."""
        await self._begun.wait()
        return self._agent.socket_path

    async def close(self) -> None:
        """The run is over: remove its files from this node. After the return no rank runs here."""
        if self._begun.is_set():
            await self._agent.end_ranks(RAYS_OWN_S)
            await self._agent.stop()
        self._forks.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def printed(self, known: mirroring.Known) -> list[mirroring.FilePiece]:
        """New output of ranks in the node's own folder, after the ``known`` part. Empty where nodes share a folder."""
        return await asyncio.to_thread(mirroring.pieces, self._folder / FOLDER, ("*.log",), known)

    async def tried(self) -> Any:
        """The failure of this node's trial of the store; None: it worked."""
        return await self._trial


def start_zygote(path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a local cluster's zygote: it does the imports for the ranks of all nodes once, while the nodes start."""
    return fork_server.start_zygote(IMPORTED_ONCE, RANK_ENVIRONMENT, path, environment)


def start_head_forks(folder: Path, environment: Mapping[str, str], raylet: int) -> fork_server.ForkServer:
    """Start a fork server for the run's actors on the head, if the head is on this machine: a node of ``environment`` and ``raylet``."""
    job = ray.get_runtime_context().get_job_id()
    variables = {**environment, processes.JOB_VARIABLE: job, processes.RAYLET_VARIABLE: str(raylet)}
    return fork_server.ForkServer(folder, variables, (__name__,))


def start_coordinator(spec: CoordinatorSpec, runtime_env: Mapping[str, Any]) -> Any:
    """Create the coordinator actor on the head node; Ray restarts it when it dies. It listens after ``begin``."""
    options: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1, "max_task_retries": -1}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return ray.remote(CoordinatorHost).options(name=f"fleet-{spec.cluster}", **options).remote(spec)


def start_agent(
    node: str, index: int, folder: Path, processes: Callable[[], ProcessPort], memory: Callable[[], MemoryPort] | None,
    preflight: Preflight | None, trial: StoreTrial | None, levels: Sequence[str], links: LinkMaker, daemons: DaemonMaker, notice_s: float,
    on_sigterm: Listen, imports: Sequence[str], tls_folder: str = "",
) -> Any:  # fmt: skip
    """Create the agent actor of ``node``. ``memory`` makes the object that keeps copies for other nodes; ``trial`` tries the store
    meanwhile.

    It connects after ``begin``, which has the coordinator's address. So its process and the fork server start in parallel with the
    coordinator. With ``preflight`` a node is checked first; its ranks join no view when the check fails. ``levels``: of its failure
    domains, from the setting ``domains``. ``notice_s``: the assumed time from a SIGTERM to the agent until the node goes; ``on_sigterm``
    sets the handler. ``imports``: statements of the run's script to carry out before ranks are forked. ``tls_folder``: see
    :mod:`fleet.host.tls`.
    """
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 3, "scheduling_strategy": strategy}
    return (
        ray.remote(AgentHost)
        .options(**options)
        .remote(node, index, folder, processes, memory, preflight, trial, levels, links, daemons, notice_s, on_sigterm, imports, tls_folder)
    )


def _cluster_of(records: list[Record]) -> str:
    """The cluster that wrote the journal last; the first one has the run's own name."""
    named = [record for record in records if isinstance(record, RunStarted | Resumed)]
    last = named[-1]
    return last.run if isinstance(last, RunStarted) else last.cluster
