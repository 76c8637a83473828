"""Simulated runs with the project's own policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fleet.protocol.records import HistoryBegun
from fleet.protocol.types import Ranges
from fleet.simulation.plan import Plan, Trouble, flipped_plan, random_plan, slow_plan, with_troubles
from fleet.simulation.world import Outcome, World
from fleet.testing import Policies
from policies.placement import copies, weighted_ranges
from tests.simulation.families import (
    cold_plan,
    cut_plan,
    daemons_plan,
    ended_plan,
    gathers_plan,
    links_plan,
    mesh_plan,
    notices_plan,
    overflows_plan,
    racks_plan,
    resizes_plan,
    stages_plan,
    stops_plan,
    stores_plan,
)

COMMAND = "python -m tests.simulation"


def _odd_sharded(plan: Callable[..., Plan]) -> Callable[[int], Plan]:
    """In odd seeds the optimizer's state is spread over ranks."""
    return lambda seed: plan(seed, sharded=seed % 2 == 1)


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "random": random_plan,
    "sharded": lambda seed: random_plan(seed, sharded=True),
    "slow": slow_plan,
    "flips": _odd_sharded(flipped_plan),
    "cuts": _odd_sharded(cut_plan),
    "racks": _odd_sharded(racks_plan),
    "links": _odd_sharded(links_plan),
    "stores": _odd_sharded(stores_plan),
    "daemons": _odd_sharded(daemons_plan),
    "notices": _odd_sharded(notices_plan),
    "resizes": _odd_sharded(resizes_plan),
    "stops": _odd_sharded(stops_plan),
    "cold": _odd_sharded(cold_plan),
    "ended": _odd_sharded(ended_plan),
    "gathers": gathers_plan,
    "mesh": mesh_plan,
    "stages": stages_plan,
    "overflows": overflows_plan,
}
"""Families of runs by seed, each with troubles of its own; in ``gathers`` parameters are spread over ranks, too."""


class Placement:
    """``PlacementPolicy``, as the live run has it: a class, so that a mutation can be put into it."""

    def weighted_ranges(self, shards: int, weights: Sequence[float]) -> Ranges:
        return weighted_ranges(shards, weights)

    def copies(self, homes: Sequence[str], domains: Mapping[str, str], wanted: int) -> tuple[tuple[str, ...], ...]:
        return copies(homes, domains, wanted)


make_machine = Policies(placement=lambda run: Placement()).machine
"""The machine of a live run, policies and all."""


def simulate(plan: Plan, keep_trace: bool = False) -> Outcome:
    return World(plan, make_machine, keep_trace).run()


def simulate_seed(family: str, seed: int, keep_trace: bool = False) -> Outcome:
    return simulate(FAMILIES[family](seed), keep_trace)


def again(family: str, seed: int) -> str:
    """What repeats the run of ``seed``."""
    return f"{COMMAND} --family {family} --seed {seed} --trace"


def completed(plan: Plan, *troubles: Trouble) -> Outcome:
    """A run through ``troubles``, all of which have struck: it completed, and no invariant was broken."""
    outcome = simulate(with_troubles(plan, troubles), keep_trace=True)
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    assert outcome.world.faults.fired >= len(troubles)
    return outcome


def rollbacks(outcome: Outcome) -> int:
    """How often the run went back to a checkpoint, or to its first state."""
    return sum(isinstance(record, HistoryBegun) for record in outcome.world.journal)
