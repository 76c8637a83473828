"""Faults of a GPU fleet, and their rates: ``catalogue.csv`` and the assumptions that turn it into arrival rates.

MTTFs are 21.2 million GPU-hours (2.65 million node-hours) over the counts of one published run of 54 days on 16,384 GPUs. So they give back
that run's failure rate. That is a self-check of this file, and no evidence about another fleet.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files

from fleet.errors import ConfigError
from fleet.planning.traces.faults import FittedFaults
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT, KINDS
from fleet.settings.fields import setting, within

HOUR_S, MINUTE_S, DAY_S = 3600.0, 60.0, 86_400.0

LEMON = "lemon_node"
OFF_BY_DEFAULT = tuple(name for name, kind in KIND_OF_COMPONENT.items() if not KINDS[kind].by_default)


@dataclass(frozen=True, slots=True)
class Assumption:
    """A figure that the plan needs and the catalogue does not have. ``why`` names its source.

    Attributes:
        duration_s: mean length of the fault, fleet time.
        severity: how many times slower; 1 where it does not apply.
        observed_s: for a share of jobs that *ever* meet the fault: the assumed length of such a job.
    """

    duration_s: float
    severity: float
    why: str
    observed_s: float = 0.0


ASSUMPTIONS = {
    "hang": Assumption(10 * MINUTE_S, 1.0, "a hang lasts until the collective's watchdog ends it: 10 min is PyTorch's default for NCCL"),
    "slow_compute": Assumption(10 * MINUTE_S, 1.1, "about 10% slow (MegaScale), mean 10 min (Greyhound)"),
    "slow_network": Assumption(
        48 * MINUTE_S, 1.34, "middle of 24-72 min, large jobs 1.34x slower (Greyhound); a week a job is assumed", 7 * DAY_S
    ),
    "lemon_node": Assumption(28 * DAY_S, 1.0, "a repeat offender is assumed to stay for four weeks before it is found"),
}


@dataclass(frozen=True, slots=True)
class Component:
    """One row of the catalogue. ``mttf_hours`` is for one unit of ``per`` (gpu, node, job, rack); ``prevalence`` a share of those units.

    ``shape``: of the Weibull law of a unit's lives, where a log has it; None: the law of the settings.
    """

    name: str
    mttf_hours: float | None
    prevalence: float | None
    per: str
    blast_radius: str
    source: str
    shape: float | None = None

    @property
    def kind(self) -> str:
        """The kind of operation that performs this fault: ``Fault.kind``."""
        return KIND_OF_COMPONENT[self.name]

    @property
    def per_unit_share(self) -> bool:
        """Whether the row is a share of the nodes at a time, and not a rate of faults that strike the job."""
        return self.prevalence is not None and self.per == "node"

    def mean_s(self, topology: Topology) -> float:
        """Mean time between two arrivals at one unit, seconds of fleet time.

        A share p of units affected *at a time*, each for d, arrives every d/p at a unit (Little's law, small p). A share of jobs that
        *ever* meet the fault in T arrives every -T / log(1 - p).
        """
        if self.mttf_hours is not None:
            return self.mttf_hours * HOUR_S
        if self.prevalence is None:
            return _rack_mttf_s(topology)
        assumed = ASSUMPTIONS[self.name]
        if assumed.observed_s:
            return -assumed.observed_s / math.log1p(-self.prevalence)
        return assumed.duration_s / self.prevalence


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The fleet of the faults. ``rack_mttf_hours`` has no published value, so racks fail only when the user sets it."""

    gpus: int = setting(16_384, "GPUs of the fleet.", least=1)
    gpus_per_node: int = setting(8, "Of a node.", least=1)
    gpus_per_rack: int = setting(64, "Of a rack.", least=1)
    rack_mttf_hours: float | None = setting(None, "MTTF of a rack; None: racks do not fail.", above=0)

    def __post_init__(self) -> None:
        within(self, "fleet.")

    def units(self, per: str) -> int:
        """The number of units of ``per`` (gpu, node, job, rack) in this fleet."""
        size = {"gpu": 1, "node": self.gpus_per_node, "rack": self.gpus_per_rack, "job": self.gpus}[per]
        return math.ceil(self.gpus / size)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All components, in the order of the file."""

    components: tuple[Component, ...]

    def chosen(self, names: Iterable[str] | None = None, kinds: Iterable[str] | None = None) -> tuple[Component, ...]:
        """Components by name (all but racks when None) with one of ``kinds`` (any when None).

        Raises:
            ConfigError: a name or kind is unknown, or no component is left.
        """
        known = {component.name: component for component in self.components}
        wanted = [name for name in known if name not in OFF_BY_DEFAULT] if names is None else list(names)
        for name in wanted:
            if name not in known:
                raise ConfigError("chaos.components", name, "not in the fault catalogue", f"Known: {', '.join(known)}.")
        allowed = tuple(KINDS) if kinds is None else check_kinds(kinds)
        found = tuple(known[name] for name in wanted if known[name].kind in allowed)
        if not found:
            raise ConfigError("chaos.kinds", "+".join(allowed), "no component of the catalogue has these kinds")
        return found

    def rates(self, topology: Topology, components: Iterable[str] | None = None) -> dict[str, float]:
        """Arrivals per second of fleet time over the whole of ``topology``, by component. See :meth:`Component.mean_s`."""
        return {c.name: topology.units(c.per) / c.mean_s(topology) for c in self.chosen(components)}

    def rate(self, topology: Topology, components: Iterable[str]) -> float:
        """Arrivals per second of these components together. A component that is not in the catalogue adds 0."""
        known = {component.name for component in self.components}
        return sum(self.rates(topology, [name]).get(name, 0.0) for name in components if name in known)


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """``kinds`` as a tuple. Raises ConfigError for an unknown kind, or without any."""
    wanted = tuple(kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise ConfigError("chaos.kinds", kind, "unknown kind of fault", f"Known: {', '.join(KINDS)}.")
    if not wanted:
        raise ConfigError("chaos.kinds", "", "no kind of fault is left", "Name at least one, or turn chaos off.")
    return wanted


def load_catalogue() -> Catalogue:
    """The catalogue that Fleet ships. The program does not use some of its columns."""
    source = files("chaos").joinpath("catalogue.csv").read_text(encoding="utf-8")
    return Catalogue(tuple(_component(row) for row in csv.DictReader(source.splitlines())))


def fitted(faults: FittedFaults, base: Catalogue | None = None) -> Catalogue:
    """The catalogue with the rates of a log in place of the published ones: components that the log does not have are left out.

    No log of faults has faults that only slow a job: those rows, and that of the lemons, stay.
    """
    found = []
    for row in (base or load_catalogue()).components:
        seen = faults.components.get(row.name)
        if seen is not None:
            found.append(replace(row, mttf_hours=seen.mttf_hours, prevalence=None, per="node", shape=seen.shape, source=faults.source))
        elif row.name == LEMON and faults.lemon_share:
            found.append(replace(row, prevalence=min(faults.lemon_share, 0.5)))
        elif row.prevalence is not None:
            found.append(row)
    return Catalogue(tuple(found))


def _component(row: dict[str, str]) -> Component:
    mttf, prevalence = (float(row[column]) if row[column] else None for column in ("mttf_hours", "prevalence"))
    return Component(row["component"], mttf, prevalence, row["per"], row["blast_radius"], row["source"])


def _rack_mttf_s(topology: Topology) -> float:
    if topology.rack_mttf_hours is None:
        reason = "there is no published MTTF of a rack"
        raise ConfigError("fleet.rack_mttf_hours", None, reason, "Set rack_mttf_hours, or leave the rack out.")
    return topology.rack_mttf_hours * HOUR_S
