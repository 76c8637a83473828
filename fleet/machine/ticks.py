"""Checks at each tick: silence, hangs, the end of a grace, an outage of the store, and the run's own limits."""

from __future__ import annotations

from fleet.machine import coordinates, partitions
from fleet.machine.leaving import drop, end_hang, gather, inspect, judge_losses, node_lost, press
from fleet.machine.roster import STOOD_STILL, STOOD_STILL_S, Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.machine.stopping import stop
from fleet.machine.views import note_commits
from fleet.protocol.causes import EndWhy, GatherWhy, NoHeartbeat, NoProgress, NotReported
from fleet.protocol.decisions import Figures
from fleet.protocol.events import StopRequested, Tick
from fleet.protocol.probes import probe


def tick(machine: MachineState, event: Tick, now_s: float) -> None:
    """Give up nodes and ranks that were silent for too long, or do not move; call spares in their place; note commits."""
    gap_s, machine.uptime.ticked_s = now_s - machine.uptime.ticked_s, now_s
    if gap_s > min(STOOD_STILL_S, STOOD_STILL * machine.settings.timeouts.heartbeat_s):
        _excuse(machine, gap_s, now_s)
    if machine.liveness.grace_until_s is not None:
        settle(machine, now_s)
        return
    partitions.look_around(machine, now_s)
    limits, waits = machine.settings.timeouts, partitions.waits(machine)
    for node, cause, at_s in machine.roster.silent_nodes(limits, waits, now_s):
        node_lost(machine, node, cause, at_s, now_s)
    partitions.hold(machine, now_s)
    for rank, silence_s in machine.roster.silent_ranks(limits, now_s, by_its_agent=waits):
        end_hang(machine, rank, NoHeartbeat(silence_s), now_s)
    goes_on = machine.phase == Phase.RUN and machine.ending.stopping is None
    moves = goes_on and not (waits and machine.roster.unheard(STOOD_STILL_S, now_s))
    limit_s = machine.progress.ceiling_s if machine.roster.first_step else machine.progress.limit_s
    stuck = machine.roster.stuck_rank(limit_s, now_s) if moves else None
    if stuck is not None:
        _unstick(machine, stuck, now_s)
    if machine.phase == Phase.GATHER:
        press(machine, now_s)
    coordinates.call(machine, now_s)
    note_commits(machine, now_s)
    _look_at_limits(machine, now_s)


def _spend(machine: MachineState, now_s: float) -> bool:
    """Whether the run stops now because its budget is spent."""
    if machine.ending.stopping is not None:
        return False
    decision = machine.uptime.budget.tick(machine.settings, machine.uptime.held_s(now_s), now_s)
    if decision is None:
        return False
    machine.write(decision)
    if decision.action == "stop":
        stop(machine, StopRequested(decision.reason, why=EndWhy.BUDGET_SPENT), now_s)
    return decision.action == "stop"


def _excuse(machine: MachineState, gap_s: float, now_s: float) -> None:
    """The coordinator stood still, most likely with its whole machine. The silence meanwhile says nothing about other processes."""
    probe("the coordinator stood still")
    reason = f"the coordinator stood still for {gap_s:.1f} s: no silence counts"
    machine.decide("recovery", "excuse", reason, Figures({"gap_s": gap_s}), now_s)
    machine.roster.excuse(gap_s, now_s)
    machine.assembly.deadline_s += gap_s


def _unstick(machine: MachineState, rank: Rank, now_s: float) -> None:
    """No member of the view moves. Call all out: a rank that hangs does not answer. If all answer, and it happens again, evict ``rank``."""
    why = NoProgress(now_s - rank.progress_s, rank.state.step if rank.state is not None else -1)
    if machine.liveness.stuck_at == machine.committed:
        end_hang(machine, rank, why, now_s)
    else:
        probe("no member of a view moves")
        machine.liveness.stuck_at = machine.committed
        inspect(machine, str(why), now_s)
        gather(machine, now_s, GatherWhy.STUCK, str(why), rank.member, in_person=True)


def settle(machine: MachineState, now_s: float) -> None:
    """End the grace after a restart: ranks that reported are there, and the others are lost. A whole view goes on undisturbed."""
    ranks = machine.roster.in_order()
    waited = machine.liveness.grace_until_s is None or now_s >= machine.liveness.grace_until_s
    if not waited and machine.attendance.missing and not all(rank.reported and rank.phase != RankPhase.STARTING for rank in ranks):
        return
    machine.liveness.grace_until_s = None
    _mark(machine)
    judge_losses(machine, now_s)  # the last coordinator may have died with the verdict
    silent = {rank.process.node for rank in ranks} - machine.roster.nodes.keys()
    waits = partitions.waits(machine) or (waited and not machine.roster.nodes)
    if waits and silent:
        probe("a restarted coordinator waits for nodes that it has not heard")
    if waits:  # their silence counts from now on: when the last coordinator heard them is not known
        machine.roster.nodes.update(dict.fromkeys(silent, now_s - machine.settings.timeouts.node_s))
    for rank in ranks:
        if not rank.reported and not (waits and rank.process.node in silent):
            drop(machine, rank, NotReported(), now_s, now_s)
    if machine.phase == Phase.RUN and machine.attendance.missing:
        probe("a view is not whole after the coordinator restarts")
        gather(machine, now_s, GatherWhy.RESTARTED, "the coordinator restarted and the view is not whole")


def _mark(machine: MachineState) -> None:
    """Note probes on the work of the last coordinator when it died."""
    if machine.growth.proposal is not None:
        probe("the coordinator restarts within a proposal")
    if machine.ending.stopping is not None:
        probe("the coordinator restarts while the run stops")
    if machine.phase == Phase.CONCLUDE:
        probe("the coordinator restarts behind the loop")
    if machine.doubts.tainted is not None:
        probe("the coordinator restarts after steps were taken back")


def _look_at_limits(machine: MachineState, now_s: float) -> None:
    """Stop the run in order if the store has failed for too long, the budget is spent, or the run has taken too long."""
    tiers = machine.checkpoints
    training = machine.phase == Phase.RUN and not machine.attendance.finished  # a final checkpoint has a limit of tries
    decision = tiers.outage.tick(tiers.store, machine.committed, now_s) if training or tiers.store.failures.since_s is None else None
    if decision is not None:
        machine.write(decision)
    if _spend(machine, now_s):
        return
    limit_s = machine.settings.timeouts.run_s
    if decision is not None and decision.action == "stop":
        stop(machine, StopRequested(decision.reason, why=EndWhy.STORE_FAILED), now_s)
    elif limit_s is not None and now_s - machine.uptime.started_s > limit_s:
        stop(machine, StopRequested(f"it has run for timeouts.run_s = {limit_s:g} s", why=EndWhy.TIME_IS_UP), now_s)
