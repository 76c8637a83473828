"""Parity in the place of copies: who keeps whose, and what can be made of it when a rank is lost. Pure.

The ranks of a view are dealt into *families* of ``parity + 1``. Each member owns its chunk, which is cut into as many *stripes* as there
are others; and it keeps the exclusive or of the bits of one stripe of each other member. So each has ``1 + 1 / parity`` chunks, and of a
family any one can be lost: each of the others makes the stripe of it whose bits are in what it keeps. All of them is the chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fleet.protocol.chunks import FAMILY_MOST, Chunk, Claim, Kin, bounds, follows, lost
from fleet.protocol.domains import Place
from fleet.protocol.probes import probe
from fleet.protocol.types import StateId

MOST = FAMILY_MOST - 1
"""Others in a family: so many stripes has a chunk."""

Family = tuple[int, ...]
"""View ranks, in order."""


def families(places: Sequence[Place], parity: int) -> tuple[Family, ...]:
    """Deal view ranks into families of ``parity + 1`` at most, as even as can be; none has one member alone where there are two ranks.

    With ``parity`` 1 and an odd number of ranks one of them has three. Ranks of one domain are dealt out one by one, so that of each
    domain, wide or narrow, a family has as few as can be.

    Args:
        places: by view rank, its failure domains from wide to narrow, and its node.
    """
    size = len(places)
    count = max(1, min(-(-size // (parity + 1)), size // 2))
    order = sorted(range(size), key=lambda rank: (places[rank], rank))
    return tuple(tuple(sorted(order[number::count])) for number in range(count))


def family_of(dealt: Sequence[Family], rank: int) -> Family:
    """That of view rank ``rank``."""
    return next(members for members in dealt if rank in members)


def stripe(size: int, members: Family, owner: int, keeper: int) -> Chunk:
    """Of the chunk of one member the stripe whose bits another one keeps. Both are places in the family, of a view of ``size`` ranks."""
    others = len(members) - 1
    return size * others, members[owner] * others + (keeper if keeper < owner else keeper - 1)


def endangered(dealt: Sequence[Family], gone: Sequence[bool]) -> int:
    """How many chunks cannot be made any more when the ranks that are ``gone`` are lost together."""
    losses = [sum(gone[rank] for rank in members) for members in dealt]
    return sum(loss for loss in losses if loss > 1) + sum(loss for loss, one in zip(losses, dealt, strict=True) if loss == len(one) == 1)


class Revival(NamedTuple):
    """One stripe of a lost member's chunk that is made of parity.

    Attributes:
        stripe: what is made, by view rank ``keeper``, of the parity of ``generation`` that it keeps.
        givers: view ranks, and the stripe whose bits each gives to the keeper; they are at ``place`` of the family for it.
        place: the keeper's place in the family.
        taken: of the flat buffers from here on, the parity is of the step before the target: givers give the bits of before, and the
            mean gradient, and the keeper takes the step. None: it is of the target, all of it.
    """

    stripe: Chunk
    keeper: int
    givers: tuple[tuple[int, Chunk], ...]
    generation: int
    place: int
    taken: int | None


def revivals(claims: Sequence[Claim], target: StateId, extents: Sequence[int]) -> list[Revival]:
    """What members that are at ``target``, or take the step to it, can make of parity, of all that none of them holds.

    Args:
        claims: by view rank, as they were told: before anybody has taken the step.
        extents: by flat buffer, its length.
    """
    held = [claim.chunks if _reaches(claim, target) else () for claim in claims]
    found: list[Revival] = []
    for present in _families(claims, target):
        gone = [lost(held, extent) for extent in extents]
        if not any(gone):
            break
        made = [one for one in _made(present, target) if _overlaps(one.stripe, gone, extents)]
        held = [(*chunks, *(one.stripe for one in made if one.keeper == rank)) for rank, chunks in enumerate(held)]
        found += made
    return found


def with_revived(claims: Sequence[Claim], made: Sequence[Revival]) -> list[Claim]:
    """What members hold once the stripes are made."""
    return [
        replace(claim, chunks=(*claim.chunks, *(one.stripe for one in made if one.keeper == rank and one.stripe not in claim.chunks)))
        for rank, claim in enumerate(claims)
    ]


def broken_families(claims: Sequence[Claim], target: StateId) -> list[tuple[Family, tuple[int, ...]]]:
    """Of each family that more than one is missing of: its ranks in the view that dealt it, and those of them that are missing."""
    found = []
    for present in _families(claims, target):
        kin = next(iter(present.values()))[1]
        missing = tuple(rank for place, rank in enumerate(kin.members) if place not in present)
        if len(missing) > 1:
            found.append((kin.members, missing))
    return found


Present = Mapping[int, tuple[int, Kin]]
"""Of one family, by place in it: who is there, as a rank of the present view, and what it says of its parity."""


def _reaches(claim: Claim, target: StateId) -> bool:
    return claim.state == target or follows(claim, target)


def _families(claims: Sequence[Claim], target: StateId) -> list[Present]:
    """Those of the latest view first."""
    found: dict[tuple[int, Family], dict[int, tuple[int, Kin]]] = defaultdict(dict)
    for rank, claim in enumerate(claims):
        for kin in claim.kin if _reaches(claim, target) else ():
            found[-kin.generation, kin.members][kin.place] = rank, kin
    return [found[key] for key in sorted(found)]


def _made(present: Present, target: StateId) -> list[Revival]:
    kin = next(iter(present.values()))[1]
    missing = [place for place in range(len(kin.members)) if place not in present]
    if len(missing) != 1:
        if missing:
            probe("a family has lost more than one member")
        return []
    found = []
    for place, (keeper, kept) in sorted(present.items()):
        if kept.step in (target.step, target.step - 1):
            givers = tuple(
                (rank, stripe(kin.size, kin.members, other, place)) for other, (rank, _) in sorted(present.items()) if other != place
            )
            made = stripe(kin.size, kin.members, missing[0], place)
            if kept.step != target.step:
                probe("a stripe is made of parity from before the step")
            found.append(Revival(made, keeper, givers, kin.generation, place, None if kept.step == target.step else kept.taken))
    return found


def _overlaps(made: Chunk, gone: Sequence[Sequence[tuple[int, int]]], extents: Sequence[int]) -> bool:
    for extent, spans in zip(extents, gone, strict=True):
        lo, hi = bounds(extent, made)
        if any(max(lo, start) < min(hi, stop) for start, stop in spans):
            return True
    return False
