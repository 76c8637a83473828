"""All members have left a view: the recovery policy chooses the next members, the coordinator publishes a view, and its members form it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.machine import nodes
from fleet.machine.candidates import StateSource, computing, fresh_wanted, is_incomplete, situation, source
from fleet.machine.corruption import judge
from fleet.machine.leaving import evict, gather, quiesce
from fleet.machine.roster import Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.machine.topology import report_lacking
from fleet.protocol.causes import FreshWanted, GatherWhy, StartsAgain
from fleet.protocol.decisions import OfView
from fleet.protocol.events import Formed
from fleet.protocol.instructions import Propose, Publish
from fleet.protocol.probes import probe
from fleet.protocol.records import Committed, HistoryBegun, ViewPublished
from fleet.protocol.types import Formation, Member, Ranges, StateId, View, in_words, shards_of


def try_form(machine: MachineState, now_s: float, ask: bool) -> None:
    """Once all ranks have left: evict ranks with a wrong state, and form the next view of the members that the recovery policy names."""
    if machine.roster.outstanding:
        if now_s - machine.assembly.sent_s >= machine.settings.timeouts.resend_s:
            quiesce(machine, now_s)
    elif ask and not (machine.liveness.away or machine.liveness.alone):
        judge(machine, now_s)
        if machine.phase == Phase.GATHER:
            form(machine, machine.policies.recovery.form(situation(machine, now_s), now_s), now_s)


def form(machine: MachineState, formation: Formation, now_s: float) -> None:
    """Carry out the recovery policy's decision."""
    decision = formation.decision
    ranks = [machine.roster.by_slot[member.slot] for member in formation.members]
    floor, newest = machine.doubts.floor(machine.committed), machine.checkpoints.newest_id
    chosen = source(ranks, floor, newest, is_incomplete(machine, ranks)) if decision.action == "form" else None
    if decision.action != "form":
        machine.decide("recovery", decision.action, decision.reason, decision.payload, now_s)
        for rank in ranks:  # "restart" names the ranks that have to go, and "wait" names none
            evict(machine, rank, StartsAgain(decision.reason), now_s)
    elif (chosen is None or chosen.state is None) and machine.checkpoints.unsure(machine.roster.silent):
        probe("a node is silent that may hold the newest copy")
        machine.decide("recovery", "wait", "a node is silent that may hold the newest state in its memory", None, now_s)
    elif chosen is None:
        _refresh(machine, fresh_wanted(ranks), now_s)
    else:
        publish(machine, formation, chosen, now_s)


def _refresh(machine: MachineState, rank: Rank, now_s: float) -> None:
    """No rank holds a usable state or the initial state, and there is no checkpoint: a fresh process must begin.

    If a process starts already, the machine waits for it without a limit.
    """
    column = [each for each in machine.roster.by_slot.values() if each.member.coordinate == rank.member.coordinate]
    if now_s >= machine.assembly.fresh_until_s and not any(each.phase is RankPhase.STARTING for each in column):
        probe("no rank has the initial state any more")
        machine.assembly.fresh_until_s = now_s + machine.settings.timeouts.start_s
        evict(machine, rank, FreshWanted(), now_s)


def publish(machine: MachineState, formation: Formation, chosen: StateSource, now_s: float) -> None:
    """Make a view of the members in ``formation``, journal it, and send it to them."""
    checkpoint = machine.checkpoints.newest_id if chosen.state is None else None
    if chosen.state is None:
        machine.assembly.incomplete = frozenset()
    state = chosen.state or begin_history(machine, now_s)
    view = make_view(machine, formation.members, chosen, state, checkpoint)
    announce(machine, view, formation, False, now_s)
    adopt(machine, view, now_s)
    send(machine, Publish(view), now_s)


def make_view(
    machine: MachineState,
    members: Sequence[Member],
    chosen: StateSource,
    state: StateId,
    checkpoint: str | None = None,
    ranges: Ranges | None = None,
) -> View:
    """The view of the next generation. Without ``ranges`` each group has as many shards as the speed of its slowest member allows.

    The first members have them, see :func:`fleet.machine.candidates.computing`.
    """
    machine.assembly.generation += 1
    if ranges is None:
        speeds = [machine.stragglers.speeds.get(member, 1.0) for member in members]
        placement, shards = machine.policies.placement, machine.settings.shards
        ranges = shards_of(
            members, computing(machine, len(members)), shards,
            lambda groups: placement.weighted_ranges(shards, [min(speeds[place] for place in group) for group in groups]),
        )  # fmt: skip
    ranks = [machine.roster.by_slot[member.slot] for member in members]
    copies = machine.checkpoints.targets(machine.policies.placement, [rank.process.node for rank in ranks])
    rest = (chosen.donor, chosen.receivers, state, ranks[chosen.donor].store, checkpoint, copies)
    return View(machine.assembly.generation, tuple(members), ranges, *rest)


def announce(machine: MachineState, view: View, formation: Formation, graceful: bool, now_s: float) -> None:
    """Journal why a view is made, and the view."""
    decision = formation.decision
    machine.decide("recovery", decision.action, decision.reason, decision.payload, now_s)
    machine.write(ViewPublished(view, now_s, decision.reason, graceful, tuple(machine.losses.causes)))
    report_lacking(machine, view, now_s)
    machine.losses.causes.clear()


def begin_history(machine: MachineState, now_s: float) -> StateId:
    """No rank holds a usable state: a new history begins from the newest checkpoint, or from the initial state."""
    rolled_back = machine.assembly.history >= 0
    start = machine.checkpoints.begin(rolled_back)
    machine.assembly.history += 1
    if rolled_back:
        if start == StateId(0, 0):
            probe("a new history begins from the initial state")
        machine.once.roll_back(start)
        machine.ending.roll_back(start, machine.assembly.history)
        machine.write(HistoryBegun(machine.assembly.history, start, now_s, _why_back(machine)))
    return StateId(machine.assembly.history, start.step)


def _why_back(machine: MachineState) -> str:
    """Why the run goes back. With sharded state, ranks that hold parts of the state may be left."""
    spread, ranks = machine.settings.spread, machine.roster.by_slot.values()
    held = {rank.member.coordinate for rank in ranks if rank.state is not None and not rank.dirty}
    bare = [coordinate for coordinate in machine.settings.coordinates if coordinate not in held]
    if bare and held:
        return f"no rank at {' or '.join(map(in_words, bare))} holds a clean state"
    if not spread or all(rank.state is None for rank in ranks):
        return "no rank holds a clean state"
    copies = machine.settings.optimizer_copies
    return f"some of the {spread} was lost with all ranks that kept it, its owner and its {copies} cop{'y' if copies == 1 else 'ies'}"


def adopt(machine: MachineState, view: View, now_s: float) -> None:
    """Make ``view`` the current view. Its members have to report that they are in it."""
    machine.enter(view)
    machine.phase = Phase.FORM
    machine.assembly.deadline_s = now_s + machine.settings.timeouts.form_s


def proposed(machine: MachineState) -> Propose:
    """The instruction for the view that is proposed now. It names the members that leave the present one."""
    proposal, view = machine.growth.proposal, machine.view
    assert proposal is not None
    staying = frozenset(proposal.members)
    return Propose(proposal, tuple(member for member in (view.members if view is not None else ()) if member not in staying))


def entered(machine: MachineState, now_s: float) -> None:
    """The members have agreed to enter the proposed view, and are in it."""
    proposal, before = machine.growth.proposal, machine.view
    assert proposal is not None
    machine.decide("recovery", "enter", f"generation {proposal.generation}", OfView(proposal.generation), now_s)
    adopt(machine, proposal, now_s)
    nodes.left(machine, before, proposal, now_s)
    machine.say(*machine.checkpoints.abandoned(now_s))


def send(machine: MachineState, word: Publish | Propose, now_s: float) -> None:
    """Tell the members of a view to form it. The machine repeats this until they have."""
    machine.assembly.sent_s = now_s
    for member in word.view.members:
        machine.roster.sent(member, word.view.generation)
    machine.say(word)


def formed(machine: MachineState, event: Formed, now_s: float) -> None:
    """A rank is in the process group of a generation."""
    is_in(machine, event.member, event.generation, event.state, RankPhase.JOINED, now_s)


def is_in(machine: MachineState, member: Member, generation: int, state: StateId, phase: RankPhase, now_s: float) -> bool:
    """A rank is in ``generation``. False when its report is stale, or when ``generation`` is not the current view's."""
    rank = machine.current(member)
    if rank is None or not rank.may_be_in(generation):
        return False
    if rank.phase == RankPhase.FINISHED and rank.generation == generation:
        return phase == RankPhase.FINISHED and machine.view is not None and generation == machine.view.generation
    rank.phase, rank.state, rank.dirty, rank.generation = phase, state, False, generation
    rank.beat_s = rank.progress_s = now_s
    rank.reported = True
    if phase == RankPhase.JOINED:
        rank.formed = (generation, state)
    machine.assembly.learn(generation, state)
    machine.roster.sent(member, generation)
    if machine.growth.proposal is not None and generation == machine.growth.proposal.generation:
        entered(machine, now_s)
    if machine.view is not None and generation == machine.view.generation:
        machine.attendance.missing.discard(member)
        return True
    if machine.phase != Phase.GATHER:
        probe("a rank is in a view that was cancelled or forgotten")
        reason = f"rank {member} is in generation {generation}, which was cancelled or forgotten"
        gather(machine, now_s, GatherWhy.FORGOTTEN, reason, member)
    return False


def watch_forming(machine: MachineState, now_s: float) -> bool:
    """True once all members are in the view, which then runs. Members that are late make the coordinator call all members out again."""
    assert machine.view is not None
    if not machine.attendance.missing:
        machine.phase, machine.assembly.since_s, machine.assembly.incomplete = Phase.RUN, now_s, frozenset()
        for member in machine.view.members:
            rank = machine.roster.by_slot[member.slot]
            rank.progress_s = rank.running_s = now_s
        note_commits(machine, now_s)
        return True
    if now_s >= machine.assembly.deadline_s:
        probe("a view did not form in time")
        late = ", ".join(map(str, sorted(machine.attendance.missing)))
        gather(machine, now_s, GatherWhy.NOT_FORMED, f"generation {machine.view.generation} did not form: waiting for {late}")
    elif now_s - machine.assembly.sent_s >= machine.settings.timeouts.resend_s:
        send(machine, Publish(machine.view), now_s)
    return False


def note_commits(machine: MachineState, now_s: float) -> None:
    """A step counts once every member of the view has reported it."""
    if machine.view is None or machine.phase != Phase.RUN:
        return
    ranks = [machine.roster.by_slot.get(member.slot) for member in machine.view.members]
    states = [rank.state for rank in ranks if rank is not None and rank.state is not None]
    if len(states) == len(machine.view.members) and min(states) > machine.committed:
        machine.committed = min(states)
        machine.write(Committed(machine.committed, now_s))
