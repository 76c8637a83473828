"""SimPy steps through every copy that the fleet simulator counts; both must come to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.peers.simpy_fleet import SimpyFleet
from fleet.simulation.fleet_arrivals import draw_arrivals
from fleet.simulation.fleet_run import FleetRun
from tests.unit.test_fleet_simulation import ALL, EXACT, IN_PLACE, random_model


@pytest.mark.parametrize("seed", range(12))
def test_event_for_event(seed: int) -> None:
    base = random_model(seed)
    model = replace(base, duration_s=60 / base.rate_per_s, replace_s=(0.0, 300.0)[seed % 2], replica_nodes=1 + seed % 3)
    arrivals, policies = draw_arrivals(model, seed), (ALL if seed % 4 == 3 else IN_PLACE, (EXACT, EXACT))
    twin = SimpyFleet(model, arrivals, *policies).run()
    assert FleetRun(model, arrivals, *policies).run().shares == pytest.approx(twin, abs=1e-7)
