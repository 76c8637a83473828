"""The nodes that an instruction goes to: those of its ranks. Pure; live and simulated coordinators use this same object."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.machine.state import MachineState
from fleet.protocol.events import Event, Joined
from fleet.protocol.instructions import Evict, Fence, Inspect, Instruction, Propose, Publish, Welcome
from fleet.protocol.types import Member


class Routes:
    """The routes of one life of a coordinator."""

    def __init__(self, state: MachineState) -> None:
        self._state = state
        self._tokens: dict[str, str] = {}
        self._late: dict[int, str] = {}

    def learn(self, event: Event) -> None:
        """Note the node of a process that the machine does not know: a welcome, a fence or its release must reach it."""
        if isinstance(event, Joined):
            self._tokens[event.token] = event.process.node
            if self._state.ending.record is not None:
                self._late[event.slot] = event.process.node

    def of(self, instruction: Instruction) -> list[str]:
        """Names of nodes, each once, no matter how many of its ranks the instruction names."""
        match instruction:
            case Publish(view=view):
                return self._homes(view.members)
            case Propose(view=view, leaving=leaving):
                return self._homes((*view.members, *leaving))
            case Welcome(token=token) | Fence(token=token):
                return [self._tokens[token]] if token in self._tokens else []
            case Inspect(nodes=nodes):
                return list(nodes)
            case Evict(process=process):
                return [process.node]
        return self._homes(getattr(instruction, "members", ()))

    def _homes(self, members: Sequence[Member]) -> list[str]:
        homes = dict.fromkeys(map(self._home, members))
        return [home for home in homes if home is not None]

    def _home(self, member: Member) -> str | None:
        rank = self._state.roster.current(member)
        return rank.process.node if rank is not None else self._late.get(member.slot)
