"""Requirements that a placement does not meet, and domains that are lost as a whole. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.protocol.decisions import Beside, Lacking, Split
from fleet.protocol.domains import HOST, Crowd, Place, level_name, shared_levels

WINDOW_S = 10.0
"""Seconds. Nodes of one domain that are lost within so long count as lost by one cause: a silent node shows only after ``node_s``."""


def asked(levels: Sequence[str]) -> bool:
    """Whether a run has set domains beyond the default, the host. Without them it has no requirements for its placement."""
    return tuple(levels) != (HOST,)


def named(domain: Place, levels: Sequence[str], deepest: int) -> tuple[str, str]:
    """(name of its level, its path) of a domain. Paths have ``deepest`` levels: as many as ``levels``, if ``FLEET_DOMAIN`` is not set."""
    name = level_name(levels[-len(domain)]) if deepest == len(levels) and domain else "domain"
    return name, "/".join(domain)


def shared(places: Sequence[Place]) -> Place:
    """The narrowest domain that contains all these places; () where there is none."""
    first: Place = places[0] if places else ()
    return first[: min((shared_levels(first, place) for place in places), default=0)]


DIMENSIONS = ("replicate", "shard")
"""Dimensions of the mesh of ranks, from the outermost on."""


def coordinate(rank: int, sharded: bool, replica_size: int) -> dict[str, int]:
    """The place of view rank ``rank`` in each dimension: its replica, and its place there. Without sharding each rank is a replica.

    Ranks beyond the last full group count as one more group.
    """
    if not sharded:
        return dict(zip(DIMENSIONS, (rank, 0), strict=True))
    where = divmod(rank, replica_size) if replica_size > 1 else (0, rank)
    return dict(zip(DIMENSIONS, where, strict=True))


# ---- requirements that a placement does not meet -----------------------------------------------------------------------------------------


def lacking(ranks: Sequence[Place], copies: Sequence[Sequence[Place]], size: int, levels: Sequence[str]) -> Lacking:
    """Groups that span several domains although one domain could hold a group, and ranks whose copies lie in their own domain.

    Args:
        ranks: by view rank, the domains of its node, from wide to narrow; () when they are not known.
        copies: by view rank, the domains of each node that keeps a copy of its part.
        size: ranks of a group; the last group may have fewer.
        levels: the setting ``domains``.
    """
    deepest = max(map(len, ranks), default=0)
    narrowest = max((len(domain) for domain, count in Crowd(ranks).counts.items() if count >= size), default=0)
    groups = [ranks[start : start + size] for start in range(0, len(ranks) - size + 1, size)]
    split = [_split(number, group, narrowest or 1, levels, deepest) for number, group in enumerate(groups)]
    beside = [Beside(rank, *named(common, levels, deepest)) for rank, common in _besides(ranks, copies)]
    return Lacking(tuple(each for each in split if each is not None) if size > 1 else (), tuple(beside))


def _split(number: int, group: Sequence[Place], narrowest: int, levels: Sequence[str], deepest: int) -> Split | None:
    """The split of a group; None when it has none. The level is the narrowest with a domain for a whole group, else the widest."""
    held, spanned = shared(group), sorted({place[:narrowest] for place in group})
    if len(spanned) == 1 or any(len(each) < narrowest for each in spanned):  # or their domains are not known
        return None
    level, _ = named(spanned[0], levels, deepest)
    within = " ".join(named(held, levels, deepest)) if held else ""
    return Split(number, level, tuple("/".join(each) for each in spanned), within)


def _besides(ranks: Sequence[Place], copies: Sequence[Sequence[Place]]) -> list[tuple[int, Place]]:
    """(view rank, domain) of each rank whose copies all lie in one domain with it."""
    commons = [(rank, shared([place, *kept])) for rank, (place, kept) in enumerate(zip(ranks, copies, strict=False)) if kept]
    return [(rank, common) for rank, common in commons if common]


def in_words(found: Lacking) -> str:
    """The unmet requirements and their consequences, for people."""
    said = [_of_split(each) for each in found.split]
    together = defaultdict[tuple[str, str], list[int]](list)
    for each in found.beside:
        together[each.level, each.domain].append(each.rank)
    for (level, domain), ranks in together.items():
        whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        said.append(f"all copies of {whose} share {level} {domain} with it: its loss leaves the durable checkpoint alone")
    return "; ".join(said) or "every group is in one domain, and every part has a copy in another"


def _of_split(each: Split) -> str:
    spans = f"replica {each.replica} spans {each.level} {' and '.join(each.domains)}: its members exchange across them"
    return f"{spans}, within {each.within}" if each.within else spans


# ---- a domain that is lost ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """A lost node: its place, and the time of the loss."""

    place: Place
    at_s: float


def lost_domain(node: str, gone: Mapping[str, Gone], there: Iterable[Place]) -> tuple[Place, tuple[str, ...]]:
    """(the widest domain of ``node`` that has no node left, its nodes that were lost with it); ((), ()) where ``node`` alone was lost.

    Args:
        gone: the lost nodes, ``node`` among them.
        there: the places of the nodes that are left.
    """
    place, left = gone[node].place, list(there)
    for depth in range(1, len(place) + 1):
        domain = place[:depth]
        if any(other[:depth] == domain for other in left):
            continue
        since_s = gone[node].at_s - WINDOW_S
        inside = tuple(sorted(name for name, each in gone.items() if each.place[:depth] == domain and each.at_s >= since_s))
        return (domain, inside) if len(inside) > 1 else ((), ())
    return (), ()
