"""Orders of faults to the agent of a node: they are carried out one after the other, beside the agent's other work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fleet.protocol.fault_kinds import Performer, kind_of
from fleet.protocol.operations import HEAL, Operation
from fleet.protocol.ports import DaemonPort, LinkPort, ProcessPort

log = logging.getLogger("fleet.agent")


class Orders:
    """Carries out orders, by the objects that inject faults into processes, links, and this agent and its host.

    ``pass_on`` gives an order to a rank's process, which carries it out itself.
    """

    def __init__(
        self, processes: ProcessPort, links: LinkPort, daemons: DaemonPort, pass_on: Callable[[Operation], str | None]
    ) -> None:  # fmt: skip
        self._processes, self._links, self._daemons, self._pass_on = processes, links, daemons, pass_on
        self._turn = asyncio.Lock()

    async def carry_out(self, order: Operation) -> tuple[str, str]:
        """Carry out an order. Gives (why it was refused or "", the applied fault)."""
        async with self._turn:
            try:
                return await self._by_performer(order)
            except Exception as error:  # an error of the injection must not end the agent
                log.exception("%s of %s failed", order.phase, order.kind)
                return f"{order.kind}: {type(error).__name__}: {error}", ""

    async def _by_performer(self, order: Operation) -> tuple[str, str]:
        """Give the order to its performer. Orders that start programs are slow, and run in a thread, so that the agent can work
        meanwhile."""
        said = ""
        match kind_of(order.kind).performer:
            case Performer.PROCESS:
                refused = self._pass_on(order)
            case Performer.LINKS:
                refused = await asyncio.to_thread(self._links.operate, order)
                said = self._links.applied(order.fault) if order.phase == HEAL else ""
            case Performer.HOST:
                refused = await asyncio.to_thread(self._daemons.operate, order)
            case Performer.CONFINED:
                refused = await asyncio.to_thread(self._daemons.operate, order) or self._pass_on(order)
            case _:
                refused = self._processes.operate(order)
        return refused or "", said

    def close(self) -> None:
        """End all faults that were begun."""
        self._links.close()
        self._daemons.close()
