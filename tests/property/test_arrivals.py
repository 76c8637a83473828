"""Planned arrivals against the law that they declare. Seeds are fixed: a test that fails once fails always."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import expon, kstest, weibull_min

from chaos.arrivals import burst_of, compression_for, load_trace, save_trace, weibull_arrivals
from chaos.catalogue import Topology, load_catalogue
from chaos.settings import ChaosSettings, plan
from fleet.laws.reliability import weibull_scale_s
from fleet.protocol.types import Fault
from fleet.simulation.rng import stream

CATALOGUE = load_catalogue()
FLEET = Topology(gpus=16_384)
FAST = settings(max_examples=25, derandomize=True)


def storm(seed: int, **changes: object) -> tuple[Fault, ...]:
    given_: dict[str, Any] = {"duration_s": 600.0, "world": 4, "nodes": 2, "mtbf_s": 1.0} | changes
    chosen = CATALOGUE.chosen(given_.pop("components", None), given_.pop("kinds", None))
    world, nodes, mtbf_s = (given_.pop(name) for name in ("world", "nodes", "mtbf_s"))
    compression = given_.pop("compression", None) or compression_for(chosen, FLEET, nodes, mtbf_s)
    return plan(chosen, ChaosSettings(**given_), seed, world=world, nodes=nodes, compression=compression)


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poisson_plan_keeps_the_declared_rate_and_law(seed: int) -> None:
    between = gaps([fault.at_s for fault in storm(seed, duration_s=20_000.0, mtbf_s=10.0)])
    assert kstest(between, expon(scale=10.0).cdf).pvalue > 0.01
    variation = statistics.stdev(between) / statistics.mean(between)
    assert variation == pytest.approx(1.0, abs=0.08), "inter-arrivals of a Poisson process have a coefficient of variation of 1"


@pytest.mark.parametrize("component", ["gpu", "host_maintenance", "slow_network"])
def test_each_component_by_itself_is_poisson_at_its_own_rate(component: str) -> None:
    faults = storm(5, duration_s=4_000.0, mtbf_s=4.0, components=[component])
    assert kstest(gaps([fault.at_s for fault in faults]), expon(scale=4.0).cdf).pvalue > 0.01


def test_bursts_take_nodes_of_the_same_rack_along_and_change_nothing_else() -> None:
    sizes = {"duration_s": 200_000.0, "mtbf_s": 100.0, "nodes": 10, "world": 20, "kinds": ["lose_node", "kill_rank"]}
    alone, together = storm(9, **sizes), storm(9, **sizes, burst=0.4, burst_s=5.0, rack_nodes=4)
    firsts = {fault.id: fault for fault in alone}
    more = [fault for fault in together if fault.id not in firsts]
    assert tuple(fault for fault in together if fault.id in firsts) == alone
    assert all(fault.kind == "lose_node" and firsts[burst_of(fault.id)].node != fault.node for fault in more)
    assert {firsts[burst_of(fault.id)].node // 4 == fault.node // 4 for fault in more if fault.node is not None} == {True}
    assert max(fault.node for fault in more if fault.node is not None) <= 9, "the last rack has two nodes"
    gaps_s = [fault.at_s - firsts[burst_of(fault.id)].at_s for fault in more]
    assert kstest(gaps_s, expon(scale=5.0).cdf).pvalue > 0.01
    lost = [fault for fault in alone if fault.kind == "lose_node"]
    others = sum(4 - 1 if fault.node is not None and fault.node < 8 else 1 for fault in lost)
    assert len(more) == pytest.approx(0.4 * 0.4 * others, rel=0.1), "0.4 of bursts, and in those 0.4 of the others"


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_one_part_renews_with_weibull_lifetimes(shape: float) -> None:
    times = list(weibull_arrivals(stream(3, "one", shape), 1, 100.0, shape, 100_000.0))
    lifetimes = gaps(times)[1:]
    assert kstest(lifetimes, weibull_min(shape, scale=weibull_scale_s(100.0, shape)).cdf).pvalue > 0.01


@pytest.mark.parametrize("shape", [0.6, 2.5])
def test_a_fleet_of_mixed_age_keeps_its_rate_from_the_start(shape: float) -> None:
    """A hundredth of a lifetime: a fleet of new parts would fail 6 times too often for shape 0.6, and hardly ever for 2.5."""
    times = list(weibull_arrivals(stream(4, "many", shape), 100_000, 100.0, shape, 1.0))
    assert len(times) == pytest.approx(1000, abs=4 * 1000**0.5)
    assert kstest(times, "uniform").pvalue > 0.01


def test_few_weibull_parts_are_not_poisson_and_many_are() -> None:
    few = gaps(list(weibull_arrivals(stream(6, "few"), 1, 1.0, 2.5, 3000.0)))
    many = gaps(list(weibull_arrivals(stream(6, "many"), 20_000, 20_000.0, 2.5, 3000.0)))
    assert statistics.stdev(few) / statistics.mean(few) < 0.6
    assert kstest(many, expon(scale=1.0).cdf).pvalue > 0.01


def test_weibull_plan_keeps_the_declared_rate() -> None:
    faults = storm(7, duration_s=300.0, mtbf_s=1.0, law="weibull", shape=0.7)
    assert len(faults) == pytest.approx(300, abs=4 * 300**0.5)


@FAST
@given(seed=st.integers(0, 2**32), removed=st.sampled_from(["gpu", "hang", "host_parts", "software"]))
def test_removing_a_component_shifts_no_other(seed: int, removed: str) -> None:
    names = [name for name in CATALOGUE.rates(FLEET) if name != removed]
    everything = storm(seed, compression=2000.0)
    without = storm(seed, compression=2000.0, components=names)
    assert without == tuple(fault for fault in everything if fault.component != removed)


@FAST
@given(seed=st.integers(0, 2**32), law=st.sampled_from(["exponential", "weibull"]), quiet=st.floats(0, 50))
def test_same_seed_same_plan_in_order_and_in_bounds(seed: int, law: str, quiet: float) -> None:
    chaos = ChaosSettings(fleet_gpus=64, duration_s=60.0, law=law, quiet_start_s=quiet)
    compression = compression_for(CATALOGUE.chosen(), chaos.fleet, 3, 2.0)

    def make() -> tuple[Fault, ...]:
        return plan(CATALOGUE.chosen(), chaos, seed, world=5, nodes=3, compression=compression)

    faults = make()
    assert faults == make()
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    assert all(quiet <= f.at_s < 60.0 + 1e-9 for f in faults)
    assert all((f.slot is None) != (f.node is None) for f in faults)
    assert all(f.slot in range(5) if f.node is None else f.node in range(3) for f in faults)
    assert len({f.id for f in faults}) == len(faults)


def test_targets_are_uniform() -> None:
    faults = storm(9, duration_s=4000.0, mtbf_s=1.0, kinds=["kill_rank"])
    counts = [sum(f.slot == slot for f in faults) for slot in range(4)]
    assert counts == pytest.approx([len(faults) / 4] * 4, abs=4 * (len(faults) / 4) ** 0.5)


@FAST
@given(seed=st.integers(0, 2**32))
def test_a_saved_plan_replays_exactly(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "faults.csv"
    faults = storm(seed, duration_s=60.0)
    save_trace(faults, path)
    assert load_trace(path) == faults
