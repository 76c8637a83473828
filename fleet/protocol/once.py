"""Tasks that one rank does for all ranks of a run, and their results.

A task has effects outside of the training state: it writes a file, evaluates, or downloads. A rank asks before it does a task, and the
first rank that asks does it. If that rank is lost before the task is done, the next rank that asks does it. So a task is *done* once, and
may be *begun* more often. Every rank that asks gets the result, even hours later.

The key of a task is ``PLACE/NAME``. PLACE is ``begin`` before the loop, ``HISTORY.STEP`` within it, and ``end`` behind it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.protocol.instructions import Instruction, OnceAnswer, Write
from fleet.protocol.probes import probe
from fleet.protocol.records import OnceRecord
from fleet.protocol.types import Member, StateId

BEGIN, END = "begin", "end"
MOST = 1000
"""The number of newest results that are kept of each name. A rank asks for tasks that other ranks do at about the same time."""


@dataclass(slots=True)
class Task:
    """One task: its ``holder`` does it now, and the ``waiting`` members want its result. ``result`` is None until the task is done."""

    holder: Member
    waiting: set[Member] = field(default_factory=set)
    result: str | None = None


class Once:
    """All such tasks of a run, folded from the ranks' messages. Rebuilt from the journal."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._steps: dict[str, list[StateId]] = {}

    def ask(self, member: Member, key: str, alive: Callable[[Member], bool], now_s: float) -> list[Instruction]:
        """``member`` asks for ``key``. It gets no answer while another rank does the task, and asks again."""
        task = self._tasks.get(key)
        if task is not None and task.result is not None:
            return [OnceAnswer((member,), key, task.result)]
        if task is not None and task.holder != member and alive(task.holder):
            task.waiting.add(member)
            return []
        if task is not None and task.holder != member:
            probe("a task passes to another rank as its holder is lost")
        waiting = task.waiting - {member} if task is not None else set()
        again = task is not None and task.holder == member
        self._tasks[key] = Task(member, waiting)
        begun = [] if again else [Write(OnceRecord("begun", key, member, now_s, ""))]
        return [*begun, OnceAnswer((member,), key, None, self._before(key))]

    def done(self, member: Member, key: str, result: str, now_s: float) -> list[Instruction]:
        """``member`` has done ``key``. Two ranks may have done it, if the first seemed lost: then the first report counts."""
        task = self._tasks.setdefault(key, Task(member))
        if task.result is not None:
            return [OnceAnswer((member,), key, task.result)]
        members, task.waiting = tuple(sorted(task.waiting | {member})), set()
        self._keep(key, member, result)
        return [Write(OnceRecord("done", key, member, now_s, result)), OnceAnswer(members, key, result)]

    def roll_back(self, to: StateId) -> None:
        """Drop the results of steps after ``to``: these steps are rolled back."""
        for name, steps in self._steps.items():
            kept = [state for state in steps if state <= to]
            for state in steps[len(kept) :]:
                self._tasks.pop(f"{_place(state)}/{name}", None)
            self._steps[name] = kept

    def replay(self, record: OnceRecord) -> None:
        """Take in a record of the journal."""
        if record.phase == "done":
            self._keep(record.key, record.member, record.result)
        else:
            self._tasks[record.key] = Task(record.member)

    def _keep(self, key: str, member: Member, result: str) -> None:
        self._tasks[key] = Task(member, result=result)
        place, _, name = key.partition("/")
        state = state_of(place)
        if state is None:
            return
        steps = self._steps.setdefault(name, [])
        if state not in steps:
            bisect.insort(steps, state)
        for old in steps[:-MOST]:
            self._tasks.pop(f"{_place(old)}/{name}", None)
        del steps[:-MOST]

    def _before(self, key: str) -> str:
        """The result of the same name at the newest earlier step; empty when there is none."""
        place, _, name = key.partition("/")
        state, steps = state_of(place), self._steps.get(name, [])
        earlier = [one for one in steps if state is None or one < state]
        task = self._tasks.get(f"{_place(earlier[-1])}/{name}") if earlier else None
        return task.result or "" if task is not None else ""


def _place(state: StateId) -> str:
    return f"{state.history}.{state.step}"


def state_of(place: str) -> StateId | None:
    """The state of a place within the loop; None before and behind the loop."""
    history, _, step = place.partition(".")
    return StateId(int(history), int(step)) if step else None


def key_of(place: str | StateId, name: str) -> str:
    """The key of the task ``name`` at ``place``: a state, ``BEGIN`` or ``END``."""
    return f"{_place(place) if isinstance(place, StateId) else place}/{name}"
