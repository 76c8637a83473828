"""A simulated rank whose parameters are spread over the ranks and gathered on demand, as the live one is in :mod:`actors.rank.fsdp`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleet.protocol import moves
from fleet.protocol.chunks import LATEST_S, SILENT_S, Chunk, Claim, Readiness, bounds, can_serve, servers
from fleet.protocol.types import Member, StateId, View
from fleet.simulation.clockwork import Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON
from fleet.simulation.ranks import Dead
from fleet.simulation.sharded import LENGTH, ShardedRank
from fleet.simulation.steps import Sum

HOP_S = (0.0002, 0.002)
"""What a request takes to its server, and what is served takes back."""
LOOK_S = 0.05
"""How often a rank that waits for a stretch looks whether it is called away."""


class Fetched(NamedTuple):
    """The answer for a stretch: the state that the server names, and the value that stands for it."""

    state: StateId
    value: int


@dataclass(eq=False)
class StretchRequest:
    """One stretch that ``fetcher`` asks one server for. ``answer``: a :class:`Fetched`, or None: it is not to be had there."""

    fetcher: GatheringRank
    state: StateId
    chunk: Chunk
    until_s: float
    answer: Future = field(default_factory=Future)


class GatheringRank(ShardedRank):
    """``value`` stands for all that the rank keeps, parameters and all, and ``weights`` is but another name of it: nobody has the whole.

    ``missed``: why this rank could not have the parameters that it computes a shard from; then the shard counts as not computed.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.missed = ""
        self.guarded: Sequence[Sequence[int]] = ((),)
        self.open: list[StretchRequest] = []
        self._early: list[StretchRequest] = []
        self._servers: list[GatheringRank] = []
        self._addresses: dict[Member, GatheringRank] = {}
        self._place, self._still, self._missed_in = 0, True, -1
        self._hops = self.world.stream("loans", self.protocol.token)
        self._carriers |= {moves.Advance: self._follow}

    @property
    def weights(self) -> int:
        return self.value

    @weights.setter
    def weights(self, value: int) -> None:
        self.value = value

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def _begin(self, move: moves.Begin) -> Steps:
        self.at_state = None
        yield from super()._begin(move)
        self._settle()

    def _complete(self, group: SimGroup, there: Sequence[Claim]) -> Steps:
        """Nothing is behind a step that was taken: nobody has the parameters whole."""
        yield from ()

    def _move(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """They tell each other where they serve before anybody drops what it had: nothing that can fail comes behind that."""
        self._still = False
        try:
            self._addresses = yield group.exchange(self.member, "addresses", self)
            if self.at("introduced"):
                yield self._pause()
            yield from super()._move(group, there, target)
        finally:
            self._settle()

    def _adopt(self, view: View, guarded: Sequence[Sequence[int]], value: int, target: StateId) -> None:
        super()._adopt(view, guarded, value, target)
        self.guarded, self._place, self.missed = guarded, view.rank_of(self.member), ""
        self._servers = [self._addresses[member] for member in view.members]
        self._settle()

    def _contribution_of(self, shards: Collection[int]) -> list[int]:
        """None: their gradients have left this rank, for the owners of an earlier view's chunks."""
        return []

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _compute(self, move: moves.Compute) -> Steps:
        if not self.missed:
            yield from super()._compute(move)

    def _parameters(self) -> Steps:
        """Gathered for the forward, and again for the backward. None: what is computed with them is of no use."""
        self.missed = ""
        forward = yield from self._gather()
        if self.at("gathering"):
            yield self._pause()
        backward = yield from self._gather()
        if self.missed:
            return None
        return forward if forward == backward else POISON

    def _gather(self) -> Steps:
        """From this rank's own chunks, and from those who serve the others: each stretch from the first that has it."""
        state, size = self.at_state, len(self.guarded)
        assert state is not None, "before its first view a rank has all parameters"
        chunks = [(size, owner) for owner in range(size)]
        found = {self.value} if any(map(self.has, chunks)) else set()
        groups = self.world.settings.replica_ranks
        wanted = [(servers(self.guarded, chunk[1], self._place, self.places, groups), chunk) for chunk in chunks if not self.has(chunk)]
        while wanted and not self.missed:
            asked = [(keepers, self._ask(self._servers[keepers[0]], state, chunk)) for keepers, chunk in wanted]
            wanted = []
            for keepers, request in asked:
                fetched: Fetched | None = yield request.answer
                if fetched is None:
                    wanted.append((keepers[1:], request.chunk))
                else:
                    self.world.watch.served(self, self._servers[keepers[0]], state, fetched, request.chunk)
                    found.add(fetched.value)
            for keepers, chunk in wanted:
                if not keepers:
                    self._miss(state, chunk)
        return found.pop() if len(found) == 1 else POISON

    def _miss(self, state: StateId, chunk: Chunk) -> None:
        self.world.note("missed", self, state, chunk)
        self.world.watch.missed(self, state, [self._servers[each] for each in (chunk[1], *self.guarded[chunk[1]])], chunk)
        self.missed = f"no rank of the view gives chunk {chunk} of the parameters"
        self._missed_in = self.protocol.generation

    def _reduce(self, move: moves.Reduce) -> Steps:
        missed, self.missed = self.missed, ""
        if missed:
            self.world.watch.cut(self, self._missed_in, self.rank_machine.view)
            raise Broken(missed)
        reduced: Sum = yield from super()._reduce(move)
        return reduced

    def _advance(self, move: moves.Apply | moves.Advance) -> Steps:
        self._still = False
        yield from super()._advance(move)
        self._settle()

    def _follow(self, move: moves.Advance) -> Steps:
        yield from self._advance(move)
        self._note_commit()

    def _committed(self, move: moves.StepCommitted) -> Steps:
        self._note_commit()
        if self.at("committed"):
            yield self._pause()

    # ---- a rank that borrows -------------------------------------------------------------------------------------------------------------

    def _ask(self, server: GatheringRank, state: StateId, chunk: Chunk) -> StretchRequest:
        clock = self.world.clock
        request = StretchRequest(self, state, chunk, clock.now_s + min(SILENT_S, self.world.settings.timeouts.collective_s))
        arrives = lambda: self.world.links.carry(server.end, {self.end}, lambda: server.asked(request))  # noqa: E731
        clock.after(self._hops.uniform(*HOP_S), arrives)
        clock.after(LOOK_S, lambda: self.gate(lambda: self._look(request)))
        return request

    def _look(self, request: StretchRequest) -> None:
        """Whether there is something else to do than to wait for a server."""
        if request.answer.done:
            return
        if self.rank_machine.wanted or self.world.clock.now_s > request.until_s:
            request.answer.resolve(None)
        self.world.clock.after(LOOK_S, lambda: self.gate(lambda: self._look(request)))

    # ---- a rank that serves, from a thread of its own -----------------------------------------------------------------------------------

    def asked(self, request: StretchRequest) -> None:
        """A request has come to this process, or to where it was: then its host, if that is there, says that nobody listens."""
        if self.alive:
            self.open.append(request)
            self.world.clock.after(LATEST_S, lambda: self.gate(lambda: self._give_up(request)))
            self.gate(lambda: self._serve(request))
        elif self.node.alive:
            self._answer(request, None)

    def die(self, cause: str) -> None:
        pending, self.open = self.open, []
        super().die(cause)
        for request in pending:
            self._answer(request, None)

    def has(self, chunk: Chunk) -> bool:
        lo, hi = bounds(LENGTH, chunk)
        return any(start <= lo and hi <= stop for start, stop in (bounds(LENGTH, one) for one in self.chunks))

    def _settle(self) -> None:
        """This rank may be at another state: those who were early may be given theirs now."""
        self._still = True
        early, self._early = self._early, []
        for request in early:
            self._serve(request)

    def _give_up(self, request: StretchRequest) -> None:
        if request in self._early:
            self._early.remove(request)
            self._answer(request, None)

    def _serve(self, request: StretchRequest) -> None:
        try:
            match can_serve(self.at_state, request.state, still=self._still):
                case Readiness.LATER:
                    self._early.append(request)
                case Readiness.NOW if self.has(request.chunk):
                    self.at("serving")
                    self.gate(lambda: self._send(request))
                case _:
                    self._answer(request, None)
        except Dead:
            return

    def _send(self, request: StretchRequest) -> None:
        if self.at_state is None:
            self._answer(request, None)
            return
        there = Fetched(self.at_state, self.value)
        self.world.clock.after(self._hops.uniform(*HOP_S), lambda: self.gate(lambda: self._sent(request, there)))

    def _sent(self, request: StretchRequest, there: Fetched) -> None:
        """What was changed while it was sent is a mixture of both."""
        self._answer(request, there if there == (self.at_state, self.value) else Fetched(there.state, POISON))

    def _answer(self, request: StretchRequest, fetched: Fetched | None) -> None:
        if request in self.open:
            self.open.remove(request)
        fetcher, links = request.fetcher, self.world.links
        arrives = lambda: fetcher.gate(lambda: request.answer.resolve(fetched))  # noqa: E731
        self.world.clock.after(self._hops.uniform(*HOP_S), lambda: links.carry(fetcher.end, {self.end}, arrives))
