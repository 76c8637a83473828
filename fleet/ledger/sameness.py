"""Whether two trials of a training script gave the same values, and which part differed first. Pure; see ``fleet doctor``.

A trial is a few steps of a script in one process. It leaves a list of marks, in order of execution, each with a digest. There is a mark for
each module's input and output, and for gradients, buffers and parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

START, BATCH, INPUT, OUTPUT, LOSS, OP = "start", "batch", "input", "output", "loss", "op"
OUT_GRADIENT, IN_GRADIENT, GRADIENT = "gradient of the output", "gradient of the input", "gradient"
BUFFER, WRITTEN, RATE, UPDATED = "buffer", "written", "learning rate", "updated"
BACKWARD = (OUT_GRADIENT, IN_GRADIENT, GRADIENT)
LOOP = "train"
"""The place of work in the loop body itself, outside all modules."""

ORDER, RANK, HASH, CLOCK, MACHINE, MEMORY, LATE = "order", "rank", "hash", "clock", "machine", "memory", "late"
VARIED = {
    ORDER: "its shards came in another order",
    RANK: "another rank computed it",
    HASH: "Python's strings had other hashes, as in each new process",
    CLOCK: "it ran at another time, and clocks ran faster",
    MACHINE: "the machine had another number of cores, another name, and listed its folders in another order",
    MEMORY: "memory that the script had not written held other bytes, and objects had other addresses",
    LATE: "a new process computed it, with the state but without the earlier steps",
}
"""Differences that a trial can have from the first one -> in words. No difference may change a bit."""
AT_ONCE = frozenset(VARIED) - {LATE}
"""Differences that one trial can combine. For a process that comes late, only its own steps can be compared."""

SEEDED, KERNELS, ONE_THREAD = "seeded", "kernels", "one_thread"
FORMS = {
    SEEDED: "all of Python's and numpy's draws seeded",
    KERNELS: "torch.use_deterministic_algorithms(True)",
    ONE_THREAD: "one thread",
}
"""Deterministic forms that a trial can have without a change of the script -> in words."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial to run.

    Attributes:
        varied: keys of ``VARIED``: the differences from the first trial.
        inside: also record torch's operations in the forward of this module, and in the backward; empty: none.
        form: a key of ``FORMS``, or empty.
        timed: record only how long steps take.
        at: note the script's kept values when this (step, shard) begins; a shard of -1: the first of the step.
    """

    varied: frozenset[str] = frozenset()
    inside: str = ""
    form: str = ""
    timed: bool = False
    at: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KeptValue:
    """A value that a script keeps from shard to shard beside its tracked state: its description, its ``line``, and its digest."""

    what: str
    line: str
    digest: str


@dataclass(frozen=True, slots=True)
class TrialMark:
    """One value that a trial computed or received.

    Attributes:
        kind: its kind, one of the constants above.
        where: qualified name of the module, parameter or buffer; of a batch the data set; of an OP the name of torch's operation.
        digest: of its value; of an OP, of its result.
        step, shard: -1 outside of them.
        within: the module whose forward was running, ``LOOP`` where none was.
        given: of an OP, the digest of its input.
        chance: of an OP, whether it draws random numbers.
    """

    kind: str
    where: str
    digest: str
    step: int = -1
    shard: int = -1
    within: str = LOOP
    given: str = ""
    chance: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A request of the script whose answer depends on the process, the moment or the machine.

    ``line`` is the line of the script, ``within`` the module whose forward was running.
    """

    what: str
    kind: str
    line: str
    within: str


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial.

    ``error``: the cause of an early end. ``step_s``: seconds of each step; ``module_s``: seconds of all forwards of each module in one
    step, on average. ``threads``: its threads at its end; ``set_threads``: whether the script changed Fleet's number. ``kept``: the
    script's kept values at the requested moment.
    """

    marks: tuple[TrialMark, ...] = ()
    calls: tuple[Call, ...] = ()
    error: str = ""
    step_s: tuple[float, ...] = ()
    module_s: Mapping[str, float] | None = None
    threads: int = 1
    set_threads: bool = False
    kept: tuple[KeptValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first mark that differs between two trials, and the qualified name of the ``place`` that causes it.

    ``other`` is None where the second trial has no such mark, ``mark`` where the first has none.
    """

    place: str
    mark: TrialMark | None
    other: TrialMark | None

    @property
    def kind(self) -> str:
        """The kind of the mark that differs."""
        return self.at.kind

    @property
    def at(self) -> TrialMark:
        """The mark of the first trial, where it has one."""
        found = self.mark or self.other
        assert found is not None
        return found


def first_difference(one: Trial, other: Trial) -> Difference | None:
    """The first difference in the order in which ``one`` ran; shards are compared with the same shards. None: there is none.

    Where a trial ended early, only the part that both reached is compared.
    """
    mine, theirs = (_by_shard([mark for mark in trial.marks if mark.kind != OP]) for trial in (one, other))
    ended = bool(one.error or other.error)
    for key, marks in mine.items():
        if ended and key not in theirs:
            continue
        for mark, twin in zip_longest(marks, theirs.get(key, ())):
            if ended and (mark is None or twin is None):
                break
            if mark != twin:
                return Difference(_place(mark, twin, marks, theirs.get(key, ())), mark, twin)
    return None


def difference_when_late(first: Trial, late: Trial) -> Difference | None:
    """As :func:`first_difference`, for a trial that began at a later step: it compares the steps of both, from that one on."""
    steps = {mark.step for mark in late.marks if mark.step >= 0}
    both = [replace(trial, marks=tuple(mark for mark in trial.marks if mark.step in steps)) for trial in (first, late)]
    return first_difference(*both)


def changed(one: Trial, other: Trial) -> tuple[KeptValue, ...]:
    """Values that the script of one trial kept, and that the other did not keep, or kept with another digest."""
    mine, theirs = ({(kept.what, kept.line): kept for kept in trial.kept} for trial in (one, other))
    return tuple(kept for name, kept in (theirs | mine).items() if mine.get(name) != theirs.get(name))


def _by_shard(marks: Sequence[TrialMark]) -> dict[tuple[int, int], list[TrialMark]]:
    found: dict[tuple[int, int], list[TrialMark]] = {}
    for mark in marks:
        found.setdefault((mark.step, mark.shard), []).append(mark)
    return found


def _place(mark: TrialMark | None, twin: TrialMark | None, marks: Sequence[TrialMark], theirs: Sequence[TrialMark]) -> str:
    """The module that causes the difference. A module's input comes from the module around it, and its output from itself."""
    found = mark or twin
    assert found is not None
    if mark is None or twin is None or (mark.kind, mark.where) != (twin.kind, twin.where):
        return found.within  # the trials took different ways: the caller is the cause
    if found.kind == INPUT:
        return found.within
    if found.kind in BACKWARD:
        return _to_blame(marks, theirs) or found.where
    if found.kind in (LOSS, RATE):
        return LOOP
    return owner(found.where.partition(" ")[0]) if found.kind in (START, BUFFER, UPDATED) else found.where


def owner(name: str) -> str:
    """The module that has the parameter or buffer of this qualified name."""
    return name.rpartition(".")[0] or name


def _to_blame(marks: Sequence[TrialMark], theirs: Sequence[TrialMark]) -> str:
    """The innermost module whose backward had the same input in both trials, and another result; empty when there is none."""
    same, differs = _compared(marks, theirs)
    given = [mark.where for mark in marks if mark.kind == OUT_GRADIENT and (OUT_GRADIENT, mark.where) in same]
    gave = {where for kind, where in differs if kind == IN_GRADIENT} | {owner(where) for kind, where in differs if kind == GRADIENT}
    guilty = [where for where in dict.fromkeys(given) if where in gave]
    return next((one for one in guilty if not any(other.startswith(one + ".") for other in guilty)), "")


def _compared(marks: Sequence[TrialMark], theirs: Sequence[TrialMark]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(marks that were the same each time, marks that were not) of one shard, as (kind, where)."""
    mine, others = dict(_numbered(marks)), dict(_numbered(theirs))
    differs = {key[:2] for key in mine.keys() | others.keys() if mine.get(key) != others.get(key)}
    return {key[:2] for key in mine} - differs, differs


def _numbered(marks: Sequence[TrialMark]) -> Iterator[tuple[tuple[str, str, int], str]]:
    seen: Counter[tuple[str, str]] = Counter()
    for mark in marks:
        key = mark.kind, mark.where
        yield (*key, seen[key]), mark.digest
        seen[key] += 1


def first_operation(one: Trial, other: Trial) -> TrialMark | None:
    """The first operation of torch that had the same input in both trials and another result; None: there is none."""
    mine, theirs = (_by_shard([mark for mark in trial.marks if mark.kind == OP]) for trial in (one, other))
    for key, marks in mine.items():
        for mark, twin in zip(marks, theirs.get(key, ()), strict=False):
            if (mark.where, mark.given) != (twin.where, twin.given):
                break
            if mark.digest != twin.digest:
                return mark
    return None


def written(trial: Trial) -> TrialMark | None:
    """The first parameter that a forward wrote to; None: there is none."""
    return next((mark for mark in trial.marks if mark.kind == WRITTEN), None)
