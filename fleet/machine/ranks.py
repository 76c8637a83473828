"""What ranks say of themselves: hello, ready, I have left, I am in, I have finished."""

from __future__ import annotations

from fleet.machine import ending
from fleet.machine.leaving import cancel, evict, gather
from fleet.machine.roster import Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.machine.views import entered
from fleet.protocol.causes import Departure, GatherWhy, Superseded
from fleet.protocol.events import Finished, Formed, Joined, Left, Quiesced, Ready
from fleet.protocol.instructions import Fence, Welcome
from fleet.protocol.probes import probe
from fleet.protocol.records import ProcessUp
from fleet.protocol.types import Member, StateId


def joined(machine: MachineState, event: Joined, now_s: float) -> None:
    """A process says hello: it is granted the next incarnation of its slot, unless it is known, or another one has taken its place."""
    slot, roster = event.slot, machine.roster
    known = roster.by_slot.get(slot)
    if known is not None and known.token == event.token:
        known.reported, known.beat_s, known.store = True, now_s, event.store
        if event.incarnation != known.member.incarnation:  # who knows its own says hello for as long as it waits, and needs no answer
            machine.say(Welcome(slot, event.token, known.member.incarnation))
        return
    overtaken = event.incarnation is not None and event.incarnation <= roster.incarnations.get(slot, -1)
    if event.token in roster.dead_tokens or overtaken:
        machine.say(Fence(slot, event.token, f"slot {slot} was given to another process after this one was declared lost"))
        return
    if known is not None:
        evict(machine, known, Superseded(), now_s)
    if machine.phase == Phase.END:
        ending.after_end(machine, event, now_s)
        return
    if event.incarnation is not None:
        probe("a rank comes whom the journal has lost")
    roster.nodes.setdefault(event.process.node, now_s)
    rank = Rank(Member(slot, roster.grant(slot, event.incarnation)), event.process, event.token, event.store, now_s)
    roster.add(rank)
    machine.write(ProcessUp(rank.member, event.process, event.token, now_s))
    machine.say(Welcome(slot, event.token, rank.member.incarnation))


def ready(machine: MachineState, event: Ready, now_s: float) -> None:
    """It has built its model."""
    rank = machine.current(event.member)
    if rank is not None and rank.phase == RankPhase.STARTING:
        rank.phase, rank.beat_s, rank.reported, rank.ready_s = RankPhase.STANDBY, now_s, True, now_s


def quiesced(machine: MachineState, event: Quiesced, now_s: float) -> None:
    """It has left its generation. If that is the present view, the others have to leave it, too."""
    rank = machine.current(event.member)
    if rank is None or event.generation < rank.generation:
        return  # overtaken on the way by a later word of the same rank
    rank.phase, rank.state, rank.dirty, rank.generation = RankPhase.STANDBY, event.state, event.dirty, event.generation
    rank.beat_s, rank.reported, rank.engaged = now_s, True, event.engaged
    machine.learn(event.generation, event.state)
    machine.doubts.receive(event)
    machine.roster.quiesced(rank, event.generation)
    view, proposal = machine.view, machine.proposal
    if event.why is Departure.INCOMPLETE:
        found_in = next((known for known in (view, proposal) if known is not None and known.generation == event.generation), None)
        machine.incomplete = frozenset(found_in.members) if found_in is not None else machine.incomplete
    runs = machine.phase in (Phase.RUN, Phase.FORM) and view is not None and event.generation >= view.generation
    if runs and machine.in_view(event.member):
        reason = f"rank {event.member} left generation {event.generation}: {event.detail or event.why}"
        gather(machine, now_s, GatherWhy.LEFT, reason, event.member)
    elif proposal is not None and event.generation >= proposal.generation and event.member in proposal.members:
        probe("a newcomer cannot form its view")
        cancel(machine, now_s, f"newcomer {event.member} could not form it: {event.detail or event.why}")


def formed(machine: MachineState, event: Formed, now_s: float) -> None:
    """It is in the process group of a generation."""
    _is_in(machine, event.member, event.generation, event.state, RankPhase.JOINED, now_s)


def finished(machine: MachineState, event: Finished | Left, now_s: float) -> None:
    """It has committed the last step, or has left the train function behind it."""
    if _is_in(machine, event.member, event.generation, event.state, RankPhase.FINISHED, now_s):
        machine.roster.by_slot[event.member.slot].digest = event.digest
        machine.finished.add(event.member)
        ending.seen(machine, event, now_s)


def _is_in(machine: MachineState, member: Member, generation: int, state: StateId, phase: RankPhase, now_s: float) -> bool:
    """A rank is in ``generation``. False when that word is stale, or ``generation`` is not that of the view."""
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
    machine.learn(generation, state)
    machine.roster.sent(member, generation)
    if machine.proposal is not None and generation == machine.proposal.generation:
        entered(machine, now_s)
    if machine.view is not None and generation == machine.view.generation:
        machine.missing.discard(member)
        return True
    if machine.phase != Phase.GATHER:
        probe("a rank is in a view that was cancelled or forgotten")
        reason = f"rank {member} is in generation {generation}, which was cancelled or forgotten"
        gather(machine, now_s, GatherWhy.FORGOTTEN, reason, member)
    return False
