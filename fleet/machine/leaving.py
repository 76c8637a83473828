"""From the loss of a rank until all members have left the view: losses, and the call to gather.

The machine forgets a lost rank at once (``drop``). If the rank was in the view, the others are called out of it (``gather``). Each reports
its state (``quiesced``), or is given up when its time is over (``press``). ``views.py`` has the next part.
"""

from __future__ import annotations

from fleet.machine import topology
from fleet.machine.end import end
from fleet.machine.losses import NOWHERE, StepPlace
from fleet.machine.roster import STOOD_STILL_S, Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import (
    AgentHungUp,
    Cause,
    Departure,
    DidNotLeave,
    EndWhy,
    Evicted,
    GatherWhy,
    GivenUp,
    NodeCause,
    Rule,
    Superseded,
    TakenAway,
    TrainRaised,
    incident,
)
from fleet.protocol.decisions import Gathering, OfView
from fleet.protocol.events import Heartbeat, NodeLost, NodeSilent, Quiesced, Raised
from fleet.protocol.facts import FaultRecord, LossExplained, ProcessLost, noted
from fleet.protocol.instructions import Cancel, Evict, Inspect, Quiesce
from fleet.protocol.probes import probe
from fleet.protocol.topology import asked
from fleet.protocol.types import Member

LOOP, RAISED = "a mistake of the train function, not the hardware", "the train function raised"

# ---- losses ------------------------------------------------------------------------------------------------------------------------------


def lost(machine: MachineState, event: ProcessLost, now_s: float) -> None:
    """The agent reports the end of a rank's process."""
    rank = machine.current(event.member)
    machine.roster.condemned.pop(event.member, None)
    if rank is not None:
        cause = _announced(machine, rank, event.cause)
        drop(machine, rank, cause, event.at_s, now_s, event.detail, where=(event.step, event.shard))
        machine.roster.condemned.pop(event.member, None)


def given_up(machine: MachineState, event: NodeLost, now_s: float) -> None:
    """An event reports the loss of a node."""
    node_lost(machine, event.node, event.cause, event.at_s, now_s)


def node_lost(machine: MachineState, node: str, cause: NodeCause, at_s: float, now_s: float) -> None:
    """A node is gone with all its ranks."""
    ranks = [rank for rank in machine.roster.by_slot.values() if rank.process.node == node]
    causes = [(rank, _announced(machine, rank, cause)) for rank in ranks]
    path = machine.roster.domains.get(node, "")
    machine.roster.gone(node)
    counted = path or (node if machine.settings.group > 1 else "")
    for rank, why in causes:
        drop(machine, rank, why, at_s, now_s, path=counted)
    if machine.phase != Phase.END:
        topology.node_gone(machine, node, path, now_s)


def _announced(machine: MachineState, rank: Rank, cause: Cause) -> Cause:
    """The cause of a loss. If the rank's node was announced to go, and the rank had left the view, the loss is expected."""
    roster, node = machine.roster, rank.process.node
    released = node in roster.released or rank.member not in machine.attendance.members
    return TakenAway() if node in roster.leaving and released else cause


def hung_up(machine: MachineState, event: NodeSilent, now_s: float) -> None:
    """The connection of a node's agent has ended. After a silence that proves nothing: a cut can end a connection, and the agent lives."""
    node = event.node
    if node in machine.roster.late or node in machine.roster.unheard(STOOD_STILL_S, now_s):
        probe("an old line breaks after a silence")
        return
    machine.roster.silent[node] = event.at_s
    if machine.phase == Phase.GATHER and machine.liveness.grace_until_s is None:
        press(machine, now_s)


def explained(machine: MachineState, event: LossExplained, now_s: float) -> None:
    """The agent reports later how a lost process ended."""
    if machine.current(event.member) is None:
        machine.write(noted(event, now_s))


def raised(machine: MachineState, event: Raised, now_s: float) -> None:
    """A rank's train function raised: the rank is replaced, once. If it raises again at that step, or before any step, the run ends.

    A mistake that any other process would make, too, ends the run at once.
    """
    rank = machine.current(event.member)
    if rank is None:
        return
    if event.mistake:
        end(machine, EndWhy.LOOP_WRONG, f"{LOOP}: {event.error}", event.traceback, now_s)
    elif machine.phase == Phase.CONCLUDE:
        end(machine, EndWhy.RAISED_BEHIND, f"{RAISED} behind the loop in slot {event.member.slot}: {event.error}", event.traceback, now_s)
    elif machine.losses.raised_before(event.step) or machine.committed.step == 0:
        where = f"step {event.step}" if event.step >= 0 else "start-up"
        end(machine, EndWhy.TRAIN_RAISED, f"{RAISED} at {where} in slot {event.member.slot}: {event.error}", event.traceback, now_s)
    else:
        cause = TrainRaised(event.error)
        machine.say(Evict(rank.member, rank.process, cause))
        drop(machine, rank, cause, now_s, now_s, event.traceback, where=(event.step, event.shard))


def evict(machine: MachineState, rank: Rank, why: Rule, now_s: float) -> None:
    """Have a rank's process killed, by the rule ``why``. The rank counts as lost from now on."""
    if machine.phase == Phase.END:
        return
    machine.say(Evict(rank.member, rank.process, why))
    drop(machine, rank, Evicted(why), now_s, now_s)


def end_hang(machine: MachineState, rank: Rank, why: Rule, now_s: float) -> None:
    """Have the stacks of all ranks recorded, then evict ``rank``."""
    inspect(machine, str(why), now_s)
    evict(machine, rank, why, now_s)


def heartbeat(machine: MachineState, event: Heartbeat, now_s: float) -> None:
    """Take in an agent's heartbeat. Evict ranks that were given up and still live, so that none lives beside its replacement."""
    generation = machine.view.generation if machine.view is not None else -1
    for stale in machine.roster.receive(event, generation, machine.progress.ceiling_s, now_s):
        probe("a rank that was given up lives on")
        machine.say(Evict(stale.member, stale.process, GivenUp()))


def injected(machine: MachineState, event: FaultRecord, now_s: float) -> None:
    """``aimed`` comes right before the fault, so that a death right after it counts as injected. It is not journalled."""
    machine.losses.aimed(event, tuple(member for member in event.members if machine.current(member)))
    if event.phase != "aimed":
        machine.write(event)


# ---- consequences ------------------------------------------------------------------------------------------------------------------------


def drop(
    machine: MachineState, rank: Rank, cause: Cause, at_s: float, now_s: float, detail: str = "", path: str = "", where: StepPlace = NOWHERE
) -> None:  # fmt: skip
    """Forget a rank; if it was in the view, the others must gather.

    ``path``: the domain path of its node, if the node is lost, too. ``where``: the rank's step and shard, as far as known.
    """
    member = rank.member
    if machine.phase == Phase.END or machine.current(member) is None:
        return
    machine.roster.remove(rank)
    joined = member in machine.attendance.members
    generation = machine.view.generation if machine.view is not None and joined else -1
    domain = path if asked(machine.settings.domains) or machine.settings.group > 1 else ""
    machine.write(machine.losses.lost(rank, cause, at_s, generation, machine.committed.step, detail, domain, where))
    if incident(cause) or cause == Evicted(Superseded()):  # the new process may report before the old one's silence shows
        machine.losses.note(rank, joined, now_s)
    if incident(cause):
        machine.checkpoints.lost(now_s)
    if joined and machine.phase == Phase.FORM:
        probe("a rank is lost while its view forms")
    if joined and machine.phase in (Phase.RUN, Phase.FORM):
        gather(machine, now_s, GatherWhy.LOST, f"rank {member} lost: {cause}", member, in_person=False)
    elif machine.growth.proposal is not None and member in machine.growth.proposal.members:
        probe("a newcomer is lost before its view is entered")
        cancel(machine, now_s, f"newcomer {member} lost: {cause}")
    judge_losses(machine, now_s)


def judge_losses(machine: MachineState, now_s: float) -> None:
    """End the run when its losses say that it cannot go on: a crash loop."""
    if not machine.losses.all:
        return
    decision = machine.policies.recovery.judge(machine.losses.all, now_s)
    if decision.action == "give_up":
        machine.decide("recovery", decision.action, decision.reason, decision.payload, now_s)
        end(machine, EndWhy.CRASH_LOOP, decision.reason, machine.losses.all[-1].detail, now_s)


def gather(
    machine: MachineState, now_s: float, why: GatherWhy, reason: str, about: Member | None = None, *, in_person: bool | None = None
) -> None:
    """Call all members out of the view to report their states. In person where a loop may hang: no view forms, or no member moves."""
    machine.assembly.in_person = machine.phase == Phase.FORM if in_person is None else in_person
    payload = Gathering(why, (about.slot, about.incarnation) if about is not None else None)
    machine.decide("recovery", "gather", reason, payload, now_s)
    if machine.phase == Phase.RUN:
        machine.assembly.since_s = now_s
    machine.phase = Phase.GATHER
    if machine.growth.proposal is not None:
        probe("a proposal falls with the view that was to change")
        machine.growth.proposal = None
    machine.assembly.deadline_s = now_s + machine.settings.timeouts.quiesce_s
    machine.say(*machine.checkpoints.abandoned(now_s))
    quiesce(machine, now_s)
    if machine.liveness.grace_until_s is None:
        press(machine, now_s)


def quiesce(machine: MachineState, now_s: float) -> None:
    """Tell all ranks that may still step in a view to leave it. The machine repeats this until they have."""
    machine.assembly.sent_s = now_s
    if members := tuple(machine.roster.by_slot[slot].member for slot in sorted(machine.roster.outstanding)):
        machine.say(Quiesce(members, machine.assembly.generation, machine.assembly.in_person))


def press(machine: MachineState, now_s: float) -> None:
    """Give up ranks that have not reported that they left, if their node is gone or their time is up."""
    for slot in sorted(machine.roster.outstanding):
        rank = machine.roster.by_slot.get(slot)
        node = rank.process.node if rank is not None else ""
        if node in machine.roster.silent:
            node_lost(machine, node, AgentHungUp(missed=True), machine.roster.silent[node], now_s)
        elif rank is not None and now_s >= machine.assembly.deadline_s:
            end_hang(machine, rank, DidNotLeave(), now_s)


def quiesced(machine: MachineState, event: Quiesced, now_s: float) -> None:
    """A rank has left its generation. If that is the present view's, the others have to leave it, too."""
    rank = machine.current(event.member)
    if rank is None or event.generation < rank.generation:
        return  # a later message of the same rank came first
    rank.phase, rank.state, rank.dirty, rank.generation = RankPhase.STANDBY, event.state, event.dirty, event.generation
    rank.beat_s, rank.reported, rank.engaged = now_s, True, event.engaged
    machine.assembly.learn(event.generation, event.state)
    machine.doubts.receive(event)
    machine.roster.quiesced(rank, event.generation)
    view, proposal = machine.view, machine.growth.proposal
    if event.why is Departure.INCOMPLETE:
        found_in = next((known for known in (view, proposal) if known is not None and known.generation == event.generation), None)
        if found_in is not None:
            machine.assembly.incomplete, machine.assembly.incomplete_in = frozenset(found_in.members), event.generation
    elif event.generation > machine.assembly.incomplete_in and event.member in machine.assembly.incomplete:
        probe("a rank that lacked some of the state may have got it in a later view")
        machine.assembly.incomplete -= {event.member}
    runs = machine.phase in (Phase.RUN, Phase.FORM) and view is not None and event.generation >= view.generation
    runs = runs and event.why is not Departure.STANDS_BY  # the others are in the view that was proposed, and will say so
    if runs and event.member in machine.attendance.members:
        reason = f"rank {event.member} left generation {event.generation}: {event.detail or event.why}"
        gather(machine, now_s, GatherWhy.LEFT, reason, event.member)
    elif proposal is not None and event.generation >= proposal.generation and event.member in proposal.members:
        probe("a newcomer cannot form its view")
        cancel(machine, now_s, f"newcomer {event.member} could not form it: {event.detail or event.why}")


def cancel(machine: MachineState, now_s: float, reason: str) -> None:
    """Forget the proposal. If members have entered it already, they will report that."""
    assert machine.growth.proposal is not None
    proposal, machine.growth.proposal = machine.growth.proposal, None
    machine.decide("recovery", "cancel", f"generation {proposal.generation}: {reason}", OfView(proposal.generation), now_s)
    joined = machine.view.members if machine.view else ()
    machine.growth.not_before_s = now_s + machine.settings.timeouts.resend_s
    machine.say(Cancel(joined, proposal.generation))
    newcomers = tuple(member for member in proposal.members if member not in joined and machine.current(member))
    if newcomers:
        machine.say(Quiesce(newcomers, proposal.generation))


def inspect(machine: MachineState, reason: str, now_s: float) -> None:
    """Have the agents record the stacks of all ranks in the view, before they evict any."""
    ranks = [machine.current(member) for member in (machine.view.members if machine.view else ())]
    nodes = sorted({rank.process.node for rank in ranks if rank is not None})
    hangs = machine.liveness.hangs
    if nodes and hangs.wanted(now_s):
        machine.say(Inspect(tuple(nodes), f"hang-{hangs.number}", reason))
