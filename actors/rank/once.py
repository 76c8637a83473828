"""Work that one rank does for all: the coordinator names the rank, and all ranks get the result. See ``fleet.protocol.once``."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.rank.membership.membership import Membership
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import ConfigError, FleetError
from fleet.protocol.lease import Lease
from fleet.protocol.moves import CarryOut
from fleet.protocol.once import key_of
from fleet.protocol.types import StateId

ASK_AGAIN_S = 0.5
MOST_BYTES = 64 << 10
"""The limit of a result: it goes to each rank, and into the journal."""

MOST_REASON = 500
"""Characters of the reason why a loop ends its run."""


def words_of(reason: Any) -> str:
    """The reason of ``run.stop``, in one line. Raises ConfigError."""
    words = " ".join(reason.split()) if isinstance(reason, str) else ""
    if not words or len(words) > MOST_REASON:
        why = f"it is a text for people, of 1 to {MOST_REASON} characters"
        raise ConfigError("reason", reason if not words else f"{words[:40]}...", why, 'Give a few words: run.stop("the loss is flat").')
    return words


class OneOfAll:
    """One rank's side of work that is done once: its key, and which rank runs it. ``membership`` carries out the moves of
    :class:`Lease`."""

    def __init__(self, membership: Membership, recorder: Recorder) -> None:
        self._membership, self._recorder = membership, recorder
        self._lease = Lease(membership.rank_machine, ASK_AGAIN_S)
        membership.carriers[CarryOut] = self._carry_out
        self._fn: Callable[[Any], Any] = lambda before: None
        self._place: str | StateId = ""
        self._calls: Counter[str] = Counter()
        self._owed: list[tuple[int, Callable[[], object]]] = []

    def begin_body(self) -> None:
        """The loop body begins. Work of an attempt that did not end has the same key when the body comes to it again."""
        self._place = ""

    def key(self, place: str | StateId, name: str) -> str:
        """The key of the next work of this name at ``place``: all ranks make the same keys, in the same order."""
        if place != self._place:
            self._place, self._calls = place, Counter()
        self._calls[name] += 1
        return key_of(place, f"{name}#{self._calls[name]}")

    def do(self, key: str, fn: Callable[[Any], Any]) -> Any:
        """Run ``fn(its last result)`` on one rank, and return its result on all. Raises RunOver when the run ends meanwhile."""
        code, stepping = self._recorder.code, self._recorder.stepping(False)
        self._fn = fn
        try:
            return json.loads(self._membership.carry(self._lease.do(key)))
        finally:
            self._recorder.stepping(stepping)
            self._recorder.switch(code)

    def owe(self, step: int, first: bool, do: Callable[[], object]) -> bool:
        """The first rank at this step calls ``do`` now. The others keep ``do`` until they leave the step, and get True.

        If the first rank is lost before ``do`` is done, one of the others calls it before any rank takes another step.
        """
        self._owed = [each for each in self._owed if each[0] == step]
        if first:
            do()
            return False
        self._owed.append((step, do))
        return True

    def pay(self, step: int, first: bool) -> None:
        """Another view has begun: its first rank that was in the step calls the work that it has kept. A second begin has no second
        effect."""
        owed = [each for each in self._owed if each[0] == step]
        self._owed = [] if first else owed
        for _, do in owed if first else ():
            do()

    def _carry_out(self, move: CarryOut) -> str:
        return _plain(move.key, self._fn(json.loads(move.before or "null")))


class EvaluationFigures(Mapping[str, float]):
    """The figures of an evaluation: a mapping from names to numbers, with the same numbers on all ranks.

    A rank that reads a figure waits for the evaluation. The object itself is true, so ``if figures:`` does not wait.
    """

    def __init__(self, fetch: Callable[[], dict[str, Any]]) -> None:
        self._fetch = fetch
        self._found: dict[str, Any] | None = None

    def fetch(self) -> dict[str, Any]:
        if self._found is None:
            self._found = self._fetch()
        return self._found

    @staticmethod
    def judged(figures: Mapping[str, float], before: dict[str, Any] | None, step: int) -> dict[str, Any]:
        """The result for all ranks: the figures, the best of each so far, and which of them are better than all before.

        If ``before`` is of the same ``step``, the run has begun again from there, and ``before`` is the result.
        """
        if before is not None and before.get("step") == step:
            return before
        now = {name: float(value) for name, value in figures.items()}
        low, high = ((before or {}).get(name, {}) for name in ("low", "high"))
        return {
            "step": step,
            "figures": now,
            "low": {**low, **{name: min(value, low.get(name, math.inf)) for name, value in now.items()}},
            "high": {**high, **{name: max(value, high.get(name, -math.inf)) for name, value in now.items()}},
            "lowest": [name for name, value in now.items() if value < low.get(name, math.inf)],
            "highest": [name for name, value in now.items() if value > high.get(name, -math.inf)],
        }

    def lowest(self, name: str) -> bool:
        """Whether ``name`` is lower than in all evaluations before. Raises KeyError: there is no such figure."""
        return self._better("lowest", name)

    def highest(self, name: str) -> bool:
        """Whether ``name`` is higher than in all evaluations before. Raises KeyError: there is no such figure."""
        return self._better("highest", name)

    def _better(self, how: str, name: str) -> bool:
        self[name]
        return name in self.fetch()[how]

    def __getitem__(self, name: str) -> float:
        figures: dict[str, float] = self.fetch()["figures"]
        return figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetch()["figures"])

    def __len__(self) -> int:
        return len(self.fetch()["figures"])

    def __bool__(self) -> bool:
        return True  # the evaluation exists, which a rank knows without its figures

    def __repr__(self) -> str:
        return f"Figures({self._found['figures'] if self._found else 'not looked at yet'})"


def name_of(fn: Callable[..., Any]) -> str:
    """A name of a function that is the same on all ranks: the place of its code."""
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return type(fn).__qualname__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_qualname}"


def _plain(key: str, result: Any) -> str:
    name = key.partition("/")[2].rpartition("#")[0]
    try:
        text = json.dumps(result)
    except (TypeError, ValueError) as error:
        reason = f"run.once, {name}: what it returns cannot be given to all ranks: {error}. Return numbers, texts, lists, or None."
        raise FleetError(reason) from error
    if len(text) > MOST_BYTES:
        limit = f"{len(text):,} bytes, and at most {MOST_BYTES:,} go to all ranks"
        raise FleetError(f"run.once, {name}: what it returns has {limit}. Write it to a file.")
    return text
