"""Actions against slow ranks: the policy judges the measured times, and this module alone carries out its answer."""

from __future__ import annotations

from dataclasses import replace

from fleet.machine.candidates import chunks_move
from fleet.machine.leaving import evict
from fleet.machine.proposals import reshare
from fleet.machine.roster import RankPhase
from fleet.machine.state import MachineState
from fleet.machine.stragglers import REVIEW_S
from fleet.protocol.causes import TooSlow
from fleet.protocol.decisions import Decision, Prices
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.slowness import ACTIONS, Circumstances, Remedy
from fleet.protocol.types import Formation, View, groups, shards_of
from fleet.settings.run import WINDOW_S


def tick(machine: MachineState, now_s: float) -> None:
    """While a view runs: ask the policy about new times, or when its last answer is no longer valid.

    Ranks of stages wait for each other, unit by unit: their times do not say which of them is slow.
    """
    slow, view = machine.stragglers, machine.view
    if slow.policy is None or view is None or machine.settings.staged:
        return
    timings = slow.timings(view, now_s)
    if timings is None and now_s < slow.review_s:
        return
    slow.acted_s = [at_s for at_s in slow.acted_s if now_s - at_s < WINDOW_S]
    seen = _judged(view, machine.settings.group)
    if timings is not None and seen is not view:
        rows = tuple(timings.rows[view.rank_of(member)] for member in seen.members)
        timings = replace(timings, members=seen.members, rows=rows)
    remedy = slow.policy.look(timings, _circumstances(machine, seen, now_s), now_s)
    slow.review_s = now_s + REVIEW_S if remedy.decision is None else remedy.decision.valid_until_s
    _write(machine, remedy, now_s)
    if remedy.decision is not None and remedy.decision.action in ACTIONS:
        _perform(machine, view, remedy, remedy.decision, now_s)


def _judged(view: View, group: int) -> View:
    """The view that the policy judges: the ranks that compute shards, or of each ``group`` of ranks that compute together the first alone.

    The ranks of a group wait for each other in each layer. So the times of one are those of all, and do not say which of them is slow.
    """
    first = view.computing if group == 1 else [each[0] for each in groups(view.members)]
    if len(first) == len(view.members):
        return view
    return replace(view, members=tuple(view.members[rank] for rank in first), ranges=tuple(view.ranges[rank] for rank in first))


def _circumstances(machine: MachineState, view: View, now_s: float) -> Circumstances:
    roster, slow, joined = machine.roster, machine.stragglers, set(view.members)
    nodes = tuple(roster.by_slot[member.slot].process.node for member in view.members)
    inside = machine.view.spares if machine.view is not None else ()
    standby = (
        rank for rank in roster.in_order() if rank.member in inside or (rank.phase == RankPhase.STANDBY and rank.member not in joined)
    )
    spares = tuple((rank.member, rank.process.node) for rank in standby if slow.admits(rank.process.node, now_s))
    left = max(0, slow.total - machine.committed.step) if slow.total else float("inf")
    rate_per_s = len(machine.losses.all) / max(now_s - machine.uptime.started_s, 1.0)
    return Circumstances(view, nodes, machine.settings.shards, spares, left, len(slow.acted_s), rate_per_s)


def _write(machine: MachineState, remedy: Remedy, now_s: float) -> None:
    """Journal the findings and the decision. A repeated decision to tolerate known slowness is not journalled."""
    for finding in remedy.findings:
        machine.write(DecisionMade("straggler", finding.action, finding.reason, finding.payload, now_s))
    decision = remedy.decision
    if decision is None or decision.action in ACTIONS:
        return
    said = (decision.action, isinstance(decision.payload, Prices) and decision.payload.limit is not None)
    if remedy.findings or said != machine.stragglers.said:
        machine.write(DecisionMade("straggler", decision.action, decision.reason, decision.payload, now_s))
    machine.stragglers.said = said


def _perform(machine: MachineState, view: View, remedy: Remedy, decision: Decision, now_s: float) -> None:
    """Change the view because of a slow rank. No other code does that. It waits for a checkpoint that is being written, and a rank does not
    go while chunks of a sharded state move."""
    slow = machine.stragglers
    if remedy.members and machine.settings.group > 1:
        probe("no rank of a slow group is exchanged")
        return
    if machine.checkpoints.pending or (remedy.members and chunks_move(machine, view)):
        probe("an action against a slow rank waits for a checkpoint")
        slow.review_s = now_s
        return
    slow.said = (decision.action, False)
    slow.acted_s.append(now_s)
    prices = decision.payload if isinstance(decision.payload, Prices) else Prices({})
    if decision.action == "rebalance":
        slow.speeds = dict(remedy.speeds)
        prices = replace(prices, speeds=tuple(((member.slot, member.incarnation), speed) for member, speed in remedy.speeds))
    ranks = [rank for member in remedy.members if (rank := machine.current(member)) is not None]
    if decision.action == "evict":
        probe("a slow rank is evicted")
        left_s = REVIEW_S if prices.expected_left_s is None else prices.expected_left_s
        shunned = {rank.process.node: now_s + left_s for rank in ranks}
        slow.shunned |= shunned
        prices = replace(prices, shunned=tuple(shunned.items()))
    machine.write(DecisionMade("straggler", decision.action, decision.reason, prices, now_s))
    if decision.action == "rebalance":
        ranges = shards_of(view.members, len(view.computing), machine.settings.shards, lambda groups: remedy.ranges)
        reshare(machine, ranges, Formation(Decision("reshare", decision.reason), view.members), now_s)
    for rank in ranks:
        evict(machine, rank, TooSlow("evict" if decision.action == "evict" else "replace", decision.reason), now_s)
