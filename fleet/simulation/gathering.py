"""Simulated ranks with sharded parameters that are gathered on demand, like live ranks in :mod:`actors.rank.fsdp`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet.protocol.adding import GRACE_S
from fleet.protocol.chunks import LATEST_S, SILENT_S, WHOLE, Chunk, Readiness, StateCut, can_serve, servers
from fleet.protocol.moves import Begin
from fleet.protocol.types import Column, Member, StateId
from fleet.simulation.clockwork import Future, Steps
from fleet.simulation.contributing import HOP_S, LOOK_S, SimContributions
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON
from fleet.simulation.ranks import Dead, SimLayout, SimRank
from fleet.simulation.sharded import SimChunks


class Fetched(NamedTuple):
    """The answer for a stretch: the server's state, and the value that stands for it."""

    state: StateId
    value: int


@dataclass(eq=False)
class StretchRequest:
    """A request of ``fetcher`` to one server for one stretch. ``answer``: a :class:`Fetched`, or None: the server does not have it."""

    fetcher: SimFsdpLayout
    state: StateId
    chunk: Chunk
    until_s: float
    answer: Future = field(default_factory=Future)


class SimFsdpLayout(SimLayout):
    """The chunks have the parameters, too: ``weights`` is another name of the chunks' value, and no rank has all parameters.

    If a rank cannot get some parameters, its shard is ``useless``: it counts as not computed.

    Attributes:
        open_requests: requests to this rank that it has not answered; some of them are early.
    """

    kept: SimChunks
    spares_newcomers = False

    def __init__(self, rank: SimRank) -> None:
        super().__init__(rank)
        self.kept = SimChunks(self)
        self.open_requests: list[StretchRequest] = []
        self._early: list[StretchRequest] = []
        self._servers: list[SimFsdpLayout] = []
        self._addresses: dict[Member, SimFsdpLayout] = {}
        self._place, self._still, self._missed_in, self._in_step = 0, True, -1, True
        self._hops = rank.world.stream("loans", rank.protocol.token)
        self.contributions = SimContributions(self, self._hops, lambda: self._still)

    @property
    def weights(self) -> int:
        return self.kept.value

    @weights.setter
    def weights(self, value: int) -> None:
        self.kept.value = value

    @property
    def compared(self) -> int:
        """Options alone: no rank has all parameters."""
        return 0

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def begin(self, move: Begin) -> Steps:
        self.kept.at = None
        yield from super().begin(move)
        self.kept.hold((WHOLE,), self.weights, move.view.state)
        self._settle()

    @contextmanager
    def moving(self) -> Iterator[None]:
        self._still = False
        try:
            yield
        finally:
            self._settle()

    def introduce(self, group: SimGroup) -> Steps:
        """Members exchange their servers' addresses before any drops its old chunks: no later step of the move can fail."""
        self._addresses = yield group.exchange(self.rank.member, "addresses", self)
        yield from self.rank.point("introduced")

    def place(self, column: Column, cut: StateCut, *, inherited: bool) -> None:
        self._place, self.useless = column.rank_of(self.rank.member), ""
        self._servers = [self._addresses[member] for member in column.members]
        self.contributions.place(column, cut, inherited=inherited)
        self._settle()

    def turn_to(self, cut: StateCut) -> None:
        self.contributions.adders.turn_to(cut)

    @property
    def adding(self) -> Collection[Chunk]:
        return self.contributions.adders.claimed

    @property
    def there(self) -> Collection[int]:
        return self.contributions.there

    def drop(self) -> None:
        self.contributions.begin_step()

    def count(self, shards: Collection[int]) -> None:
        self.contributions.count(shards)

    def repeat(self) -> None:
        self.contributions.repeat()

    def leave(self) -> Steps:
        yield from self.contributions.leave()

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def parameters(self) -> Steps:
        """The parameters, gathered for the forward, and again for the backward. None: some are missing, and the shard is useless."""
        self.useless = "" if self.contributions.adders.twice else self.contributions.failed
        forward = yield from self._gather()
        yield from self.rank.point("gathering")
        backward = yield from self._gather()
        if self.useless:
            return None
        return forward if forward == backward else POISON

    def _gather(self) -> Steps:
        """Take this rank's own chunks, and the others from their servers: each stretch from the first server that has it."""
        kept, state, cut = self.kept, self.kept.at, self.kept.cut
        assert state is not None, "before its first view a rank has all parameters"
        chunks = [(cut.size, index) for index in range(cut.size)]
        found = {kept.value} if any(map(kept.has, chunks)) else set()
        groups = self.rank.world.settings.replica_ranks
        wanted = [(servers(cut.keepers[one[1]], self._place, kept.places, groups), one) for one in chunks if not kept.has(one)]
        while wanted and not self.useless:
            asked = [(keepers, self._ask(self._servers[keepers[0]], state, chunk)) for keepers, chunk in wanted]
            wanted = []
            for keepers, request in asked:
                fetched: Fetched | None = yield request.answer
                if fetched is None:
                    wanted.append((keepers[1:], request.chunk))
                else:
                    self.rank.world.watch.served(self.rank, self._servers[keepers[0]].rank, state, fetched, request.chunk)
                    found.add(fetched.value)
            for keepers, chunk in wanted:
                if not keepers:
                    self._miss(state, chunk)
        return found.pop() if len(found) == 1 else POISON

    def _miss(self, state: StateId, chunk: Chunk) -> None:
        rank, keepers = self.rank, self.kept.cut.keepers[chunk[1]]
        rank.world.note("missed", rank, state, chunk)
        rank.world.watch.missed(rank, state, [self._servers[each].rank for each in keepers], chunk)
        self.useless = f"no rank of the view gives chunk {chunk} of the parameters"
        self._missed_in = rank.protocol.generation

    def evaluate(self) -> Steps:
        """Between two steps, gather all parameters on this rank alone. Raises Broken where this view lacks some."""
        self.useless, self._in_step = "", False
        try:
            yield from self._gather()
            missed = self.useless
        finally:
            self.useless, self._in_step = "", True
        if missed:
            raise Broken(missed)

    def contribute(self, shard: int, value: int, right: int) -> None:
        self.contributions.send([server.contributions for server in self._servers], shard, value, right)

    def flush(self) -> Steps:
        missed, self.useless = self.useless, ""
        if missed and missed != self.contributions.failed:
            self.rank.world.watch.cut(self.rank, self._missed_in, self.rank.rank_machine.view)
        if missed:
            raise Broken(missed)
        yield from self.contributions.flush()

    def summed(self, merged: Mapping[int, int]) -> dict[int, int]:
        return self.contributions.summed(merged)

    def word(self, sums: Mapping[int, int]) -> bool:
        return self.kept.word(sums)

    def take_out(self) -> int:
        self._still = False
        return self.kept.take_out()

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        self.kept.put_back(value, at, turns=turns)
        self.contributions.begin_step()
        self._settle()

    def followed(self) -> None:
        self.rank.world.watch.commit(self.rank, self.kept.at)

    # ---- a rank that borrows -------------------------------------------------------------------------------------------------------------

    def _ask(self, server: SimFsdpLayout, state: StateId, chunk: Chunk) -> StretchRequest:
        rank, clock, links, end = self.rank, self.rank.world.clock, self.rank.world.links, server.rank.end
        request = StretchRequest(self, state, chunk, clock.now_s + min(SILENT_S, rank.world.settings.timeouts.collective_s))
        arrives = lambda: links.carry(end, {rank.end}, lambda: server.asked(request))  # noqa: E731
        clock.after(self._hops.uniform(*HOP_S), arrives)
        clock.after(LOOK_S, lambda: rank.gate(lambda: self._look(request)))
        return request

    def _look(self, request: StretchRequest) -> None:
        """Stop the wait for a server if the rank is called away, or the time is over."""
        rank, clock = self.rank, self.rank.world.clock
        if request.answer.done:
            return
        if self._in_step and rank.rank_machine.wanted:
            request.until_s = min(request.until_s, clock.now_s + (GRACE_S if self.contributions.adders.twice else 0.0))
        if clock.now_s >= request.until_s:
            request.answer.resolve(None)
        clock.after(LOOK_S, lambda: rank.gate(lambda: self._look(request)))

    # ---- a rank that serves, in a separate thread ----------------------------------------------------------------------------------------

    def asked(self, request: StretchRequest) -> None:
        """A request has come to this process. If the process is dead and its host lives, the host refuses the connection."""
        rank = self.rank
        if rank.alive:
            self.open_requests.append(request)
            rank.world.clock.after(LATEST_S, lambda: rank.gate(lambda: self._give_up(request)))
            rank.gate(lambda: self._serve(request))
        elif rank.node.alive:
            self._answer(request, None)

    def died(self) -> None:
        pending, self.open_requests = self.open_requests, []
        for request in pending:
            self._answer(request, None)

    def _settle(self) -> None:
        """This rank may be at another state now: serve the early requests again."""
        self._still = True
        self.look_again()
        self.contributions.look_again()

    def look_again(self) -> None:
        """Serve the early requests again."""
        early, self._early = self._early, []
        for request in early:
            self._serve(request)

    def _give_up(self, request: StretchRequest) -> None:
        if request in self._early:
            self._early.remove(request)
            self._answer(request, None)

    def _serve(self, request: StretchRequest) -> None:
        try:
            match can_serve(self.kept.at, request.state, still=self._still, left=self.rank.rank_machine.outside):
                case Readiness.LATER:
                    self._early.append(request)
                case Readiness.NOW if self.kept.has(request.chunk):
                    self.rank.at("serving")
                    self.rank.gate(lambda: self._send(request))
                case _:
                    self._answer(request, None)
        except Dead:
            return

    def _send(self, request: StretchRequest) -> None:
        if self.kept.at is None:
            self._answer(request, None)
            return
        there = Fetched(self.kept.at, self.kept.value)
        self.rank.world.clock.after(self._hops.uniform(*HOP_S), lambda: self.rank.gate(lambda: self._sent(request, there)))

    def _sent(self, request: StretchRequest, there: Fetched) -> None:
        """The stretch was sent. If the state changed meanwhile, the receiver has a mixture of both states."""
        self._answer(request, there if there == (self.kept.at, self.kept.value) else Fetched(there.state, POISON))

    def _answer(self, request: StretchRequest, fetched: Fetched | None) -> None:
        if request in self.open_requests:
            self.open_requests.remove(request)
        world, end, fetcher = self.rank.world, self.rank.end, request.fetcher.rank
        arrives = lambda: fetcher.gate(lambda: request.answer.resolve(fetched))  # noqa: E731
        world.clock.after(self._hops.uniform(*HOP_S), lambda: world.links.carry(fetcher.end, {end}, arrives))
