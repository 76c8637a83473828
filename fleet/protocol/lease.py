"""A rank's half of what is done once in a run: it asks, does it when it may, and tells what came of it. See :mod:`fleet.protocol.once`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet.errors import RunOver
from fleet.protocol.instructions import OnceAnswer
from fleet.protocol.moves import Awaited, CarryOut, Wait
from fleet.protocol.probes import probe
from fleet.protocol.rank_machine import Moves, RankMachine


class Lease:
    """Pure: live ranks and simulated ones are driven by this very object.

    Args:
        ask_again_s: seconds after which words are said again: they are lost when an agent or the coordinator dies.
    """

    def __init__(self, rank_machine: RankMachine, ask_again_s: float) -> None:
        self._rank_machine, self._protocol, self._ask_again_s = rank_machine, rank_machine.protocol, ask_again_s

    def do(self, key: str) -> Moves:
        """``key`` is done by one rank. Gives what came of it, as JSON text, on all. Raises RunOver when the run ends meanwhile."""
        answer: OnceAnswer = yield from self._talk(key, lambda: self._protocol.ask_once(key), lambda found: True)
        if answer.result is None:
            result = yield CarryOut(key, answer.before)
            answer = yield from self._talk(key, lambda: self._protocol.done_once(key, result), lambda found: found.result is not None)
        return answer.result

    def _talk(self, key: str, say: Callable[[], None], fits: Callable[[OnceAnswer], bool]) -> Any:
        """Say it until it is answered."""
        protocol = self._protocol

        def answered() -> OnceAnswer | None:
            found = protocol.answers.get(key)
            return found if found is not None and fits(found) else None

        while True:
            say()
            yield Wait(Awaited.ANSWER, lambda: answered() or protocol.interrupted, self._ask_again_s)
            if protocol.released is not None:
                probe("the run ends while a rank waits for its answer")
                raise RunOver
            if (found := answered()) is not None:
                protocol.answers.pop(key, None)
                return found
            if protocol.interrupted and protocol.view is not None:
                yield from self._rank_machine.leave("told to leave")
