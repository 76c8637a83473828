"""Whether two trials of a training script came to the same, and which part of it was the first to differ. Pure; see ``fleet doctor``.

A trial is a few steps of a script in one process. It leaves a list of marks, in order of execution: what went into each module and came out
of it, gradients, buffers, parameters, each as a digest.
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
"""The place of what is done in the loop body itself, and in no module."""

ORDER, RANK, HASH, CLOCK, MACHINE, MEMORY, LATE = "order", "rank", "hash", "clock", "machine", "memory", "late"
VARIED = {
    ORDER: "its shards came in another order",
    RANK: "another rank computed it",
    HASH: "Python's strings had other hashes, as they have in each process",
    CLOCK: "it was another time, and clocks ran faster",
    MACHINE: "the machine had another number of cores, another name, and listed its folders in another order",
    MEMORY: "memory that nobody had written held something else, and objects lay elsewhere",
    LATE: "a new process computed it, which had the state and none of the steps before",
}
"""What a trial can have otherwise than the first one -> in words. None of it may change a bit."""
AT_ONCE = frozenset(VARIED) - {LATE}
"""What is tried in one trial. Of a process that comes late only its own steps can be compared."""

SEEDED, KERNELS, ONE_THREAD = "seeded", "kernels", "one_thread"
FORMS = {
    SEEDED: "all of Python's and numpy's draws seeded",
    KERNELS: "torch.use_deterministic_algorithms(True)",
    ONE_THREAD: "one thread",
}
"""Deterministic forms that can be tried without a change of the script -> in words."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial that is wanted.

    Attributes:
        varied: keys of ``VARIED``: what is otherwise than in the first trial.
        inside: record also torch's operations in the forward of this module, and in the backward; empty: none.
        form: a key of ``FORMS``, or empty.
        timed: nothing is recorded but how long steps take.
        at: note what the script keeps when this (step, shard) begins; a shard of -1: the first of the step.
    """

    varied: frozenset[str] = frozenset()
    inside: str = ""
    form: str = ""
    timed: bool = False
    at: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KeptValue:
    """Something that a script keeps from shard to shard beside what it tracks: what it is in words, its ``line``, and a digest of it."""

    what: str
    line: str
    digest: str


@dataclass(frozen=True, slots=True)
class TrialMark:
    """One thing that a trial came by.

    Attributes:
        kind: what it is, one of the constants above.
        where: qualified name of the module, parameter or buffer; of a batch the data set; of an OP the name of torch's operation.
        digest: of its value; of an OP that of what it gave.
        step, shard: -1 outside of them.
        within: the module that was in its forward then, ``LOOP`` where none was.
        given: of an OP the digest of what it was given.
        chance: of an OP whether it draws random numbers.
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
    """The script asked for something that another process, moment or machine answers otherwise.

    ``line`` is that of the script, ``within`` the module whose forward was running.
    """

    what: str
    kind: str
    line: str
    within: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial left. ``error``: what ended it early. ``step_s``: seconds of each step, ``module_s`` of all forwards of each module in
    one step, on average; ``threads`` it computed with at its end, ``set_threads`` whether that is not what Fleet has set.
    ``kept``: what the script kept at the moment that was asked for."""

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
    """The first mark that differs between two trials, and the qualified name of the ``place`` that is to blame for it.

    ``other`` is None where the second trial has no such mark, ``mark`` where the first has none.
    """

    place: str
    mark: TrialMark | None
    other: TrialMark | None

    @property
    def kind(self) -> str:
        """Of the mark that differs."""
        return self.at.kind

    @property
    def at(self) -> TrialMark:
        """The mark of the first trial, where it has one."""
        found = self.mark or self.other
        assert found is not None
        return found


def first_difference(one: Trial, other: Trial) -> Difference | None:
    """The first difference in the order in which ``one`` was computed; shards are compared with the same shards. None: there is none.

    Where a trial was ended early, only what both came to is compared.
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
    """As :func:`first_difference`, of a trial that began at a later step: the steps that both have taken, from that one on."""
    steps = {mark.step for mark in late.marks if mark.step >= 0}
    both = [replace(trial, marks=tuple(mark for mark in trial.marks if mark.step in steps)) for trial in (first, late)]
    return first_difference(*both)


def changed(one: Trial, other: Trial) -> tuple[KeptValue, ...]:
    """What the script of one trial kept, and that of the other did not, or kept otherwise."""
    mine, theirs = ({(kept.what, kept.line): kept for kept in trial.kept} for trial in (one, other))
    return tuple(kept for name, kept in (theirs | mine).items() if mine.get(name) != theirs.get(name))


def _by_shard(marks: Sequence[TrialMark]) -> dict[tuple[int, int], list[TrialMark]]:
    found: dict[tuple[int, int], list[TrialMark]] = {}
    for mark in marks:
        found.setdefault((mark.step, mark.shard), []).append(mark)
    return found


def _place(mark: TrialMark | None, twin: TrialMark | None, marks: Sequence[TrialMark], theirs: Sequence[TrialMark]) -> str:
    """Who is to blame. What goes into a module was made by the one around it, and what comes out of it by itself."""
    found = mark or twin
    assert found is not None
    if mark is None or twin is None or (mark.kind, mark.where) != (twin.kind, twin.where):
        return found.within  # it has taken another way: whoever calls is to blame
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
    """The innermost module whose backward was given the same in both trials, and gave something else; empty when there is none."""
    same, differs = _compared(marks, theirs)
    given = [mark.where for mark in marks if mark.kind == OUT_GRADIENT and (OUT_GRADIENT, mark.where) in same]
    gave = {where for kind, where in differs if kind == IN_GRADIENT} | {owner(where) for kind, where in differs if kind == GRADIENT}
    guilty = [where for where in dict.fromkeys(given) if where in gave]
    return next((one for one in guilty if not any(other.startswith(one + ".") for other in guilty)), "")


def _compared(marks: Sequence[TrialMark], theirs: Sequence[TrialMark]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(what came out the same each time, what did not) of one shard, as (kind, where)."""
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
    """The first operation of torch's that was given the same in both trials and gave something else; None: there is none."""
    mine, theirs = (_by_shard([mark for mark in trial.marks if mark.kind == OP]) for trial in (one, other))
    for key, marks in mine.items():
        for mark, twin in zip(marks, theirs.get(key, ()), strict=False):
            if (mark.where, mark.given) != (twin.where, twin.given):
                break
            if mark.digest != twin.digest:
                return mark
    return None


def written(trial: Trial) -> TrialMark | None:
    """The first parameter that a forward has written to; None: there is none."""
    return next((mark for mark in trial.marks if mark.kind == WRITTEN), None)
