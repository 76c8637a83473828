"""Faults of every kind that chaos can carry out, drawn anew for each round of a soak. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chaos.arrivals import arrival_rates
from chaos.catalogue import Topology, check_kinds, load_catalogue
from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import KINDS, TABLE, FaultKind, Performer
from fleet.protocol.types import Fault
from fleet.simulation.rng import stream

CATALOGUE_SHARE = 0.7
"""This share of the faults is of the catalogue's kinds, at its rates; the other kinds share the rest evenly."""
RANGES: Mapping[str, tuple[float, float]] = {
    "duration_s": (0.2, 8.0), "severity": (1.5, 4.0), "loss": (0.002, 0.05), "delay_s": (0.002, 0.05), "bytes_per_s": (1e7, 1e8),
    "jitter_s": (0.0, 0.01),
}  # fmt: skip
"""Bounds of a fault's parameters."""


def kinds_for(asked: Iterable[str] | None, *, hosts: bool, verified: bool) -> tuple[FaultKind, ...]:
    """The kinds to draw from: the ``asked`` ones, or all that chaos can carry out. Raises ConfigError for one that it cannot.

    Args:
        hosts: the cluster's nodes have addresses of their own, so that links between them can be cut.
        verified: ranks compute shards again, so that a wrong gradient is found.
    """
    possible = [kind for kind in TABLE if kind.performer is not None and not kind.whole_rack]
    possible = [kind for kind in possible if hosts or kind.performer is not Performer.LINKS]
    possible = [kind for kind in possible if verified or not kind.needs_verify]
    if asked is None:
        return tuple(possible)
    wanted = check_kinds(asked)
    for name in wanted:
        if KINDS[name] not in possible:
            why = KINDS[name].why_not or "it needs a cluster of several hosts, or verification"
            raise ConfigError(
                "--kinds", name, f"cannot be carried out there: {why}", f"Possible: {', '.join(kind.name for kind in possible)}."
            )
    return tuple(KINDS[name] for name in wanted)


def round_of(
    seed: int, number: int, kinds: Sequence[FaultKind], *, mtbf_s: float, duration_s: float, world: int, nodes: int
) -> tuple[Fault, ...]:
    """The faults of round ``number``: the same for the same arguments.

    Args:
        mtbf_s: mean time between two of them.
        duration_s: no fault comes after so many seconds of training.
        world, nodes: slots and worker nodes; a fault names any of them.
    """
    draw, faults, at_s = stream(seed, "soak", number), list[Fault](), 0.0
    weights = _weights(kinds, nodes)
    while (at_s := at_s + draw.expovariate(1.0 / mtbf_s)) < duration_s:
        [kind] = draw.choices(kinds, weights)
        name = kind.targets[0].field
        target = {name: draw.randrange(world if name == "slot" else nodes)} if name else {}
        own = {parameter.name: draw.uniform(*RANGES[parameter.name]) for parameter in kind.parameters}
        faults.append(Fault(f"soak-{number}-{len(faults):03d}", at_s, "soak", kind.name, **target, **own))  # type: ignore[arg-type]
    return tuple(faults)


def _weights(kinds: Sequence[FaultKind], nodes: int) -> list[float]:
    """By the catalogue's rates for a job on a large fleet, where it has the kind."""
    rates = arrival_rates(load_catalogue().chosen(), Topology(), nodes)
    rate = {kind.name: sum(rates.get(component, 0.0) for component in kind.components) for kind in kinds}
    known, unknown = sum(rate.values()), [name for name, each in rate.items() if not each]
    if not known or not unknown:
        return [rate[kind.name] or 1.0 for kind in kinds]
    rest = (1.0 - CATALOGUE_SHARE) / len(unknown)
    return [CATALOGUE_SHARE * rate[kind.name] / known or rest for kind in kinds]
