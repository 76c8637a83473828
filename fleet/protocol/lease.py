"""A rank's half of a task that one rank does for all: it asks, does the task when it may, and reports the result.

See :mod:`fleet.protocol.once`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet.errors import GroupLost, RunOver
from fleet.protocol.instructions import OnceAnswer
from fleet.protocol.moves import Awaited, CarryOut, Wait
from fleet.protocol.probes import probe
from fleet.protocol.rank_machine import Moves, RankMachine
from fleet.protocol.types import StateId


class _WentBack(Exception):
    """The run has gone back to an earlier state."""


class Lease:
    """Pure: live ranks and simulated ranks use this same object.

    Args:
        ask_again_s: seconds after which a message is sent again: it is lost when an agent or the coordinator dies.
    """

    def __init__(self, rank_machine: RankMachine, ask_again_s: float) -> None:
        self._rank_machine, self._protocol, self._ask_again_s = rank_machine, rank_machine.protocol, ask_again_s

    def do(self, key: str) -> Moves:
        """Have one rank do ``key``. Gives its result as JSON text, on all ranks. Raises RunOver when the run ends meanwhile.

        The task may need parameters that a lost rank had. Then the rank begins the task again in the next view. If the run goes back
        meanwhile, the rank does the task for itself, and sends the result to no other rank. Its loop body comes to its end, and begins
        anew.
        """
        here, result = self._protocol.state, None
        try:
            while result is None:
                answer: OnceAnswer = yield from self._talk(key, lambda: self._protocol.ask_once(key), lambda found: True)
                if answer.result is not None:
                    return answer.result
                result = yield from self._try(CarryOut(key, answer.before))
                self._check(here)
            given = result
            answer = yield from self._talk(key, lambda: self._protocol.done_once(key, given), lambda found: found.result is not None)
            return answer.result
        except _WentBack:
            probe("the run goes back while one rank does something for all")
            while result is None:
                result = yield from self._try(CarryOut(key, ""))
            return result

    def _try(self, move: CarryOut) -> Moves:
        """The result of ``move``; None: the group was lost, and this rank has joined another view."""
        try:
            return (yield move)
        except GroupLost as error:
            probe("what one rank does for all begins again in the next view")
            yield from self._rank_machine.rejoin(str(error))
            return None

    def _check(self, here: StateId | None) -> None:
        """Raises _WentBack where the rank's state is not ``here`` any more."""
        if self._protocol.state != here:
            raise _WentBack

    def _talk(self, key: str, say: Callable[[], None], fits: Callable[[OnceAnswer], bool]) -> Any:
        """Send the message again and again until an answer fits."""
        protocol, machine, here = self._protocol, self._rank_machine, self._protocol.state

        def answered() -> OnceAnswer | None:
            found = protocol.answers.get(key)
            return found if found is not None and fits(found) else None

        while True:
            say()
            yield Wait(Awaited.ANSWER, lambda: answered() or protocol.interrupted or machine.called_in, self._ask_again_s)
            if protocol.released is not None:
                probe("the run ends while a rank waits for its answer")
                raise RunOver
            if (found := answered()) is not None:
                protocol.answers.pop(key, None)
                return found
            if machine.called_in:
                probe("a rank that waits for an answer joins the next view")
                yield from machine.rejoin("told to leave")
                self._check(here)
            elif protocol.interrupted and protocol.view is not None:
                yield from machine.leave("told to leave")
