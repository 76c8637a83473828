"""A fleet of real processes without Ray: coordinator and agents in this process's event loop, ranks as children, a supervisor that replaces
the dead. For tests of the protocol on real signals, sockets and gloo, at a fraction of a cluster's start-up time."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from actors.coordinator import Coordinator, SpanEnd, span_end
from actors.node import NodeAgent, socket_path
from actors.rank.main import run_rank
from fleet.host import secret
from fleet.host.clock import MonotonicClock, unix_time_s
from fleet.host.journal import JournalWriter, read_journal
from fleet.host.rank_logs import logs_of
from fleet.machine.core import FleetMachine
from fleet.protocol.decisions import GoneBack
from fleet.protocol.instructions import EndRun, Write
from fleet.protocol.records import VERSION, Record, Resumed, RunStarted, Spans
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import RunSettings
from policies import placement
from policies.corruption import MajorityRules
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from policies.straggler.mitigation import Mitigator
from policies.timeouts import ProgressTimeout
from storage.checkpoint.parts import Parts, RetainingStore, newest_checkpoint
from storage.peers.memory import PeerMemory
from tests.support.agents import agent_of
from tests.support.waiting import until

REPORT_S = 0.05
"""Steps of tests take 25 ms: what strikes at one of them should not come ten later."""

FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    "actors.rank.main", "storage.checkpoint.parts", "tests.support.trains", "tests.support.tensors", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.tensor.parallel",
]  # fmt: skip
FORKED.set_forkserver_preload(PRELOADED)
"""Ranks are forked off one process that has imported all and started nothing: most of a test's time went into imports."""


def nothing(process: str) -> None:
    """What a process does first, where the test has no wish."""


def _rank(
    train: Callable[[Any], None], settings: RunSettings, slot: int, node: str, folder: Path, host: str, url: str, logs: Path,
    first: Callable[[str], None],
) -> None:  # fmt: skip
    first(f"rank{slot}")
    multiprocessing.set_start_method("fork", force=True)  # as in Ray's workers: DataLoaders of who is killed then end with it
    run_rank(train, settings, slot, node, folder, host, Parts(url), socket_path(folder, node), logs=logs)


class PlainFleet:
    """``with PlainFleet(train, settings, folder) as fleet: fleet.wait()``. Nodes are agents; slot ``s`` lives on node ``s % nodes``.
    ``begin``: id and state of the checkpoint in its store to begin with. ``resume``: the run whose journal is in ``folder`` goes on, from
    its newest checkpoint, or ``back`` to another one. ``hosts``: addresses of the nodes, in turn; the coordinator is at the first.
    ``first``: called with a name before anything else, in each rank, and in the thread
    of coordinator and agents."""

    def __init__(
        self, train: Callable[[Any], None], settings: RunSettings, folder: Path, respawn: bool = True, url: str = "",
        begin: tuple[str, StateId] | None = None, resume: bool = False, first: Callable[[str], None] = nothing,
        back: GoneBack | None = None, hosts: Sequence[str] = ("127.0.0.1",),
    ) -> None:  # fmt: skip
        self.back, self.hosts = back, hosts
        self.train, self.settings, self.folder, self.respawn, self.first = train, settings, folder, respawn, first
        self.journal_path = folder / "journal.jsonl"
        self.url, self.resume = url or f"file://{folder}", resume
        self.begin = newest_checkpoint(self.url) if resume else begin
        self.shm = Path(tempfile.mkdtemp(prefix="fleet-test-", dir="/dev/shm"))
        secret.keep(self.shm, secret.held())
        secret.keep(folder, secret.held())
        self.loop = asyncio.new_event_loop()
        self.ended: Future[EndRun] = Future()
        self.agents: dict[str, NodeAgent] = {}
        self.processes: dict[int, Any] = {}
        self._all: list[Any] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run_loop, name="plain-fleet", daemon=True)

    def __enter__(self) -> PlainFleet:
        self._thread.start()
        self.call(self._start())
        for slot in range(self.settings.slots):
            self.spawn(slot)
        self._supervisor = threading.Thread(target=self._supervise, name="plain-fleet-supervisor", daemon=True)
        self._supervisor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        for process in self._all:
            process.kill()
            process.join(10)
        self._supervisor.join(10)
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        shutil.rmtree(self.shm, ignore_errors=True)

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def _run_loop(self) -> None:
        self.first("control")
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    # ---- control plane ---------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.port = await self.start_coordinator(0)
        for index in range(self.settings.nodes):
            await self.start_agent(index)

    async def start_coordinator(self, port: int) -> int:
        clock = MonotonicClock()
        records: list[Record] = []
        ends: dict[Member, SpanEnd] = {}
        if self.journal_path.exists():
            for record in read_journal(self.journal_path):
                if isinstance(record, Spans):
                    ends[record.member] = span_end(record)
                else:
                    records.append(record)
        self.journal = JournalWriter(self.journal_path)
        settings = self.settings
        copy_s = settings.checkpoint.peer_interval_s
        peers = CheckpointInterval(law="fixed", interval_s=copy_s) if copy_s else None
        machine = FleetMachine(
            settings, ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s), placement,
            CheckpointInterval(law=settings.checkpoint.policy, interval_s=settings.checkpoint.interval_s), peers=peers,
            straggler=Mitigator(settings.straggler), progress=ProgressTimeout.of(settings), corruption=MajorityRules(),
            now_s=clock.now_s(), checkpoint=self.begin,
        )  # fmt: skip
        if records and self.resume:
            self.resume, again = False, Resumed(clock.now_s(), unix_time_s(), "resumed in a new cluster", "again")
            self.journal.append(again)
            for instruction in machine.resume([*records, again], clock.now_s(), self.back):
                assert isinstance(instruction, Write)
                self.journal.append(instruction.record)
        elif records:
            machine.replay(records, clock.now_s())
        else:
            started = RunStarted(VERSION, "test", clock.now_s(), unix_time_s(), settings.world, settings.spares, settings.shards, "{}")
            self.journal.append(started)
        self.coordinator = Coordinator(
            machine, clock, self.journal, RetainingStore(self.url, 3), self._on_end, self.folder / "evidence", ends
        )
        return await self.coordinator.start(self.hosts[0], port)

    async def start_agent(self, index: int) -> None:
        node = f"node{index}"
        memory = PeerMemory(self.host_of(node)) if self.settings.peer_copies else None
        self.agents[node] = agent_of(node, index, self.shm, f"{self.hosts[0]}:{self.port}", memory, REPORT_S)
        await self.agents[node].start()

    def host_of(self, node: str) -> str:
        return self.hosts[int(node.removeprefix("node")) % len(self.hosts)]

    async def kill_coordinator(self) -> None:
        """As if its process died: nothing is said, nothing is flushed that was not."""
        await self.coordinator.stop()
        self.journal.close()

    async def _stop(self) -> None:
        await self.coordinator.stop()
        for agent in self.agents.values():
            await agent.stop()
        self.journal.close()

    def _on_end(self, outcome: EndRun) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    # ---- ranks -----------------------------------------------------------------------------------------------------------------------

    def spawn(self, slot: int) -> None:
        self.spawn_on(slot, f"node{slot % self.settings.nodes}")

    def spawn_on(self, slot: int, node: str) -> None:
        given = self.train, self.settings, slot, node, self.shm, self.host_of(node), self.url, logs_of(self.folder), self.first
        process = FORKED.Process(target=_rank, args=given, daemon=False)
        process.start()
        self.processes[slot] = process
        self._all.append(process)

    def _supervise(self) -> None:
        while not self._closing and not self.ended.done():
            for slot, process in list(self.processes.items()):
                process.join(0.01)
                if process.exitcode is not None and self.respawn and not self._closing and not self.ended.done():
                    self.spawn(slot)
            time.sleep(0.02)

    def kill(self, slot: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[slot].pid, number)

    def wait(self, timeout_s: float = 120.0) -> EndRun:
        until(self.ended.done, "the end of the run", timeout_s)
        return self.ended.result()

    def records(self) -> list[Record]:
        self.call(self._flush())
        return list(read_journal(self.journal_path))

    async def _flush(self) -> None:
        self.journal.flush()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Poll ``condition`` until it holds; fails with TimeoutError."""
        until(condition, str(condition), timeout_s, tick_s=0.005)

    @property
    def step(self) -> int:
        """The last step that the coordinator knows to be committed."""
        return self.coordinator.machine.state.committed.step

    def census(self) -> list[tuple[Member, Process, bool]]:
        return self.coordinator.census()
