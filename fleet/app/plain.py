"""Composition root of a job that is not Fleet's: it puts processes, their state, chaos and the journal together into one run."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from actors.plain.crew import HERE, Came, Crew, Event, RankGone, RankReported
from chaos.controls import ChaosControls
from chaos.injector import ChaosView, Occupant
from chaos.live import live_chaos
from chaos.nodes import ClusterNodes
from chaos.processes import LocalProcesses
from fleet.app.plans import RunPlan, RunResult, describe
from fleet.app.tracking import tracked
from fleet.host.clock import MonotonicClock, unix_time_s
from fleet.host.journal import JournalWriter
from fleet.host.provenance import code_of
from fleet.host.rank_logs import logs_of
from fleet.ledger import pace
from fleet.machine.plain.job import Limits, PlainJob
from fleet.machine.plain.nodes import INJECTABLE, PlainNodes, why_not
from fleet.protocol.causes import EndWhy
from fleet.protocol.events import FloorReached
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import Performer, kind_of
from fleet.protocol.operations import Operation
from fleet.protocol.records import VERSION, Record, RunEnded, RunStarted
from fleet.protocol.types import Member
from fleet.settings.run import WINDOW_S

TURN_S = 0.1
STOP_S = 10.0
"""Seconds for the script to end after it is asked to."""


class PlainRun:
    """A run of a script as it is, from its first process to its last record. It stands in for ``fleet.app.recipes.LiveRun``."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan, settings = plan, plan.settings
        budgets = settings.budgets
        self.job = PlainJob(settings.world, Limits(budgets.slot_fruitless, budgets.slot, WINDOW_S))
        self.nodes = PlainNodes(settings.world, settings.nodes)
        self.controls = ChaosControls(settings.world, settings.nodes, plan.chaos.on)
        self.lock = threading.RLock()
        self.clock = MonotonicClock()
        self._over, self._asked = threading.Event(), ""
        self._stop_s: float | None = None
        self._held: dict[Member, Came] = {}

    def execute(self) -> RunResult:
        """Run the script to its end, under chaos. Returns how it ended."""
        with tracked(self.plan.folder, self.plan.settings.track):
            return self._run()

    def _run(self) -> RunResult:
        plan = self.plan
        code = code_of(plan.script)
        code.keep(plan.folder)
        self.journal = JournalWriter(plan.journal)
        world, now_s = plan.settings.world, self.clock.now_s()
        self.write([RunStarted(VERSION, plan.name, now_s, unix_time_s(), world, 0, world, describe(plan, code))])
        self._crew = Crew(world, plan.script, plan.plain or (), logs_of(plan.folder))
        chaos = threading.Thread(target=self._inject, name="fleet-chaos", daemon=True)
        chaos.start()
        try:
            self._watch()
        finally:
            self._over.set()
            self.controls.close()
            chaos.join()
            self._crew.close()
        ended = self._close()
        return RunResult(plan=plan, status=ended.status, reason=ended.reason, detail=ended.detail)

    def stop(self, reason: str) -> None:
        """Let the launcher end all processes; ``execute`` returns soon after."""
        self._asked = self._asked or reason

    def write(self, records: Iterable[Record]) -> None:
        """Write records to the journal."""
        for record in records:
            self.journal.append(record)
        self.journal.flush()

    def _watch(self) -> None:
        """Take events until the launcher has ended."""
        while self._crew.status is None:
            for event in self._crew.turn(TURN_S):
                with self.lock:
                    self._take(event)
            if (self._asked or self.job.verdict) and self._expired():
                return
            with self.lock:
                self._let_in()

    def _take(self, event: Event) -> None:
        match event:
            case Came(member):
                self._held[member] = event
            case RankReported(member, word):
                self.write(self.job.receive(member, word))
            case RankGone(member, at_s) if member in self._held:
                del self._held[member]
            case RankGone(member, at_s):
                self.write(self.job.ended(member, at_s))

    def _let_in(self) -> None:
        """Let in the new ranks whose node is there, unless the run is to end."""
        if self._stop_s is not None:
            return
        for member, came in list(self._held.items()):
            if self.nodes.is_up(member.slot):
                del self._held[member]
                self.write(self.job.up(member, came.process, round(self.clock.now_s() * 1e6)))
                self._crew.let_in(member)

    def _expired(self) -> bool:
        """Ask the launcher once to end all. Returns whether its time is over."""
        now_s = self.clock.now_s()
        if self._stop_s is None:
            self._stop_s = now_s + STOP_S
            with self.lock:
                self.job.leave()
            self._crew.stop()
        return now_s > self._stop_s

    def _close(self) -> RunEnded:
        """Write the run's end to the journal."""
        why, reason, detail = self._verdict()
        records = self.job.over(why, reason, self.clock.now_s(), detail)
        self.write(records)
        self.journal.close()
        ended = records[-1]
        assert isinstance(ended, RunEnded)
        return ended

    def _verdict(self) -> tuple[EndWhy, str, str]:
        if self._asked:
            return EndWhy.STOPPED, self._asked, ""
        if self.job.verdict is not None:
            reason, said = self.job.verdict
            return EndWhy.CRASH_LOOP, reason, said
        if self._crew.status == 0:
            unseen = "" if self.job.committed else ", without a step that was seen"
            return EndWhy.ALL_STEPS, f"the script has come to its end{unseen}", ""
        log = logs_of(self.plan.folder) / "launcher.log"
        return EndWhy.DRIVER_FAILED, f"the launcher ended with status {self._crew.status}: see {log}", ""

    def _inject(self) -> None:
        """Inject the planned faults, and those that an operator orders, until the run is over."""
        world = _World(self)
        try:
            live_chaos(self.plan.settings, self.plan.chaos, self.controls, world).run(self.clock, self._over.wait)
        finally:
            world.close()


class _World:
    """The job as chaos sees it and acts on it."""

    def __init__(self, run: PlainRun) -> None:
        self._run, self._processes = run, LocalProcesses(HERE)
        self._nodes = ClusterNodes(_Lost(run, self._processes))

    def close(self) -> None:
        """Let all stopped and slowed processes go on."""
        self._processes.close()

    def see(self) -> ChaosView:
        run = self._run
        with run.lock:
            slots = {slot: Occupant(rank.member, rank.process, run.job.formed) for slot, rank in run.job.ranks.items()}
            nodes = {node: tuple(slot for slot in slots if slot in held) for node, held in run.nodes.up().items()}
            return ChaosView(slots, nodes, run.job.has_trained, bool(run.job.newest_file))

    def operate(self, order: Operation) -> str | None:
        if order.kind not in INJECTABLE:
            return why_not(order.kind)
        performer = self._nodes if kind_of(order.kind).performer is Performer.LAUNCHER else self._processes
        return performer.operate(order)

    def learned(self, fault: str) -> str:
        return ""

    def committed_step(self) -> int | None:
        with self._run.lock:
            return self._run.job.committed

    def report_floor(self, event: FloorReached) -> None:
        with self._run.lock:
            self._run.write([pace.stops(event, self._run.clock.now_s())])

    def report(self, event: FaultRecord) -> None:
        with self._run.lock:
            self._run.write(self._run.job.injected(event))


class _Lost:
    """Nodes of a job that runs on one machine: groups of its ranks."""

    def __init__(self, run: PlainRun, processes: LocalProcesses) -> None:
        self._run, self._processes = run, processes

    def lose(self, index: int) -> str | None:
        """Kill the node's ranks, and let in no new ones before the node is back."""
        run = self._run
        with run.lock:
            if not run.nodes.lose(index):
                return f"node {index} is not there"
            hit = [rank.process for slot, rank in run.job.ranks.items() if run.nodes.of(slot) == index]
        for process in hit:
            self._processes.kill(process)
        return None

    def add(self) -> int:
        """Bring back the node that was lost first."""
        with self._run.lock:
            return self._run.nodes.restore()

    def alive(self) -> list[int]:
        return list(self._run.nodes.up())

    def announce(self, index: int, notice_s: float | None) -> str | None:
        """Such a job cannot hear a notice; its node goes all the same."""
        return None
