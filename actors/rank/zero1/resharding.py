"""How the members of a view come to one sharded state, and to the cut with which they go on.

:mod:`fleet.protocol.chunks` has the decisions. Where the members hold all chunks of some cut, none moves before the first step. A rank that
holds a lost owner's chunk becomes its owner, and a newcomer has no chunks yet. :mod:`actors.rank.zero1.moving` brings chunks to their
places beside the steps that follow. Chunks move at once where a history begins, since one rank alone has the whole then, and where a loss
has cut a move short.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.state.tracked import receive_state, send_state
from actors.rank.step.train_step import TrainStep
from actors.rank.tags import Tag
from actors.rank.zero1.chunked import MOST_RUNS
from actors.rank.zero1.kept import KeptChunks
from actors.rank.zero1.layout import Routes
from actors.rank.zero1.moving import MovingChunks
from actors.rank.zero1.pieces import StatePiece, exchange_pieces, swap_pieces
from fleet.protocol.chunks import (
    RUN_NUMBERS,
    WHOLE,
    Chunk,
    ChunkRun,
    Claim,
    StateCut,
    ViewState,
    chunks_of,
    cut_of,
    guards,
    lost,
    route,
    runs,
    servers,
    settled,
    to_begin_with,
)
from fleet.protocol.domains import VARIABLE, Place, number, numbered, place_of
from fleet.protocol.member import MemberProtocol
from fleet.protocol.recut import Recut, first_elements
from fleet.protocol.types import StateId, View, columns
from fleet.protocol.vote import CommitVote


def exchange_claims(group: Group, mine: Claim) -> list[Claim]:
    """The claims of all members, by rank. Raises GroupBroken."""
    history, step = (mine.state.history, mine.state.step) if mine.state is not None else (-1, -1)
    claimed = runs(mine.chunks)
    flags = [history, step, mine.ready, mine.factor, mine.complete, mine.node, mine.pace_s, mine.adds, len(claimed)]
    row = torch.zeros(len(flags) + RUN_NUMBERS * MOST_RUNS, dtype=torch.float64, device="cpu")
    numbers = [*map(float, flags), *(float(number) for run in claimed for number in run)]
    row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    rows = torch.empty(group.size, len(row), dtype=torch.float64, device="cpu")
    group.all_gather(rows, row, Tag.CLAIM)
    return [_claim(each) for each in rows.tolist()]


def _claim(row: list[float]) -> Claim:
    history, step, ready, factor, complete, node, pace_s, adds, count = row[:9]
    numbers = list(map(int, row[9:]))
    claimed = [ChunkRun(*numbers[start : start + RUN_NUMBERS]) for start in range(0, RUN_NUMBERS * int(count), RUN_NUMBERS)]
    state = StateId(int(history), int(step)) if step >= 0 else None
    return Claim(state, bool(ready), factor, bool(complete), int(node), chunks_of(claimed), pace_s, int(adds))


def come_to_one(
    group: Group, mine: Claim, donor: int, vote: CommitVote, protocol: MemberProtocol, advance: Callable[[], None]
) -> tuple[list[Claim], StateId]:
    """(the claims of all members by rank, the state of ``donor``). If others have taken a step to it, this rank has taken it, too.

    ``advance``: see :class:`Resharding`. Raises GroupBroken: the donor holds no state.
    """
    claims = exchange_claims(group, mine)
    target = claims[donor].state
    if target is None:
        if group.rank == donor:
            protocol.receiving()  # tells the coordinator, which will choose another donor
        raise GroupBroken(f"the donor, rank {donor}, holds no state", group.generation)
    if vote.follow(claims, group.rank, target):
        advance()
    return claims, target


class Resharding:
    """Brings the members of a column to one state, each with its chunks.

    Args:
        copies: how many ranks guard each chunk.
        advance: takes the step that the others have taken, from this rank's sums, and reports it.
        levels: how many levels failure domains have. :data:`fleet.protocol.domains.VARIABLE` names this process's domains.
        replica_size: each group of so many successive ranks of a column keeps all chunks; 1: no groups.
    """

    def __init__(
        self,
        train: TrainStep,
        protocol: MemberProtocol,
        copies: int,
        advance: Callable[[], None],
        levels: int = 1,
        replica_size: int = 1,
    ) -> None:
        self._train, self._layout = train, train.layout
        self._kept: KeptChunks = train.layout.kept
        self._protocol, self._copies, self._advance = protocol, copies, advance
        self._depth, self._replica_size = levels + 1, replica_size
        self._node = number(place_of(os.environ.get(VARIABLE, ""), protocol.process.node), self._depth)

    def exchange(self, groups: ViewGroups, view: View) -> ViewState:
        """Meet in ``view``. All ranks then hold the state.

        Raises GroupBroken: each rank is as before, or a step further, and no chunk is lost by it. When no member of a column has a chunk,
        all ranks find and report it. A later view may have the chunk; if none has, a new history begins.
        """
        self._kept.stop()
        mine = replace(self._kept.claim(self._node), pace_s=self._train.pace_s)
        said, target = come_to_one(groups.whole, mine, view.donor, self._train.vote, self._protocol, self._advance)
        with self._layout.moving():  # until all are here, a rank may compute a shard, and ask this one
            return self._exchange(groups, view, said, target)

    def _exchange(self, groups: ViewGroups, view: View, said: Sequence[Claim], target: StateId) -> ViewState:
        kept_here, group, me = self._kept, groups.column, groups.column.rank
        reads, everywhere = kept_here.reads(target), settled(said, target)
        columns_there = {coordinate: [everywhere[rank] for rank in ranks] for coordinate, ranks in columns(view.members).items()}
        if not reads:
            for each in columns_there.values():
                self._check_lost(groups.whole, each)
        coordinate = view.members[groups.whole.rank].coordinate
        claims, there = [said[rank] for rank in columns(view.members)[coordinate]], columns_there[coordinate]
        self._complete(group, there)
        self._give_the_rest(group, view.column_of(view.members[groups.whole.rank]).donor, there)
        places = [numbered(claim.node, self._depth) for claim in claims]
        wanted = cut_of(guards(places, self._copies, self._replica_size))
        self._layout.introduce(group)  # before chunks move, as a rank may serve once its own have moved
        cut = wanted if reads else to_begin_with([claim.chunks for claim in there], wanted, [claim.adding for claim in there])
        if reads:
            kept_here.chunks.adopt(wanted.kept(me), kept_here.chunks.first(wanted.kept(me)))
        elif cut is None:
            self._move(group, there, wanted, places)
        else:
            self._keep_those_of(cut, me)
        asked, inherited = self._asked(cut or wanted, me, places), cut is not None and not reads
        self._layout.place(target, cut or wanted, group, asked, inherited=inherited)
        moving = None
        if cut is not None and cut != wanted:
            recut = Recut(cut, wanted, group.size, kept_here.chunks.extents, places, first=first_elements(claims))
            moving = MovingChunks(group, kept_here.chunks, recut, self._train.device, self._asked(wanted, me, places))
        kept_here.move(moving)
        return ViewState(target)

    def _keep_those_of(self, cut: StateCut, rank: int) -> None:
        """Keep this rank's chunks of ``cut``, which it holds, and no others: nothing else will be stepped."""
        chunks = self._kept.chunks
        if set(cut.kept(rank)) != set(chunks.chunks):  # some came for a view that broke
            chunks.recut(cut.kept(rank))
        chunks.drop_more()
        chunks.drop_beside()

    def _asked(self, cut: StateCut, rank: int, places: Sequence[Place]) -> list[tuple[int, ...]]:
        """By chunk, the ranks that ``rank`` asks for it, in order."""
        return [servers(keepers, rank, places, self._replica_size) for keepers in cut.keepers]

    def _check_lost(self, group: Group, there: Sequence[Claim]) -> None:
        gone = [span for extent in self._kept.chunks.extents for span in lost([claim.chunks for claim in there], extent)]
        if gone:
            self._protocol.incomplete()
            lo, hi = gone[0]
            raise GroupBroken(f"no member of the view holds elements {lo} to {hi} of the optimizer's state", group.generation)

    def _complete(self, group: Group, there: Sequence[Claim]) -> None:
        """Send parameters that were on their way when a view broke. Newcomers get them with the rest of the state."""
        if all(claim.complete for claim in there if claim.state is not None):
            return
        held = [(WHOLE,) if claim.complete else claim.chunks for claim in there]
        extents = self._kept.chunks.extents
        routes: Routes = [
            [route(held, [WHOLE] if claim.state is not None else [], extent, rank) for extent in extents]
            for rank, claim in enumerate(there)
        ]
        self._layout.gather(group, routes)
        if there[group.rank].state is not None:
            self._kept.conclude()

    def _give_the_rest(self, group: Group, donor: int, there: Sequence[Claim]) -> None:
        """The donor, or another rank in its place, sends newcomers the state without the optimizer's chunks."""
        newcomers, chunks = [rank for rank, claim in enumerate(there) if claim.state is None], self._kept.chunks
        giver = min((rank for rank in range(group.size) if rank not in newcomers), key=lambda rank: rank != donor)
        if group.rank == giver:
            for rank in newcomers:
                send_state(group, rank, self._train.state)
            swap_pieces(group, dict.fromkeys(newcomers, chunks.examples), (), self._train.device, Tag.PIECES)
        elif group.rank in newcomers:
            self._protocol.receiving()
            self._train.reset()
            self._kept.lose()
            receive_state(group, giver, self._train.state)
            chunks.follow(swap_pieces(group, {}, (giver,), self._train.device, Tag.PIECES))

    def _move(self, group: Group, there: Sequence[Claim], cut: StateCut, places: Sequence[Place]) -> None:
        """Move each chunk to its owner and guards. Ranks drop old chunks once all have the new ones."""
        me, wanted = group.rank, [cut.kept(rank) for rank in range(group.size)]
        pieces = self._fetch(group, there, wanted, places)
        try:
            said = torch.zeros(1, dtype=torch.float32, device="cpu")
            group.all_gather(said.new_empty(group.size, 1), said, Tag.PIECES)
        except GroupBroken:
            self._keep(wanted[me], pieces)
            raise
        if there[me].chunks != wanted[me]:  # else its chunks stay as they are
            self._kept.chunks.adopt(wanted[me], pieces)

    def _fetch(
        self, group: Group, there: Sequence[Claim], wanted: Sequence[tuple[Chunk, ...]], places: Sequence[Place]
    ) -> list[StatePiece]:  # fmt: skip
        """The pieces of this rank's chunks, from this rank and others. Raises GroupBroken."""
        chunks, me = self._kept.chunks, group.rank
        held = [claim.chunks for claim in there]
        outgoing: dict[int, list[StatePiece]] = {}
        local: list[StatePiece] = []
        for rank in (rank for rank in range(group.size) if rank == me or held[rank] != wanted[rank]):
            stretches = [(f, one) for f, extent in enumerate(chunks.extents) for one in route(held, wanted[rank], extent, rank, places)]
            pieces = chunks.cut([(flat, one.lo, one.hi) for flat, one in stretches if one.source == me])
            if rank == me:
                local = pieces
            elif pieces:
                outgoing[rank] = pieces
        return local + exchange_pieces(group, outgoing, self._train.device)

    def _keep(self, wanted: tuple[Chunk, ...], pieces: list[StatePiece]) -> None:
        """Keep the received pieces beside the old chunks: another rank may already have dropped its old ones."""
        if self._kept.claim(0).state is not None:
            self._kept.chunks.keep_beside(wanted, pieces)
