"""Simulated runs with the project's own policies."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence

from fleet.protocol.records import LineageBegun
from fleet.protocol.types import Ranges
from fleet.simulation.families import (
    daemons_plan,
    gathers_plan,
    links_plan,
    notices_plan,
    parity_plan,
    resizes_plan,
    stops_plan,
    stores_plan,
)
from fleet.simulation.plan import Plan, Trouble, cut_plan, flipped_plan, racks_plan, random_plan, slow_plan, with_troubles
from fleet.simulation.world import Outcome, World
from fleet.testing import Policies
from policies.placement import copies, weighted_ranges

COMMAND = "python -m tests.simulation"


FAMILIES = {
    "cuts": cut_plan,
    "racks": racks_plan,
    "links": links_plan,
    "stores": stores_plan,
    "daemons": daemons_plan,
    "notices": notices_plan,
    "resizes": resizes_plan,
    "stops": stops_plan,
    "gathers": gathers_plan,
    "parity": parity_plan,
}
"""Families of runs, each with troubles of its own. In odd seeds the optimizer's state is spread over
ranks; in ``gathers`` and ``parity`` all is."""


class Placement:
    """``PlacementPolicy``, as the live run has it: a class, so that a mutation can be put into it."""

    def weighted_ranges(self, shards: int, weights: Sequence[float]) -> Ranges:
        return weighted_ranges(shards, weights)

    def copies(self, homes: Sequence[str], domains: Mapping[str, str], wanted: int) -> tuple[tuple[str, ...], ...]:
        return copies(homes, domains, wanted)


make_machine = Policies(placement=lambda run: Placement()).machine
"""The machine of a live run, policies and all."""


def in_parts(failed: Callable[[range], list[str]], seeds: int, part: int = 100) -> list[str]:
    """What ``failed`` reports of seeds ``0..seeds``, on two processes, ``part`` seeds at a time."""
    parts = [range(first, min(first + part, seeds)) for first in range(0, seeds, part)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        reports = [report for found in pool.imap_unordered(failed, parts) for report in found]
        pool.close()
        pool.join()
    return reports


def simulate(plan: Plan, keep_trace: bool = False) -> Outcome:
    return World(plan, make_machine, keep_trace).run()


def simulate_seed(seed: int, keep_trace: bool = False, sharded: bool = False) -> Outcome:
    return simulate(random_plan(seed, sharded=sharded), keep_trace)


def simulate_slow(seed: int, keep_trace: bool = False) -> Outcome:
    return simulate(slow_plan(seed), keep_trace)


def simulate_flips(seed: int, keep_trace: bool = False) -> Outcome:
    """A run in which bits flip; with the other troubles of the seed in most of them."""
    return simulate(flipped_plan(seed), keep_trace)


def simulate_family(family: str, seed: int, keep_trace: bool = False) -> Outcome:
    return simulate(FAMILIES[family](seed, sharded=seed % 2 == 1), keep_trace)


def failed_of(family: str, seeds: range) -> list[str]:
    """What was broken in these seeds, and how to repeat it."""
    outcomes = [simulate_family(family, seed) for seed in seeds]
    return [outcome.report(f"{COMMAND} --family {family}") for outcome in outcomes if outcome.broken]


def completed(plan: Plan, *troubles: Trouble) -> Outcome:
    """A run through ``troubles``, all of which have struck: it completed, and no invariant was broken."""
    outcome = simulate(with_troubles(plan, troubles), keep_trace=True)
    assert not outcome.broken, outcome.report(COMMAND)
    assert outcome.status == "completed", outcome.reason
    assert outcome.world.faults.fired >= len(troubles)
    return outcome


def rollbacks(outcome: Outcome) -> int:
    """How often the run went back to a checkpoint, or to its first state."""
    return sum(isinstance(record, LineageBegun) for record in outcome.world.journal)
