"""The decision core: events in, instructions out.

``FleetMachine.handle`` records what an event says about the world, then compares what is with what should be (``_reconcile``) and says what
to do about the difference. It is level-based: a missed or doubled notice does no harm, because every tick compares again and repeats what
was not yet acknowledged. It reads no clock and does no I/O; the live coordinator and the simulator run this same object.

The life of a view: GATHER (everyone who was seated reports where it stands) -> FORM (a view is published, its members meet and take state
from the donor) -> RUN -> on any loss GATHER again. ``END`` is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.config import RunSettings
from fleet.events import (
    CheckpointDurable,
    CheckpointFailed,
    Event,
    FaultReported,
    Finished,
    Formed,
    Heartbeat,
    Joined,
    Lost,
    Measured,
    NodeJoined,
    NodeLost,
    NodeSilent,
    Parked,
    PartWritten,
    Raised,
    Ready,
    StopRequested,
    Tick,
)
from fleet.instructions import Cancel, EndRun, Evict, Fence, Instruction, Park, Propose, Publish, Release, Welcome, Write
from fleet.machine_checkpoints import Checkpoints
from fleet.machine_state import END, FORM, GATHER, RUN, Rank, Roster
from fleet.ports import IntervalPolicy, PlacementPolicy, RecoveryPolicy
from fleet.records import (
    Committed,
    DecisionMade,
    FaultRecord,
    LineageBegun,
    Measurement,
    ProcessLost,
    ProcessUp,
    Record,
    RunEnded,
    ViewPublished,
)
from fleet.types import Candidate, Formation, Loss, Member, Situation, StateId, View

START = StateId(0, 0)


class FleetMachine:
    """Decides membership, views, checkpoints and the end of one run.

    Args:
        settings: the run's settings.
        recovery, placement, interval: pure policies.
        checkpoint: id and state of the newest durable checkpoint, when the run resumes one.
        checkpoint_rate_per_s: rate of faults that need a durable checkpoint, for the interval policy.
        now_s: when the run starts, on the run's clock.
    """

    def __init__(
        self,
        settings: RunSettings,
        recovery: RecoveryPolicy,
        placement: PlacementPolicy,
        interval: IntervalPolicy,
        *,
        checkpoint: tuple[str, StateId] | None = None,
        checkpoint_rate_per_s: float = 0.0,
        now_s: float = 0.0,
    ) -> None:
        self.settings, self.recovery, self.placement = settings, recovery, placement
        self.phase = GATHER
        self.roster = Roster()
        self.view: View | None = None
        self.proposal: View | None = None
        self.generation = 0
        self.lineage = checkpoint[1].lineage if checkpoint else -1
        self.committed = checkpoint[1] if checkpoint else START
        self.ended: RunEnded | None = None
        self.checkpoints = Checkpoints(settings, interval, checkpoint, checkpoint_rate_per_s, now_s)
        self.losses: list[Loss] = []
        self._causes: list[str] = []
        self._injected: dict[Member, str] = {}
        self._raised_at: set[int] = set()
        self._missing: set[Member] = set()
        self._finished: set[Member] = set()
        self._since_s = self._deadline_s = now_s
        self._sent_s = self._proposed_s = self._no_growth_until_s = now_s
        self._stopping: tuple[str, float] | None = None
        self._grace_until_s: float | None = None
        self._last_decision: tuple[str, str] | None = None
        self._out: list[Instruction] = []

    # ---- the one entry -----------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event at ``now_s`` on the run's clock; returns what is to be done, in order."""
        self._out = []
        if self.phase == END:
            self._after_end(event)
            return self._out
        self._observe(event, now_s)
        if self.phase != END and not isinstance(event, Heartbeat | Measured):
            self._reconcile(now_s)
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
            case Finished(member=member, generation=generation, state=state):
                if self._on_seated(member, generation, state, "finished", now_s):
                    self.roster.by_slot[member.slot].digest = event.digest
                    self._finished.add(member)
            case Lost():
                self._on_lost(event, now_s)
            case NodeLost(node=node, cause=cause, at_s=at_s):
                self._on_node_lost(node, cause, at_s, now_s)
            case NodeJoined():
                self.roster.nodes[event.node] = now_s
                self.roster.silent.pop(event.node, None)
            case NodeSilent(node=node, at_s=at_s):
                self.roster.silent[node] = at_s
            case _:
                self._observe_rare(event, now_s)

    def _observe_rare(self, event: Event, now_s: float) -> None:
        match event:
            case Raised():
                self._on_raised(event, now_s)
            case Measured(member=member) if self._current(member):
                self._write(Measurement(event.state, event.name, event.value, now_s))
            case PartWritten(member=member) if self._current(member) and self.view is not None:
                self._out += self.checkpoints.part(event, self.view)
            case CheckpointDurable():
                self._out += self.checkpoints.durable(event, now_s)
            case CheckpointFailed():
                self._out += self.checkpoints.failed(event.reason, now_s)
            case FaultReported():
                self._on_fault(event)
            case StopRequested(reason=reason, error=error) if error:
                self._end("failed", reason, error, now_s)
            case StopRequested(reason=reason) if self._stopping is None:
                self._stopping = (reason, now_s + self.settings.timeouts.park_s)
                self._out += self.checkpoints.request(self.view, now_s) if self.phase == RUN and self.view else []

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
        self.generation = max(self.generation, event.generation)
        self.roster.parked(rank, event.generation)
        if self._has_left(self.view, event) and self.phase in (RUN, FORM):
            self._gather(now_s, f"rank {event.member} left generation {event.generation}: {event.reason}")
        elif self._has_left(self.proposal, event):
            self._cancel(now_s, f"newcomer {event.member} could not form it: {event.reason}")

    @staticmethod
    def _has_left(view: View | None, event: Parked) -> bool:
        return view is not None and event.generation >= view.generation and event.member in view.members

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
        self.generation = max(self.generation, generation)
        self.roster.sent(member, generation)
        if self.proposal is not None and generation == self.proposal.generation:
            self._entered(now_s)
        if self.view is not None and generation == self.view.generation:
            self._missing.discard(member)
        return True

    def _entered(self, now_s: float) -> None:
        """The members have agreed among themselves and entered the proposal."""
        assert self.proposal is not None
        self.view, self.proposal, self.phase = self.proposal, None, FORM
        self._missing, self._finished = set(self.view.members), set()
        self._deadline_s = now_s + self.settings.timeouts.form_s
        self._out += self.checkpoints.abandoned(now_s, "the view changed")

    def _on_lost(self, event: Lost, now_s: float) -> None:
        rank = self._current(event.member)
        self.roster.condemned.pop(event.member, None)
        if rank is not None:
            rank.step, rank.shard = event.step, event.shard
            self._drop(rank, event.cause, event.at_s, now_s, event.detail)
            self.roster.condemned.pop(event.member, None)

    def _on_node_lost(self, node: str, cause: str, at_s: float, now_s: float) -> None:
        self.roster.nodes.pop(node, None)
        for rank in [rank for rank in self.roster.by_slot.values() if rank.process.node == node]:
            self._drop(rank, cause, at_s, now_s)

    def _drop(self, rank: Rank, cause: str, at_s: float, now_s: float, detail: str = "") -> None:
        """Forget a rank; if it was seated, the others must gather."""
        member = rank.member
        self.roster.remove(rank)
        fault = self._injected.pop(member, None)
        seated = self.view is not None and member in self.view.members
        generation = self.view.generation if self.view is not None and seated else -1
        self._write(ProcessLost(member, cause, at_s, fault, generation, rank.step, rank.shard, detail))
        self._causes.append(str(member))
        self.losses.append(self._loss(rank, at_s, fault is not None, detail or cause))
        if seated and self.phase in (RUN, FORM):
            self._gather(now_s, f"rank {member} lost: {cause}")
        elif self.proposal is not None and member in self.proposal.members:
            self._cancel(now_s, f"newcomer {member} lost: {cause}")
        self._judge(now_s)

    def _loss(self, rank: Rank, at_s: float, injected: bool, detail: str) -> Loss:
        return Loss(rank.member.slot, rank.process.node, at_s, rank.step, rank.shard, injected, detail, self.committed.step)

    def _judge(self, now_s: float) -> None:
        decision = self.recovery.judge(self.losses, now_s)
        if decision.action == "give_up":
            self._decide("recovery", decision.action, decision.reason, dict(decision.fields), now_s)
            self._end("failed", decision.reason, self.losses[-1].detail, now_s)

    def _on_raised(self, event: Raised, now_s: float) -> None:
        rank = self._current(event.member)
        if rank is None:
            return
        rank.step, rank.shard = event.step, event.shard
        again = event.step in self._raised_at or self.committed.step == 0
        self._raised_at.add(event.step)
        if again:
            where = f"step {event.step}" if event.step >= 0 else "start-up"
            self._end("failed", f"the train function raised at {where} in slot {event.member.slot}: {event.error}", event.traceback, now_s)
        else:
            self._say(Evict(rank.member, rank.process, "its train function raised"))
            self._drop(rank, f"the train function raised {event.error}", now_s, now_s, event.traceback)

    def _on_fault(self, event: FaultReported) -> None:
        """``aimed`` comes right before the blow, so that a death that follows at once is known to be injected; it is not journalled."""
        if event.phase in ("aimed", "executed"):
            self._injected.update({member: event.fault.id for member in event.members if self._current(member)})
        else:
            for member in event.members:
                if self._injected.get(member) == event.fault.id:
                    del self._injected[member]
        if event.phase != "aimed":
            self._write(FaultRecord(event.fault, event.phase, event.at_s, event.members, event.detail))

    # ---- facts: time -------------------------------------------------------------------------------------------------------------------

    def _on_heartbeat(self, event: Heartbeat, now_s: float) -> None:
        self.roster.nodes[event.node] = now_s
        self.roster.silent.pop(event.node, None)
        generation = self.view.generation if self.view is not None else -1
        for pulse in event.pulses:
            rank = self._current(pulse.member)
            if rank is None:
                self._haunted(pulse.member)
                continue
            rank.beat_s = now_s - pulse.beat_age_s
            rank.progress_s = now_s - pulse.progress_age_s if pulse.stepping else now_s
            rank.heard = True
            if pulse.generation == generation == rank.generation and rank.phase == "seated":
                rank.state = pulse.state

    def _haunted(self, member: Member) -> None:
        """A rank that was given up still runs: its node was only silent for a while. It must not live beside its replacement."""
        ghost = self.roster.condemned.get(member)
        if ghost is not None:
            self._say(Evict(member, ghost.process, "given up earlier, and another may have taken its slot"))

    def _on_tick(self, now_s: float) -> None:
        if self._grace_until_s is not None:
            self._settle_after_restart(now_s)
            return
        limits = self.settings.timeouts
        for node, seen_s in list(self.roster.nodes.items()):
            if now_s - seen_s > limits.node_s:
                self._on_node_lost(node, f"its agent was silent for {now_s - seen_s:.1f} s", now_s, now_s)
        for rank in list(self.roster.by_slot.values()):
            # A rank that starts up imports, and may hold its interpreter's lock for long.
            silence_s = limits.start_s if rank.phase == "starting" else limits.heartbeat_s
            if now_s - rank.beat_s > silence_s and rank.process.node in self.roster.nodes:
                self._evict(rank, f"no heartbeat for {now_s - rank.beat_s:.1f} s", now_s)
            elif rank.phase == "seated" and self.phase == RUN and now_s - rank.progress_s > limits.progress_s:
                self._evict(rank, f"no progress for {now_s - rank.progress_s:.1f} s at step {rank.state}", now_s)
        self._note_commits(now_s)

    def _evict(self, rank: Rank, reason: str, now_s: float) -> None:
        self._say(Evict(rank.member, rank.process, reason))
        self._drop(rank, f"evicted: {reason}", now_s, now_s)

    def _note_commits(self, now_s: float) -> None:
        if self.view is None or self.phase != RUN:
            return
        ranks = [self.roster.by_slot.get(member.slot) for member in self.view.members]
        states = [rank.state for rank in ranks if rank is not None and rank.state is not None]
        if len(states) == len(self.view.members):
            self._commit(min(states), now_s)

    def _commit(self, state: StateId, now_s: float) -> None:
        if state > self.committed:
            self.committed = state
            self._write(Committed(state, now_s))

    # ---- what should be ------------------------------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> None:
        if self._stopping is not None and (not self.checkpoints.pending or now_s > self._stopping[1]):
            self._end("stopped", self._stopping[0], "", now_s)
        elif self._grace_until_s is not None:
            return
        elif self.phase == GATHER:
            self._try_form(now_s)
        elif self.phase == FORM:
            self._watch_forming(now_s)
        elif self.phase == RUN:
            self._while_running(now_s)

    def _gather(self, now_s: float, reason: str) -> None:
        """Everyone who is seated must leave and say where it stands."""
        self._decide("recovery", "gather", reason, {}, now_s)
        if self.phase == RUN:
            self._since_s = now_s
        self.phase = GATHER
        self.proposal = None
        self._deadline_s = now_s + self.settings.timeouts.park_s
        self._out += self.checkpoints.abandoned(now_s, "the view changed")
        self._park(now_s)

    def _park(self, now_s: float) -> None:
        self._sent_s = now_s
        members = tuple(self.roster.by_slot[slot].member for slot in sorted(self.roster.outstanding))
        if members:
            self._say(Park(members, self.generation))

    def _try_form(self, now_s: float) -> None:
        for slot in list(self.roster.outstanding):
            node = self.roster.by_slot[slot].process.node if slot in self.roster.by_slot else ""
            if node in self.roster.silent:
                self._on_node_lost(node, "its agent hung up, and its ranks are missed", self.roster.silent.pop(node), now_s)
        if self.roster.outstanding and now_s >= self._deadline_s:
            for slot in list(self.roster.outstanding):
                self._evict(self.roster.by_slot[slot], "did not leave its process group when told to", now_s)
        if self.phase == END:
            return
        if self.roster.outstanding:
            if now_s - self._sent_s >= self.settings.timeouts.resend_s:
                self._park(now_s)
            return
        formation = self.recovery.form(self._situation(), now_s)
        if formation.decision.action == "form":
            self._publish(formation, now_s)
        else:
            self._decide("recovery", formation.decision.action, formation.decision.reason, dict(formation.decision.fields), now_s)

    def _situation(self) -> Situation:
        seated = set(self.view.members) if self.view else set()
        candidates = tuple(
            Candidate(rank.member, rank.process.node, rank.state, rank.dirty, rank.member in seated)
            for rank in self.roster.in_order()
            if rank.phase != "starting"
        )
        starting = len(self.roster.by_slot) - len(candidates)
        return Situation(
            candidates, self.settings.world, self.settings.min_ranks, self._since_s, starting, self.checkpoints.newest_id
        )  # fmt: skip

    def _publish(self, formation: Formation, now_s: float) -> None:
        view = self._make_view(formation.members, now_s)
        self._decide("recovery", "form", formation.decision.reason, dict(formation.decision.fields), now_s)
        self._write(ViewPublished(view, now_s, formation.decision.reason, False, tuple(self._causes)))
        self._causes.clear()
        self.view, self.phase = view, FORM
        self._missing, self._finished = set(view.members), set()
        self._deadline_s = now_s + self.settings.timeouts.form_s
        self._commit(view.state, now_s)
        self._send_view(now_s)

    def _send_view(self, now_s: float) -> None:
        assert self.view is not None
        self._sent_s = now_s
        for member in self.view.members:
            self.roster.sent(member, self.view.generation)
        self._say(Publish(self.view))

    def _make_view(self, members: Sequence[Member], now_s: float) -> View:
        """A view in which the clean member with the greatest state gives it to all that differ; with none, the newest checkpoint does."""
        self.generation += 1
        ranks = [self.roster.by_slot[member.slot] for member in members]
        clean = [rank.state for rank in ranks if rank.state is not None and not rank.dirty]
        checkpoint = None
        if clean:
            state = max(clean)
            donor = next(i for i, rank in enumerate(ranks) if rank.state == state and not rank.dirty)
            receivers = tuple(i for i, rank in enumerate(ranks) if rank.dirty or rank.state != state)
        else:
            checkpoint, start = self.checkpoints.newest_id, self.checkpoints.newest_state
            state, donor, receivers = self._begin_lineage(start, now_s), 0, tuple(range(1, len(ranks)))
        ranges = self.placement.ranges(self.settings.shards, len(ranks))
        return View(self.generation, tuple(members), ranges, donor, receivers, state, ranks[donor].store, checkpoint)

    def _begin_lineage(self, start: StateId, now_s: float) -> StateId:
        rolled_back = self.lineage >= 0
        self.lineage += 1
        state = StateId(self.lineage, start.step)
        if rolled_back:
            self._write(LineageBegun(self.lineage, start, now_s, "no rank holds a clean state"))
        return state

    def _watch_forming(self, now_s: float) -> None:
        assert self.view is not None
        if not self._missing:
            self.phase = RUN
            self._since_s = now_s
            for member in self.view.members:
                self.roster.by_slot[member.slot].progress_s = now_s
            self._while_running(now_s)
        elif now_s >= self._deadline_s:
            late = ", ".join(map(str, sorted(self._missing)))
            self._gather(now_s, f"generation {self.view.generation} did not form: waiting for {late}")
        elif now_s - self._sent_s >= self.settings.timeouts.resend_s:
            self._send_view(now_s)

    def _while_running(self, now_s: float) -> None:
        assert self.view is not None
        if len(self._finished) == len(self.view.members):
            self._complete([self.roster.by_slot[member.slot] for member in self.view.members], now_s)
        elif self._finished:
            return
        elif self.proposal is not None:
            self._watch_proposal(now_s)
        elif len(self.view.members) < self.settings.world and now_s >= self._no_growth_until_s:
            self._try_grow(now_s)
        if self.phase == RUN and self.proposal is None and self._stopping is None:
            self._out += self.checkpoints.tick(self.view, now_s)

    def _complete(self, finished: list[Rank], now_s: float) -> None:
        digests = {rank.digest for rank in finished}
        self._commit(max(rank.state for rank in finished if rank.state), now_s)
        if len(digests) > 1:
            held = ", ".join(f"{rank.member}: {(rank.digest or '')[:12]}" for rank in finished)
            self._end("failed", "the ranks end with different states, which is silent corruption or a bug", held, now_s)
        else:
            self._end("completed", "all steps are committed", "", now_s, digests.pop() or "")

    # ---- growing beside running steps ------------------------------------------------------------------------------------------------------

    def _try_grow(self, now_s: float) -> None:
        formation = self.recovery.grow(self._situation(), now_s)
        if formation.decision.action != "grow" or self.checkpoints.pending:
            return
        assert self.view is not None
        present = set(self.view.members)
        donor = next(i for i, member in enumerate(formation.members) if member in present)
        receivers = tuple(i for i, member in enumerate(formation.members) if member not in present)
        ranges = self.placement.ranges(self.settings.shards, len(formation.members))
        self.generation += 1
        store = self.roster.by_slot[formation.members[donor].slot].store
        self.proposal = View(self.generation, formation.members, ranges, donor, receivers, self.committed, store)
        self._decide("recovery", "grow", formation.decision.reason, dict(formation.decision.fields), now_s)
        self._write(ViewPublished(self.proposal, now_s, formation.decision.reason, True, tuple(self._causes)))
        self._causes.clear()
        self._proposed_s = now_s
        self._send_proposal(now_s)

    def _send_proposal(self, now_s: float) -> None:
        assert self.proposal is not None
        self._sent_s = now_s
        for member in self.proposal.members:
            self.roster.sent(member, self.proposal.generation)
        self._say(Propose(self.proposal))

    def _watch_proposal(self, now_s: float) -> None:
        limits = self.settings.timeouts
        if now_s - self._proposed_s > limits.form_s + limits.progress_s:
            self._cancel(now_s, "it was not entered in time")
        elif now_s - self._sent_s >= limits.resend_s:
            self._send_proposal(now_s)

    def _cancel(self, now_s: float, reason: str) -> None:
        assert self.proposal is not None
        proposal, self.proposal = self.proposal, None
        self._decide("recovery", "cancel", f"generation {proposal.generation}: {reason}", {}, now_s)
        seated = set(self.view.members) if self.view else set()
        self._no_growth_until_s = now_s + self.settings.timeouts.resend_s
        self._say(Cancel(tuple(member for member in proposal.members if member in seated), proposal.generation))
        newcomers = tuple(member for member in proposal.members if member not in seated and self._current(member))
        if newcomers:
            self._say(Park(newcomers, proposal.generation))

    # ---- the end -----------------------------------------------------------------------------------------------------------------------------

    def _end(self, status: str, reason: str, detail: str, now_s: float, digest: str = "") -> None:
        if self.phase == END:
            return
        self.phase = END
        self.ended = RunEnded(status, reason, now_s, digest, detail)
        self._write(self.ended)
        self._release(tuple(rank.member for rank in self.roster.in_order()))
        self._say(EndRun(status, reason, detail))

    def _release(self, members: Iterable[Member]) -> None:
        members = tuple(members)
        if members and self.ended is not None:
            self._say(Release(members, self.ended.reason))

    def _after_end(self, event: Event) -> None:
        """Late comers and ranks that missed the word are released again; nothing else matters any more."""
        if isinstance(event, Joined):
            incarnation = self.roster.grant(event.slot, event.incarnation)
            self._say(Welcome(event.slot, event.token, incarnation))
            self._release([Member(event.slot, incarnation)])
        elif isinstance(event, Ready | Parked | Formed | Finished):
            self._release([event.member])
        elif isinstance(event, Heartbeat):
            self._release(pulse.member for pulse in event.pulses)

    # ---- rebuilding after the coordinator died ------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record], now_s: float) -> None:
        """Rebuild from the journal of this very run. Ranks may be training meanwhile: they get ``node_s`` to report before any is given up."""
        for record in records:
            self._replay_one(record)
        self._since_s = now_s
        for rank in self.roster.by_slot.values():
            rank.beat_s = rank.progress_s = now_s
            rank.heard = False
        if self.phase != END:
            self.phase = RUN if self.view is not None else GATHER
            self._grace_until_s = now_s + self.settings.timeouts.node_s
        self.checkpoints.restarted(now_s)

    def resume(self, records: Iterable[Record], now_s: float) -> list[Instruction]:
        """Go on in a new cluster, from the journal of a run whose ranks are all gone; returns what is to be written first."""
        self._out = []
        self.replay(records, now_s)
        self.ended, self._grace_until_s = None, None
        self.view = self.proposal = None
        self.phase, self._deadline_s = GATHER, now_s
        for rank in list(self.roster.by_slot.values()):
            self._drop(rank, "its cluster ended", now_s, now_s)
        self.losses.clear()
        return self._out

    def _replay_one(self, record: Record) -> None:
        match record:
            case ProcessUp(member=member, process=process, token=token):
                self.roster.grant(member.slot, member.incarnation)
                self.roster.add(Rank(member, process, token, "", record.at_s))
            case ProcessLost(member=member):
                rank = self._current(member)
                if rank is not None:
                    rank.step, rank.shard = record.step, record.shard
                    self.roster.remove(rank)
                    self.losses.append(self._loss(rank, record.at_s, record.fault is not None, record.detail or record.cause))
            case ViewPublished(view=view, graceful=graceful):
                self.generation = max(self.generation, view.generation)
                self.lineage = max(self.lineage, view.state.lineage)
                if graceful:
                    self.proposal = view
                else:
                    self.view, self.proposal = view, None
                    self._missing = set(view.members)
                for member in view.members:
                    self.roster.sent(member, view.generation)
            case LineageBegun(lineage=lineage):
                self.lineage = max(self.lineage, lineage)
            case Committed(state=state):
                self.committed = max(self.committed, state)
            case FaultRecord(fault=fault, phase="executed", members=members):
                self._injected.update({member: fault.id for member in members})
            case RunEnded():
                self.phase, self.ended = END, record
            case _:
                self.checkpoints.replay(record)

    def _settle_after_restart(self, now_s: float) -> None:
        """End of the grace: whoever reported is there, whoever did not is lost; a view that is whole goes on undisturbed."""
        assert self._grace_until_s is not None
        ranks = list(self.roster.by_slot.values())
        if now_s < self._grace_until_s and self._missing and not all(rank.heard and rank.phase != "starting" for rank in ranks):
            return
        self._grace_until_s = None
        for rank in ranks:
            if not rank.heard:
                self._drop(rank, "not heard of since the coordinator restarted", now_s, now_s)
        if self.phase == RUN and self._missing:
            self._gather(now_s, "the coordinator restarted and the view is not whole")

    # ---- small helpers ---------------------------------------------------------------------------------------------------------------------------

    def _say(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _write(self, record: Record) -> None:
        self._out.append(Write(record))

    def _decide(self, policy: str, action: str, reason: str, fields: dict[str, float], now_s: float) -> None:
        """Journal a decision, once: a policy that says the same again at the next tick adds nothing."""
        if (action, reason) != self._last_decision:
            self._last_decision = (action, reason)
            self._write(DecisionMade(policy, action, reason, fields, now_s))
