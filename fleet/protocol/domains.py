"""Failure domains: what fails together, from a host to its rack and its row. Pure.

A node's *domain path* names its domains from wide to narrow, as a file's path does: ``row-2/rack-7/host-31``. Two nodes share a domain
when their paths begin alike up to there, so that racks of two rows may have one name.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError

HOST = "host"
"""Stands, among names of labels, for the host that a node is on: every node has one."""
VARIABLE = "FLEET_DOMAIN"
"""Of a process's environment: the domain path of its node. Whoever sets it for a node's Ray has said where that node is."""
SEPARATOR = "/"
MOST_LEVELS = 4

BITS = 52
"""Of a number that a 64-bit float holds exactly."""

Place = tuple[Any, ...]
"""Where something lies: its domains from wide to narrow, in most places with the node itself as the last."""


def check_levels(levels: Sequence[str]) -> None:
    """Refuse what cannot be the levels of domain paths: labels, or ``NAME=LABEL``. Raises ConfigError."""
    if not 1 <= len(levels) <= MOST_LEVELS:
        reason = f"domains have 1 to {MOST_LEVELS} levels"
        raise ConfigError("domains", tuple(levels), reason, f"Name labels of nodes from narrow to wide; {HOST} is the host, the default.")
    names, labels = [level_name(level) for level in levels], [label_of(level) for level in levels]
    if len(set(names)) < len(names) or len(set(labels)) < len(labels) or not all((*names, *labels)):
        raise ConfigError("domains", tuple(levels), "a level is empty, or there twice", "Name each label once, from narrow to wide.")
    if renamed := [level for level in levels if HOST in (level_name(level), label_of(level)) and level != HOST]:
        raise ConfigError("domains", renamed[0], f"{HOST} is the host itself, and no label", f"Write {HOST}, or choose another name.")


def check_labels(levels: Sequence[str], nodes: Sequence[Mapping[str, str]]) -> None:
    """Refuse a level whose label none of these nodes has: then nothing is known of what fails together there. Raises ConfigError."""
    for level in levels:
        if level != HOST and not any(labels.get(label_of(level)) for labels in nodes):
            known = sorted({label for labels in nodes for label in labels if not label.startswith("ray.io/node-")})
            reason = f"no node has a label {label_of(level)}; they have {', '.join(known) or 'none'}"
            way_out = f"Start nodes with ray start --labels {label_of(level)}=..., or set {VARIABLE} for them and for the run."
            raise ConfigError("domains", level, reason, way_out)


def level_name(level: str) -> str:
    """What people call a level: ``nvlink`` of ``nvlink=ray.io/gpu-domain``; of a label alone, the label."""
    return level.partition("=")[0]


def label_of(level: str) -> str:
    """The label that a level is read from."""
    name, equals, label = level.partition("=")
    return label if equals else name


@dataclass(frozen=True, slots=True)
class LocatedNode:
    """A node's domain path, and the labels that it should have had: in their place its host stands."""

    path: str
    missing: tuple[str, ...] = ()


def locate(labels: Mapping[str, str], host: str, levels: Sequence[str], override: str = "") -> LocatedNode:
    """Where a node with these ``labels`` lies.

    Args:
        levels: labels, or ``NAME=LABEL``, from narrow to wide; ``host`` among them is the host itself.
        override: its path, where somebody has said it (``FLEET_DOMAIN``); labels do not count then.
    """
    if override:
        return LocatedNode(override)
    names = [host if level == HOST else labels.get(label_of(level)) or host for level in levels]
    missing = tuple(label_of(level) for level in levels if level != HOST and not labels.get(label_of(level)))
    return LocatedNode(SEPARATOR.join(name.replace(SEPARATOR, "_") for name in reversed(names)), missing)


def place_of(path: str, node: str = "") -> tuple[str, ...]:
    """The domains of a path from wide to narrow, then the node; an empty path is of a node that shares no domain with anybody."""
    names = tuple(name for name in path.split(SEPARATOR) if name)
    return (*names, node) if node else names


def site_of(path: str, node: str) -> str:
    """What a rank there says it shares with its neighbours: its narrowest domain, by the whole path; where none is known, its node."""
    return SEPARATOR.join(place_of(path)) or node


def number(place: Place, depth: int) -> int:
    """``place`` as a number of :data:`BITS` bits, for where only numbers travel: hashes of its first ``depth`` - 1 levels, and of its last.

    Two places get one number by chance only: with ``depth`` 2, a host and a node, two of 1000 nodes in 1 of 130 fleets. They are taken for
    one then, which costs distance between copies and nothing else.
    """
    bits, packed = BITS // depth, 0
    names = (*place[: min(len(place), depth) - 1], place[-1])
    for name in (*names, *[""] * (depth - len(names))):
        packed = packed << bits | (zlib.crc32(name.encode()) & (1 << bits) - 1)
    return packed


def numbered(packed: int, depth: int) -> Place:
    """The place that :func:`number` has made a number of, each level a number of its own."""
    bits = BITS // depth
    return tuple(packed >> bits * level & (1 << bits) - 1 for level in reversed(range(depth)))


def shared_levels(one: Place, other: Place) -> int:
    """At how many levels, from the widest on, two places are in one domain."""
    return next((level for level, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), min(len(one), len(other)))


class Crowd:
    """How many lie in which domain already: ``counts``. ``of`` a place says, from the widest level on, how many share its domain there."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.counts: Counter[Place] = Counter()
        for place in places:
            self.add(place)

    def add(self, place: Place, weight: int = 1) -> None:
        """One more, who counts as ``weight``."""
        for depth in range(1, len(place) + 1):
            self.counts[place[:depth]] += weight

    def of(self, place: Place) -> tuple[int, ...]:
        """The less, the farther apart from all of them. It ends with the narrowest level at which somebody is."""
        found: list[int] = []
        for depth in range(1, len(place) + 1):
            count = self.counts[place[:depth]]
            if not count:  # then nobody is in a narrower one either
                break
            found.append(count)
        return tuple(found)
