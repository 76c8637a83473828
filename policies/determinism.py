"""Causes of a training script that gives other results in each run: the trials, the likely cause of a difference, and its way out. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleet.ledger import sameness
from fleet.ledger.sameness import (
    AT_ONCE,
    CLOCK,
    HASH,
    KERNELS,
    LATE,
    LOOP,
    MACHINE,
    MEMORY,
    ONE_THREAD,
    ORDER,
    RANK,
    SEEDED,
    VARIED,
    Call,
    Difference,
    KeptValue,
    Trial,
    TrialMark,
    TrialRequest,
)  # fmt: skip

AGAIN, TOGETHER, WROTE = "again", "together", "written"
"""Values of ``varied`` besides ``VARIED``: no variation, several variations only together, a write that needs no comparison."""


@dataclass(frozen=True, slots=True)
class FormCost:
    """The cost of a deterministic form: medians of ``step_s``, without and with the form; 0 where there is no form to switch on.

    ``module_s``: of all forwards of the module in a step, 0 where it has none. ``holds``: whether the form removes the difference.
    """

    form: str
    step_s: float
    form_step_s: float
    module_s: float
    form_module_s: float
    holds: bool


@dataclass(frozen=True, slots=True)
class DeterminismFinding:
    """A difference, its first place, its likely cause, and its remedy.

    Attributes:
        place: qualified name of the first module that differs; a data set's name; ``train`` for the loop body itself.
        ``what``: the value that differs, in words.
        varied: the variation that showed it: ``AGAIN`` for none, ``WROTE``, ``TOGETHER``, or a key of ``VARIED``.
        cause: one word for it; ``reason``: the same in a sentence; ``way_out``: the remedy.
        calls: lines of the script that may be the cause.
        kept: values that the script keeps, and that differed at that moment.
        operation: torch's operation that gave another result for the same input.
    """

    place: str
    what: str
    varied: str
    cause: str
    reason: str
    way_out: str
    calls: tuple[Call, ...] = ()
    kept: tuple[KeptValue, ...] = ()
    operation: str = ""
    cost: FormCost | None = None
    forms: tuple[str, ...] = ()


Run = Callable[[TrialRequest], Trial]


def examine(run: Run) -> list[DeterminismFinding]:
    """Run trials and return the differences; none: a clean script. Without a difference there are few trials: one, one more, one with all
    variations, and one in a process that comes late.

    A difference without any variation is returned alone: it hides all others.
    """
    first = run(TrialRequest())
    if (mark := sameness.written(first)) is not None:
        return [_written(mark)]
    found = sameness.first_difference(first, run(TrialRequest()))
    if found is not None:
        return [_judged(found, AGAIN, first, run)]
    found = sameness.first_difference(first, run(TrialRequest(AT_ONCE)))
    if found is None:
        return _when_late(first, run)
    again = sameness.first_difference(first, run(TrialRequest()))  # the first two may have been the same by chance
    if again is not None:
        return [_judged(again, AGAIN, first, run)]
    singly = {one: sameness.first_difference(first, run(TrialRequest(frozenset({one})))) for one in VARIED if one in AT_ONCE}
    findings = [_judged(difference, one, first, run) for one, difference in singly.items() if difference is not None]
    late = [] if singly[ORDER] is not None else _when_late(first, run)  # values kept from shard to shard are also kept from step to step
    return [*findings, *late] or [_judged(found, TOGETHER, first, run)]


def _when_late(first: Trial, run: Run) -> list[DeterminismFinding]:
    found = sameness.difference_when_late(first, run(TrialRequest(frozenset({LATE}))))
    return [] if found is None else [_judged(found, LATE, first, run)]


REPEATS = 2
"""Timed trials without and with a form, in turns."""


def priced(found: DeterminismFinding, run: Run) -> DeterminismFinding:
    """The finding with the cost of its form: the first form that removes the difference is timed against the unchanged script."""
    keys = _keys(found.varied)
    held = next((form for form in found.forms if _holds(form, keys, run)), "")
    plain, formed = list[Trial](), list[Trial]()
    for _ in range(REPEATS):
        plain.append(run(TrialRequest(timed=True)))
        if held:
            formed.append(run(TrialRequest(timed=True, form=held)))
    cost = FormCost(held, _step_s(plain), _step_s(formed), _module_s(plain, found.place), _module_s(formed, found.place), bool(held))
    return replace(found, cost=cost)


def _holds(form: str, keys: frozenset[str], run: Run) -> bool:
    base = run(TrialRequest(form=form))
    return sameness.first_difference(base, run(TrialRequest(keys, form=form))) is None


def _step_s(trials: Sequence[Trial]) -> float:
    return statistics.median([one for trial in trials for one in trial.step_s] or [0.0])


def _module_s(trials: Sequence[Trial], place: str) -> float:
    return statistics.median([(trial.module_s or {}).get(place, 0.0) for trial in trials] or [0.0])


def _written(mark: TrialMark) -> DeterminismFinding:
    place = sameness.owner(mark.where)
    reason = "the forward writes to it, so the next shard's result depends on the shards that this process computed before"
    way_out = "Keep the change for step.on_commit(fn), or compute with a copy: functional forms such as weight / weight.norm()."
    return DeterminismFinding(place, f"parameter {mark.where}", WROTE, "written", reason, way_out)


def _judged(found: Difference, varied: str, first: Trial, run: Run) -> DeterminismFinding:
    place = found.place
    at = (found.at.step, found.at.shard) if varied in (ORDER, LATE) else None
    base, other = run(TrialRequest(inside=place, at=at)), run(TrialRequest(_keys(varied), inside=place, at=at))
    operation = sameness.first_operation(base, other)
    calls = suspects((*other.calls, *first.calls), place, ASKS.get(varied, ()))
    threads = other.set_threads or first.set_threads
    cause, reason, way_out, forms = likely(found, varied, operation, calls, threads)
    name = operation.where if operation is not None else ""
    return DeterminismFinding(
        place, described(found), varied, cause, reason, way_out, calls, sameness.changed(base, other), name, forms=forms
    )


def _keys(varied: str) -> frozenset[str]:
    if varied == TOGETHER:
        return AT_ONCE
    return frozenset({varied}) if varied in VARIED else frozenset()


ASKS = {
    AGAIN: ("chance", "clock", "process"),
    TOGETHER: ("chance", "clock", "process", "machine", "threads"),
    CLOCK: ("clock",),
    MACHINE: ("machine", "threads"),
}
"""Variation that shows a difference -> the kinds of calls that may cause it."""


def suspects(calls: Sequence[Call], place: str, kinds: Sequence[str]) -> tuple[Call, ...]:
    """Calls of the script that may be the cause: in the forward of ``place``, or else outside of all modules."""
    each = tuple(call for call in dict.fromkeys(calls) if call.kind in kinds)
    return tuple(call for call in each if call.within == place) or tuple(call for call in each if call.within == LOOP)


def described(found: Difference) -> str:
    """The difference, in words."""
    mark, other = found.mark, found.other
    at = f"step {found.at.step}, shard {found.at.shard}" if found.at.shard >= 0 else f"step {found.at.step}"
    if mark is None or other is None or (mark.kind, mark.where) != (other.kind, other.where):
        names = [f"{one.kind} of {one.where}" if one is not None else "nothing" for one in (mark, other)]
        return f"its calls: {names[0]} in one trial, and {names[1]} in the other, in {at}"
    words = {
        sameness.START: f"{mark.where} before the first step",
        sameness.BATCH: f"the batch, in {at}",
        sameness.INPUT: f"its input to {mark.where}, in {at}",
        sameness.OUTPUT: f"its output, in {at}",
        sameness.LOSS: f"the loss, in {at}",
        sameness.BUFFER: f"buffer {mark.where} behind the forward, in {at}",
        sameness.RATE: f"the {mark.where}, in {at}",
        sameness.UPDATED: f"{mark.where} behind commit, in {at}",
    }
    return words.get(mark.kind, f"its backward: {mark.kind} {mark.where}, in {at}")


Likely = tuple[str, str, str, tuple[str, ...]]
SEED_IT = "Draw from torch, random or numpy's global generators: Fleet seeds them for each shard. Or make the generator from run.seed."


def likely(found: Difference, varied: str, operation: TrialMark | None, calls: Sequence[Call], threads: bool) -> Likely:
    """(cause in a word, reason, way out, deterministic forms to try)."""
    kinds = {call.kind for call in calls}
    if varied == AGAIN:
        return _by_chance(found, operation, kinds)
    if varied == MACHINE and threads:
        reason = "the script sets the number of threads from the machine, and another number of threads rounds sums differently"
        return "threads", reason, "Leave it to Fleet: --config threads_per_rank=N is the same on every rank.", (ONE_THREAD,)
    return OTHERWISE[varied]


def _by_chance(found: Difference, operation: TrialMark | None, kinds: set[str]) -> Likely:
    """A difference without any variation."""
    if operation is not None and operation.chance:
        reason = f"{operation.where} draws from a generator that Fleet does not seed: one of its own, or one that the script has seeded"
        return "draw", reason, SEED_IT, (SEEDED,)
    if operation is not None and not operation.where.startswith(("aten::", "prims::")):
        reason = f"the custom operation {operation.where} gives another result for the same input"
        return "operation", reason, "Fix the order in which it adds, or register a deterministic form of it.", (KERNELS,)
    if "chance" in kinds:
        return "draw", "it draws random numbers without a seed", SEED_IT, (SEEDED,)
    if "clock" in kinds:
        return "clock", "it reads a clock", "Decide by step.number, which is the same on all ranks and in each attempt.", ()
    if "process" in kinds:
        return "process", "it depends on the process that computes it", "Use run.seed and the number of the sample.", ()
    if operation is not None:
        reason = f"{operation.where} gives another result for the same input: its order of adding up is not fixed"
        return (
            "kernel",
            reason,
            "Call torch.use_deterministic_algorithms(True) in train(run), or use another operation.",
            (KERNELS, ONE_THREAD),
        )
    if found.kind == sameness.BATCH:
        return "samples", "a sample does not follow from its number and Fleet's seeds", SEED_IT, (SEEDED,)
    reason = "it computes with a value that differs between processes: a draw without a seed, an address (id), or unwritten memory"
    return "chance", reason, SEED_IT, (SEEDED, KERNELS, ONE_THREAD)


OTHERWISE: dict[str, Likely] = {
    ORDER: (
        "state",
        "it keeps a value between shards (a counter, a cache, a generator, a sum), and losses change the order of a rank's shards",
        "Compute it from the batch, make it a registered buffer (its changes are averaged over shards), or give it to step.on_commit(fn).",
        (),
    ),
    LATE: (
        "carried",
        "it keeps an untracked value from step to step, and a process that takes the place of a lost one does not have it",
        "Compute it from the batch, or track it, such as by fleet.ShardState: see docs/determinism.md, state that a script keeps.",
        (),
    ),
    RANK: (
        "rank",
        "it depends on the rank that computes it, and after a loss another rank may compute the shard",
        "Use step.number and step.shard in the place of run.rank, run.slot, run.is_main, and of RANK or WORLD_SIZE.",
        (),
    ),
    HASH: (
        "hash",
        "it goes through a set, or by hash(), in an order that differs between processes",
        "Use sorted(...) or a dict, which keeps its order.",
        (),
    ),
    CLOCK: ("clock", "it depends on the time", "Decide by step.number, which is the same on all ranks and in each attempt.", ()),
    MACHINE: (
        "machine",
        "it depends on the machine: its number of cores, its name, or the order in which it lists a folder",
        "Use sorted(os.listdir(...)), and a number of parts that is a constant.",
        (ONE_THREAD,),
    ),
    MEMORY: (
        "memory",
        "it reads memory that it has not written, as of torch.empty, or goes by the addresses of objects (id, a set of objects)",
        "Use torch.zeros in the place of torch.empty, and sort by a name in the place of id().",
        (),
    ),
    TOGETHER: (
        "together",
        "it differs only where several things vary at once: " + ", ".join(one for one in VARIED if one in AT_ONCE),
        "Check which of them the named place depends on.",
        (),
    ),
}  # fmt: skip
