"""Which rank keeps which stretch of a sharded state, at any world size, and where ranks find a lost stretch again. Pure.

A flat buffer is cut into *chunks* at multiples of :data:`BLOCK` elements: chunk ``(size, index)`` is the ``index``-th of ``size``.
View rank ``i`` of a view of ``size`` ranks owns chunk ``(size, i)``, and guards copies of a few other chunks. When the view changes, each
member says in a :class:`Claim` which chunks it holds. All members see the same claims. So all derive the same :class:`StateCut` to go on
with, and the same transfers (:mod:`fleet.protocol.recut`).

``replica_size`` view ranks in a row can form a group. The members of a full group together hold all chunks. The member at place ``c`` of
its group has the chunks of all ranks at place ``c`` of theirs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from fleet.protocol.domains import Crowd, Place, shared_levels
from fleet.protocol.probes import probe
from fleet.protocol.types import StateId, View, columns

BLOCK = 1024
"""Elements. No block is ever cut, so a norm that is taken block by block has the same bits at any world size."""

LEAST_AT_ONCE, AT_ONCE = 2, 3
"""Number of units whose parameters a rank holds gathered at one time: the outermost unit, the one that computes, and the next one. Between
two backwards the last one takes the place of the next one. Without room for three, no unit is gathered ahead."""

Chunk = tuple[int, int]
WHOLE: Chunk = (1, 0)


def bounds(length: int, chunk: Chunk) -> tuple[int, int]:
    """The half-open range of ``chunk`` in a buffer of ``length`` elements. Chunks of one size tile it, as evenly as whole blocks allow."""
    size, index = chunk
    blocks = -(-length // BLOCK)
    return min(length, blocks * index // size * BLOCK), min(length, blocks * (index + 1) // size * BLOCK)


def cut_points(lo: int, hi: int, parts: int) -> list[int]:
    """Where to cut ``lo..hi`` evenly into ``parts``. No block of :data:`BLOCK` elements, counted from ``lo``, is cut."""
    blocks = -(-(hi - lo) // BLOCK)
    return [min(hi, lo + blocks * i // parts * BLOCK) for i in range(parts + 1)]


def guards(places: Sequence[Place], copies: int, replica_size: int = 1) -> tuple[tuple[int, ...], ...]:
    """By chunk, the view ranks that keep a copy: the owner's siblings in other groups, then more ranks until there are ``copies``.

    The additional ranks are in other failure domains than the ranks that have the chunk already. A different wide domain counts more than
    a different narrow one. No rank keeps more than twice an even share. Within that limit, each chunk survives the loss of any one domain
    wherever possible. So every chunk gets its first copy before any chunk gets a second one. Chunks of the largest domain come first,
    since the fewest ranks lie outside of it.

    Args:
        places: by view rank, its failure domains from wide to narrow, and its node.
        copies: the least number of copies; fewer when there are not as many other ranks.
        replica_size: number of ranks in a row that form a group; 1: no groups.
    """
    size, sizes = len(places), Counter(place[:1] for place in places)
    found = [siblings(size, owner, replica_size) for owner in range(size)]
    kept = Counter(rank for chosen in found for rank in chosen)
    load = [kept[rank] for rank in range(size)]
    ranks: dict[Place, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        ranks[place].append(rank)
    order = sorted(range(size), key=lambda owner: -sizes[places[owner][:1]])
    for target in range(1, min(copies, size - 1) + 1):
        for owner in (owner for owner in order if len(found[owner]) < target):
            crowd = Crowd(places[rank] for rank in (owner, *found[owner]))
            peer = _least(owner, {owner, *found[owner]}, ranks, crowd, load, 2 * copies)
            load[peer] += 1
            found[owner].append(peer)
    return tuple(map(tuple, found))


def siblings(size: int, rank: int, replica_size: int) -> list[int]:
    """In each full group but the rank's own, the member at the rank's place."""
    full = size // replica_size if replica_size > 1 else 0
    return [group * replica_size + rank % replica_size for group in range(full) if group != rank // replica_size]


def _least(owner: int, taken: Collection[int], ranks: Mapping[Place, Sequence[int]], crowd: Crowd, load: Sequence[int], most: int) -> int:
    """The rank that keeps the next copy. In turn, these count: room, distance from other copies, few copies there, soon after the owner."""
    size = len(load)
    keys = (
        (load[rank] >= most, near, load[rank], (rank - owner) % size)
        for near, inside in [(crowd.of(place), inside) for place, inside in ranks.items()]
        for rank in inside
        if rank not in taken
    )
    return (owner + min(keys)[-1]) % size


class StateCut(NamedTuple):
    """Which ranks of a view keep which chunk of a sharded state. All chunks have one size.

    Attributes:
        keepers: by chunk, the view ranks that keep it. The first one owns it: it adds up the gradients of the chunk.
    """

    keepers: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of chunks."""
        return len(self.keepers)

    def owned(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks that view rank ``rank`` owns."""
        return tuple((self.size, index) for index, keepers in enumerate(self.keepers) if keepers[0] == rank)

    def kept(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of view rank ``rank``: its own, then those that it guards."""
        return (*self.owned(rank), *((self.size, index) for index, keepers in enumerate(self.keepers) if rank in keepers[1:]))

    def by_rank(self, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
        """By view rank, of ``ranks`` in all: the numbers of the chunks that it owns, and of those that it guards. In one pass."""
        owned, guarded = ([list[int]() for _ in range(ranks)] for _ in range(2))
        for index, (owner, *guards) in enumerate(self.keepers):
            owned[owner].append(index)
            for guard in guards:
                guarded[guard].append(index)
        return owned, guarded


UNCUT = StateCut(((0,),))
"""One rank keeps the whole."""


def cut_of(guarded: Sequence[Sequence[int]]) -> StateCut:
    """The cut in which each view rank owns the chunk of its number. ``guarded``: see :func:`guards`."""
    return StateCut(tuple((owner, *chosen) for owner, chosen in enumerate(guarded)))


def inherited(held: Sequence[Sequence[Chunk]], adding: Sequence[Collection[Chunk]] = ()) -> StateCut | None:
    """The cut with which a view can begin when no chunk moves: each chunk is kept by all ranks that hold it.

    None when the ranks do not hold all chunks of any one size. Chunks of several sizes are held where a move was cut short. Then the
    smallest size that is held whole counts. A chunk with few holders is the first to get an owner, and a rank that owns few chunks is the
    first to become one. Ranks that add up the chunk's gradients come first, so that the step can go on.

    Args:
        held: by view rank, the chunks that it holds. ``adding``: those whose gradients it adds up in the present step; (): of no rank.
    """
    for size in sorted({size for chunks in held for size, _ in chunks}):
        holders, adders = ([list[int]() for _ in range(size)] for _ in range(2))
        for rank, chunks in enumerate(held):
            for index in sorted({index for one, index in chunks if one == size}):
                holders[index].append(rank)
                if adding and (size, index) in adding[rank]:
                    adders[index].append(rank)
        if all(holders):
            return StateCut(tuple(map(tuple, _with_owners(holders, adders, len(held)))))
    return None


def to_begin_with(
    held: Sequence[Sequence[Chunk]], wanted: StateCut, adding: Sequence[Collection[Chunk]] = ()
) -> StateCut | None:  # fmt: skip
    """The cut with which a view begins, towards the cut ``wanted``; None: chunks have to move to ``wanted`` first.

    They have to where one rank has the whole, as when a history begins, and where the ranks hold no whole cut.
    """
    if all(set(chunks) == set(wanted.kept(rank)) for rank, chunks in enumerate(held)):
        return wanted
    return None if any(WHOLE in chunks for chunks in held) else inherited(held, adding)


def _with_owners(holders: Sequence[Sequence[int]], adders: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """The holders of each chunk: its owner, others of its ``adders``, the rest."""
    owned, found = Counter[int](), [list(each) for each in holders]
    for index in sorted(range(len(holders)), key=lambda index: len(holders[index])):
        owner = min(adders[index] or holders[index], key=lambda rank: (owned[rank], (rank - index) % ranks))
        owned[owner] += 1
        found[index] = list(dict.fromkeys([owner, *adders[index], *holders[index]]))
    return found


def servers(keepers: Sequence[int], rank: int, places: Sequence[Place] = (), replica_size: int = 1) -> tuple[int, ...]:
    """The ranks that keep a chunk, in the order in which view rank ``rank`` asks them. Ranks begin at different keepers.

    Where there are groups, ranks of the asking rank's own group come first, then near ranks. So a full group gathers within itself.

    Args:
        keepers: see :class:`StateCut`.
        places: as for :func:`guards`; () when they are not known.
    """
    first = rank % len(keepers)
    turned = (*keepers[first:], *keepers[:first])
    if replica_size == 1:
        return turned
    nearness = {keeper: shared_levels(places[keeper], places[rank]) for keeper in keepers} if places else dict.fromkeys(keepers, 0)
    return tuple(sorted(turned, key=lambda keeper: (keeper // replica_size != rank // replica_size, -nearness[keeper])))


SILENT_S = 15.0
"""Seconds. A rank leaves a server that says nothing for so long, and asks the next one. It is longer than ``LATEST_S``."""
LATEST_S = 10.0
"""Seconds that a server waits at most for its own commit of a step that its peer has committed."""


class Readiness(Enum):
    """The answer to a request for a stretch of the parameters of one certain state."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def can_serve(here: StateId | None, wanted: StateId, *, still: bool = True, left: bool = False) -> Readiness:
    """Whether a rank at ``here`` can serve parameters of ``wanted``. A rank serves committed parameters alone.

    A peer that has already taken the next step asks early. It gets its answer once this rank has taken that step, too.

    Args:
        still: false while this rank's parameters change: it takes a step, or it moves the chunks of a new view to their places. A peer
            that is done earlier asks meanwhile, and has to wait, as no whole state is here.
        left: this rank is out of its view. If it is a step behind its peer, it takes that step in the next view, and the peer has to join
            that view first.
    """
    if not still:
        return Readiness.LATER
    if here == wanted:
        return Readiness.NOW
    behind = here is not None and here.history == wanted.history and here.step + 1 == wanted.step
    if not behind:
        probe("a server is asked for a state that it does not hold")
    if behind and left:
        probe("a server is asked for a step that it takes in the next view alone")
    return Readiness.LATER if behind and not left else Readiness.NEVER


class Turn(NamedTuple):
    """An attempt at a step: the view's generation, and how often the step was computed again in that view."""

    generation: int
    attempt: int


def can_accept(here: tuple[StateId | None, Turn], contributed: tuple[StateId, Turn], *, still: bool = True) -> Readiness:
    """Whether a rank that computes a step from ``here`` can use a peer's part of a gradient, of the step from ``contributed``.

    A peer can be ahead: in a newer view, at the next step, or at the next attempt. It gets its answer once this rank has come there, too.
    A part of an earlier attempt is useless, since the ranks gave up that sum.

    Args:
        still: see :func:`can_serve`.
    """
    mine, theirs = here[1], contributed[1]
    if theirs.generation != mine.generation:
        return Readiness.LATER if theirs.generation > mine.generation else Readiness.NEVER
    fate = can_serve(here[0], contributed[0], still=still)
    if fate is not Readiness.NOW or theirs.attempt == mine.attempt:
        return fate
    return Readiness.LATER if theirs.attempt > mine.attempt else Readiness.NEVER


class ChunkRun(NamedTuple):
    """``total`` chunks of one ``size``: the first has index ``first``, and each next index is ``step`` higher."""

    size: int
    first: int
    step: int
    total: int


RUN_NUMBERS = 4
"""Count of the numbers in a :class:`ChunkRun`."""


def runs(chunks: Sequence[Chunk]) -> list[ChunkRun]:
    """The same chunks as few runs, in their order. A member of a group has one chunk of each group, at equal distances."""
    found: list[ChunkRun] = []
    for size, index in chunks:
        last = found[-1] if found else ChunkRun(0, 0, 0, 0)
        step = index - last.first if last.total == 1 else last.step
        if last.size == size and index == last.first + step * last.total:
            found[-1] = ChunkRun(size, last.first, step, last.total + 1)
        else:
            found.append(ChunkRun(size, index, 0, 1))
    return found


def chunks_of(found: Sequence[ChunkRun]) -> tuple[Chunk, ...]:
    """Inverse of :func:`runs`."""
    return tuple((run.size, run.first + run.step * number) for run in found for number in range(run.total))


@dataclass(frozen=True, slots=True)
class Claim:
    """A member's statement of its chunks when a view begins.

    Attributes:
        state: the state of the member's chunks; None when it holds none.
        ready: the member holds all that the next step of its chunks needs: it can take that step without any peer.
        factor: multiplier of the gradients of the step before ``state``. A ready member takes that step with it.
        complete: the parameters, which all members keep whole, are of ``state`` everywhere, and not in the member's chunks alone.
        node: number of the member's place: see :func:`fleet.protocol.domains.number`.
        chunks: the chunks that the member holds, its own and copies, at the cuts of any earlier view.
        pace_s: seconds of its last steps, the shortest; 0 when it has taken none.
        adds: bit i: the member adds up the gradients of ``chunks[i]`` in the present step.
    """

    state: StateId | None
    ready: bool = False
    factor: float = 1.0
    complete: bool = False
    node: int = 0
    chunks: tuple[Chunk, ...] = ()
    pace_s: float = 0.0
    adds: int = 0

    @property
    def adding(self) -> frozenset[Chunk]:
        """The chunks of :attr:`adds`."""
        return frozenset(chunk for number, chunk in enumerate(self.chunks) if self.adds >> number & 1)


MOST_ADDED = 50
"""Of its first chunks, so many at most a claim says whether they are added up: as many bits travel as one number."""


def added(chunks: Sequence[Chunk], adding: Collection[Chunk]) -> int:
    """:attr:`Claim.adds` of a member that holds ``chunks`` and adds up ``adding``."""
    return sum(1 << number for number, chunk in enumerate(chunks[:MOST_ADDED]) if chunk in adding)


def follows(claim: Claim, target: StateId) -> bool:
    """Whether the member can take, by itself, the one step that it is behind ``target``."""
    return claim.ready and claim.state is not None and claim.state == StateId(target.history, target.step - 1)


def settled(claims: Sequence[Claim], target: StateId) -> list[Claim]:
    """The claims at ``target``, after each ready member one step behind has taken that step. Chunks of other states do not count."""
    found = []
    for claim in claims:
        if follows(claim, target):
            probe("a member takes by itself the step that it is behind")
            claim = replace(claim, state=target, complete=False)
        elif claim.state != target:
            claim = Claim(None, node=claim.node)
        found.append(replace(claim, ready=False))
    return found


class ViewState(NamedTuple):
    """The state of a view, as it is for one of its ranks: the rank holds it, or it is on its way.

    ``giver``: the rank of this one's column that gives it to this rank; -1: this rank holds it. ``receivers``: ranks of its column to which
    this rank gives it.
    """

    state: StateId
    giver: int = -1
    receivers: tuple[int, ...] = ()


def state_in_column(claims: Sequence[Claim], target: StateId, view: View, rank: int) -> ViewState | None:
    """How ``rank`` of ``view`` meets the others at ``target``, where each rank has all of its column's part of the state.

    In each column the first rank that holds the state gives it to those that lack it. None: some column has no such rank.
    """
    there = [claim.state is not None for claim in settled(claims, target)]
    found = [(ranks, [place for place, each in enumerate(ranks) if not there[each]]) for ranks in columns(view.members).values()]
    if any(len(lacking) == len(ranks) for ranks, lacking in found):
        return None
    ranks, lacking = next((ranks, lacking) for ranks, lacking in found if rank in ranks)
    giver, me = next(place for place in range(len(ranks)) if place not in lacking), ranks.index(rank)
    return ViewState(target, giver if me in lacking else -1, tuple(lacking) if me == giver else ())


class Stretch(NamedTuple):
    """Elements ``lo..hi`` of a buffer, and the view rank that gives them; -1 when no member has them."""

    lo: int
    hi: int
    source: int


def route(
    held: Sequence[Sequence[Chunk]], wanted: Sequence[Chunk], length: int, rank: int, places: Sequence[Place] = ()
) -> list[Stretch]:  # fmt: skip
    """Sources of the chunks ``wanted`` of view rank ``rank``: itself where it holds them, else the nearest holders in turn.

    The stretches are in order and do not overlap.

    Args:
        held: by view rank, the chunks that it holds.
        places: as for :func:`guards`; (): all ranks are equally near.
    """
    spans = [[bounds(length, chunk) for chunk in chunks] for chunks in held]
    goals = [bounds(length, chunk) for chunk in wanted]
    cuts = sorted({0, length, *(cut for span in (*spans, goals) for both in span for cut in both)})
    found: list[Stretch] = []
    for number, (lo, hi) in enumerate(itertools.pairwise(cuts)):
        if any(start <= lo and hi <= stop for start, stop in goals):
            holders = [peer for peer, span in enumerate(spans) if any(start <= lo and hi <= stop for start, stop in span)]
            found.append(Stretch(lo, hi, choose(holders, rank, number, places)))
    return found


def choose(holders: Sequence[int], rank: int, number: int, places: Sequence[Place] = ()) -> int:
    """The view rank of ``holders`` that gives stretch ``number`` to ``rank``: itself, else one of the nearest; -1 without holders."""
    if rank in holders:
        return rank
    if places and holders:
        nearness = [shared_levels(places[peer], places[rank]) for peer in holders]
        holders = [peer for peer, levels in zip(holders, nearness, strict=True) if levels == max(nearness)]
    return holders[(rank + number) % len(holders)] if holders else -1


def lost(held: Sequence[Sequence[Chunk]], length: int) -> list[tuple[int, int]]:
    """The stretches that no member holds."""
    return [(lo, hi) for lo, hi, source in route(held, [WHOLE], length, 0) if source < 0]


class Rectangle(NamedTuple):
    """Elements ``start..stop`` of a tensor, in row-major order: they begin at ``offsets`` and have the shape ``sizes``."""

    start: int
    stop: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Cut the elements ``start..stop`` of a tensor of ``shape``, in row-major order, into the fewest rectangles: whole rows together."""
    if start >= stop:
        return []
    if len(shape) < 2 or stop - start == math.prod(shape):
        whole = tuple(shape) if stop - start == math.prod(shape) else (stop - start,)
        return [Rectangle(start, stop, (start,) if len(shape) == 1 else (0,) * len(shape), whole)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _in_row(shape, last, start, stop)
    found = _in_row(shape, first - 1, start, first * row)
    if first < last:
        rows = (last - first, *shape[1:])
        found.append(Rectangle(first * row, last * row, (first, *(0,) * (len(shape) - 1)), rows))
    return found + _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> list[Rectangle]:
    begin = number * math.prod(shape[1:])
    inner = rectangles(shape[1:], start - begin, stop - begin)
    return [Rectangle(begin + one.start, begin + one.stop, (number, *one.offsets), (1, *one.sizes)) for one in inner]
