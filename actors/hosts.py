"""Ray's side of the coordinator and the node agents: thin actors around plain asyncio classes."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import fork_server
from actors.coordinator import Coordinator, SpanEnd, span_end
from actors.node import NodeAgent
from actors.rank.environment import RANK_ENVIRONMENT
from fleet.cluster.clock import Clock, MonotonicClock, unix_time_s
from fleet.cluster.urgency import be_prompt
from fleet.machine.core import FleetMachine
from fleet.protocol.decisions import Decision
from fleet.protocol.events import FaultReported
from fleet.protocol.fault_kinds import Operation
from fleet.protocol.instructions import EndRun, Write
from fleet.protocol.journal import JournalWriter, read_journal
from fleet.protocol.ports import CheckpointPort, MemoryPort, ProcessPort
from fleet.protocol.records import Record, Resumed, RunStarted, Spans
from fleet.protocol.types import Member, Process
from fleet.settings.live import ADDRESS_FILE

log = logging.getLogger("fleet.hosts")
FORMAT = "storage.dcp"
"""Parts are written and committed with it. It imports 2 s of torch."""
IMPORTED = ("torch", "torch._dynamo", "torch.profiler", "actors.worker", "storage.parts", FORMAT, "ray.tune", "pydantic.v1", "pyarrow.json")
"""What a rank has imported once it has taken a step and saved a part: else each replacement takes a core from the others for half a second.

An optimizer's first step imports ``torch._dynamo``, which takes as long as ``torch``; the last three are Ray's worker's.
"""

MIRROR_S = 5.0


@dataclass(frozen=True)
class CoordinatorSpec:
    """All that a coordinator needs to start, and to start again after it was killed.

    ``machine`` makes the decision core for a start time; ``store`` the checkpoint port; ``started`` the journal's first record for a time;
    ``mirror`` makes what copies the journal to the run's storage, where that is elsewhere.
    ``cluster`` names this cluster: a journal that was written under another one belongs to a run that is being resumed.
    """

    journal: Path
    host: str
    port: int
    cluster: str
    machine: Callable[[float], FleetMachine]
    store: Callable[[], CheckpointPort]
    started: Callable[[float], RunStarted]
    mirror: Callable[[], Callable[[Path], object]] | None = None


def _history(path: Path) -> tuple[list[Record], dict[Member, SpanEnd]]:
    """The journal without its spans, and up to where each member's time is in it."""
    records: list[Record] = []
    ends: dict[Member, SpanEnd] = {}
    for record in read_journal(path) if path.exists() else ():
        if isinstance(record, Spans):
            ends[record.member] = span_end(record)
        else:
            records.append(record)
    return records, ends


def _run_clock(records: list[Record]) -> MonotonicClock:
    """A clock that goes on where the journal's stopped, also when the host was rebooted in between."""
    started = next((record for record in records if isinstance(record, RunStarted)), None)
    clock = MonotonicClock()
    if started is not None:
        drift_s = started.at_s + (unix_time_s() - started.unix_time_s) - clock.now_s()
        clock.offset_s = drift_s if abs(drift_s) > 60.0 else 0.0
    return clock


class CoordinatorHost:
    """The actor. It is rebuilt from the journal whenever its process is new."""

    async def __init__(self, spec: CoordinatorSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        be_prompt(children=False)
        records, ends = _history(spec.journal)
        clock = _run_clock(records)
        self.outcome: EndRun | None = None
        self._done = asyncio.Event()
        journal = JournalWriter(spec.journal)
        machine = spec.machine(clock.now_s())
        self._begin(spec, machine, records, journal, clock)
        self._coordinator = Coordinator(
            machine, clock, journal, spec.store(), self._on_end, ends, round(clock.offset_s * 1e6), spec.journal.parent / "evidence"
        )
        self._coordinator.on_failure = lambda: os._exit(1)  # an exception would end Ray's loop in here, and leave the process
        await self._coordinator.start(spec.host, spec.port)
        self._address = spec.journal.parent / ADDRESS_FILE
        self._address.write_text(f"{spec.host}:{spec.port}")
        self._copy = spec.mirror() if spec.mirror is not None else None
        self._journal = spec.journal
        self._mirroring = asyncio.create_task(self._mirror_forever())
        # While the ranks start: the first commit would do it while they compute, and be measured with it.
        self._preparing = asyncio.create_task(asyncio.to_thread(importlib.import_module, FORMAT))

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

    def _begin(self, spec: CoordinatorSpec, machine: FleetMachine, records: list[Record], journal: JournalWriter, clock: Clock) -> None:
        now_s = clock.now_s()
        if not records:
            journal.append(spec.started(now_s))
        elif _cluster_of(records) != spec.cluster:
            journal.append(Resumed(now_s, unix_time_s(), "resumed in a new cluster", spec.cluster))
            for instruction in machine.resume(records, now_s):
                if isinstance(instruction, Write):
                    journal.append(instruction.record)
        else:
            journal.append(Resumed(now_s, unix_time_s(), "the coordinator was restarted", spec.cluster, gap=False))
            machine.replay(records, now_s)
            if (ended := machine.state.ended) is not None:
                self.outcome = EndRun(ended.status, ended.reason, ended.detail, ended.why)
        journal.flush()

    def _on_end(self, outcome: EndRun) -> None:
        self.outcome = outcome
        self._done.set()

    async def wait(self, timeout_s: float) -> EndRun | None:
        """How the run ended, or None when it has not ended within ``timeout_s``."""
        if self.outcome is None:
            try:
                await asyncio.wait_for(self._done.wait(), timeout_s)
            except TimeoutError:
                return None
        return self.outcome

    async def stop_run(self, reason: str, error: str = "") -> None:
        self._coordinator.stop_run(reason, error)

    async def report_fault(self, event: FaultReported) -> None:
        self._coordinator.report_fault(event)

    async def census(self) -> tuple[str, list[tuple[Member, Process, bool]], bool]:
        """(phase, live ranks, whether a run that lost all of them could go on from a later state than its first)."""
        machine = self._coordinator.machine
        return machine.state.phase, self._coordinator.census(), machine.state.checkpoints.newest_id is not None

    async def operate(self, order: Operation) -> tuple[str, float]:
        """(why it was refused or "", when it happened on the run's clock)."""
        answer = await self._coordinator.operate(order)
        return answer.refused, answer.at_s

    async def close(self) -> None:
        """Everything that was said is in the journal, and the journal where it belongs."""
        self._mirroring.cancel()
        self._address.unlink(missing_ok=True)
        await self._coordinator.stop()
        await self._mirror()


Preflight = Callable[[], Decision]
StoreTrial = Callable[[], Any]
"""Tries the store from the process that it is called in; returns what failed, or None."""


def _untried() -> None:
    """For a node that comes later: a run that has begun goes on while its store is away."""


class AgentHost:
    """The actor of one node's agent."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, node: str, index: int, folder: Path, coordinator: str, processes: Callable[[], ProcessPort],
        memory: Callable[[], MemoryPort] | None, preflight: Preflight | None, trial: StoreTrial | None,
    ) -> None:  # fmt: skip
        be_prompt(children=False)
        self._trial = asyncio.create_task(asyncio.to_thread(trial or _untried))
        if not fork_server.die_with_parent():
            log.warning("This agent could not be bound to its node's life.")
        folder.mkdir(parents=True, exist_ok=True)
        self._forks = fork_server.ForkServer(folder, RANK_ENVIRONMENT, IMPORTED)
        decision = await asyncio.to_thread(preflight) if preflight is not None else None
        unfit = decision.reason if decision is not None and decision.action == "keep_out" else ""
        self._agent = NodeAgent(node, index, folder, coordinator, processes(), memory() if memory is not None else None, unfit)
        await self._agent.start()

    async def ready(self) -> str:
        return self._agent.socket_path

    async def tried(self) -> Any:
        """What failed when this node tried the store, None when nothing did."""
        return await self._trial


def start_coordinator(spec: CoordinatorSpec) -> Any:
    """Create the coordinator actor on the head node; Ray restarts it when it dies."""
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(CoordinatorHost).options(name=f"fleet-{spec.cluster}", **options).remote(spec)


def start_agent(
    node: str, index: int, folder: Path, coordinator: str, processes: Callable[[], ProcessPort], memory: Callable[[], MemoryPort] | None,
    preflight: Preflight | None = None, trial: StoreTrial | None = None,
) -> Any:  # fmt: skip
    """Create the agent actor of ``node``; ``memory`` makes what keeps copies for other nodes, ``trial`` tries the store meanwhile.

    With ``preflight`` the node is checked first, and its ranks join no view when that fails.
    """
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
    return ray.remote(AgentHost).options(**options).remote(node, index, folder, coordinator, processes, memory, preflight, trial)


def _cluster_of(records: list[Record]) -> str:
    """The cluster under which the journal was last written; the first one has the run's own name."""
    named = [record for record in records if isinstance(record, RunStarted | Resumed)]
    last = named[-1]
    return last.run if isinstance(last, RunStarted) else last.cluster
