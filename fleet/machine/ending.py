"""How a run of ``FleetMachine`` ends: all ranks hold the last state, it is kept, the code behind the loop runs, and all are released.

In RUN, all members finish, with one digest. Then their final checkpoint becomes durable, or is given up. In CONCLUDE they run the code
behind the loop. When each has left it, END follows. If a rank is lost on the way, the others go on. If none is left, the run goes back to
its final checkpoint, and the code behind the loop runs again.

Members finish after the run's last step, or earlier, where their loops have ended the run. Each reports ``Finished``. A member that got
this state from a donor has not run that loop body, so ``EndAt`` tells it. ``EndAt`` also tells a member whose loop goes on.
"""

from __future__ import annotations

from fleet.machine.corruption import judge_the_end
from fleet.machine.end import end, release
from fleet.machine.leaving import gather, heartbeat
from fleet.machine.roster import Rank, RankPhase
from fleet.machine.state import ALL, EndOrder, MachineState, Phase
from fleet.machine.stopping import waits_unasked
from fleet.machine.views import note_commits
from fleet.protocol.causes import EndWhy, GatherWhy
from fleet.protocol.decisions import Concluded, LoopEnded
from fleet.protocol.events import Event, Finished, Formed, Heartbeat, Joined, Left, Quiesced, Ready
from fleet.protocol.instructions import Conclude, EndAt, Welcome
from fleet.protocol.probes import probe
from fleet.protocol.types import Member, StateId


def complete(machine: MachineState, now_s: float) -> None:
    """All members of the view wait at the finish barrier: keep their state, then let them go on behind the loop, or end a stop."""
    assert machine.view is not None
    finished = [machine.roster.by_slot[member.slot] for member in machine.view.members]
    note_commits(machine, now_s)
    digests = {rank.digest for rank in finished}
    if len(digests) > 1:
        if not judge_the_end(machine, finished, now_s):
            held = ", ".join(f"{rank.member}: {(rank.digest or '')[:12]}" for rank in finished)
            end(machine, EndWhy.ENDS_DIFFER, "the ranks end with different states, which is silent corruption or a bug", held, now_s)
        return
    machine.ending.digest = digests.pop() or ""
    store, stop = machine.checkpoints.store, machine.ending.stopping
    why, reason = _whole(machine)
    if stop is not None and (store.holds(machine.committed) or store.final.lost):
        end(machine, stop.why, stop.reason, "", now_s)
    elif store.holds(machine.committed):
        _conclude(machine, why, reason, now_s)
    elif store.final.lost:
        _conclude(machine, EndWhy.NOT_SAVED, f"{reason}, and the final checkpoint could not be kept: {store.failures.last}", now_s)
    else:
        out, late = store.keep_final(machine.view, now_s)
        machine.say(*out)
        if late:
            probe("a rank does not write its part of the final checkpoint")
            gather(machine, now_s, GatherWhy.PART_MISSING, "a rank did not write its part of the final checkpoint", in_person=True)


def _whole(machine: MachineState) -> tuple[EndWhy, str]:
    """The reason by which the run is completed once its last state is kept."""
    order = machine.ending.order
    if order is None:
        return EndWhy.ALL_STEPS, ALL
    return EndWhy.LOOP_ENDED, f"its loop ended it behind step {order.state.step}: {order.reason}"


def _conclude(machine: MachineState, why: EndWhy, reason: str, now_s: float) -> None:
    assert machine.view is not None
    machine.phase = Phase.CONCLUDE
    machine.ending.conclude(why, reason, now_s)
    generation = machine.view.generation
    machine.decide("ending", "conclude", reason, Concluded(float(generation), why is not EndWhy.NOT_SAVED), now_s)
    machine.say(Conclude(machine.view.members, generation))


def take_up(machine: MachineState, reason: str, kept: bool, now_s: float) -> None:
    """Restore CONCLUDE, which the coordinator had reached before it died."""
    machine.phase = Phase.CONCLUDE
    machine.ending.conclude(_whole(machine)[0] if kept else EndWhy.NOT_SAVED, reason, now_s)


def seen(machine: MachineState, event: Finished | Left, now_s: float) -> None:
    """A member of the view has the run's last state. It may be behind the loop already, if a coordinator that died let it go on."""
    concluded = isinstance(event, Left) or event.concluded
    if isinstance(event, Finished) and event.ended:
        _end_at(machine, event, now_s)
    if isinstance(event, Finished) and event.halted:
        waits_unasked(machine, now_s)
    if machine.phase != Phase.CONCLUDE and concluded:
        _conclude(machine, *_whole(machine), now_s)
    if machine.phase == Phase.CONCLUDE:
        machine.ending.digest = event.digest
    if isinstance(event, Left):
        machine.ending.left.add(event.member)
    elif machine.phase == Phase.CONCLUDE and not concluded:
        machine.say(Conclude((event.member,), event.generation))


def _end_at(machine: MachineState, event: Finished, now_s: float) -> None:
    """The loop of a member has ended the run. The journal records it before any other member hears of it."""
    order = machine.ending.order
    if order is None or order.state != event.state:
        machine.ending.order = EndOrder(event.state, event.member, event.ended)
        where = LoopEnded(event.state.history, event.state.step, (event.member.slot, event.member.incarnation))
        machine.decide("ending", "end", event.ended, where, now_s)


def end_again(machine: MachineState, where: LoopEnded, reason: str) -> None:
    """Restore the end by a loop, which a coordinator had heard of before it died."""
    machine.ending.order = EndOrder(StateId(where.history, where.step), Member(*where.member), reason)


def say_where(machine: MachineState, now_s: float) -> None:
    """Tell members that do not wait behind the last step that it is the last. The machine repeats this until they wait."""
    view, order = machine.view, machine.ending.order
    if view is None or order is None:
        return
    if order.generation != view.generation or now_s - order.sent_s >= machine.settings.timeouts.resend_s:
        order.generation, order.sent_s = view.generation, now_s
        if members := tuple(member for member in view.members if member not in machine.attendance.finished):
            machine.say(EndAt(members, order.state, order.by, order.reason))


def watch(machine: MachineState, now_s: float) -> None:
    """While the code behind the loop runs: the run ends when all ranks that are left have left that code."""
    ending, limit_s = machine.ending, machine.settings.timeouts.finish_s
    ranks = [machine.current(member) for member in (machine.view.members if machine.view is not None else ())]
    # A member that was called back waits for the end.
    alive = [rank.member for rank in ranks if rank is not None and rank.phase == RankPhase.FINISHED]
    if ending.left >= set(alive) and ending.left:
        end(machine, ending.why, ending.reason, "", now_s, ending.digest)
    elif not alive:
        probe("all ranks are lost behind the loop")
        gather(machine, now_s, GatherWhy.ALL_LOST, "all ranks were lost behind the loop", in_person=False)
    elif now_s - ending.since_s > limit_s:
        names = ", ".join(str(member) for member in alive if member not in ending.left)
        reason = f"the code behind the loop takes longer than timeouts.finish_s = {limit_s:g} s in {names}; {ending.reason}"
        end(machine, EndWhy.LATE_BEHIND, reason, "", now_s)


def after_end(machine: MachineState, event: Event, now_s: float) -> None:
    """Release late comers, and again ranks that missed their release. Other events have no effect any more."""
    match event:
        case Joined(slot=slot, token=token, incarnation=incarnation):
            known: Rank | None = machine.roster.by_slot.get(slot)
            if incarnation is None:
                incarnation = known.member.incarnation if known and known.token == token else machine.roster.grant(slot, None)
                machine.say(Welcome(slot, token, incarnation))
            release(machine, [Member(slot, incarnation)], now_s)
        case Ready(member=member) | Quiesced(member=member) | Formed(member=member) | Finished(member=member) | Left(member=member):
            release(machine, [member], now_s)
        case Heartbeat(pulses=pulses):
            heartbeat(machine, event, now_s)
            release(machine, (pulse.member for pulse in pulses), now_s)
