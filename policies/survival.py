"""Losses that a run on some nodes cannot survive, domain by domain: ranks, state, copies, and room for replacements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.protocol.chunks import guards
from fleet.protocol.decisions import Lacking
from fleet.protocol.domains import HOST, level_name, place_of
from fleet.protocol.topology import lacking
from fleet.settings.run import RunSettings
from policies.placement import copies
from policies.topology import together


@dataclass(frozen=True, slots=True)
class Site:
    """A node: its name, its domain path (see :mod:`fleet.protocol.domains`), and the number of ranks that it has room for."""

    node: str
    path: str
    slots: int


@dataclass(frozen=True, slots=True)
class Risk:
    """The effect on a run of the loss of one domain, all its nodes at once.

    Attributes:
        level: the kind of the domain (the label's name); ``domain``: its path.
        nodes: their number in the domain; ``slots``: theirs.
        ranks: the run's number of them in the domain; ``spares``: theirs.
        left: ranks that train elsewhere, and spares elsewhere that can be promoted.
        enough: ``left`` is at least ``min_ranks``.
        chunks: parts of a sharded optimizer's state with all copies in the domain.
        copies: parts of a checkpoint in memory with all copies in the domain, if ranks elsewhere were lost as well.
        parts: the number of all parts, of either; 0 for copies where no node keeps one.
        room: the number of its ranks and spares that find a free slot elsewhere.
    """

    level: str
    domain: str
    nodes: tuple[str, ...]
    slots: int
    ranks: int
    spares: int
    left: int
    enough: bool
    chunks: int
    copies: int
    parts: int
    room: int

    @property
    def survives(self) -> bool:
        """Whether the run goes on at once, with all of its state."""
        return self.enough and not self.chunks


def place_slots(sites: Sequence[Site], slots: int) -> tuple[str, ...]:
    """The node of each slot, as Ray's SPREAD places them on empty nodes: one after the other, on the emptiest. Fewer when room ends."""
    used, found = {site.node: 0 for site in sites}, list[str]()
    for _ in range(slots):
        free = [site for site in sites if used[site.node] < site.slots]
        if not free:
            break
        node = min(free, key=lambda site: used[site.node]).node
        used[node] += 1
        found.append(node)
    return tuple(found)


def lacks(sites: Sequence[Site], settings: RunSettings) -> Lacking:
    """The requirements of ``domains`` and ``replica_size`` that the placement of the training ranks does not meet."""
    places = {site.node: place_of(site.path, site.node) for site in sites}
    homes = place_slots(sites, settings.slots)[: settings.world]
    ranked = [homes[index] for group in together([places[node] for node in homes], settings.replica_size) for index in group]
    kept = copies(ranked, {site.node: site.path for site in sites}, settings.peer_copies)
    domains = {node: place[:-1] for node, place in places.items()}
    copied = [[domains[node] for node in nodes] for nodes in kept]
    return lacking([domains[node] for node in ranked], copied, settings.replica_size, settings.domains)


def risks(sites: Sequence[Site], settings: RunSettings) -> list[Risk]:
    """For each domain that holds nodes, from wide to narrow. A domain with the very nodes of a wider one is left out."""
    homes, places = place_slots(sites, settings.slots), {site.node: place_of(site.path) for site in sites}
    depth, found = max(map(len, places.values()), default=0), list[Risk]()
    seen = set[tuple[str, ...]]()
    for level in range(1, depth + 1):
        for domain in sorted({place[:level] for place in places.values() if len(place) >= level}):
            inside = tuple(site.node for site in sites if places[site.node][:level] == domain)
            if inside not in seen:
                seen.add(inside)
                name = level_name(settings.domains[-level]) if depth == len(settings.domains) else "domain"
                found.append(_risk(name, "/".join(domain), inside, homes, sites, settings))
    return found


def _risk(
    level: str, domain: str, inside: tuple[str, ...], homes: Sequence[str], sites: Sequence[Site], settings: RunSettings
) -> Risk:  # fmt: skip
    members, lost = homes if settings.spread else homes[: settings.world], set(inside)
    here = [node in lost for node in homes]
    left = min(settings.world, here.count(False))
    free = sum(site.slots for site in sites if site.node not in lost) - here.count(False)
    return Risk(
        level, domain, inside, sum(site.slots for site in sites if site.node in lost), sum(here[: settings.world]),
        sum(here[settings.world :]), left, left >= settings.min_ranks, _chunks(members, lost, sites, settings),
        _copies(members, lost, sites, settings), len(members), max(0, min(free, sum(here))),
    )  # fmt: skip


def _chunks(members: Sequence[str], lost: set[str], sites: Sequence[Site], settings: RunSettings) -> int:
    """Chunks whose owner and guards are all lost. With the whole state on each rank: all chunks, when no rank is left."""
    if settings.optimizer_sharding == "none":
        return 0 if any(node not in lost for node in members) else len(members)
    paths = {site.node: site.path for site in sites}
    if settings.replica_ranks > 1:
        homes = [place_of(paths[node], node) for node in members]
        members = [members[index] for group in together(homes, settings.replica_ranks) for index in group]
    places = [place_of(paths[node], node) for node in members]
    placed = guards(places, settings.optimizer_copies, settings.replica_ranks)
    return sum(all(members[rank] in lost for rank in (owner, *chosen)) for owner, chosen in enumerate(placed))


def _copies(members: Sequence[str], lost: set[str], sites: Sequence[Site], settings: RunSettings) -> int:
    chosen = copies(members, {site.node: site.path for site in sites}, settings.peer_copies)
    return sum(all(node in lost for node in nodes) for nodes in chosen)


# ---- in words ----------------------------------------------------------------------------------------------------------------------------


def sentences(risk: Risk, settings: RunSettings) -> list[str]:
    """The effect of the loss of this domain, in words."""
    holds = f"{_kind(risk)} {risk.domain} holds {risk.ranks} of {settings.world} ranks and {risk.spares} of {settings.spares} spares."
    if not risk.ranks + risk.spares:
        return [holds]
    return [holds, _of_ranks(risk, settings), *_of_state(risk, settings), _of_room(risk)]


def _kind(risk: Risk) -> str:
    return "Host" if risk.level == HOST else "Domain" if risk.level == "domain" else f"Domain ({risk.level})"


def _of_ranks(risk: Risk, settings: RunSettings) -> str:
    if risk.enough:
        return f"Its loss leaves {risk.left} ranks, and min_ranks is {settings.min_ranks}: training goes on with them."
    return f"Its loss leaves {risk.left} ranks, and min_ranks is {settings.min_ranks}: training waits for replacements."


def _of_state(risk: Risk, settings: RunSettings) -> list[str]:
    sharded, found = settings.optimizer_sharding != "none", list[str]()
    if risk.chunks and sharded:
        lost = f"{risk.chunks} of {risk.parts} parts of the optimizer's state lie there alone"
        found.append(f"{lost}: the run goes back to a checkpoint.")
    elif risk.chunks:
        found.append("No rank is left that holds the state: the run goes back to a checkpoint.")
    else:
        found.append("All of the state is held elsewhere too: no committed step is lost.")
    if not settings.peer_copies:
        return [*found, "No copies are kept in memory (peer_copies is 0): the way back is the newest durable checkpoint."]
    if risk.copies:
        lost = f"{risk.copies} of {risk.parts} parts of the checkpoint in memory lie there alone"
        when = "" if risk.chunks else ", if all other ranks were lost as well"
        return [*found, f"{lost}: the way back is the newest durable checkpoint{when}."]
    return [*found, "Every part of the checkpoint in memory has a copy elsewhere."]


def _of_room(risk: Risk) -> str:
    asked = risk.ranks + risk.spares
    if risk.room == asked:
        return f"There is room elsewhere for all {asked} that it holds."
    return f"There is room elsewhere for {risk.room} of the {asked} that it holds: the others wait until a node comes."


def shortage(sites: Sequence[Site], settings: RunSettings) -> str:
    """The reason why the run does not fit on these nodes; empty when it fits."""
    room = sum(site.slots for site in sites)
    if room >= settings.slots:
        return ""
    return f"world {settings.world} and {settings.spares} spares take {settings.slots} slots, and the cluster has {room}"
