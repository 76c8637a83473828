"""A rank's half of what is done once in a run: it asks, does it when it may, and tells what came of it. See :mod:`fleet.protocol.once`."""

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
    """Pure: live ranks and simulated ones are driven by this very object.

    Args:
        ask_again_s: seconds after which words are said again: they are lost when an agent or the coordinator dies.
    """

    def __init__(self, rank_machine: RankMachine, ask_again_s: float) -> None:
        self._rank_machine, self._protocol, self._ask_again_s = rank_machine, rank_machine.protocol, ask_again_s

    def do(self, key: str) -> Moves:
        """``key`` is done by one rank. Gives what came of it, as JSON text, on all. Raises RunOver when the run ends meanwhile.

        A rank that cannot go on with it in its view, as it needs parameters that a lost rank had, begins again in the next view. Where the
        run goes back meanwhile, the rank does it for itself, and no other rank hears of it: its loop body comes to an end, and begins anew.
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
        """What came of it; None: this rank is in another view by now."""
        try:
            return (yield move)
        except GroupLost as error:
            probe("what one rank does for all begins again in the next view")
            yield from self._rank_machine.rejoin(str(error))
            return None

    def _check(self, here: StateId | None) -> None:
        """Raises _WentBack where the state at hand is another one than ``here``."""
        if self._protocol.state != here:
            raise _WentBack

    def _talk(self, key: str, say: Callable[[], None], fits: Callable[[OnceAnswer], bool]) -> Any:
        """Say it until it is answered."""
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
