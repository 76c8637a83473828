"""Invariants of every simulated run: one named checker for each invariant of the protocol.

A checker sees every process's own state, and not only the coordinator's events.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.machine.core import FleetMachine
from fleet.machine.state import Contradiction, MachineState, Phase
from fleet.machine.table import allowed
from fleet.machine.tiers import TRIES
from fleet.protocol.causes import AgentHungUp, AgentSilent, EndWhy
from fleet.protocol.decisions import TakenBack
from fleet.protocol.events import CopiesHeld, Event, Heartbeat, Joined
from fleet.protocol.instructions import CommitCheckpoint, Instruction, Propose, Publish, Write
from fleet.protocol.levels import PEERS_SCHEME, STORE
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    DecisionMade,
    HistoryBegun,
    ProcessLost,
    ProcessUp,
    Received,
    Record,
    Resumed,
    RunEnded,
    ViewPublished,
)
from fleet.protocol.topology import WINDOW_S as TOGETHER_S
from fleet.protocol.types import Member, StateId, View, columns, groups
from fleet.settings.run import WINDOW_S
from fleet.simulation.checker import Homes, InvariantChecker, Violation
from fleet.simulation.endings import DoneOnce, FinalKept, InOrder
from fleet.simulation.model import POISON, SPOILED, gradient
from fleet.simulation.outages import AllWait, Corruption, Durable, Excused, OneHistory, SavesAlone
from fleet.simulation.ranks import SimRank
from fleet.simulation.serving import Copies, EachUnit, Gathers, GradientsAdded, Near, Recuts, Serves, SparesKeep, Together, TwoPhase
from fleet.simulation.slow_ranks import ChangesBounded, HealthyStay
from fleet.simulation.stage import Stage


class Donor(InvariantChecker):
    """1: a donor is a clean member of the new view, in its current incarnation, with the greatest state; all that differ receive it."""

    name = "donor"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._proposed: set[int] = set()
        self._suspected: set[int] = set()

    def record(self, record: Record) -> None:
        if isinstance(record, ViewPublished) and record.graceful:
            self._proposed.add(record.view.generation)  # its state is the donor's when it enters
        if isinstance(record, DecisionMade) and isinstance(record.payload, TakenBack) and record.action != "carry_on":
            self._suspected.add(record.payload.found[0])

    def sent(self, machine: FleetMachine, instruction: Instruction) -> None:
        if not isinstance(instruction, Publish) or instruction.view.checkpoint is not None:
            return
        view = instruction.view
        if view.generation in self._proposed:
            return
        members = [self.process(member) for member in view.members]
        donor = members[view.donor]
        if any(rank is None or rank.protocol.view is not None or rank.protocol.floor >= view.generation for rank in members):
            return  # a repeated message: members already form the view, or have left it
        assert donor is not None
        held = [rank.protocol.state for rank in members if rank is not None and rank.protocol.state and not rank.protocol.dirty]
        clean = [state for state in held if state.history not in self._suspected]
        if clean and max(clean) >= machine.state.committed and view.state.history == max(clean).history:
            self.require(not donor.protocol.dirty, f"donor {donor} of generation {view.generation} is dirty")
            self.require(donor.protocol.state == max(clean), f"donor {donor} holds {donor.protocol.state}, another holds {max(clean)}")
            self.require(view.state == max(clean), f"generation {view.generation} is to hold {view.state}, its donor has {max(clean)}")
        elif clean and machine.state.settings.replicated:  # else ``TwoPhase`` checks that
            self.require(
                max(clean) < machine.state.committed, f"generation {view.generation} rolls back although a member holds {max(clean)}"
            )
        for index, rank in enumerate(members):
            column = view.column_of(view.members[index])
            begins = column.rank_of(view.members[index]) == column.donor
            if rank is not None and not begins and (rank.protocol.dirty or rank.protocol.state != view.state):
                self.require(index in view.receivers, f"{rank} differs from the donor and does not receive in generation {view.generation}")


class Dirty(InvariantChecker):
    """2: no rank steps with, gives away, or saves a half-written state."""

    name = "dirty"

    def contribute(self, rank: SimRank, view: View, state: StateId, dirty: bool) -> None:
        self.require(not dirty and rank.layout.weights != POISON, f"{rank} steps from {state} with a half-written state")

    def joined(self, rank: SimRank, view: View, state: StateId) -> None:
        self.require(not rank.protocol.dirty and rank.layout.weights != POISON, f"{rank} joined with a half-written state")

    def checkpoint(self, order: CommitCheckpoint, parts: Sequence[int | None]) -> None:
        self.require(POISON not in parts, f"checkpoint {order.checkpoint} holds a half-written state")


class Stale(InvariantChecker):
    """3: messages from and to an overtaken generation or incarnation have no effect."""

    name = "stale"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._greatest: dict[str, int] = {}

    def joining(self, rank: SimRank, view: View) -> None:
        token = rank.protocol.token
        last = self._greatest.get(token, -1)
        self.require(view.generation > last, f"{rank} joins generation {view.generation} after {last}")
        self.require(view.rank_of(rank.member) >= 0, f"{rank} joins a view that it is no member of")
        self.require(rank.protocol.fenced is None, f"{rank} was fenced and joins")
        self._greatest[token] = view.generation

    def handle(self, machine: FleetMachine, event: Event) -> Callable[[], None] | None:
        """Called before an event. If its rank is not current, returns the check to make after it."""
        member: Member = getattr(event, "member", None) or Member(-1, 0)
        rank = machine.state.roster.by_slot.get(member.slot)
        if rank is None or rank.member == member or machine.state.phase not in (Phase.FORM, Phase.RUN):
            return None
        before = dataclasses.replace(rank)

        def after() -> None:
            now = machine.state.roster.by_slot.get(member.slot)
            self.require(now == before, f"{type(event).__name__} of {member}, which is not current, made {before} of its slot {now}")

        return after


class Repeats(InvariantChecker):
    """4: a repeated attempt computes the same as the first one, apart from values that were not finite."""

    name = "repeat"

    def reduced(self, rank: SimRank, view: View, number: int, values: Mapping[Member, Any]) -> None:
        wrong = [process for process in map(self.process, values) if process is not None and process.layout.corrupt]
        given = any(process.layout.kept is not None for process in wrong)  # others may have their parameters; the sum is not used
        for member, (state, weights, contributions, _) in values.items():
            process = self.process(member)
            if process is None or process.layout.corrupt:
                continue
            chain = self.world.chain.weights(state.step)
            if weights is None:
                self.require(not contributions, f"{member} contributes to step {state} before it has its weights")
                continue
            if self.excused(state) or given:
                continue
            self.require(weights == chain, f"{member} reduces step {state} from weights that are not those of the fault-free run")
            right = all(value in (SPOILED, gradient(chain, state.step, shard)) for shard, value in contributions.items())
            self.require(right, f"{member} contributes something else to step {state} than in the fault-free run")


class OneIncarnation(InvariantChecker):
    """6: at most one live incarnation of a slot steps in a history."""

    name = "one incarnation"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._greatest: dict[tuple[int, int], int] = {}

    def completed(self, view: View, values: Mapping[Member, Any]) -> None:
        slots = [member.slot for member in values]
        self.require(len(set(slots)) == len(slots), f"generation {view.generation} holds two incarnations of a slot: {list(values)}")
        for member, (state, *_) in values.items():
            key = (member.slot, state.history)
            last = self._greatest.get(key, -1)
            self.require(member.incarnation >= last, f"{member} completes {state} after incarnation {last} of its slot did")
            self._greatest[key] = member.incarnation


class ExactlyOnce(InvariantChecker):
    """6: no committed step is lost or doubled."""

    name = "exactly once"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._committed = StateId(0, 0)

    def record(self, record: Record) -> None:
        if isinstance(record, Committed):
            self.require(record.state > self._committed, f"{record.state} is committed after {self._committed}")
            self._committed = record.state
            self._check_members(record.state)
        elif isinstance(record, ViewPublished) and not record.graceful:
            self.require(record.view.state >= self._committed, f"view {record.view} goes back behind the committed {self._committed}")

    def _check_members(self, state: StateId) -> None:
        coordinator = self.world.coordinator
        view = coordinator.machine.state.view if coordinator is not None else None
        for member in view.members if view is not None else ():
            rank = self.process(member)
            held = rank.protocol.state if rank is not None else None
            self.require(held is not None and held >= state, f"{state} is committed but {member} holds {held}")

    def truncated(self, journal: Sequence[Record]) -> None:
        self._committed = max((record.state for record in journal if isinstance(record, Committed)), default=StateId(0, 0))

    def completed(self, view: View, values: Mapping[Member, Any]) -> None:
        states = {value[0] for value in values.values()}
        self.require(len(states) == 1, f"members reduce different steps in generation {view.generation}: {states}")
        whole = list(range(self.world.settings.shards))
        for column in columns(view.members).values():
            shards = sorted(shard for place in column for shard in values[view.members[place]][2])
            self.require(shards == whole, f"generation {view.generation} computes shards {shards}")
        for group in groups(view.members):
            mine = [sorted(values[view.members[place]][2]) for place in group]
            self.require(all(each == mine[0] for each in mine), f"a group of generation {view.generation} computes shards {mine}")
        state = states.pop()
        doubled = state.history == self._committed.history and state.step < self._committed.step
        self.require(not doubled, f"step {state} is computed again although {self._committed} is committed")


class Identical(InvariantChecker):
    """6, and the promise of bit-identity: every member that commits step k of any history has the fault-free weights."""

    name = "identical"

    def commit(self, rank: SimRank, state: StateId) -> None:
        right = rank.layout.corrupt or self.fault_free(rank.layout.weights, state)
        self.require(right, f"{rank} commits {state} with other weights than the fault-free run")

    def joined(self, rank: SimRank, view: View, state: StateId) -> None:
        right = rank.layout.corrupt or self.fault_free(rank.layout.weights, state)
        self.require(right, f"{rank} joined at {state} with weights of another state")

    def end(self) -> None:
        ended = next((record for record in self.world.journal if isinstance(record, RunEnded)), None)
        if ended is not None and ended.status == "completed" and not (self.world.excused or self._alone()):
            digest = str(self.world.chain.weights(self.world.plan.last))
            self.require(ended.digest == digest, "the run completes with a digest other than the fault-free run's")

    def _alone(self) -> bool:
        """One rank was left at the end, with a flipped bit in its state, and no other rank could tell."""
        views = [record.view for record in self.world.journal if isinstance(record, ViewPublished)]
        last = self.process(views[-1].members[0]) if views else None
        return last is not None and last.layout.corrupt and len(views[-1].members) == 1


class Agreement(InvariantChecker):
    """4: members that hold the result of one reduction decide alike on the next view and checkpoint."""

    name = "agreement"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._agreed: dict[tuple[int, str, int], tuple[int, int | None, bool]] = {}

    def agreed(self, rank: SimRank, view: View, number: int, enter: View | None, save: int | None) -> None:
        mine = (enter.generation if enter is not None else -1, save, rank.protocol.halted)
        first = self._agreed.setdefault((view.generation, view.store, number), mine)
        # A rank that was told to leave has dropped its proposal. Its peers will be told to leave, too.
        self.require(mine == first or rank.protocol.interrupted, f"{rank} decides {mine} after reduction {number}, another {first}")


class WholeCheckpoint(InvariantChecker):
    """2 and 3, for the store: the parts of a checkpoint are all members' parts of one state."""

    name = "whole checkpoint"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._saves: dict[tuple[int, int], StateId] = {}
        self._sizes: dict[StateId, set[int]] = {}

    def save(self, rank: SimRank, view: View, request: int, state: StateId) -> None:
        self._sizes.setdefault(state, set()).add(len(view.members))
        first = self._saves.setdefault((view.generation, request), state)
        self.require(first == state, f"{rank} serves request {request} of generation {view.generation} at {state}, another did at {first}")

    def checkpoint(self, order: CommitCheckpoint, parts: Sequence[int | None]) -> None:
        sizes, right = self._sizes.get(order.state, set()), self.world.chain.weights(order.state.step)
        self.require(len(parts) in sizes, f"checkpoint {order.checkpoint} has {len(parts)} parts, its view {sizes} members")
        if self.world.flipped:
            return  # parts that a wrong rank saved are withdrawn; see ``Corruption``
        self.require(all(part == right for part in parts), f"checkpoint {order.checkpoint} is made of {parts}, not of {right}")


class Restored(InvariantChecker):
    """2: when no rank holds a clean state, the run uses the newest complete checkpoint that was reported, in memory or in the store."""

    name = "restored"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._copies: dict[str, CopiesHeld] = {}
        self._durable = StateId(-1, -1)
        self._tried: Counter[str] = Counter()

    def reported(self, event: CopiesHeld) -> None:
        """The living coordinator has received a report of copies."""
        self._copies[event.node] = event

    def record(self, record: Record) -> None:
        if isinstance(record, CheckpointRecord) and record.phase == "durable" and record.level == STORE:
            self._durable = max(self._durable, record.state)
        elif isinstance(record, Resumed):
            self._copies = {}  # a new coordinator has no reports yet
        elif isinstance(record, ViewPublished) and (record.view.checkpoint or "").startswith(PEERS_SCHEME):
            name = (record.view.checkpoint or "").rpartition("/")[2]
            self._tried[name] += 1
            self.require(name in self._complete(), f"generation {record.view.generation} begins from {name}, and a part of it is missing")
        elif isinstance(record, HistoryBegun) and not self.world.flipped:
            usable = [state for name, state in self._complete().items() if self._tried[name] < TRIES]
            newest = max([self._durable, StateId(0, 0), *usable])
            self.require(record.from_state >= newest, f"history {record.history} begins at {record.from_state}, {newest} is complete")

    def truncated(self, journal: Sequence[Record]) -> None:
        self._durable, self._copies = StateId(-1, -1), {}
        for record in journal:
            if isinstance(record, CheckpointRecord) and record.phase == "durable" and record.level == STORE:
                self._durable = max(self._durable, record.state)

    def _complete(self) -> dict[str, StateId]:
        """Checkpoints whose number of parts some memory knows, and whose parts are all in the memories."""
        coordinator = self.world.coordinator
        there = coordinator.machine.state.roster.nodes if coordinator is not None else ()
        copies = [copy for held in self._copies.values() for copy in held.copies if held.node in there]
        parts: dict[str, set[int]] = defaultdict(set)
        for copy in copies:
            parts[copy.checkpoint] |= set(copy.parts)
        return {one.checkpoint: one.state for one in copies if 0 < one.count <= len(parts[one.checkpoint] & set(range(one.count)))}

    def restored(self, rank: SimRank, view: View, weights: int) -> None:
        right = self.fault_free(weights, view.state)
        self.require(right, f"{rank} begins generation {view.generation} from another state than {view.state}")


class Persisted(InvariantChecker):
    """3 and 8: a view is in the journal before any rank hears of it, generations only grow, and one generation is one view."""

    name = "persisted"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._written: dict[int, View] = {}
        self._published: dict[int, View] = {}

    def record(self, record: Record) -> None:
        if isinstance(record, ViewPublished):
            view = record.view
            last = max(self._written, default=-1)
            self.require(view.generation > last, f"generation {view.generation} is written after {last}")
            published = self._published.get(view.generation, view)
            self.require(published == view, f"generation {view.generation} was published before, as another view")
            self._written[view.generation] = view

    def truncated(self, journal: Sequence[Record]) -> None:
        self._written = {record.view.generation: record.view for record in journal if isinstance(record, ViewPublished)}

    def sent(self, machine: FleetMachine, instruction: Instruction) -> None:
        if isinstance(instruction, Publish | Propose):
            view = instruction.view
            written = self._written.get(view.generation)
            same = written == view
            self.require(same, f"generation {view.generation} is published but the journal has {written}")
            self._published[view.generation] = view

    def meet(self, first: View, second: View) -> None:
        self.require(first == second, f"two views of generation {first.generation} meet: {first} and {second}")


class Journal(InvariantChecker):
    """8: the journal is consistent by itself: no record comes after the end, and every number grows."""

    name = "journal"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._forget()

    def _forget(self) -> None:
        self._ended = False
        self._history = 0
        self._incarnations: dict[int, int] = {}

    def record(self, record: Record) -> None:
        self.require(not self._ended or type(record).__name__ == "Resumed", f"{record} comes after the end of the run")
        match record:
            case ProcessUp(member=member):
                last = self._incarnations.get(member.slot, -1)
                self.require(member.incarnation > last, f"{member} comes up after incarnation {last}")
                self._incarnations[member.slot] = member.incarnation
            case HistoryBegun(history=history):
                self.require(history > self._history, f"history {history} begins after {self._history}")
                self._history = history
            case RunEnded():
                self._ended = True

    def truncated(self, journal: Sequence[Record]) -> None:
        self._forget()
        for record in journal:
            self.record(record)


class Rebuilt(InvariantChecker):
    """8: a machine rebuilt from the journal has the same state as the living one."""

    name = "rebuilt"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._compared = ["committed", "ending.record", "assembly.history"]

    def truncated(self, journal: Sequence[Record]) -> None:
        self._compared = ["committed", "ending.record"]  # ranks have told the living machine of lost histories

    def end(self) -> None:
        coordinator = self.world.coordinator
        if coordinator is None:
            return
        reborn = self.world.make_machine()
        reborn.replay(list(self.world.journal), self.world.clock.now_s)
        living, rebuilt = coordinator.machine.state, reborn.state
        greatest, again = living.assembly.generation, rebuilt.assembly.generation
        self.require(again >= greatest, f"generation is {greatest}, rebuilt it is {again}")
        for what in self._compared:
            one, other = map(operator.attrgetter(what), (living, rebuilt))
            self.require(one == other, f"{what} is {one}, rebuilt it is {other}")
        stops, again_stops = (machine.ending.stopping is not None for machine in (living, rebuilt))
        same = stops == again_stops or "assembly.history" not in self._compared
        self.require(same, f"whether it is told to stop: {stops}, rebuilt {again_stops}")
        for what in ("newest_id", "newest_state"):
            one, other = getattr(living.checkpoints.store, what), getattr(rebuilt.checkpoints.store, what)
            self.require(one == other, f"{what} of the checkpoints is {one}, rebuilt it is {other}")
        one, other = self._living(living), self._living(rebuilt)
        self.require(one == other, f"the living ranks are {one}, rebuilt they are {other}")

    @staticmethod
    def _living(machine: MachineState) -> list[Member]:
        return sorted(rank.member for rank in machine.roster.by_slot.values())


class Ends(InvariantChecker):
    """6: the run always ends, for a reason that its troubles explain, and every process that can be told exits."""

    name = "ends"

    def end(self) -> None:
        plan, world = self.world.plan, self.world
        late_s = world.clock.now_s - plan.quiet_s
        self.require(world.over, f"the run has not ended {late_s:.0f} s after its last trouble, at {world.clock.now_s:.0f} s")
        if (ended := world.ended) is not None:
            explained = ended.status != "failed" or ended.why in plan.failures
            fits = ended.status in plan.statuses and explained
            self.require(fits, f"the run ends as {ended.status}: {ended.reason}; expected {plan.statuses} {plan.failures}")
        left = [str(rank) for rank in world.reachable()]
        self.require(not left, f"{left} were never released")


class BudgetsHold(Homes):
    """6: a run does not go on beyond its budgets, and does not end because of them before."""

    name = "budgets"

    def record(self, record: Record) -> None:
        super().record(record)
        if isinstance(record, ViewPublished):
            over = self._exceeded(record.at_s)
            self.require(not over, f"a view is published although {over}")
        elif isinstance(record, RunEnded) and record.why is EndWhy.CRASH_LOOP:
            self.require(bool(self._exceeded(record.at_s)), f"the run ends within its budgets: {record.reason}")

    def _exceeded(self, now_s: float) -> str:
        budgets = self.world.settings.budgets
        losses = [record for record in self.world.journal if isinstance(record, ProcessLost) and record.fault is None]
        losses = [loss for loss in losses if now_s - loss.at_s <= WINDOW_S]
        counts = [
            ("the total", len(losses) - self._with_their_node(losses), budgets.total),
            ("a slot", max(Counter(loss.member.slot for loss in losses).values(), default=0), budgets.slot),
            ("a node", max(Counter(self.nodes.get(loss.member) for loss in losses).values(), default=0), budgets.node),
            ("a shard", max(Counter((loss.step, loss.shard) for loss in losses if loss.shard >= 0).values(), default=0), budgets.shard),
        ]
        over = [f"{what} was lost {count} times, limit {limit}" for what, count, limit in counts if count >= limit]
        fruitless = self._fruitless()
        if fruitless >= budgets.slot_fruitless:
            over.append(f"a slot was lost {fruitless} times without a commit")
        return "; ".join(over)

    def _with_their_node(self, losses: Sequence[ProcessLost]) -> int:
        """Losses that add nothing to the total: ranks of a group are lost with their node as one, also where it is lost again soon."""
        if self.world.settings.group == 1:
            return 0
        gone = [loss for loss in losses if isinstance(loss.cause, AgentHungUp | AgentSilent)]
        last_s, repeats = dict[str | None, float](), 0
        for loss in gone:
            node = self.nodes.get(loss.member)
            repeats += loss.at_s - last_s.get(node, -math.inf) <= TOGETHER_S
            last_s[node] = loss.at_s
        return repeats

    def _fruitless(self) -> int:
        """Most losses of one slot at the same committed step of the run. A new history at that step is no progress."""
        counts: Counter[tuple[int, int]] = Counter()
        step = 0
        for record in self.world.journal:
            if isinstance(record, Committed):
                step = record.state.step
            elif isinstance(record, ProcessLost) and record.fault is None:
                counts[record.member.slot, step] += 1
        return max(counts.values(), default=0)


class Traffic(InvariantChecker):
    """7: the coordinator's messages grow with nodes, view changes and waiting time, and not with ranks squared or with ticks."""

    name = "traffic"

    def end(self) -> None:
        world = self.world
        views = sum(isinstance(record, ViewPublished) for record in world.journal)
        elapsed_s = world.clock.now_s
        each = 35 + 10 * views + 3 * elapsed_s / world.settings.timeouts.resend_s
        limit = each * len(world.nodes) + 10 * len(world.train.processes)
        said = world.network.down_messages
        self.require(said <= limit, f"the coordinator sent {said} messages in {elapsed_s:.1f} s and {views} views; bound {limit:.0f}")


CHECKERS: tuple[type[InvariantChecker], ...] = (
    Donor, Dirty, Stale, Repeats, Together, TwoPhase, OneIncarnation, ExactlyOnce, Corruption, Identical, Agreement, WholeCheckpoint,
    Restored, Persisted, Journal, Rebuilt, FinalKept, InOrder, DoneOnce, Ends, BudgetsHold, HealthyStay, ChangesBounded, Traffic, AllWait,
    OneHistory, Durable, SavesAlone, Excused, Gathers, GradientsAdded, Serves, Near, Copies, Recuts,
    EachUnit, SparesKeep,
)  # fmt: skip
HOOKS = (
    "record", "truncated", "sent", "reported", "checkpoint", "restored", "end", "meet", "joining", "joined", "contribute", "completed",
    "reduced", "computed_together", "unit",
    "agreed", "commit", "save", "begins", "placed", "served", "missed", "cut", "summed", "behind", "did",
)  # fmt: skip


class Watch:
    """Calls every checker that has the hook. ``came``: (class of an event, class of a result)."""

    def __init__(self, world: Stage) -> None:
        checkers = [kind(world) for kind in CHECKERS]
        self._hooks = {hook: [getattr(checker, hook) for checker in checkers if hasattr(checker, hook)] for hook in HOOKS}
        self.came: set[tuple[type, type]] = set()
        self._stale = next(checker for checker in checkers if isinstance(checker, Stale))

    def handle(self, machine: FleetMachine, event: Event, now_s: float) -> list[Instruction]:
        """Let ``machine`` handle ``event``, and check the results. The machine's state must be consistent afterwards."""
        if isinstance(event, CopiesHeld):
            self.reported(event)
        after = None if isinstance(event, Heartbeat | Joined) else self._stale.handle(machine, event)
        before, stops = machine.state.phase, machine.state.ending.stopping is not None
        out = machine.handle(event, now_s)
        if after is not None:
            after()
        named = allowed(type(event), before, machine.state.phase, stops or machine.state.ending.stopping is not None)
        came = {type(one.record) if isinstance(one, Write) else type(one) for one in out} - {Received}
        self.came |= {(type(event), kind) for kind in came}
        for kind in came - named:
            raise Violation("emits", f"{kind.__name__} comes of {event} in phase {before}, and no row of the table names it")
        try:
            machine.state.validate()
        except Contradiction as wrong:
            raise Violation("state", f"after {event}: {wrong}") from wrong
        return out

    def __getattr__(self, hook: str) -> Callable[..., None]:
        hooks = self.__dict__.get("_hooks", {}).get(hook)
        if hooks is None:
            raise AttributeError(hook)

        def call(*arguments: Any) -> None:
            for each in hooks:
                each(*arguments)

        setattr(self, hook, call)
        return call
