"""How a run stops in order: its ranks agree on a last step and wait behind it, their state is kept, and the run ends.

A request to stop leads to ``Halt`` in each view that runs. All members finish, as behind the run's last step (``ending.py``). Once their
state is durable, END follows. So the checkpoint has every committed step. If a rank is lost on the way, the next view halts.

The run waits for ranks without a view, or within a step, as long as the grace allows. Then all ranks are called out. Ranks that hold the
newest state get ``Keep``, and write it beside their loops. Once it is durable, END follows. The run does not wait for a store that fails.
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
"""The run ends so many seconds before the end of the grace. In the rest, its processes and its cluster end, and the report is written."""
ANSWER_S = 1.0
"""Seconds for ranks to report their states. The listening thread answers for a loop that computes."""
WRITE, WRITE_S = 2.0, 1.0
"""The time for a checkpoint: so many times the usual latency, which counts as at least so many seconds."""
TRIES = 3
"""How often ranks are asked to write the state, when one of them cannot."""


def stop(machine: MachineState, event: StopRequested, now_s: float) -> None:
    """End a run that has failed at once, and any other run in order."""
    if event.error:
        end(machine, EndWhy.DRIVER_FAILED if event.why is EndWhy.STOPPED else event.why, event.reason, event.error, now_s)
    elif machine.ending.stopping is None:
        machine.decide("ending", "stop", event.reason, Stopping(event.why), now_s)
        machine.ending.stopping = stopping = Stop(event.why, event.reason)
        give_time(machine, stopping, now_s)
        if machine.phase == Phase.GATHER and machine.assembly.in_person:
            probe("a run is told to stop while its ranks are called out in person")
            machine.assembly.in_person = False  # its state is enough, and the listening thread of a hanging rank can report that
            quiesce(machine, now_s)


def give_time(machine: MachineState, stopping: Stop, now_s: float) -> None:
    """Begin the grace: at the request to stop, and again when a coordinator restarts."""
    stopping.until_s, stopping.kept_s = now_s + patience_s(machine), now_s + write_s(machine)


def patience_s(machine: MachineState) -> float:
    """Seconds until all ranks have to wait. The rest of the grace is for answers and for writing."""
    return max(0.0, write_s(machine) - ANSWER_S - WRITE * max(machine.checkpoints.store.latency_s, WRITE_S))


def write_s(machine: MachineState) -> float:
    """Seconds after the request to stop in which a run may write its ranks' state."""
    return max(0.0, machine.settings.timeouts.grace_s - LEAVE_S)


def waits_unasked(machine: MachineState, now_s: float) -> None:
    """Ranks have halted by an order that the journal has lost: the run stops, and is not completed."""
    if machine.ending.stopping is None:
        stop(machine, StopRequested("it was told to stop"), now_s)


def halt(machine: MachineState, now_s: float) -> None:
    """Tell all members of the running view to halt. The machine repeats this until they wait."""
    view, stopping = machine.view, machine.ending.stopping
    assert view is not None and stopping is not None
    if stopping.generation != view.generation or now_s - stopping.sent_s >= machine.settings.timeouts.resend_s:
        stopping.generation, stopping.sent_s = view.generation, now_s
        machine.say(Halt(view.members, view.generation))


def is_over(machine: MachineState, stopping: Stop, now_s: float) -> bool:
    """Whether the stop is complete, and waits for nothing any more."""
    store = machine.checkpoints.store
    if _all_wait(machine):
        note_commits(machine, now_s)  # the last step of the waiting ranks may have been reported just now
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
    """Whether the wait for ranks is over. Then ranks write their state beside their loops, and the run ends."""
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
    """Have ranks write the newest state, until it is durable, or until no rank is left that can."""
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
    """The ranks to ask next. A rank that was asked, and could not, is not asked again."""
    failed = machine.checkpoints.store.failures.by
    if stopping.asked and all(machine.current(member) is not None for member in stopping.asked):
        stopping.tries += 1
        stopping.could_not |= {failed} if failed in stopping.asked else set()
    stopping.asked = ()
    return keepers(machine, stopping.could_not)
