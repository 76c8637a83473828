"""Events of ranks: joined, ready, finished, left. ``leaving.py`` has ``Quiesced``, and ``views.py`` has ``Formed``."""

from __future__ import annotations

from fleet.machine import coordinates, ending
from fleet.machine.leaving import evict
from fleet.machine.roster import Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.machine.views import is_in
from fleet.protocol.causes import Superseded
from fleet.protocol.events import Finished, Joined, Left, Ready
from fleet.protocol.instructions import Fence, Welcome
from fleet.protocol.probes import probe
from fleet.protocol.records import ProcessUp
from fleet.protocol.types import Member


def joined(machine: MachineState, event: Joined, now_s: float) -> None:
    """A process says hello. It gets the next incarnation of its slot, unless it is known, or another process has taken its slot."""
    slot, roster = event.slot, machine.roster
    known = roster.by_slot.get(slot)
    if known is not None and known.token == event.token:
        known.reported, known.beat_s, known.store = True, now_s, event.store
        if event.coordinate and event.coordinate != known.member.coordinate:
            probe("the journal has lost a coordinate that a rank has")
            known.member = Member(slot, known.member.incarnation, event.coordinate)
        mine = known.member
        if (event.incarnation, event.coordinate) != (mine.incarnation, mine.coordinate):  # a rank that knows both needs no answer
            machine.say(Welcome(slot, event.token, mine.incarnation, mine.coordinate))
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
        probe("a rank comes that the journal has lost")
    roster.nodes.setdefault(event.process.node, now_s)
    coordinate = coordinates.of_newcomer(machine, slot, event.process.node, event.coordinate)
    member = Member(slot, roster.grant(slot, event.incarnation), coordinate)
    roster.add(Rank(member, event.process, event.token, event.store, now_s))
    machine.write(ProcessUp(member, event.process, event.token, now_s))
    machine.say(Welcome(slot, event.token, member.incarnation, coordinate))


def ready(machine: MachineState, event: Ready, now_s: float) -> None:
    """The rank has built its model."""
    rank = machine.current(event.member)
    if rank is not None and rank.phase == RankPhase.STARTING:
        rank.phase, rank.beat_s, rank.reported, rank.ready_s = RankPhase.STANDBY, now_s, True, now_s
        if event.apart and machine.settings.spread:
            machine.roster.apart.add(rank.member)
            if machine.view is None and rank.member.slot < machine.settings.world:
                return  # it is a rank of the first view
            reason = f"as a spare, rank {rank.member} stands by without a part of the {machine.settings.spread}: {event.apart}"
            machine.decide("recovery", "warn", reason, None, now_s)


def finished(machine: MachineState, event: Finished | Left, now_s: float) -> None:
    """The rank has committed the last step, or its train function has returned after it."""
    if is_in(machine, event.member, event.generation, event.state, RankPhase.FINISHED, now_s):
        machine.roster.by_slot[event.member.slot].digest = event.digest
        machine.attendance.finished.add(event.member)
        ending.seen(machine, event, now_s)
