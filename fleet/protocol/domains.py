"""Failure domains: sets of nodes that fail together, from a host to its rack and its row. Pure.

A node's *domain path* names its domains from wide to narrow, as a file's path does: ``row-2/rack-7/host-31``. Two nodes share a domain
when their paths are equal down to that domain. So racks of two rows may have the same name.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError

HOST = "host"
"""Among names of labels, this stands for the node's host. Every node has one."""
VARIABLE = "FLEET_DOMAIN"
"""Environment variable with the domain path of the process's node. Set for a node's Ray, it takes the place of labels."""
SEPARATOR = "/"
MOST_LEVELS = 4

BITS = 52
"""Bits of a number that a 64-bit float holds exactly."""

Place = tuple[Any, ...]
"""A place: its domains from wide to narrow, mostly with the node itself as the last."""


def check_levels(levels: Sequence[str]) -> None:
    """Refuse levels that domain paths cannot have. A level is a label, or ``NAME=LABEL``. Raises ConfigError."""
    if not 1 <= len(levels) <= MOST_LEVELS:
        reason = f"domains have 1 to {MOST_LEVELS} levels"
        raise ConfigError("domains", tuple(levels), reason, f"Name labels of nodes from narrow to wide; {HOST} is the host, the default.")
    names, labels = [level_name(level) for level in levels], [label_of(level) for level in levels]
    if len(set(names)) < len(names) or len(set(labels)) < len(labels) or not all((*names, *labels)):
        raise ConfigError("domains", tuple(levels), "a level is empty, or there twice", "Name each label once, from narrow to wide.")
    if renamed := [level for level in levels if HOST in (level_name(level), label_of(level)) and level != HOST]:
        raise ConfigError("domains", renamed[0], f"{HOST} is the host itself, and no label", f"Write {HOST}, or choose another name.")


def check_labels(levels: Sequence[str], nodes: Sequence[Mapping[str, str]]) -> None:
    """Refuse a level whose label none of these nodes has: Fleet could not know its domains. Raises ConfigError."""
    for level in levels:
        if level != HOST and not any(labels.get(label_of(level)) for labels in nodes):
            known = sorted({label for labels in nodes for label in labels if not label.startswith("ray.io/node-")})
            reason = f"no node has a label {label_of(level)}; they have {', '.join(known) or 'none'}"
            way_out = f"Start nodes with ray start --labels {label_of(level)}=..., or set {VARIABLE} for them and for the run."
            raise ConfigError("domains", level, reason, way_out)


def level_name(level: str) -> str:
    """The name of a level for people: ``nvlink`` of ``nvlink=ray.io/gpu-domain``; of a label alone, the label."""
    return level.partition("=")[0]


def label_of(level: str) -> str:
    """The node label that names a level's domain."""
    name, equals, label = level.partition("=")
    return label if equals else name


@dataclass(frozen=True, slots=True)
class LocatedNode:
    """A node's domain path, and the labels that the node lacks. In their place the path has the node's host."""

    path: str
    missing: tuple[str, ...] = ()


def locate(labels: Mapping[str, str], host: str, levels: Sequence[str], override: str = "") -> LocatedNode:
    """Where a node with these ``labels`` lies.

    Args:
        levels: labels, or ``NAME=LABEL``, from narrow to wide; ``host`` among them is the host itself.
        override: the path from ``FLEET_DOMAIN``; if it is not empty, labels do not count.
    """
    if override:
        return LocatedNode(override)
    names = [host if level == HOST else labels.get(label_of(level)) or host for level in levels]
    missing = tuple(label_of(level) for level in levels if level != HOST and not labels.get(label_of(level)))
    return LocatedNode(SEPARATOR.join(name.replace(SEPARATOR, "_") for name in reversed(names)), missing)


def place_of(path: str, node: str = "") -> tuple[str, ...]:
    """The domains of a path from wide to narrow, then the node. A node with an empty path shares no domain with another node."""
    names = tuple(name for name in path.split(SEPARATOR) if name)
    return (*names, node) if node else names


def site_of(path: str, node: str) -> str:
    """The site that a rank shares with its neighbours: its narrowest domain, as the whole path; its node where no domain is known."""
    return SEPARATOR.join(place_of(path)) or node


def number(place: Place, depth: int) -> int:
    """``place`` as a number of :data:`BITS` bits, for messages of numbers alone: hashes of its first ``depth`` - 1 levels, and of its last.

    Two places get the same number by chance alone. With ``depth`` 2, a host and a node, this happens to two of 1000 nodes in 1 of 130
    fleets. Both then count as one place, so that a copy may be nearer than it has to be. Nothing else follows.
    """
    bits, packed = BITS // depth, 0
    names = (*place[: min(len(place), depth) - 1], place[-1])
    for name in (*names, *[""] * (depth - len(names))):
        packed = packed << bits | (zlib.crc32(name.encode()) & (1 << bits) - 1)
    return packed


def numbered(packed: int, depth: int) -> Place:
    """The place of a number from :func:`number`. Each level is a number of its own."""
    bits = BITS // depth
    return tuple(packed >> bits * level & (1 << bits) - 1 for level in reversed(range(depth)))


def shared_levels(one: Place, other: Place) -> int:
    """The number of levels, from the widest on, at which two places are in the same domain."""
    return next((level for level, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), min(len(one), len(other)))


class Crowd:
    """``counts``: by domain, the number of places in it. ``of(place)`` gives the counts of a place's domains, from the widest level on."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.counts: Counter[Place] = Counter()
        for place in places:
            self.add(place)

    def add(self, place: Place, weight: int = 1) -> None:
        """Count ``place`` in each of its domains, ``weight`` times."""
        for depth in range(1, len(place) + 1):
            self.counts[place[:depth]] += weight

    def of(self, place: Place) -> tuple[int, ...]:
        """A smaller value means farther apart from the counted places. It ends at the narrowest level that has a counted place."""
        found: list[int] = []
        for depth in range(1, len(place) + 1):
            count = self.counts[place[:depth]]
            if not count:  # then no narrower domain has a place either
                break
            found.append(count)
        return tuple(found)
