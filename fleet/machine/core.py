"""The decision core: events in, instructions out.

``FleetMachine.handle`` records what an event says about the world, then compares what is with what should be (``_reconcile``) and says what
to do about the difference. It is level-based: a missed or doubled notice does no harm, because every tick compares again and repeats what
was not yet acknowledged. It reads no clock and does no I/O; the live coordinator and the simulator run this same object.

The life of a view: GATHER (everyone who was seated reports where it stands) -> FORM (a view is published, its members meet and take state
from the donor) -> RUN -> on any loss GATHER again; after the last step CONCLUDE, see ``fleet.machine.ending``. ``END`` is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fleet.config import RunSettings
from fleet.decisions import Decision
from fleet.events import (
    CopiesHeld,
    Event,
    EvidenceWritten,
    FaultReported,
    Finished,
    Formed,
    Heartbeat,
    Implausible,
    Joined,
    Left,
    Lost,
    Measured,
    NodeJoined,
    NodeLost,
    NodeSilent,
    OnceDone,
    OnceWanted,
    Parked,
    Raised,
    Reads,
    Ready,
    SettingChanged,
    StepsTimed,
    StopRequested,
    Tick,
)
from fleet.instructions import Evict, Fence, Instruction, Park, Publish, Welcome, Write
from fleet.machine import ending
from fleet.machine.candidates import Source, situation, source
from fleet.machine.corruption import Doubts, judge
from fleet.machine.evidence import Evidence, inspect, note
from fleet.machine.losses import Losses, raised, struck
from fleet.machine.nodes import joined
from fleet.machine.outage import look
from fleet.machine.progress import Progress
from fleet.machine.proposals import cancel, try_grow, watch
from fleet.machine.replay import move, rebuild, settle
from fleet.machine.roster import CONCLUDE, END, FORM, GATHER, RUN, STOOD_STILL_S, Rank, Roster
from fleet.machine.settings import on_setting
from fleet.machine.stragglers import Stragglers
from fleet.machine.tiers import Tiers
from fleet.once import Once
from fleet.ports import CorruptionPolicy, IntervalPolicy, PlacementPolicy, ProgressPolicy, RecoveryPolicy, StragglerPolicy
from fleet.records import (
    Committed,
    DecisionMade,
    LineageBegun,
    Measurement,
    ProcessUp,
    Record,
    RunEnded,
    ViewPublished,
)
from fleet.types import Formation, Member, Ranges, StateId, View


class FleetMachine:
    """Decides membership, views, checkpoints and the end of one run.

    Args:
        settings: the run's settings.
        recovery, placement, interval, straggler, progress, corruption: pure policies. Without a straggler policy slow ranks are borne;
            without one for progress that time-out is fixed; without one for corruption, ranks that differ end the run.
        lemons: why nodes stay out for what they did in earlier runs, by their index.
        checkpoint: id and state of the newest durable checkpoint, when the run resumes one.
        peers: interval of copies in the memory of other nodes; None: none are made.
        rates_per_s: rate of the faults that need a durable checkpoint, and of those that need copies in memory.
        now_s: when the run starts, on the run's clock.
    """

    def __init__(
        self,
        settings: RunSettings,
        recovery: RecoveryPolicy,
        placement: PlacementPolicy,
        interval: IntervalPolicy,
        *,
        straggler: StragglerPolicy | None = None,
        progress: ProgressPolicy | None = None,
        corruption: CorruptionPolicy | None = None,
        lemons: Mapping[int, Decision] | None = None,
        checkpoint: tuple[str, StateId] | None = None,
        peers: IntervalPolicy | None = None,
        rates_per_s: tuple[float, float] = (0.0, 0.0),
        now_s: float = 0.0,
    ) -> None:
        self.settings, self.recovery, self.placement, self.lemons = settings, recovery, placement, lemons or {}
        self.phase, self.data = GATHER, (0, 0, "", 0)
        self.roster = Roster()
        self.view: View | None = None
        self.proposal: View | None = None
        self.generation = 0
        self.committed, self.lineage = (checkpoint[1], checkpoint[1].lineage) if checkpoint else (StateId(0, 0), -1)
        self.ended: RunEnded | None = None
        self.checkpoints = Tiers(settings, self.roster, interval, peers, checkpoint, rates_per_s, now_s)
        self.losses, self.doubts, self.evidence = Losses(), Doubts(corruption), Evidence()
        self.stragglers, self.once, self.ending = Stragglers(straggler), Once(), ending.Ending()
        self.progress = Progress(progress, settings.timeouts.progress_s, now_s)
        self.started_s = self._ticked_s = now_s
        self.missing: set[Member] = set()
        self.since_s = now_s
        self._finished: set[Member] = set()
        self._deadline_s = self._sent_s = self._proposed_s = self._no_growth_until_s = self._fresh_until_s = now_s
        self._stuck_at: StateId | None = None
        self._in_person = False
        self._stopping: tuple[str, float] | None = None
        self.grace_until_s: float | None = None
        self._last_decision: tuple[str, str] | None = None
        self._seats: tuple[int, frozenset[Member]] = (-1, frozenset())
        self._out: list[Instruction] = []

    # ---- the one entry -------------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event at ``now_s`` on the run's clock; returns what is to be done, in order."""
        self._out = []
        if self.phase == END:
            ending.after_end(self, event, now_s)
            return self._out
        outstanding = bool(self.roster.outstanding)
        self._observe(event, now_s)
        if self.phase != END and not isinstance(event, Heartbeat | Measured | Reads | StepsTimed):
            # Policies look at all ranks: they are asked at ticks, and when the last rank has answered, not for each word of each rank.
            self._reconcile(now_s, isinstance(event, Tick) or (outstanding and not self.roster.outstanding))
        return self._out

    def _observe(self, event: Event, now_s: float) -> None:
        match event:
            case Heartbeat():
                self._on_heartbeat(event, now_s)
            case Tick():
                self._on_tick(now_s)
            case Joined():
                self._on_joined(event, now_s)
            case Ready(member=member):
                self._on_ready(member, now_s)
            case Parked():
                self._on_parked(event, now_s)
            case Formed(member=member, generation=generation, state=state):
                self._on_seated(member, generation, state, "seated", now_s)
            case Finished(member=member, generation=generation, state=state) | Left(member=member, generation=generation, state=state):
                if self._on_seated(member, generation, state, "finished", now_s):
                    self.roster.by_slot[member.slot].digest = event.digest
                    self._finished.add(member)
                    ending.seen(self, event, now_s)
            case Lost():
                self._on_lost(event, now_s)
            case NodeLost(node=node, cause=cause, at_s=at_s):
                self._on_node_lost(node, cause, at_s, now_s)
            case NodeJoined():
                joined(self, event, now_s)
            case NodeSilent(node=node, at_s=at_s):
                self.roster.silent[node] = at_s
                if self.phase == GATHER and self.grace_until_s is None:
                    self._press(now_s)
            case _:
                self._observe_rare(event, now_s)

    def _observe_rare(self, event: Event, now_s: float) -> None:
        match event:
            case Raised():
                raised(self, event, now_s)
            case Measured(member=member) if self._current(member):
                self._write(Measurement(event.state, event.name, event.value, now_s))
            case OnceWanted(member=member, key=key) if self._current(member):
                self._out += self.once.ask(member, key, lambda other: self._current(other) is not None, now_s)
            case OnceDone(member=member, key=key, result=result) if self._current(member):
                self._out += self.once.done(member, key, result, now_s)
            case StepsTimed():
                self.stragglers.take(event, self.view, now_s)
            case CopiesHeld() if self.checkpoints.hold(event, self.view) and self.phase == RUN:
                self.gather(now_s, f"the memory of {event.node}, which kept copies, began anew")
            case FaultReported():
                struck(self, event)
            case SettingChanged():
                on_setting(self, event, now_s)
            case EvidenceWritten() | Implausible() | Reads():
                note(self, event, now_s)
            case StopRequested(reason=reason, error=error) if error:
                self._end("failed", reason, error, now_s)
            case StopRequested(reason=reason) if self._stopping is None:
                self._stopping = (reason, now_s + self.settings.timeouts.park_s)
                self._out += self.checkpoints.request(self.view, now_s) if self.phase == RUN and self.view else []
            case _ if (said_by := getattr(event, "member", None)) is None or (self._current(said_by) and self._seated(said_by)):
                self._out += self.checkpoints.handle(event, self.view, now_s)

    # ---- facts: who is there -------------------------------------------------------------------------------------------------------------

    def _on_joined(self, event: Joined, now_s: float) -> None:
        slot = event.slot
        known = self.roster.by_slot.get(slot)
        if known is not None and known.token == event.token:
            known.heard, known.beat_s, known.store = True, now_s, event.store
            self._say(Welcome(slot, event.token, known.member.incarnation))
            return
        overtaken = event.incarnation is not None and event.incarnation <= self.roster.incarnations.get(slot, -1)
        if event.token in self.roster.dead_tokens or overtaken:
            self._say(Fence(slot, event.token, f"slot {slot} was given to another process after this one was declared lost"))
            return
        if known is not None:
            self._evict(known, "superseded by a newer process of the same slot", now_s)
        if self.phase == END:
            ending.after_end(self, event, now_s)
            return
        self.roster.nodes.setdefault(event.process.node, now_s)
        rank = Rank(Member(slot, self.roster.grant(slot, event.incarnation)), event.process, event.token, event.store, now_s)
        self.roster.add(rank)
        self._write(ProcessUp(rank.member, event.process, event.token, now_s))
        self._say(Welcome(slot, event.token, rank.member.incarnation))

    def _current(self, member: Member) -> Rank | None:
        return self.roster.current(member)

    def _on_ready(self, member: Member, now_s: float) -> None:
        rank = self._current(member)
        if rank is not None and rank.phase == "starting":
            rank.phase, rank.beat_s, rank.heard = "standby", now_s, True

    def _on_parked(self, event: Parked, now_s: float) -> None:
        rank = self._current(event.member)
        if rank is None or event.generation < rank.generation:
            return  # overtaken on the way by a later word of the same rank
        rank.phase, rank.state, rank.dirty, rank.generation = "standby", event.state, event.dirty, event.generation
        rank.beat_s, rank.heard = now_s, True
        self._learn(event.generation, event.state)
        self.doubts.hear(event)
        self.roster.parked(rank, event.generation)
        if self.phase in (RUN, FORM) and self.view is not None and event.generation >= self.view.generation and self._seated(event.member):
            self.gather(now_s, f"rank {event.member} left generation {event.generation}: {event.reason}")
        elif self.proposal is not None and event.generation >= self.proposal.generation and event.member in self.proposal.members:
            cancel(self, now_s, f"newcomer {event.member} could not form it: {event.reason}")

    def _seated(self, member: Member) -> bool:
        """Whether ``member`` is in the view. Asked for each word of each rank, so the members are kept as a set."""
        if self.view is None:
            return False
        if self._seats[0] != self.view.generation:
            self._seats = (self.view.generation, frozenset(self.view.members))
        return member in self._seats[1]

    def _on_seated(self, member: Member, generation: int, state: StateId, phase: str, now_s: float) -> bool:
        """A rank is in ``generation``. False when that word is stale: a rank that parked in a generation never comes back to it."""
        rank = self._current(member)
        if rank is None or generation <= rank.parked_generation or generation < rank.generation:
            return False
        if rank.phase == "finished" and rank.generation == generation:
            return phase == "finished"
        rank.phase, rank.state, rank.dirty, rank.generation = phase, state, False, generation
        rank.beat_s = rank.progress_s = now_s
        rank.heard = True
        self._learn(generation, state)
        self.roster.sent(member, generation)
        if self.proposal is not None and generation == self.proposal.generation:
            self._entered(now_s)
        if self.view is not None and generation == self.view.generation:
            self.missing.discard(member)
            return True
        if self.phase != GATHER:
            self.gather(now_s, f"rank {member} is in generation {generation}, which was cancelled or forgotten")
        return False

    def _learn(self, generation: int, state: StateId | None) -> None:
        """A rank's word may be newer than the journal: numbers that were used once are never used again."""
        self.generation = max(self.generation, generation)
        self.lineage = max(self.lineage, state.lineage if state is not None else -1)

    def _entered(self, now_s: float) -> None:
        """The members have agreed among themselves and entered the proposal."""
        assert self.proposal is not None
        self._decide("recovery", "enter", f"generation {self.proposal.generation}", {"generation": self.proposal.generation}, now_s)
        self._sit(self.proposal, now_s)
        self._out += self.checkpoints.abandoned(now_s, "the view changed")

    def _sit(self, view: View, now_s: float) -> None:
        """``view`` is the one from here on; its members have to say that they are in it."""
        self.view, self.proposal, self.phase = view, None, FORM
        self.missing, self._finished = set(view.members), set()
        self._deadline_s = now_s + self.settings.timeouts.form_s

    def _on_lost(self, event: Lost, now_s: float) -> None:
        rank = self._current(event.member)
        self.roster.condemned.pop(event.member, None)
        if rank is not None:
            rank.step, rank.shard = event.step, event.shard
            self.drop(rank, event.cause, event.at_s, now_s, event.detail)
            self.roster.condemned.pop(event.member, None)

    def _on_node_lost(self, node: str, cause: str, at_s: float, now_s: float) -> None:
        self.roster.nodes.pop(node, None)
        self.roster.silent.pop(node, None)
        for rank in [rank for rank in self.roster.by_slot.values() if rank.process.node == node]:
            self.drop(rank, cause, at_s, now_s)

    def drop(self, rank: Rank, cause: str, at_s: float, now_s: float, detail: str = "") -> None:
        """Forget a rank; if it was seated, the others must gather."""
        member = rank.member
        if self.phase == END or self._current(member) is None:
            return
        self.roster.remove(rank)
        seated = self._seated(member)
        generation = self.view.generation if self.view is not None and seated else -1
        self._write(self.losses.lost(rank, cause, at_s, generation, self.committed.step, detail))
        if seated and self.phase in (RUN, FORM):
            self.gather(now_s, f"rank {member} lost: {cause}", in_person=False)
        elif self.proposal is not None and member in self.proposal.members:
            cancel(self, now_s, f"newcomer {member} lost: {cause}")
        self.judge(now_s)

    def judge(self, now_s: float) -> None:
        if not self.losses.all:
            return
        decision = self.recovery.judge(self.losses.all, now_s)
        if decision.action == "give_up":
            self._decide("recovery", decision.action, decision.reason, decision.fields, now_s)
            self._end("failed", decision.reason, self.losses.all[-1].detail, now_s)

    # ---- facts: time ---------------------------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, event: Heartbeat, now_s: float) -> None:
        for ghost in self.roster.hear(event, self.view.generation if self.view is not None else -1, now_s):
            # Its node was only silent for a while. It must not live beside its replacement.
            self._say(Evict(ghost.member, ghost.process, "given up earlier, and another may have taken its slot"))

    def _on_tick(self, now_s: float) -> None:
        gap_s, self._ticked_s = now_s - self._ticked_s, now_s
        if gap_s > STOOD_STILL_S:
            self._excuse(gap_s, now_s)
        if self.grace_until_s is not None:
            settle(self, now_s)
            return
        limits = self.settings.timeouts
        for node, cause, at_s in self.roster.silent_nodes(limits, now_s):
            self._on_node_lost(node, cause, at_s, now_s)
        for rank, silence_s in self.roster.silent_ranks(limits, now_s):
            self._end_hang(rank, f"no heartbeat for {silence_s:.1f} s", now_s)
        stuck = self.roster.stuck_rank(self.progress.limit_s, now_s) if self.phase == RUN else None
        if stuck is not None:
            self._unstick(stuck, now_s)
        if self.phase == GATHER:
            self._press(now_s)
        self._note_commits(now_s)
        look(self, now_s)

    def _excuse(self, gap_s: float, now_s: float) -> None:
        """This process stood still, and most likely its whole machine: that it heard of nobody meanwhile says nothing about them."""
        self._decide(
            "recovery", "excuse", f"the coordinator stood still for {gap_s:.1f} s: nobody's silence counts", {"gap_s": gap_s}, now_s
        )
        self.roster.excuse(gap_s, now_s)
        self._deadline_s += gap_s

    def _unstick(self, rank: Rank, now_s: float) -> None:
        """Nobody in the view moves. All are called out: whoever hangs does not answer. If all do and it happens again, one has to go."""
        reason = f"no progress for {now_s - rank.progress_s:.1f} s at step {rank.state}"
        if self._stuck_at == self.committed:
            self._end_hang(rank, reason, now_s)
        else:
            self._stuck_at = self.committed
            inspect(self, reason, now_s)
            self.gather(now_s, reason, in_person=True)

    def _end_hang(self, rank: Rank, reason: str, now_s: float) -> None:
        inspect(self, reason, now_s)
        self._evict(rank, reason, now_s)

    def _evict(self, rank: Rank, reason: str, now_s: float) -> None:
        if self.phase == END:
            return
        self._say(Evict(rank.member, rank.process, reason))
        self.drop(rank, f"evicted: {reason}", now_s, now_s)

    def _note_commits(self, now_s: float) -> None:
        if self.view is None or self.phase != RUN:
            return
        ranks = [self.roster.by_slot.get(member.slot) for member in self.view.members]
        states = [rank.state for rank in ranks if rank is not None and rank.state is not None]
        if len(states) == len(self.view.members) and min(states) > self.committed:
            self.committed = min(states)
            self._write(Committed(self.committed, now_s))

    # ---- what should be ------------------------------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float, ask: bool) -> None:
        """Do something about the difference between what is and what should be; ``ask`` the policies too."""
        if self._stopping is not None and (not self.checkpoints.pending or now_s > self._stopping[1]):
            self._end("stopped", self._stopping[0], "", now_s)
        elif self.grace_until_s is not None:
            return
        elif self.phase == GATHER:
            self._try_form(now_s, ask)
        elif self.phase == FORM:
            self._watch_forming(now_s)
        elif self.phase == RUN:
            self._while_running(now_s, ask)
        elif self.phase == CONCLUDE:
            ending.watch(self, now_s)

    def gather(self, now_s: float, reason: str, *, in_person: bool | None = None) -> None:
        """Everyone who is seated must leave and say where it stands. In person where one may hang: no view forms, or nothing moves."""
        self._in_person = self.phase == FORM if in_person is None else in_person
        self._decide("recovery", "gather", reason, {}, now_s)
        if self.phase == RUN:
            self.since_s = now_s
        self.phase = GATHER
        self.proposal = None
        self._deadline_s = now_s + self.settings.timeouts.park_s
        self._out += self.checkpoints.abandoned(now_s, "the view changed")
        self._park(now_s)
        if self.grace_until_s is None:
            self._press(now_s)

    def _park(self, now_s: float) -> None:
        self._sent_s = now_s
        if members := tuple(self.roster.by_slot[slot].member for slot in sorted(self.roster.outstanding)):
            self._say(Park(members, self.generation, self._in_person))

    def _try_form(self, now_s: float, ask: bool) -> None:
        if self.roster.outstanding:
            if now_s - self._sent_s >= self.settings.timeouts.resend_s:
                self._park(now_s)
        elif ask:
            judge(self, now_s)
            if self.phase == GATHER:
                self._form(self.recovery.form(situation(self, now_s), now_s), now_s)

    def _press(self, now_s: float) -> None:
        """Ranks that have not yet said that they left: their node may be gone, or their time may be up."""
        for slot in sorted(self.roster.outstanding):
            rank = self.roster.by_slot.get(slot)
            node = rank.process.node if rank is not None else ""
            if node in self.roster.silent:
                self._on_node_lost(node, "its agent hung up, and its ranks are missed", self.roster.silent[node], now_s)
            elif rank is not None and now_s >= self._deadline_s:
                self._end_hang(rank, "did not leave its process group when told to", now_s)

    def _form(self, formation: Formation, now_s: float) -> None:
        decision = formation.decision
        ranks = [self.roster.by_slot[member.slot] for member in formation.members]
        chosen = source(ranks, self.doubts.floor(self.committed), self.checkpoints.newest_id) if decision.action == "form" else None
        if decision.action != "form":
            self._decide("recovery", decision.action, decision.reason, decision.fields, now_s)
            for rank in ranks:  # "restart" names those who have to go; "wait" nobody
                self._evict(rank, decision.reason, now_s)
        elif (chosen is None or chosen.state is None) and self.checkpoints.unsure(self.roster.silent):
            self._decide("recovery", "wait", "a node is silent that may hold the newest state in its memory", {}, now_s)
        elif chosen is None:
            self._refresh(ranks[0], now_s)
        else:
            self._publish(formation, chosen, now_s)

    def _refresh(self, rank: Rank, now_s: float) -> None:
        """No rank holds a usable state, there is no checkpoint, and nobody has the initial state any more: a fresh process must begin."""
        if now_s >= self._fresh_until_s:
            self._fresh_until_s = now_s + self.settings.timeouts.start_s
            self._evict(rank, "a fresh process must begin: no state is left, and there is no checkpoint", now_s)

    def _publish(self, formation: Formation, chosen: Source, now_s: float) -> None:
        checkpoint = self.checkpoints.newest_id if chosen.state is None else None
        state = chosen.state or self._begin_lineage(now_s)
        view = self._make_view(formation.members, chosen, state, checkpoint)
        self._announce(view, formation, False, now_s)
        self._sit(view, now_s)
        self._send_view(now_s)

    def _make_view(
        self, members: Sequence[Member], chosen: Source, state: StateId, checkpoint: str | None = None, ranges: Ranges | None = None
    ) -> View:
        self.generation += 1
        if ranges is None:
            speeds = [self.stragglers.speeds.get(member, 1.0) for member in members]
            ranges = self.placement.weighted_ranges(self.settings.shards, speeds)
        ranks = [self.roster.by_slot[member.slot] for member in members]
        copies = self.checkpoints.targets(self.placement, [rank.process.node for rank in ranks])
        rest = (chosen.donor, chosen.receivers, state, ranks[chosen.donor].store, checkpoint, copies)
        return View(self.generation, tuple(members), ranges, *rest)

    def _announce(self, view: View, formation: Formation, graceful: bool, now_s: float) -> None:
        decision = formation.decision
        self._decide("recovery", decision.action, decision.reason, decision.fields, now_s)
        self._write(ViewPublished(view, now_s, decision.reason, graceful, tuple(self.losses.causes)))
        self.losses.causes.clear()

    def _begin_lineage(self, now_s: float) -> StateId:
        rolled_back = self.lineage >= 0
        start = self.checkpoints.begin(rolled_back)
        self.lineage += 1
        if rolled_back:
            self.once.roll_back(start)
            self._write(LineageBegun(self.lineage, start, now_s, "no rank holds a clean state"))
        return StateId(self.lineage, start.step)

    def _send_view(self, now_s: float) -> None:
        assert self.view is not None
        self._sent_s = now_s
        for member in self.view.members:
            self.roster.sent(member, self.view.generation)
        self._say(Publish(self.view))

    def _watch_forming(self, now_s: float) -> None:
        assert self.view is not None
        if not self.missing:
            self.phase = RUN
            self.since_s = now_s
            for member in self.view.members:
                self.roster.by_slot[member.slot].progress_s = now_s
            self._note_commits(now_s)
            self._while_running(now_s, ask=False)
        elif now_s >= self._deadline_s:
            late = ", ".join(map(str, sorted(self.missing)))
            self.gather(now_s, f"generation {self.view.generation} did not form: waiting for {late}")
        elif now_s - self._sent_s >= self.settings.timeouts.resend_s:
            self._send_view(now_s)

    def _while_running(self, now_s: float, ask: bool) -> None:
        assert self.view is not None
        if len(self._finished) == len(self.view.members):
            ending.complete(self, now_s)
        elif self._finished:
            return
        elif self.proposal is not None:
            watch(self, now_s)
        elif ask and try_grow(self, now_s):
            return
        if ask and self.phase == RUN and self.proposal is None and self._stopping is None:
            self._out += self.checkpoints.tick(self.view, now_s)
            self._out += self.progress.tick(self.stragglers.steps_s, now_s)
            self.stragglers.tick(self, now_s)

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def _end(self, status: str, reason: str, detail: str, now_s: float) -> None:
        ending.end(self, status, reason, detail, now_s)

    # ---- after the coordinator died ------------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record], now_s: float) -> None:
        """Rebuild from the journal of this very run. Ranks may train meanwhile: they get ``node_s`` to report before any is given up."""
        rebuild(self, records, now_s)
        self.grace_until_s = now_s + self.settings.timeouts.node_s if self.phase != END else None

    def resume(self, records: Iterable[Record], now_s: float) -> list[Instruction]:
        """Go on in a new cluster, from the journal of a run whose ranks are all gone; returns what is to be written first."""
        self._out = [Write(record) for record in move(self, records, now_s)]
        self._deadline_s = now_s
        return self._out

    # ---- small helpers -------------------------------------------------------------------------------------------------------------------

    def _say(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _write(self, record: Record) -> None:
        self._out.append(Write(record))

    def _decide(self, policy: str, action: str, reason: str, fields: Mapping[str, float], now_s: float) -> None:
        """Journal a decision, once: a policy that says the same again at the next tick adds nothing."""
        if (action, reason) != self._last_decision:
            self._last_decision = (action, reason)
            self._write(DecisionMade(policy, action, reason, dict(fields), now_s))
