"""What is done once in a run, however many ranks come to it: who may do it, and what came of it.

A rank asks before it does something that has effects outside of the training state: write a file, evaluate, download. The first to ask does
it. When it is lost before it is done, the next one that asks does it instead; so the thing is *done* once, and may be *begun* more often.
What came of it is told to all who ask, also to those who ask for the first time hours later.

The key of a thing is ``PLACE/NAME``. PLACE is ``begin`` before the loop, ``LINEAGE.STEP`` within it, and ``end`` behind it.
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
"""Of each name so many results are kept, the newest: a rank asks for what others do right now."""


@dataclass(slots=True)
class Task:
    """One thing: who does it now, and who waits to hear of it. ``result`` is None until it is done."""

    holder: Member
    waiting: set[Member] = field(default_factory=set)
    result: str | None = None


class Once:
    """All that is done once in a run, folded from what ranks say. Rebuilt from the journal."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._steps: dict[str, list[StateId]] = {}

    def ask(self, member: Member, key: str, alive: Callable[[Member], bool], now_s: float) -> list[Instruction]:
        """``member`` has come to ``key``. No answer while another one does it: it asks again."""
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
        """``member`` has done ``key``. Of two that did it, as the first seemed lost, the first word counts."""
        task = self._tasks.setdefault(key, Task(member))
        if task.result is not None:
            return [OnceAnswer((member,), key, task.result)]
        members, task.waiting = tuple(sorted(task.waiting | {member})), set()
        self._keep(key, member, result)
        return [Write(OnceRecord("done", key, member, now_s, result)), OnceAnswer(members, key, result)]

    def roll_back(self, to: StateId) -> None:
        """Steps after ``to`` are taken back: what came of them is no result of this history."""
        for name, steps in self._steps.items():
            kept = [state for state in steps if state <= to]
            for state in steps[len(kept) :]:
                self._tasks.pop(f"{_place(state)}/{name}", None)
            self._steps[name] = kept

    def replay(self, record: OnceRecord) -> None:
        """Take up what the journal says."""
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
        """What came of the same name at the newest step before."""
        place, _, name = key.partition("/")
        state, steps = state_of(place), self._steps.get(name, [])
        earlier = [one for one in steps if state is None or one < state]
        task = self._tasks.get(f"{_place(earlier[-1])}/{name}") if earlier else None
        return task.result or "" if task is not None else ""


def _place(state: StateId) -> str:
    return f"{state.history}.{state.step}"


def state_of(place: str) -> StateId | None:
    """The step of a place within the loop; None before it and behind it."""
    history, _, step = place.partition(".")
    return StateId(int(history), int(step)) if step else None


def key_of(place: str | StateId, name: str) -> str:
    """The key of what is done once at ``place``: a state, ``BEGIN`` or ``END``."""
    return f"{_place(place) if isinstance(place, StateId) else place}/{name}"
