"""One agent on each node: it knows its ranks' processes, passes messages on, and reports for all of them at once.

This module does not import Ray: ``actors.hosts`` makes it an actor, tests run it in a plain event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors import evidence
from actors.connections import Connections
from actors.fork_server import exit_status
from actors.lines import give_up_after, knock, same_user, unacknowledged_s
from actors.local_rank import LocalRank
from actors.memory_kills import MemoryKills
from actors.messages import (
    DOWN,
    UP,
    AgentDismissed,
    AgentHello,
    AgentWelcome,
    EvidenceGathered,
    Operated,
    SpanAck,
    SpanBatch,
    ViewChange,
    ViewWanted,
)
from actors.orders import Orders
from actors.rank.membership.lifeline import TOKEN_BYTES, lifeline_path
from actors.rank.telemetry.recorder import RingReader, ring_path
from actors.rank.telemetry.spans import SpanBuilder
from actors.rank.telemetry.stacks import stacks_path
from actors.rank.telemetry.timing import OwnTime, summary, thinned
from fleet.errors import LineRefused
from fleet.host.clock import now_us
from fleet.host.refusals import REFUSALS
from fleet.host.scheduling import bow_out
from fleet.host.wire import frame, read_frame
from fleet.machine.roster import STOOD_STILL_S
from fleet.protocol import domains
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.events import EVENTS, CopiesHeld, Heartbeat, Joined, Left, NodeLeaves, StepsTimed
from fleet.protocol.facts import LossExplained, ProcessLost
from fleet.protocol.instructions import INSTRUCTIONS, Evict, Fence, Inspect, Instruction, Propose, Publish, Quiesce, Welcome
from fleet.protocol.operations import Operation
from fleet.protocol.ports import DaemonPort, LinkPort, MemoryPort, ProcessPort
from fleet.protocol.proof import ANSWERS_BYTES, Purpose
from fleet.protocol.reach import Reach
from fleet.protocol.records import Spans
from fleet.protocol.types import Copy, Member, Process, Pulse, StateId, View, apply_delta

log = logging.getLogger("fleet.agent")
REPORT_S = 0.25
"""The interval of all regular reports, which are sent together: each time the agent wakes, it takes a core and cache contents from a
rank."""
CUT_S = 1.0
RECONNECT_S, CONNECT_S = 0.05, 2.0
UNHEARD_S = 3.0
"""The agent gives up a connection without acknowledgements for so long. The kernel would keep it for a quarter of an hour."""
ENDED_BY_SIGTERM = "its agent got SIGTERM"
REFUSED_S = 0.5
"""The pause of an agent whose connection was refused: the coordinator may be restarted, with the secret of its run."""
KEPT_VIEWS = 8
EXPLAIN_S, LOOK_S = 5.0, 0.05
"""A killed process frees its memory before its parent learns of its end. The agent looks for the exit status for so long, at this
interval."""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


LinkMaker = Callable[[Callable[[], Iterable[int]], str], LinkPort]
DaemonMaker = Callable[[], DaemonPort]


@dataclass(slots=True)
class Uplink:
    """The connection to the coordinator, and messages to send again when it breaks. ``goes_us``: when the node will be taken away; None: it
    stays."""

    writer: asyncio.StreamWriter | None = None
    unacked: deque[SpanBatch] = field(default_factory=deque)
    lost: dict[Member, ProcessLost] = field(default_factory=dict)
    number: int = 0
    goes_us: int | None = None

    def send(self, *messages: Any) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(b"".join(frame(UP.encode(message)) for message in messages))


@dataclass(slots=True)
class PassedViews:
    """The last views of the coordinator on this connection, which may be the base of its next delta; and the newest of all."""

    by_generation: dict[int, View] = field(default_factory=dict)
    newest: int = -1

    def add(self, view: View) -> None:
        self.by_generation[view.generation] = view
        self.newest = max(self.newest, view.generation)
        self.by_generation = {key: kept for key, kept in self.by_generation.items() if key > view.generation - KEPT_VIEWS}


class MemoryReport:
    """Reports of the copies in a node's memory, for a coordinator that may not know them."""

    def __init__(self, node: str, memory: MemoryPort) -> None:
        self.node, self.memory = node, memory
        self._sent: tuple[Copy, ...] | None = None

    def begin(self) -> None:
        """Report again: the coordinator may be a new one."""
        self._sent = None

    def news(self) -> list[CopiesHeld]:
        """The report that is due now: one for each change."""
        held = self.memory.held()
        if held == self._sent:
            return []
        self._sent = held
        return [CopiesHeld(self.node, self.memory.address, os.environ.get(domains.VARIABLE, ""), held)]


class NodeAgent:
    """Serves the ranks of one node on a unix socket and keeps one connection to the coordinator.

    Args:
        node: the node's name, unique in the run.
        index: its place among the cluster's nodes.
        folder: the folder of the socket and of the ranks' rings (tmpfs).
        coordinator: ``host:port``.
        processes: carries out fault operations.
        links: makes the object that cuts links of this host; it gets the PIDs of the processes whose connections are the run's.
        daemons: makes the object that injects faults into this process and its host.
        memory: keeps copies for ranks of other nodes; it lives as long as this agent. ``FLEET_DOMAIN`` names the node's failure domains.
        unfit: why the node's pre-flight check failed; empty when the node may train.
        report_s: the interval of regular reports.

    ``dismissed`` is set once the coordinator has reported that the run has lost this node: the agent's owner then ends it.
    """

    def __init__(
        self, node: str, index: int, folder: Path, coordinator: str, processes: ProcessPort, links: LinkMaker, daemons: DaemonMaker,
        memory: MemoryPort | None = None, unfit: str = "", report_s: float = REPORT_S,
    ) -> None:  # fmt: skip
        self.node, self.index, self.folder, self.coordinator = node, index, folder, coordinator
        self.unfit, self._report_s = unfit, report_s
        self._memory = MemoryReport(node, memory) if memory is not None else None
        self._ranks: dict[str, LocalRank] = {}
        self._up = Uplink()
        self._views = PassedViews()
        self._offset_us = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._kills = MemoryKills()
        self._begun: set[asyncio.Task[None]] = set()
        self._inspection: asyncio.Task[EvidenceGathered] | None = None
        self._servers: list[asyncio.AbstractServer] = []
        self._connections = Connections()
        local_links = links(lambda: [os.getpid(), *(rank.process.pid for rank in list(self._ranks.values()))], coordinator)
        self._orders = Orders(processes, local_links, daemons(), self._have_done)
        self._reach = Reach(time.monotonic(), CONNECT_S)
        self.dismissed = asyncio.Event()

    @property
    def socket_path(self) -> str:
        return socket_path(self.folder, self.node)

    async def start(self) -> None:
        for serve, path in ((self._serve_rank, self.socket_path), (self._hold_lifeline, lifeline_path(self.folder, self.node))):
            Path(path).unlink(missing_ok=True)
            self._servers.append(await asyncio.start_unix_server(self._connections.serving(serve), path))
        self._tasks = [asyncio.create_task(work()) for work in (self._keep_connected, self._report)]

    async def stop(self) -> None:
        begun = (*self._tasks, *self._begun)
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, *([self._inspection] if self._inspection else []), return_exceptions=True)
        for server in self._servers:
            server.close()
        self._orders.close()
        if self._memory is not None:
            self._memory.memory.close()
        for rank in self._ranks.values():
            asyncio.get_running_loop().remove_reader(rank.pidfd)
            os.close(rank.pidfd)
        self._ranks.clear()
        if self._up.writer is not None:
            self._up.writer.close()
        await self._connections.close()

    # ---- ranks ---------------------------------------------------------------------------------------------------------------------------

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: LocalRank | None = None
        if not same_user(writer, "agent socket"):
            return
        try:
            while True:
                event = EVENTS.decode(await read_frame(reader))
                if isinstance(event, Joined):
                    rank = self._adopt(event, writer)
                if isinstance(event, Left):  # it may end the run, and later spans would be lost
                    self._up.send(*self._spans())
                self._up.send(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            if rank is not None and rank.writer is writer:
                rank.writer = None

    def _adopt(self, hello: Joined, writer: asyncio.StreamWriter) -> LocalRank | None:
        rank = self._ranks.get(hello.token)
        if rank is None:
            try:
                pidfd = os.pidfd_open(hello.process.pid)
            except ProcessLookupError:
                return None
            rank = LocalRank(hello.process, hello.token, RingReader(ring_path(self.folder, hello.token)), pidfd)
            self._ranks[hello.token] = rank
            self._kills.watch(hello.process.pid)
            asyncio.get_running_loop().add_reader(pidfd, self._on_death, rank)
            if hello.incarnation is not None:
                self._name(rank, Member(hello.slot, hello.incarnation))
        rank.writer = writer
        return rank

    async def _hold_lifeline(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a lifeline. It ends without a farewell when its process is killed, long before the pidfd is readable: see
        ``membership.lifeline``."""
        if not same_user(writer, "lifeline socket"):
            return
        try:
            words = await reader.read(-1)
        except ConnectionError:
            return
        token, farewell = words[:TOKEN_BYTES].decode(), words[TOKEN_BYTES:]
        if not farewell and (rank := self._ranks.get(token)) is not None:
            self._kill(rank)  # makes sure that the process is dead, for any reason of the end
            self._on_death(rank)

    def _name(self, rank: LocalRank, member: Member) -> None:
        if rank.member != member:
            rank.member, rank.builder = member, SpanBuilder(member)

    def _on_death(self, rank: LocalRank) -> None:
        at_us = now_us()
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        os.close(rank.pidfd)
        self._ranks.pop(rank.token, None)
        if rank.member is None or rank.builder is None:
            return
        where = rank.ring.position()
        lost = ProcessLost(rank.member, ProcessEnded(), step=where.step, shard=where.shard, at_s=self._run_s(at_us))
        self._up.lost[rank.member] = lost
        self._up.send(lost)  # first, as all ranks wait for the next view
        bow_out(rank.process.pid)
        self._up.send(*self._batch([*rank.builder.add(rank.ring.drain()), *rank.builder.cut(at_us)]))
        rank.ring.path.unlink(missing_ok=True)
        stacks_path(self.folder, rank.token).unlink(missing_ok=True)
        self._begin(self._explain(rank.member, rank.process.pid))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task, until its end or that of the agent."""
        self._begun.add(task := asyncio.create_task(work))
        task.add_done_callback(self._begun.discard)

    async def _explain(self, member: Member, pid: int) -> None:
        """Report how the process has ended. The agent is not its parent, and gets the status from the parent if that is the node's fork
        server."""
        looks = round(EXPLAIN_S / LOOK_S)
        while (status := exit_status(self.folder, pid)) is None and (looks := looks - 1) > 0:
            await asyncio.sleep(LOOK_S)
        if status is None:
            self._kills.forget(pid)
            return
        injected = status == -signal.SIGKILL and self._kills.killed(pid)
        self._up.send(LossExplained(member, ProcessEnded(status, injected)))

    def _run_s(self, at_us: int) -> float:
        return (at_us + self._offset_us) / 1e6

    # ---- the coordinator -----------------------------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        host, port = self.coordinator.rsplit(":", 1)
        refused = ""
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):  # across a cut link the kernel would wait longer at each attempt
                    reader, writer = await asyncio.open_connection(host, int(port))
            except OSError as error:
                if isinstance(error, ConnectionRefusedError):  # the host answers, and the coordinator will
                    self._reach.answered(time.monotonic())
                await asyncio.sleep(RECONNECT_S)
                continue
            self._reach.answered(time.monotonic())
            try:
                give_up_after(writer, UNHEARD_S)
                await self._converse(reader, writer)
                return
            except LineRefused as error:
                if str(error) != refused:
                    log.warning("the coordinator at %s: %s", self.coordinator, error)
                refused = str(error)
                await asyncio.sleep(REFUSED_S)
            except (asyncio.IncompleteReadError, OSError) as error:
                log.info("the coordinator hung up: %s", error)
            finally:
                self._up.writer = None
                self._views.by_generation.clear()
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection to the coordinator until it ends, which raises, or until this node is dismissed."""
        await knock(reader, writer, Purpose.AGENT)
        domain = os.environ.get(domains.VARIABLE, "")
        writer.write(frame(UP.encode(AgentHello(self.node, self.index, boot_id(), now_us(), self.unfit, domain))))
        welcome = DOWN.decode(await read_frame(reader))
        if isinstance(welcome, AgentDismissed):
            self._go(welcome.reason)
            return
        self._align(welcome)
        self._up.writer = writer  # not earlier, as messages without acknowledgement have to go first
        for message in [*self._up.unacked, *self._up.lost.values(), *self._notice()]:
            self._up.send(message)
        if self._memory is not None:
            self._memory.begin()
        self._send_copies()
        for rank in self._ranks.values():
            self._hang_up_on(rank)  # so it sends its hello and status again: the coordinator may be new
        while not self.dismissed.is_set():
            self._take(DOWN.decode(await read_frame(reader, ANSWERS_BYTES[Purpose.AGENT])))

    def leave_in(self, notice_s: float) -> None:
        """Announce that this node goes, now and to each new coordinator. Only the first call counts."""
        if self._up.goes_us is None:
            self._up.goes_us = now_us() + round(notice_s * 1e6)
            log.warning("this agent has got SIGTERM: it announces that its node goes in %g s", notice_s)
            self._up.send(*self._notice())

    def _notice(self) -> list[NodeLeaves]:
        return [NodeLeaves(self.node, self._run_s(self._up.goes_us), ENDED_BY_SIGTERM)] if self._up.goes_us is not None else []

    async def end_ranks(self, limit_s: float) -> None:
        """Kill this node's ranks, and report their deaths before the connection ends."""
        for rank in self._ranks.values():
            self._kill(rank)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._ranks:
                    await asyncio.sleep(LOOK_S)

    def _go(self, reason: str) -> None:
        """The run goes on without this node: kill its ranks, before they do any more work."""
        log.warning("%s: its ranks and its files on this node are removed", reason)
        for rank in self._ranks.values():
            self._kill(rank)
        self.dismissed.set()

    @staticmethod
    def _kill(rank: LocalRank) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)

    @staticmethod
    def _hang_up_on(rank: LocalRank) -> None:
        if rank.writer is not None:
            rank.writer.close()

    def _align(self, welcome: AgentWelcome) -> None:
        self._reach.lease_s = welcome.lease_s
        if welcome.boot == boot_id():
            self._offset_us = welcome.offset_us
        elif not self._offset_us:  # kept for this agent's life: another estimate would make gaps in a rank's spans
            self._offset_us = welcome.clock_us - (welcome.sent_us + now_us()) // 2

    def _take(self, message: Any) -> None:
        match message:
            case SpanAck(number=number):
                while self._up.unacked and self._up.unacked[0].number <= number:
                    self._up.unacked.popleft()
                self._up.lost.clear()
            case ViewChange(delta=delta, leaving=leaving):
                base = self._views.by_generation.get(delta.base)
                if base is None:
                    self._up.send(ViewWanted(delta.view.generation))
                else:
                    view = apply_delta(base, delta)
                    self._take(Publish(view) if leaving is None else Propose(view, leaving))
            case Publish(view=view):
                self._views.add(view)
                self._pass_on(message, view.members)
            case Propose(view=view, leaving=leaving):
                self._views.add(view)
                self._pass_on(message, (*view.members, *leaving))
            case Welcome(token=token, slot=slot, incarnation=incarnation):
                if token in self._ranks:
                    self._name(self._ranks[token], Member(slot, incarnation))
                    self._send(self._ranks[token], message)
            case Fence(token=token):
                if token in self._ranks:
                    self._send(self._ranks[token], message)
            case Evict():
                self._evict_after_inspection(message)
            case Inspect():
                self._inspect(message)
            case Operation():
                self._begin(self._carry_out(message))
            case AgentDismissed(reason=reason):
                self._go(reason)
            case _:
                self._pass_on(message, message.members)

    def _pass_on(self, message: Instruction, members: tuple[Member, ...]) -> None:
        wanted = set(members)
        for rank in self._ranks.values():
            if rank.member in wanted:
                self._send(rank, message)

    def _send(self, rank: LocalRank, message: Instruction) -> None:
        if rank.writer is not None and not rank.writer.is_closing():
            rank.writer.write(frame(INSTRUCTIONS.encode(message)))

    def _inspect(self, order: Inspect) -> None:
        """Collect evidence of all ranks of this node. Ranks that have to leave, or are evicted, go after it: soon, in any state."""
        asked = evidence.begin(list(self._ranks.values()), self.folder, lambda rank: self._send(rank, order))
        self._inspection = asyncio.create_task(evidence.gather(self.node, order, asked, self.folder))
        self._inspection.add_done_callback(lambda task: None if task.cancelled() else self._up.send(task.result()))

    def _evict_after_inspection(self, message: Evict) -> None:
        if self._inspection is None or self._inspection.done():
            self._evict(message)
        else:
            self._inspection.add_done_callback(lambda _: self._evict(message))

    def _rank_of(self, process: Process) -> LocalRank | None:
        return next((rank for rank in self._ranks.values() if rank.process == process), None)

    def _evict(self, message: Evict) -> None:
        rank = self._rank_of(message.process)
        if rank is not None:
            log.warning("evicting %s (pid %d): %s", message.member, rank.process.pid, message.why)
            self._kill(rank)

    async def _carry_out(self, order: Operation) -> None:
        at_us = now_us()
        refused, said = await self._orders.carry_out(order)
        self._up.send(Operated(order, refused, self._run_s(at_us), said))

    def _have_done(self, order: Operation) -> str | None:
        """Pass ``order`` on to the process that it names. A later process with the same pid has another start time, and is another rank."""
        rank = self._rank_of(order.process) if order.process is not None else None
        if rank is None or rank.writer is None:
            return f"{order.kind}: {order.place} is not connected to the agent of {self.node}"
        self._send(rank, order)
        return None

    # ---- regular reports -----------------------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            slept_s = -time.monotonic()
            await asyncio.sleep(self._report_s)
            slept_s += time.monotonic()
            self._mind_the_coordinator()
            self._up.send(*self._heartbeat(slept_s), *self._spans(), *self._times(), *REFUSALS.take(self.node))
            self._send_copies()

    def _mind_the_coordinator(self) -> None:
        """Let the ranks leave the view if the agent cannot reach the coordinator's host. It checks this before it sends more data."""
        now_s, writer = time.monotonic(), self._up.writer
        if writer is not None and not writer.is_closing():
            self._reach.answered(now_s - unacknowledged_s(writer))
        if self._reach.lapses(now_s):
            log.warning(
                "the coordinator's host has not answered for %g s: ranks leave generation %d", self._reach.lease_s, self._views.newest
            )
            members = tuple(rank.member for rank in self._ranks.values() if rank.member is not None)
            self._pass_on(Quiesce(members, self._views.newest), members)

    def _heartbeat(self, slept_s: float) -> list[Heartbeat]:
        """The heartbeat; none right after this agent stood still, most likely with its machine: the ranks had no time to send beats."""
        if slept_s > STOOD_STILL_S:
            log.warning("this agent stood still for %.1f s", slept_s - self._report_s)
            return []
        return [Heartbeat(self.node, tuple(self._pulse(rank, rank.member) for rank in self._ranks.values() if rank.member is not None))]

    def _send_copies(self) -> None:
        """Report the copies in memory, when the coordinator may not know them."""
        if self._memory is not None and self._up.writer is not None:
            self._up.send(*self._memory.news())

    @staticmethod
    def _pulse(rank: LocalRank, member: Member) -> Pulse:
        where, at_us = rank.ring.position(), now_us()
        state = StateId(where.history, where.step)
        beat_age_s = 0.0 if where.collecting else (at_us - where.beat_us) / 1e6
        progress_age_s = (at_us - where.progress_us) / 1e6
        return Pulse(member, where.generation, state, beat_age_s, progress_age_s, where.stepping, where.between, where.moving)

    def _spans(self) -> list[SpanBatch]:
        spans: list[Spans] = []
        for rank in self._ranks.values():
            if rank.builder is not None:
                rows = rank.ring.drain()
                rank.timer.add(rows)
                spans += rank.builder.add(rows)
                since = rank.builder.open_since_us
                if since is not None and now_us() - since > CUT_S * 1e6:
                    spans += rank.builder.cut(now_us())
        return self._batch(spans)

    def _times(self) -> list[StepsTimed]:
        """The times of steps committed since the last call, one message for each view. They are not sent again if they are lost."""
        found: dict[int, list[tuple[LocalRank, list[OwnTime]]]] = {}
        waited_us: dict[str, int] = {}
        for rank in self._ranks.values():
            if done := rank.timer.take():
                waited_us[rank.token] = rank.waited(len(done))
            for generation in dict.fromkeys(own.generation for own in done):
                found.setdefault(generation, []).append((rank, [own for own in done if own.generation == generation]))
        reports: list[StepsTimed] = []
        for generation, timed in sorted(found.items()):
            ranks = tuple(summary(rank.member, thinned(steps), waited_us[rank.token]) for rank, steps in timed if rank.member is not None)
            reports.append(StepsTimed(self.node, generation, max(rank.ring.total() for rank, _ in timed), ranks))
        return reports

    def _batch(self, spans: list[Spans]) -> list[SpanBatch]:
        """A batch of spans, which is kept until it is acknowledged."""
        if not spans:
            return []
        self._up.number += 1
        offset_us = self._offset_us
        shifted = spans if not offset_us else [replace(record, start_us=record.start_us + offset_us) for record in spans]
        batch = SpanBatch(self._up.number, tuple(shifted))
        self._up.unacked.append(batch)
        return [batch]


def socket_path(folder: Path, node: str) -> str:
    """The socket of the agent of ``node``. The path of a Unix socket has at most about 100 characters."""
    return str(folder / f"agent-{node[-16:]}.sock")
