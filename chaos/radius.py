"""The blast radius: how much of a run faults may hit, at once and within an hour. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.protocol.types import Member

HOUR_S = 3600.0
PLACES = ("ranks", "nodes", "domains")
AN_HOUR = "/h"


@dataclass(frozen=True, slots=True)
class BlastLimit:
    """The most ``ranks``, ``nodes`` or ``domains`` (racks) that may be hit: at once, or by all faults of an hour."""

    place: str
    most: int
    an_hour: bool


def limits_of(texts: Iterable[str], where: str = "chaos.limits") -> tuple[BlastLimit, ...]:
    """Limits from ``ranks:2`` and ``ranks/h:20``. Raises ConfigError."""
    found: dict[str, BlastLimit] = {}
    for text in texts:
        name, colon, most = (part.strip() for part in text.partition(":"))
        place = name.removesuffix(AN_HOUR)
        if place not in PLACES or not colon:
            known = ", ".join(f"{each}, {each}{AN_HOUR}" for each in PLACES)
            raise ConfigError(where, text, "is no limit", f"Write ranks:2 or ranks/h:20; known are {known}.")
        if not most.isdecimal():
            raise ConfigError(where, text, f"{most or 'nothing'} is no whole number of {place}", f"Write {name}:1, or more.")
        if name in found:
            raise ConfigError(where, text, f"{name} is limited twice", "Write each limit once.")
        found[name] = BlastLimit(place, int(most), name.endswith(AN_HOUR))
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class FaultReach:
    """The places that one fault hits at ``at_s``: processes of ranks, nodes by their index, and whether it takes a rack."""

    at_s: float
    members: tuple[Member, ...]
    nodes: tuple[int, ...]
    takes_rack: bool

    def hit(self, place: str, name: str) -> set[int] | set[str]:
        """The places of kind ``place`` that the fault ``name`` hits."""
        if place == "ranks":
            return {member.slot for member in self.members}
        if place == "nodes":
            return set(self.nodes)
        return {name} if self.takes_rack else set()


class BlastRadius:
    """Counts the places that faults hit, and refuses a fault that would hit too many."""

    def __init__(self, limits: Iterable[BlastLimit]) -> None:
        self._limits = tuple(limits)
        self._reaches: dict[str, FaultReach] = {}

    def count(self, name: str, reach: FaultReach) -> None:
        """Count the fault ``name``: it strikes, or is announced."""
        if self._limits:
            self._reaches[name] = reach

    def forget(self, name: str) -> None:
        """Forget a fault that did not happen."""
        self._reaches.pop(name, None)

    def refusal(self, name: str, reach: FaultReach, lasts: Callable[[str, FaultReach], bool]) -> str | None:
        """The reason why the fault ``name`` may not strike; None: it may. ``lasts``: whether an earlier fault's places are still hit."""
        earlier = {each: one for each, one in self._reaches.items() if each != name}
        recent = {each: one for each, one in earlier.items() if reach.at_s - one.at_s < HOUR_S}
        standing = {each: one for each, one in earlier.items() if lasts(each, one)}
        for limit in self._limits:
            mine, others = reach.hit(limit.place, name), recent if limit.an_hour else standing
            hit = [place for each, one in others.items() for place in one.hit(limit.place, each)] + list(mine)
            count = len(hit) if limit.an_hour else len(set(hit))
            if mine and count > limit.most:
                when = "within an hour" if limit.an_hour else "at once"
                return f"chaos.limits: {count} {limit.place} would be hit {when}, of at most {limit.most}"
        return None
