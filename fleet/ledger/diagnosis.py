"""The causes of a run's cost: symptom, metric, term of the step, layer, remedy, place to which the cost moves, and evidence.

A pure function of the ledger. Every sentence has the figures that it rests on, and guesses nothing that a ledger does not show. ``where``
is the term of the Fleet Law with the time (see ``fleet.ledger.step_law``); the layer is the part to change. They may differ: ranks that
wait for a slow rank are coordination, and the part to mend computes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.laws import fleet_law
from fleet.laws.checkpointing import exact_work_s
from fleet.ledger.report import duration, rank_time
from fleet.ledger.step_law import (
    COMMUNICATION,
    COMPUTE,
    COORDINATION,
    OF_CATEGORY,
    STEP_NAMES,
    StepLaw,
    hidden_words,
    in_shares,
    plain_shares,
)
from fleet.ledger.summary import LedgerSummary

DATA, STORAGE, SCHEDULING, MEMBERSHIP, JOURNAL = "data", "storage", "scheduling", "membership", "journal"
LAYER_OF: Mapping[str, str] = {
    "straggler_wait": COMPUTE, "garbage_collection": COMPUTE, "verify": COMPUTE, "losses": COMPUTE, "exposed_comm": COMMUNICATION,
    "restore": COMMUNICATION, "data_wait": DATA, "checkpoint_stall": STORAGE, "rework": STORAGE, "finish": STORAGE,
    "provision": SCHEDULING, "idle_spare": SCHEDULING, "maintenance": SCHEDULING, "group_wait": SCHEDULING, "init": SCHEDULING,
    "detect": MEMBERSHIP, "reform": MEMBERSHIP, "other": JOURNAL,
}  # fmt: skip
"""Metric -> the layer of the system whose cost it is."""
TERM_NAMES = {"T_compute": "computing", "T_comm": "communication that nothing hides", "T_sync": "coordination"}
NOTABLE = 0.01
"""The diagnosis leaves out smaller shares of all rank-seconds, but always names the largest loss."""
UNEVEN = 1.5
"""A slot that waits this many times less than the others is the one that they wait for."""
OFTEN = 3
"""From so many losses of one slot on, the diagnosis suspects the place and not bad luck."""


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """One cost in time.

    ``share``: of all allocated rank-seconds that have a category. ``metric``: the category or figure that shows it. ``layer``: the part of
    the system's layer (``system``) that causes it. ``moves_to``: the cost that grows with the remedy; no remedy is free.
    """

    symptom: str
    metric: str
    share: float
    layer: str
    remedy: str
    moves_to: str
    evidence: tuple[str, ...]

    @property
    def where(self) -> str:
        """Compute, communication or coordination."""
        return OF_CATEGORY.get(self.metric, COORDINATION)

    @property
    def system(self) -> str:
        """The layer of the system: compute, communication, data, storage, scheduling, membership or the journal."""
        return LAYER_OF[self.metric]


def diagnose(summary: LedgerSummary) -> tuple[TimeFinding, ...]:
    """The largest costs of the run, dearest first. Empty for a run without losses."""
    found = [rule(summary) for rule in RULES]
    ranked = sorted((finding for finding in found if finding is not None and finding.share > 0), key=lambda each: -each.share)
    notable = [finding for finding in ranked if finding.share >= NOTABLE] or ranked[:1]
    return (*notable, *_places(summary))


def _of_all(summary: LedgerSummary, rank_s: float) -> float:
    """``rank_s`` as a share of all rank-seconds that have a category."""
    return rank_s / summary.decided_s if summary.decided_s > 0 else 0.0


def _finding(
    summary: LedgerSummary, metric: str, symptom: str, layer: str, remedy: str, moves_to: str, *evidence: str, part_s: float | None = None
) -> TimeFinding:
    """About the time of a category, or of ``part_s`` seconds of it. The evidence begins with that time."""
    spent_s = summary.categories[metric] if part_s is None else part_s
    share = _of_all(summary, spent_s)
    spent = f"{metric} took {rank_time(spent_s)} of all {rank_time(summary.decided_s)} that the ranks had ({share:.1%})."
    return TimeFinding(symptom, metric, share, layer, remedy, moves_to, (spent, *evidence))


# ---- steps -------------------------------------------------------------------------------------------------------------------------------


def _slow_rank(summary: LedgerSummary) -> TimeFinding:
    waits = _waits(summary)
    slowest = min(waits, key=lambda slot: waits[slot], default=None)
    others = [wait for slot, wait in waits.items() if slot != slowest]
    layer, said = "the batch: shards that take unequal time", "All slots wait about as long as each other, so none of them is the slow one."
    if slowest is not None and others and statistics.median(others) > UNEVEN * waits[slowest]:
        layer = f"the node of slot {slowest}"
        said = f"Slot {slowest} waited {waits[slowest]:.1%} of its steps for others, the others {statistics.median(others):.1%}."
    return _finding(
        summary, "straggler_wait", "Ranks wait for the slowest of them.", layer,
        "Give the slow rank fewer shards, or put a spare in its place.",
        "to exposed_comm, as uneven shards send more partial sums; to idle_spare, when a spare is used up", said,
    )  # fmt: skip


def _waits(summary: LedgerSummary) -> dict[int, float]:
    """Share of each slot's steps in which it waited for slower ones; slots without steps are left out."""
    totals = {slot: sum(row[name] for name in STEP_NAMES) for slot, row in enumerate(summary.slots)}
    return {slot: summary.slots[slot]["straggler_wait"] / total for slot, total in totals.items() if total > 0}


def _wire(summary: LedgerSummary) -> TimeFinding:
    law = summary.law
    overlap = _overlap(law) if summary.step_law is not None else []
    rho = law.exposed_s / law.compute_s if law.compute_s else 0.0
    part = f"{law.exposed_s / (sum(law.parts_s) or 1.0):.0%} of a step."
    return _finding(
        summary, "exposed_comm", "Ranks wait for the network.", "the reduction of gradients",
        "Compute more between two reductions (a larger batch), or let them overlap with the backward pass.",
        "to memory, for the larger batch or the buffers in flight",
        f"A rank's step has {duration(law.exposed_s)} of communication that nothing hides, beside {duration(law.compute_s)} of compute.",
        f"rho = {rho:.2f}: {'a step waits for communication.' if rho > 1 else part}", *overlap,
    )  # fmt: skip


def _overlap(law: StepLaw) -> list[str]:
    """The hidden part of the exchange, and the gain from hiding all that compute can hide."""
    said = [f"{hidden_words(law).capitalize()}."]
    speedup = {lever.name: lever.speedup for lever in _levers(law)}.get("T_overlap", 1.0)
    return [*said, f"With all hidden that computing can hide, steps would be {speedup:.2f} times as fast."] if speedup > 1.005 else said


def _levers(law: StepLaw) -> list[fleet_law.TermChange]:
    """The gain from each term of the step; empty for a step of no time."""
    return fleet_law.levers(law.compute_s, law.comm_s, law.sync_s, law.hidden_s) if law.step_s > 0 else []


def attack(law: StepLaw) -> str:
    """The term of the Fleet Law that costs a step most beside computing."""
    return fleet_law.term_to_attack(law.compute_s, law.comm_s, law.sync_s, law.hidden_s)


def _data(summary: LedgerSummary) -> TimeFinding:
    return _finding(
        summary, "data_wait", "Ranks wait for data.", "the feed: storage and decoding",
        "Fetch further ahead, or keep the samples nearer.", "to memory and to the disks of the nodes",
        f"A rank's step waits {duration(summary.law.data_s)} for its samples.",
    )  # fmt: skip


def _garbage(summary: LedgerSummary) -> TimeFinding:
    return _finding(
        summary, "garbage_collection", "Python collects garbage in the loop's thread.", "objects that the script makes",
        "Make fewer objects a step, and make those that last before the loop begins: they are not looked through again.", "to nothing else",
        f"A rank's step has {duration(summary.law.garbage_s)} of it.",
    )  # fmt: skip


# ---- checkpoints -------------------------------------------------------------------------------------------------------------------------


def _interval(summary: LedgerSummary) -> list[str]:
    """Compares the interval in use with the optimum for the measured figures."""
    every_s, blocked_s, losses = summary.checkpoint_interval_s, summary.checkpoint_blocked_s, summary.in_view_losses
    if every_s is None or not blocked_s or not losses:
        return []
    mtbf_s = summary.held_s / losses
    best_s = float(exact_work_s(blocked_s, mtbf_s)) + blocked_s
    used = f"A checkpoint blocks for {duration(blocked_s)} and is written every {duration(every_s)}; "
    return [f"{used}if each of the losses, one every {duration(mtbf_s)}, needed it, every {duration(best_s)} would be best."]


def _checkpoints(summary: LedgerSummary) -> TimeFinding:
    written = summary.checkpoints_by_phase.get("durable", 0)
    return _finding(
        summary, "checkpoint_stall", "Steps stop for checkpoints.", "snapshots and the store",
        "Write them less often, or make the snapshot cheaper.", "to rework, as a fault that needs one loses more steps",
        f"{written} checkpoints became durable.", *_interval(summary),
    )  # fmt: skip


def _rework(summary: LedgerSummary) -> TimeFinding:
    layer, remedy, moves_to = "the step", "Make steps shorter.", "to exposed_comm, as shorter steps reduce as much"
    evidence = _by_fault(summary, "rework")
    if summary.rolled_back_total:
        layer, remedy = "checkpoints", "Write checkpoints more often, or keep a copy in other ranks."
        moves_to = "to checkpoint_stall"
        evidence += [f"{summary.rolled_back_total:,} committed steps were rolled back to a checkpoint.", *_interval(summary)]
    return _finding(summary, "rework", "Work is done twice.", layer, remedy, moves_to, *evidence)


# ---- faults ------------------------------------------------------------------------------------------------------------------------------


def _by_fault(summary: LedgerSummary, name: str) -> list[str]:
    """The faults that cost most of ``name``."""
    costs = [(incident.cost[name], incident) for incident in summary.incidents if incident.cost.get(name, 0.0) > 0]
    if not costs:
        return []
    worst_s, worst = max(costs, key=lambda pair: pair[0])
    each = sum(cost for cost, _ in costs) / len(costs)
    count = f"{len(costs)} faults cost {rank_time(each)} of it each" if len(costs) > 1 else "One fault has a part in it"
    return [f"{count}; the dearest is {worst.id} ({worst.kind}) with {rank_time(worst_s)}."]


def _of_faults(name: str, symptom: str, layer: str, remedy: str, moves_to: str) -> Callable[[LedgerSummary], TimeFinding]:
    return lambda summary: _finding(summary, name, symptom, layer, remedy, moves_to, *_by_fault(summary, name))


def _cold(summary: LedgerSummary) -> TimeFinding:
    """Slots that wait for their first process: no spare helps there."""
    started = "the run started"
    if again := sum(incident.down_s > 0 for incident in summary.incidents):
        started += f" and was resumed {again} time{'s' if again > 1 else ''}"
    return _finding(
        summary, "provision", "The cluster takes long to start.", "start-up: the cluster and its first processes",
        "Use a cluster that is up already (fleet cluster up, fleet cluster submit), or run longer.",
        "to machines that are held while nothing runs on them",
        f"All of it was before a slot had its first process, as {started}.", part_s=summary.cold_provision_s,
    )  # fmt: skip


def _empty(summary: LedgerSummary) -> TimeFinding:
    idle = _of_all(summary, summary.categories["idle_spare"])
    spares = f"{summary.spares} spares stood by, idle for {idle:.1%} of all rank-seconds." if summary.spares else "There was no spare."
    return _finding(
        summary, "provision", "Slots stand empty after a loss.", "the scheduler: replacing lost ranks",
        "Keep a spare more, or make replacements start faster.", "to idle_spare, which is paid for whether a fault comes or not",
        *_by_fault(summary, "provision"), spares, part_s=summary.categories["provision"] - summary.cold_provision_s,
    )  # fmt: skip


def _spares(summary: LedgerSummary) -> TimeFinding | None:
    if not summary.spares or summary.in_view_losses:
        return None
    return _finding(
        summary, "idle_spare", "Spares stand by.", "capacity", "Keep fewer spares, if the fleet is as quiet as this run.",
        "to provision, when a rank is lost after all", "No rank was lost from the view, so that no spare was needed.",
    )  # fmt: skip


def _start(summary: LedgerSummary) -> TimeFinding:
    again = sum(incident.init_s for incident in summary.incidents)
    return _finding(
        summary, "init", "Processes take long to start.", "start-up: imports, building the model",
        "Run longer, import less, or fork ranks from a warm process.", "to memory of the nodes, for processes kept warm",
        f"{rank_time(again)} of it are replacements of lost ranks.",
    )  # fmt: skip


def _verification(summary: LedgerSummary) -> TimeFinding:
    compute = summary.categories["compute"]
    share = [f"That is {summary.categories['verify'] / compute:.1%} of the steps' compute."] if compute else []
    return _finding(
        summary, "verify", "Ranks check each other's work.", "the defence against silent corruption",
        "Compute fewer shards again (--verify), if the nodes are trusted.",
        "to rework: a rank that computes wrongly is found later, and more steps are in doubt", *share,
    )  # fmt: skip


def _unexplained(summary: LedgerSummary) -> TimeFinding:
    return _finding(
        summary, "other", "Time without a record.", "the journal",
        "Look at which slots have holes, and when: a node that died takes its last moments along.", "nowhere: it was lost anyway",
        f"{summary.holes} holes of {duration(summary.hole_s)} in the ranks' records.",
    )  # fmt: skip


def _places(summary: LedgerSummary) -> list[TimeFinding]:
    """Slots that are lost again and again, not through chaos."""
    natural = [i for i in summary.incidents if i.id.startswith("loss-")]
    lost = Counter(member.partition(".")[0] for incident in natural for member in incident.members)
    found = []
    for slot, count in lost.most_common():
        if count < OFTEN or count < 0.5 * len(natural):
            continue
        cost = sum(i.cost_s for i in natural if any(member.startswith(f"{slot}.") for member in i.members))
        said = f"Slot {slot} was lost {count} times of {len(natural)} losses that chaos did not cause, at {rank_time(cost)} in all."
        found.append(
            TimeFinding(
                "One place fails again and again.", "losses", _of_all(summary, cost), f"the node of slot {slot}",
                "Keep its node out of the run, and have it tested.", "to provision, until another node is there", (said,),
            )
        )  # fmt: skip
    return found


RULES: tuple[Callable[[LedgerSummary], TimeFinding | None], ...] = (
    _slow_rank, _wire, _data, _garbage, _checkpoints, _rework, _cold, _empty,
    _of_faults("maintenance", "Slots stand empty as nodes are taken away.",
               "the scheduler: maintenance, and machines that a cloud takes back", "Keep a spare more, or have nodes come back earlier.",
               "to idle_spare, which is paid for whether a node goes or not"),
    _of_faults("group_wait", "Ranks wait until their group is whole.", "the scheduler: replacing lost ranks of a group",
               "Keep a spare more, or divide a shard over fewer ranks.", "to idle_spare, which is paid for whether a fault comes or not"),
    _spares, _start, _verification, _unexplained,
    _of_faults("detect", "Faults are noticed late.", "failure detection: connections and time-outs",
               "Shorten the time-out that fired, or watch the process itself.", "to false alarms: a slow rank is taken for dead"),
    _of_faults("reform", "Survivors take long to meet again.", "membership and process groups",
               "Have fewer view changes, or build groups before they are needed.", "to memory, for groups that are kept ready"),
    _of_faults("restore", "Newcomers take long to get the state.", "state transfer",
               "Send it from several peers, or keep a copy beside the spare.", "to exposed_comm, while copies are kept up to date"),
    _of_faults("finish", "The run takes long to end.", "the end of the run: the last checkpoint, and processes that leave",
               "Run longer, so that there is one end to more steps, or leave the last checkpoint out where no later run needs it.",
               "to rework, when the run is taken up again from an older checkpoint"),
)  # fmt: skip


# ---- words -------------------------------------------------------------------------------------------------------------------------------


def explain(summary: LedgerSummary, findings: tuple[TimeFinding, ...]) -> str:
    """Plain sentences, dearest first."""
    head = f"{summary.run}: goodput {summary.goodput:.1%} of {summary.world} ranks over {duration(summary.held_s)}.{_law_words(summary)}"
    if not findings:
        return f"{head}\nNothing was lost.\n"
    parts = [head]
    for number, finding in enumerate(findings, 1):
        goes, evidence = "goes" if finding.moves_to.startswith("nowhere") else "moves", f"\n{'':13}".join(finding.evidence)
        parts += [
            "",
            f"{number}. {finding.symptom} ({finding.share:.1%} of all rank-seconds)",
            f"   metric    {finding.metric}, which is {finding.where}",
            f"   layer     {finding.system}: {finding.layer}",
            f"   remedy    {finding.remedy}",
            f"   the cost  {goes} {finding.moves_to}",
            f"   evidence  {evidence}",
        ]
    return "\n".join(parts) + "\n"


def _law_words(summary: LedgerSummary) -> str:
    """Lines on the terms of a step, the term to attack first, and all rank-seconds by the same terms."""
    law = summary.step_law
    if law is None:
        return ""
    lines = [f"A step by the Fleet Law: {in_shares(law.shares)} of {duration(law.step_s)}, with {law.ranks:.3g} ranks."]
    lines.append(f"All rank-seconds: {in_shares(summary.run_shares)}.")
    term = attack(law)
    half = next((lever.speedup for lever in _levers(law) if lever.name == term), 1.0)
    lines.append(f"In a step, {TERM_NAMES[term]} comes first: with half of {term}, steps would be {half:.2f} times as fast.")
    return "".join(f"\n{line}" for line in lines)


def law_plain(summary: LedgerSummary) -> dict[str, object] | None:
    """The same lines for JSON; None before a step is kept."""
    law = summary.step_law
    if law is None:
        return None
    speedups = {lever.name: lever.speedup for lever in _levers(law)}
    return law.plain() | {"attack": attack(law), "speedups": speedups, "of_all": plain_shares(summary.run_shares)}


def plain(findings: tuple[TimeFinding, ...]) -> list[Mapping[str, object]]:
    """For JSON."""
    return [{name: getattr(finding, name) for name in (*TimeFinding.__slots__, "where", "system")} for finding in findings]
