"""The coordinator: agents' connections around the pure ``FleetMachine``, and the only writer of the journal.

This module does not import Ray: ``actors.hosts`` makes it an actor that Ray restarts; tests run it in a plain event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from actors import evidence
from actors.connections import Connections
from actors.driver import Driver
from actors.lines import Reception, peer_of
from actors.messages import (
    DOWN,
    UP,
    AgentDismissed,
    AgentHello,
    AgentWelcome,
    EvidenceGathered,
    NoticeWanted,
    Operated,
    PauseWanted,
    SettingAnswer,
    SettingWanted,
    SpanAck,
    SpanBatch,
    ViewChange,
    ViewWanted,
    Wanted,
)
from actors.node import boot_id
from fleet.errors import ConfigError, LineRefused, ProtocolError
from fleet.host.clock import Clock
from fleet.host.refusals import REFUSALS, REPORT_S
from fleet.host.wire import frame, read_frame
from fleet.machine.core import FleetMachine
from fleet.machine.routes import Routes
from fleet.machine.state import Phase
from fleet.machine.views import proposed
from fleet.protocol.causes import EndWhy
from fleet.protocol.events import (
    FloorReached,
    NodeJoined,
    NodeLeaves,
    NodeSilent,
    NodeStays,
    NodesWanted,
    RoomMissing,
    SettingChanged,
    StopRequested,
)
from fleet.protocol.facts import EvidenceKept, FaultRecord
from fleet.protocol.instructions import EndRun, Instruction, Propose, Publish
from fleet.protocol.operations import Operation
from fleet.protocol.ports import CheckpointPort, JournalPort
from fleet.protocol.proof import ANSWERS_BYTES, LIMITS_BYTES, UNPROVEN_S, Purpose, Reason
from fleet.protocol.reach import LEASE
from fleet.protocol.records import COMMIT, Spans, Unobserved
from fleet.protocol.types import Member, Process, View, view_delta
from fleet.settings.live import changed, parsed
from fleet.settings.run import HANGUP_S

log = logging.getLogger("fleet.coordinator")
CONTRADICTION = "contradiction.txt"
"""The file with a contradictory state, in the folder of evidence."""
DISMISSED = AgentDismissed("the run had lost this node, and took it out of Ray")


@dataclass(slots=True)
class AgentLine:
    """One agent's connection. ``seen``: the last view that was sent to it, the base of the next delta."""

    node: str
    index: int
    writer: asyncio.StreamWriter
    seen: View | None = None
    waiting: dict[Operation, asyncio.Future[Operated]] = field(default_factory=dict)

    def send(self, message: Any) -> None:
        if self.writer.is_closing():
            return
        self.writer.write(frame(DOWN.encode(message)))
        if self.writer.transport.get_write_buffer_size() > ANSWERS_BYTES[Purpose.AGENT]:
            REFUSALS.note(Purpose.AGENT, Reason.SLOW, peer_of(self.writer), f"the agent of {self.node} does not take what it is sent")
            self.writer.transport.abort()


class AgentLines:
    """Implements ``MembersPort``: sends instructions to the agents whose ranks they concern."""

    def __init__(self, machine: FleetMachine) -> None:
        self.routes = Routes(machine.state)
        self.by_node: dict[str, AgentLine] = {}

    def send(self, instruction: Instruction) -> None:
        for node in self.routes.of(instruction):
            if (line := self.by_node.get(node)) is not None:
                line.send(_as_delta(line, instruction))

    def to_target(self, order: Operation) -> AgentLine | None:
        """The connection to the agent that carries out ``order``, or passes it on to a process."""
        if order.process is not None:
            return self.by_node.get(order.process.node)
        return next((line for line in self.by_node.values() if line.index == order.node), None)


def _as_delta(line: AgentLine, instruction: Instruction) -> Instruction | ViewChange:
    """A view as a delta to the last view that was sent to the agent; other instructions as they are."""
    if not isinstance(instruction, Publish | Propose):
        return instruction
    view, seen, line.seen = instruction.view, line.seen, instruction.view
    if seen is None or seen.generation >= view.generation:
        return instruction
    return ViewChange(view_delta(seen, view), instruction.leaving if isinstance(instruction, Propose) else None)


class Coordinator:
    """One run's coordinator. ``start`` listens; ``on_end`` is called with the end of the run.

    ``span_ends`` says for each member up to when its time is in the journal; a restarted coordinator reads it from there. Agents send spans
    without an acknowledgement again, and no microsecond may be counted twice. ``offset_us`` is the run's clock less the monotonic one. The
    evidence of agents about a hang goes to ``evidence_folder``, beside the journal.
    """

    def __init__(
        self,
        machine: FleetMachine,
        clock: Clock,
        journal: JournalPort,
        checkpoints: CheckpointPort,
        on_end: Callable[[EndRun], None],
        evidence_folder: Path,
        span_ends: dict[Member, SpanEnd] | None = None,
        offset_us: int = 0,
    ) -> None:
        self._offset_us, self._evidence = offset_us, evidence_folder
        self._lines = AgentLines(machine)
        self._journal = journal
        self._driver = Driver(machine, clock, journal, self._lines, checkpoints, on_end, self._keep_state)
        self._span_ends = span_ends if span_ends is not None else {}
        self._connections = Connections()
        self._reception: Reception | None = None
        self._nodes_away_s: dict[str, float | None] = {}
        self._dismissed: set[str] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self.on_failure: Callable[[], None] = lambda: sys.exit(1)

    @property
    def machine(self) -> FleetMachine:
        return self._driver.machine

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any); returns the port."""
        self._reception = Reception(host, port, (Purpose.AGENT, Purpose.SETTING), self._begin)
        self._ticker = asyncio.create_task(self._driver.tick_forever())
        self._ticker.add_done_callback(self._complain)
        self._reporting = asyncio.create_task(self._report_refusals())
        return self._reception.port

    def _complain(self, task: asyncio.Task[None]) -> None:
        """A coordinator that no longer ticks must not look alive: end the process, Ray restarts it and the journal rebuilds it."""
        if not task.cancelled() and task.exception() is not None:
            log.critical("the coordinator's loop failed", exc_info=task.exception())
            self.on_failure()

    async def _report_refusals(self) -> None:
        """Write this process's own refusals of connections into the journal, too."""
        while True:
            await asyncio.sleep(REPORT_S)
            for event in REFUSALS.take("coordinator"):
                self._driver.submit(event)

    async def stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._reception is not None:
            await self._reception.close()
        await self._driver.stop()
        await self._connections.close()
        self._driver.write(self._journal.flush)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, purpose: Purpose) -> None:
        self._connections.serving(functools.partial(self._serve, purpose))(reader, writer)

    async def _serve(self, purpose: Purpose, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await (self._answer if purpose == Purpose.SETTING else self._converse)(reader, writer)
        except LineRefused as error:
            REFUSALS.note(purpose, error.reason, peer_of(writer), error.detail)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, such as that of ``fleet runs set`` or ``fleet runs drain``. The client may hang up."""
        try:
            async with asyncio.timeout(UNPROVEN_S):
                wanted = _first(await read_frame(reader, LIMITS_BYTES[Purpose.SETTING]), SettingWanted, NoticeWanted, PauseWanted)
        except TimeoutError as error:
            raise LineRefused(Reason.SLOW, f"no request came within {UNPROVEN_S:g} s") from error
        except asyncio.IncompleteReadError:
            return
        writer.write(frame(DOWN.encode(self._do(wanted))))

    def _do(self, wanted: Wanted) -> SettingAnswer:
        """Carry out a request. A request that ends the run counts as done."""
        if self.ended:
            return SettingAnswer("the run has ended")
        match wanted:
            case SettingWanted():
                return self._change(wanted)
            case NoticeWanted():
                return self._take_notice(wanted)
            case PauseWanted(reason=reason):
                self._driver.submit(StopRequested(reason, why=EndWhy.PAUSED))
                return SettingAnswer("")

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one agent, until its connection ends."""
        line: AgentLine | None = None
        try:
            hello = _first(await read_frame(reader, LIMITS_BYTES[Purpose.SETTING]), AgentHello)
            if hello.node in self._dismissed:
                writer.write(frame(DOWN.encode(DISMISSED)))
                return
            line = self._greet(hello, writer)
            while True:
                self._take(line, decoded(await read_frame(reader, LIMITS_BYTES[Purpose.AGENT])))
        except LineRefused:
            self._hung_up(line)
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            self._hung_up(line)
        except Exception:
            log.exception("the connection of agent %s is dropped", line.node if line else "?")
            self._hung_up(line)

    def _change(self, wanted: SettingWanted) -> SettingAnswer:
        """Change a setting. The answer has the reason of a refusal, or is empty once the change is in the journal."""
        try:
            value = parsed(wanted.key, wanted.text)
            changed(self.machine.state.settings, wanted.key, value)
        except ConfigError as error:
            return SettingAnswer(error.reason, error.way_out)
        self._driver.submit(SettingChanged(wanted.key, value))
        return SettingAnswer("")

    def _take_notice(self, wanted: NoticeWanted) -> SettingAnswer:
        nodes = {line.node: line.index for line in self._lines.by_node.values()}
        found = called(wanted.node, nodes)
        if len(found) != 1:
            known = ", ".join(f"{index} ({node[:12]})" for node, index in sorted(nodes.items(), key=lambda item: item[1]))
            return SettingAnswer("no node of this run" if not found else f"{len(found)} nodes match", f"Its nodes: {known}.")
        leaving = self.machine.state.roster.leaving
        if wanted.notice_s is None and found[0] not in leaving:
            return SettingAnswer("its departure is not announced", "Leave --withdraw out to announce it.")
        self.announce(found[0], wanted.notice_s, wanted.why)
        return SettingAnswer("")

    def _greet(self, hello: AgentHello, writer: asyncio.StreamWriter) -> AgentLine:
        line = AgentLine(hello.node, hello.index, writer)
        if (old := self._lines.by_node.get(hello.node)) is not None:
            old.writer.transport.abort()  # the agent has given it up, which this end cannot see across a cut link
        self._lines.by_node[hello.node] = line
        self._nodes_away_s[hello.node] = None
        clock_us = int(self._driver.clock.now_s() * 1e6)
        lease_s = self.machine.state.settings.timeouts.heartbeat_s * LEASE
        line.send(AgentWelcome(boot_id(), hello.sent_us, clock_us, self._offset_us, lease_s))
        self._driver.submit(NodeJoined(hello.node, hello.index, hello.unfit, hello.domain))
        return line

    def _hung_up(self, line: AgentLine | None) -> None:
        if line is not None and self._lines.by_node.get(line.node) is line:
            del self._lines.by_node[line.node]
            self._driver.submit(NodeSilent(line.node, self._driver.clock.now_s()))
            self._driver.tick_after(HANGUP_S)
        for future in line.waiting.values() if line is not None else ():
            if not future.done():
                future.set_exception(ConnectionError("the node's agent hung up"))

    def _take(self, line: AgentLine, message: Any) -> None:
        match message:
            case SpanBatch():
                if self._driver.write(functools.partial(self._record, message)):
                    line.send(SpanAck(message.number))
            case ViewWanted():
                self._repeat_view(line)
            case Operated(order=order):
                future = line.waiting.pop(order, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case EvidenceGathered():
                self._keep(message)
            case _:
                self._lines.routes.learn(message)
                self._driver.submit(message)

    def _keep(self, found: EvidenceGathered) -> None:
        members = tuple(rank.member for rank in found.ranks)
        detail = "; ".join(f"{rank.member}: {rank.where}, {rank.process}" for rank in found.ranks)
        try:
            path = evidence.keep(found, self._evidence)
        except OSError as error:
            log.warning("the evidence of %s was not kept: %s", found.incident, error)
            return
        self._driver.submit(EvidenceKept(found.incident, f"{self._evidence.name}/{path.name}", members, found.reason, detail))

    def _keep_state(self, text: str) -> str:
        """Keep the state of a machine that contradicts itself; of several the first. Returns the file's place, or "" on failure."""
        path = self._evidence / CONTRADICTION
        try:
            self._evidence.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("the coordinator's state was not kept: %s", error)
            return ""
        return f"{self._evidence.name}/{path.name}"

    def _repeat_view(self, line: AgentLine) -> None:
        line.seen, state = None, self.machine.state
        if state.view is not None:
            line.send(Publish(state.view))
            line.seen = state.view
        if state.growth.proposal is not None:
            line.send(proposed(state))
            line.seen = state.growth.proposal

    def _record(self, batch: SpanBatch) -> None:
        for spans in batch.spans:
            known = self._span_ends.get(spans.member, BEGIN)
            fresh = trim(spans, known)
            if fresh is None:
                continue
            if known is not BEGIN and known.at_us < fresh.start_us:  # an agent read it, and was replaced before its report
                log.warning("%s: its spans of %d us were not reported", spans.member, fresh.start_us - known.at_us)
                self._journal.append(Unobserved(spans.member, known.at_us, fresh.start_us))
            self._span_ends[spans.member] = span_end(fresh)
            self._journal.append(fresh)
        self._journal.flush()  # acknowledged spans survive this process

    # ---- calls of the driver process ---------------------------------------------------------------------------

    def stop_run(self, reason: str, error: str = "", why: EndWhy = EndWhy.STOPPED) -> None:
        self._driver.submit(StopRequested(reason, error, why))

    def report(self, event: FaultRecord | RoomMissing | NodesWanted | FloorReached) -> None:
        """Handle an event from the driver process."""
        self._driver.submit(event)

    def announce(self, node: str, notice_s: float | None, why: str) -> None:
        """Announce that node ``node`` will be taken away in ``notice_s``, for the reason ``why``; None: it stays after all."""
        now_s = self._driver.clock.now_s()
        self._driver.submit(NodeStays(node) if notice_s is None else NodeLeaves(node, now_s + notice_s, why))

    @property
    def ended(self) -> bool:
        return self.machine.state.phase == Phase.END

    def census(self) -> list[tuple[Member, Process, bool]]:
        """The live ranks, their processes, and whether they compute shards in the view."""
        view = self.machine.state.view
        joined = {view.members[rank] for rank in view.computing} if view is not None else set()
        return [(rank.member, rank.process, rank.member in joined) for rank in self.machine.state.roster.in_order()]

    def lost_nodes(self) -> dict[str, float]:
        """Nodes that the run has lost, each with the seconds since a call of this method first found it away."""
        now_s, present = self._driver.clock.now_s(), self.machine.state.roster.nodes
        for node, since_s in self._nodes_away_s.items():
            self._nodes_away_s[node] = None if node in present else now_s if since_s is None else since_s
        return {node: now_s - since_s for node, since_s in self._nodes_away_s.items() if since_s is not None}

    def dismiss(self, node: str) -> bool:
        """Dismiss a node that is away: its agent gets the message as soon as it is reached. False: the node is back."""
        if node in self.machine.state.roster.nodes:
            return False
        self._dismissed.add(node)
        line = self._lines.by_node.get(node)
        if line is not None:  # a cut link closes no connection: the message arrives when the link is repaired
            line.send(DISMISSED)
            line.writer.close()
        return True

    async def operate(self, order: Operation) -> Operated:
        """Carry out a fault on a process or a node, by the node's agent. Raises ConnectionError when the agent cannot be reached."""
        line = self._lines.to_target(order)
        if line is None:
            raise ConnectionError(f"{order.place}: its node has no agent")
        line.waiting[order] = asyncio.get_running_loop().create_future()
        line.send(order)
        return await asyncio.wait_for(line.waiting[order], timeout=5.0)


def called(text: str, nodes: Mapping[str, int]) -> list[str]:
    """The nodes (name -> index) that a user's text matches: by index, else by the first letters of the name, which may be digits."""
    return [node for node, index in nodes.items() if text == str(index)] or [node for node in nodes if node.startswith(text)]


def decoded(data: bytes) -> Any:
    """The message in a frame. Raises LineRefused."""
    try:
        return UP.decode(data)
    except (ProtocolError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise LineRefused(Reason.FORMAT, f"{type(error).__name__}: {str(error)[:200]}") from error


def _first(data: bytes, *kinds: type) -> Any:
    """The first message of a line, which must be of one of these kinds. Raises LineRefused."""
    message = decoded(data)
    if not isinstance(message, kinds):
        raise LineRefused(Reason.FORMAT, f"{type(message).__name__} came first, not {' or '.join(kind.__name__ for kind in kinds)}")
    return message


class SpanEnd(NamedTuple):
    """The end of a member's recorded time. ``place`` is its (generation, history, next step) there."""

    at_us: int
    place: tuple[int, int, int]


BEGIN = SpanEnd(0, (-2, -2, -2))


def span_end(spans: Spans) -> SpanEnd:
    place = (spans.generation, spans.history, spans.step + spans.codes.count(COMMIT))
    return SpanEnd(spans.start_us + sum(spans.durations_us), place)


def trim(spans: Spans, known: SpanEnd) -> Spans | None:
    """The part of ``spans`` after ``known``, or None. A record of marks alone has no length: its step shows whether it is known."""
    known_us = known.at_us
    if spans.start_us >= known_us:
        marks_only = not any(spans.durations_us)
        return None if marks_only and (spans.generation, spans.history, spans.step) < known.place else spans
    at_us, step = spans.start_us, spans.step
    for index, (duration_us, code) in enumerate(zip(spans.durations_us, spans.codes, strict=True)):
        if at_us + duration_us > known_us:
            durations = (at_us + duration_us - known_us, *spans.durations_us[index + 1 :])
            return dataclasses.replace(spans, start_us=known_us, step=step, durations_us=durations, codes=spans.codes[index:])
        at_us += duration_us
        step += code == COMMIT
    return None
