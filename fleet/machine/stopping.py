"""How a run of ``FleetMachine`` stops in order: its ranks agree on a last step, wait behind it, what they hold is kept, and the run ends.

It is told to stop -> ``Halt``, in each view that runs -> all members have finished, as behind the run's last step (``ending.py``) -> their
state is durable -> END. So no step is committed that the checkpoint does not have. When a rank is lost on the way, the next view halts.

Ranks that do not come together, or to the end of a step, are waited for as long as the grace allows. Then all are called out, and those
that hold the newest state write it beside whatever their loops do: ``Keep`` -> it is durable -> END. A store that fails is not waited for.
"""

from __future__ import annotations

from fleet.machine.candidates import keepers
from fleet.machine.corruption import judge
from fleet.machine.end import end
from fleet.machine.leaving import gather, quiesce
from fleet.machine.state import MachineState, Phase, Stop
from fleet.machine.views import note_commits
from fleet.protocol.causes import EndWhy, GatherWhy
from fleet.protocol.decisions import Stopping
from fleet.protocol.events import StopRequested
from fleet.protocol.instructions import Halt
from fleet.protocol.probes import probe
from fleet.protocol.records import Committed
from fleet.protocol.types import Member, StateId

LEAVE_S = 10.0
"""So long before the grace is over the run has ended: then its processes end, and its cluster, and the report is written."""
ANSWER_S = 1.0
"""Ranks may take so long to say what they hold: whoever listens answers for a loop that computes."""
WRITE, WRITE_S = 2.0, 1.0
"""A checkpoint may take so many times as long as they do, and at least so long."""
TRIES = 3
"""So often ranks are asked to keep the state, when one of them cannot."""


def stop(machine: MachineState, event: StopRequested, now_s: float) -> None:
    """End at once what has failed already; else in order."""
    if event.error:
        end(machine, EndWhy.DRIVER_FAILED if event.why is EndWhy.STOPPED else event.why, event.reason, event.error, now_s)
    elif machine.ending.stopping is None:
        machine.decide("ending", "stop", event.reason, Stopping(event.why), now_s)
        machine.ending.stopping = stopping = Stop(event.why, event.reason)
        give_time(machine, stopping, now_s)
        if machine.phase == Phase.GATHER and machine.assembly.in_person:
            probe("a run is told to stop while its ranks are called out in person")
            machine.assembly.in_person = False  # who hangs is of no matter any more: what it holds is, and whoever listens can tell
            quiesce(machine, now_s)


def give_time(machine: MachineState, stopping: Stop, now_s: float) -> None:
    """The grace begins: with the word to stop, and anew with a coordinator that comes back."""
    stopping.until_s, stopping.kept_s = now_s + patience_s(machine), now_s + write_s(machine)


def patience_s(machine: MachineState) -> float:
    """How long ranks may take until all of them wait: what else is to be done within the grace has its time behind that."""
    return max(0.0, write_s(machine) - ANSWER_S - WRITE * max(machine.checkpoints.store.latency_s, WRITE_S))


def write_s(machine: MachineState) -> float:
    """How long after it was told to stop a run may still write what its ranks hold."""
    return max(0.0, machine.settings.timeouts.grace_s - LEAVE_S)


def waits_unasked(machine: MachineState, now_s: float) -> None:
    """Ranks have halted that were told so by a coordinator whose journal has lost it: the run does not go on, and is not completed."""
    if machine.ending.stopping is None:
        stop(machine, StopRequested("it was told to stop"), now_s)


def halt(machine: MachineState, now_s: float) -> None:
    """Tell all members of the view that runs; repeated until they wait."""
    view, stopping = machine.view, machine.ending.stopping
    assert view is not None and stopping is not None
    if stopping.generation != view.generation or now_s - stopping.sent_s >= machine.settings.timeouts.resend_s:
        stopping.generation, stopping.sent_s = view.generation, now_s
        machine.say(Halt(view.members, view.generation))


def is_over(machine: MachineState, stopping: Stop, now_s: float) -> bool:
    """Whether there is nothing that a stop still waits for."""
    store = machine.checkpoints.store
    if _all_wait(machine):
        note_commits(machine, now_s)  # what they wait behind may have been heard of just now
        failing = store.failures.since_s is not None and now_s > stopping.kept_s
        return store.holds(machine.committed) or store.final.lost or failing
    # A coordinator that was away may not have heard of steps that its ranks have taken.
    held = [rank.state.step for rank in machine.roster.in_order() if rank.state is not None]
    untouched = max([machine.committed.step, *held, machine.view.state.step if machine.view is not None else 0]) == 0
    late = now_s > stopping.until_s
    return (machine.phase == Phase.CONCLUDE and late) or (machine.phase in (Phase.GATHER, Phase.FORM) and untouched)


def _all_wait(machine: MachineState) -> bool:
    return machine.phase == Phase.RUN and machine.attendance.all_finished()


def takes(machine: MachineState, stopping: Stop, now_s: float) -> bool:
    """Ranks have been waited for long enough: what they hold is kept beside what they do, and the run ends. Whether it has come to that."""
    if now_s <= stopping.until_s or _all_wait(machine):
        return False
    if machine.phase in (Phase.RUN, Phase.FORM):
        probe("a stop waits no longer for the end of a step")
        gather(machine, now_s, GatherWhy.STOPS, "the run stops, and not all ranks have come to the end of their step", in_person=False)
        stopping.answer_s = now_s + ANSWER_S
    if machine.phase != Phase.GATHER:
        return True
    if stopping.answer_s is None:
        stopping.answer_s = now_s + ANSWER_S
    if machine.roster.outstanding and now_s < stopping.answer_s:
        if now_s - machine.assembly.sent_s >= machine.settings.timeouts.resend_s:
            quiesce(machine, now_s)
        return True
    judge(machine, now_s)
    if machine.phase == Phase.GATHER:
        _keep(machine, stopping, now_s)
    return True


def _keep(machine: MachineState, stopping: Stop, now_s: float) -> None:
    """Have the newest state written by those who can, until it is durable, or none is left who could."""
    store = machine.checkpoints.store
    if stopping.asked and any(machine.current(member) is None for member in stopping.asked):
        probe("a rank is lost that keeps the state of a run that stops")
        machine.say(*store.abandoned(now_s))
    if store.pending:
        machine.say(*store.repeat(now_s))
        if store.pending:
            return
    state, members = _next_keepers(machine, stopping)
    if state is None or store.holds(state) or stopping.tries == TRIES:
        if state is not None and not store.holds(state):
            probe("a run stops and the state that its ranks hold is not kept")
        end(machine, stopping.why, stopping.reason, "", now_s)
        return
    machine.assembly.generation += 1
    stopping.asked = members
    if state > machine.committed and machine.view is not None and set(members) == set(machine.view.members):
        machine.committed = state
        machine.write(Committed(state, now_s))
    machine.say(*store.keep(members, machine.assembly.generation, state, now_s))


def _next_keepers(machine: MachineState, stopping: Stop) -> tuple[StateId | None, tuple[Member, ...]]:
    """A rank that was asked, and could not, is not asked again."""
    failed = machine.checkpoints.store.failures.by
    if stopping.asked and all(machine.current(member) is not None for member in stopping.asked):
        stopping.tries += 1
        stopping.could_not |= {failed} if failed in stopping.asked else set()
    stopping.asked = ()
    return keepers(machine, stopping.could_not)
