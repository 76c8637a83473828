"""What should hold after a storm, as pure functions of the run's journal. Three verdicts: pass, fail, unknown.

Unknown means that the journal cannot tell; a checker that crashes says unknown and why, and never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fleet.records import (
    COMMIT,
    Committed,
    FaultRecord,
    LineageBegun,
    ProcessLost,
    Record,
    RunEnded,
    RunStarted,
    Spans,
    ViewPublished,
)
from fleet.types import Member

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``verdict``: pass, fail or unknown. ``reason`` is a sentence with the figures."""

    checker: str
    verdict: str
    reason: str


Checker = Callable[[Sequence[Record]], Verdict]


def check(journal: Iterable[Record], checkers: Iterable[tuple[str, Checker]]) -> list[Verdict]:
    """One verdict for each (name, checker), in order."""
    records = list(journal)
    return [_guarded(name, checker, records) for name, checker in checkers]


def standard_checkers(*, reaction_s: float, full_again_s: float, other_share: float | None = None) -> list[tuple[str, Checker]]:
    """The checkers of every chaos experiment, with this experiment's bounds."""
    return [
        ("faults_accounted", faults_accounted),
        ("views_follow_kills", partial(views_follow_kills, bound_s=reaction_s)),
        ("world_full_again", partial(world_full_again, bound_s=full_again_s)),
        ("commits_exact", commits_exact),
        ("ledger_other", partial(ledger_other, share=other_share)),
    ]


def _guarded(name: str, checker: Checker, records: Sequence[Record]) -> Verdict:
    try:
        return checker(records)
    except Exception as error:  # noqa: BLE001 - whatever a checker trips over, it must not pass for a verdict
        return Verdict(name, UNKNOWN, f"the checker crashed: {type(error).__name__}: {error}")


def faults_accounted(records: Sequence[Record]) -> Verdict:
    """Every planned fault was executed or suppressed, once."""
    name = "faults_accounted"
    faults = [record for record in records if isinstance(record, FaultRecord)]
    planned = {record.fault.id for record in faults if record.phase == "planned"}
    decided = [record.fault.id for record in faults if record.phase in ("executed", "suppressed")]
    doubled = sorted({fault for fault in decided if decided.count(fault) > 1})
    missing = sorted(planned - set(decided))
    if doubled:
        return Verdict(name, FAIL, f"decided more than once: {', '.join(doubled)}")
    if missing and any(isinstance(record, RunEnded) for record in records):
        return Verdict(name, FAIL, f"neither executed nor suppressed: {', '.join(missing)}")
    if missing:
        return Verdict(name, UNKNOWN, f"the journal ends before {len(missing)} of {len(planned)} planned faults were decided")
    return Verdict(name, PASS, f"{len(decided)} faults, each executed or suppressed once")


def views_follow_kills(records: Sequence[Record], *, bound_s: float) -> Verdict:
    """Every kill or node loss that hit a member of the view was followed, within ``bound_s``, by a view without it or the run's end."""
    name, view, waiting, late = "views_follow_kills", frozenset[Member](), dict[str, tuple[float, frozenset[Member]]](), list[str]()
    seen, now_s = 0, 0.0
    for record in records:
        now_s = max(now_s, getattr(record, "at_s", now_s))
        match record:
            case FaultRecord(fault=fault, phase="executed", at_s=at_s, members=members) if fault.kind in ("kill_rank", "lose_node"):
                hit = view.intersection(members)
                if hit:
                    seen += 1
                    waiting[fault.id] = (at_s, hit)
            case ViewPublished(view=published, at_s=at_s):
                view = frozenset(published.members)
                answered = [fault for fault, (_, hit) in waiting.items() if not hit & view]
                late += [fault for fault in answered if at_s - waiting.pop(fault)[0] > bound_s]
            case RunEnded(at_s=at_s):
                late += [fault for fault, (since_s, _) in waiting.items() if at_s - since_s > bound_s]
                waiting.clear()
    late += [fault for fault, (since_s, _) in waiting.items() if now_s - since_s > bound_s]
    if late:
        return Verdict(name, FAIL, f"no new view within {bound_s:g} s after {', '.join(sorted(late))}")
    if waiting:
        return Verdict(name, UNKNOWN, f"the journal ends less than {bound_s:g} s after {', '.join(sorted(waiting))}")
    return Verdict(name, PASS if seen else UNKNOWN, f"{seen} kills of ranks in the view, each answered within {bound_s:g} s")


def world_full_again(records: Sequence[Record], *, bound_s: float) -> Verdict:
    """At most ``bound_s`` after the last fault, or the last return of what it took, the view had all its ranks, and kept them."""
    name = "world_full_again"
    started = next((record for record in records if isinstance(record, RunStarted)), None)
    if started is None:
        return Verdict(name, UNKNOWN, "the journal has no start of the run")
    last_s, full_s, view, dead, now_s = None, None, frozenset[Member](), set[Member](), 0.0
    for record in records:
        at_s = getattr(record, "at_s", now_s)
        now_s = max(now_s, at_s)
        match record:
            case FaultRecord(fault=fault, phase="executed" | "healed", members=members):
                last_s = at_s
                dead.update(members if fault.kind in ("kill_rank", "lose_node") and record.phase == "executed" else ())
            case ProcessLost(member=member):
                dead.add(member)
            case ViewPublished(view=published):
                view = frozenset(published.members)
            case RunEnded():
                break
            case _:
                continue
        full = len(view) == started.world and not view & dead
        full_s = (at_s if full_s is None else full_s) if full else None
    if last_s is None:
        return Verdict(name, UNKNOWN, "no fault was executed")
    if full_s is not None:
        took_s = max(0.0, full_s - last_s)
        verdict = PASS if took_s <= bound_s else FAIL
        return Verdict(name, verdict, f"{started.world} ranks again {took_s:.2f} s after the last fault (bound {bound_s:g} s)")
    if now_s - last_s <= bound_s:
        return Verdict(name, UNKNOWN, f"the run ended {now_s - last_s:.2f} s after the last fault, before the bound of {bound_s:g} s")
    return Verdict(name, FAIL, f"{len(view - dead)} of {started.world} ranks {now_s - last_s:.2f} s after the last fault")


def commits_exact(records: Sequence[Record]) -> Verdict:
    """No committed step is lost or doubled, but for what a new lineage rolled back on record.

    In the coordinator's records: within a lineage commits only go up, no view starts from before them, and a lineage starts from what
    exists. In the ranks' own time lines: one process commits a step of a lineage at most once, and together they commit every step.
    """
    name, newest, base, done = "commits_exact", dict[int, int](), dict[int, int](), dict[int, set[int]]()
    next_of: dict[tuple[Member, int], int] = {}
    for record in records:
        match record:
            case LineageBegun(lineage=lineage, from_state=start):
                base[lineage] = newest[lineage] = start.step
            case Committed(state=state):
                if state.step <= newest.get(state.lineage, -1) and state.step != base.get(state.lineage):
                    return Verdict(name, FAIL, f"step {state.step} of lineage {state.lineage} was committed twice")
                newest[state.lineage] = state.step
            case ViewPublished(view=view):
                if view.state.step < newest.get(view.state.lineage, view.state.step):
                    lost = f"{newest[view.state.lineage]} steps of lineage {view.state.lineage} were committed"
                    return Verdict(name, FAIL, f"generation {view.generation} starts from step {view.state.step}, but {lost}")
            case Spans(member=member, lineage=lineage, step=step):
                commits = record.codes.count(COMMIT)
                if commits and step < next_of.get((member, lineage), step):
                    return Verdict(name, FAIL, f"{member} committed step {step} of lineage {lineage} twice")
                next_of[member, lineage] = step + commits
                done.setdefault(lineage, set()).update(range(step, step + commits))
    return _coverage(name, newest, base, done)


def _coverage(name: str, newest: dict[int, int], base: dict[int, int], done: dict[int, set[int]]) -> Verdict:
    if not newest:
        return Verdict(name, UNKNOWN, "nothing was committed")
    last = max(newest)
    wanted = range(base.get(last, 0), newest[last])
    if not any(done.values()):
        return Verdict(name, UNKNOWN, "the journal has no time lines of ranks")
    missing = sorted(set(wanted) - done.get(last, set()))
    if missing:
        return Verdict(name, FAIL, f"no rank committed step {missing[0]} of lineage {last} ({len(missing)} such steps)")
    return Verdict(name, PASS, f"{len(wanted)} steps of lineage {last}, each committed, none twice by one process")


def ledger_other(records: Sequence[Record], *, share: float | None, limit: float = 0.01) -> Verdict:
    """At most ``limit`` of the rank-seconds are in the ledger's ``other``. ``share`` is the ledger's figure, in 0..1."""
    if share is None:
        return Verdict("ledger_other", UNKNOWN, "no ledger was given")
    verdict = PASS if 0 <= share <= limit else FAIL
    return Verdict("ledger_other", verdict, f"other is {100 * share:.3f}% of the rank-seconds (limit {100 * limit:g}%)")
