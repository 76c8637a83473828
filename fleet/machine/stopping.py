"""How a run of ``FleetMachine`` stops in order: its ranks agree on a last step, wait behind it, what they hold is kept, and the run ends.

It is told to stop -> ``Halt``, in each view that runs -> all members have finished, as behind the run's last step (``ending.py``) -> their
state is durable -> END. So no step is committed that the checkpoint does not have. When a rank is lost on the way, the next view halts.
Only what cannot be kept is not waited for: ranks that do not come together, or to the end of a step, in time, and a store that fails.
"""

from __future__ import annotations

from fleet.machine.end import end
from fleet.machine.state import MachineState, Phase, Stop
from fleet.machine.views import note_commits
from fleet.protocol.causes import EndWhy
from fleet.protocol.decisions import Stopping
from fleet.protocol.events import StopRequested
from fleet.protocol.instructions import Halt
from fleet.protocol.probes import probe

STEPS = 2
"""A step that has begun, and another one: not all ranks hear of it in the same."""


def stop(machine: MachineState, event: StopRequested, now_s: float) -> None:
    """End at once what has failed already; else in order."""
    if event.error:
        end(machine, EndWhy.DRIVER_FAILED, event.reason, event.error, now_s)
    elif machine.stopping is None:
        machine.decide("ending", "stop", event.reason, Stopping(event.why), now_s)
        machine.stopping = Stop(event.why, event.reason, now_s + patience_s(machine))


def patience_s(machine: MachineState) -> float:
    """How long ranks may take until all of them wait."""
    return machine.settings.timeouts.park_s + STEPS * max(machine.stragglers.steps_s, default=0.0)


def waits_unasked(machine: MachineState, now_s: float) -> None:
    """Ranks have halted that were told so by a coordinator whose journal has lost it: the run does not go on, and is not completed."""
    if machine.stopping is None:
        stop(machine, StopRequested("it was told to stop"), now_s)


def halt(machine: MachineState, now_s: float) -> None:
    """Tell all members of the view that runs; repeated until they wait."""
    view, told = machine.view, machine.stopping
    assert view is not None and told is not None
    if told.generation != view.generation or now_s - told.sent_s >= machine.settings.timeouts.resend_s:
        told.generation, told.sent_s = view.generation, now_s
        machine.say(Halt(view.members, view.generation))


def is_over(machine: MachineState, now_s: float) -> bool:
    """Whether there is nothing that a stop still waits for."""
    assert machine.stopping is not None
    late, store = now_s > machine.stopping.until_s, machine.checkpoints.store
    if late:
        probe("a stop waits no longer")
    if machine.phase == Phase.RUN and machine.view is not None and len(machine.finished) == len(machine.view.members):
        note_commits(machine, now_s)  # what they wait behind may have been heard of just now
        return store.holds(machine.committed) or store.lost_final or (late and store.failing_since_s is not None)
    # A coordinator that was away may not have heard of steps that its ranks have taken.
    held = [rank.state.step for rank in machine.roster.in_order() if rank.state is not None]
    untouched = max([machine.committed.step, *held, machine.view.state.step if machine.view is not None else 0]) == 0
    return late or machine.phase == Phase.CONCLUDE or (machine.phase in (Phase.GATHER, Phase.FORM) and untouched)
