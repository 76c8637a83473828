"""What every law keeps: its limits, its order, arrays as single numbers, and a refusal by name of what cannot be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.laws import checkpointing as ck
from fleet.laws import collectives as co
from fleet.laws import detection, energy, fleet_law, memory, models, parallelism, scaling, spares, tiers, training
from fleet.laws.hardware import ACCELERATORS, FABRICS, accelerator
from fleet.laws.law import REGISTRY, Law, _domains
from fleet.simulation.rng import stream
from tests.support.law_table import UNITS, formula, shown, table, unit_of, worked
from tests.support.model_shapes import shape_parameters

TABLE = table()
LAWS = [pytest.param(entry, id=name) for name, entry in sorted(REGISTRY.items())]
ALONE = ("fleet_law.term_to_attack", "fleet_law.levers", "parallelism.largest_mapping")
"""Laws that answer with a name or a mapping."""
COST = st.floats(0.01, 1e4)
MTBF = st.floats(1.0, 1e7)


def _numeric(entry: Law) -> dict[str, Any]:
    domains = _domains(entry.function.__wrapped__)[1]  # type: ignore[attr-defined]
    return {name: value for name, value in entry.example.items() if name in domains}


@pytest.mark.parametrize("entry", LAWS)
def test_a_law_says_what_it_is(entry: Law) -> None:
    assert len(formula(entry)) > 20 and formula(entry).endswith(".")
    assert entry.source and entry.example
    assert shown(worked(entry))
    assert f"| `{entry.name}` |" in TABLE


@pytest.mark.parametrize("entry", LAWS)
def test_not_a_number_is_refused_by_name(entry: Law) -> None:
    for name in _numeric(entry):
        for bad in (math.nan, -1e9, np.array([entry.example[name], math.nan])):
            with pytest.raises(ConfigError) as refused:
                entry.function(**{**entry.example, name: bad})
            assert refused.value.field == name or entry.name == "checkpointing.lambert_w0"


@pytest.mark.parametrize("entry", LAWS)
def test_an_array_gives_what_its_elements_give(entry: Law) -> None:
    """Records and mappings hold arrays then; a law whose answer is no number at all refuses them by name."""
    single = _parts(worked(entry))
    for name, value in _numeric(entry).items():
        call = {**entry.example, name: np.array([value, value])}
        if entry.name in ALONE:
            with pytest.raises(ConfigError, match="one number at a time") as refused:
                entry.function(**call)
            assert refused.value.field == name
            continue
        many = entry.function(**call)
        assert isinstance(many, np.ndarray) == isinstance(worked(entry), (float, int))
        assert any(np.shape(part) == (2,) for part in _parts(many).values())
        for key, part in _parts(many).items():
            assert np.broadcast_to(part, 2).tolist() == pytest.approx([single[key]] * 2, rel=1e-12)


def _parts(result: Any) -> dict[str, Any]:
    """The numbers of a result by name."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return result if isinstance(result, dict) else {"": result}


def test_arrays_of_different_fleets_give_different_spares() -> None:
    units, risks = np.array([64, 2048, 12_500]), np.array([[0.01], [0.001]])
    many = spares.spares_for_risk(units, 4e-8, 86_400.0, risks)
    assert many.tolist() == [[spares.spares_for_risk(int(n), 4e-8, 86_400.0, float(r)) for n in units] for r in risks[:, 0]]
    repair = spares.machine_repair(units, 2, 4e-8, 86_400.0)
    assert repair.missing.tolist() == [spares.machine_repair(int(n), 2, 4e-8, 86_400.0).missing for n in units]  # type: ignore[attr-defined]


def test_results_are_plain_numbers() -> None:
    assert type(ck.daly_work_s(60.0, 3600.0)) is float
    assert ck.goodput(np.array([[60.0], [600.0]]), 6.0, np.array([1e3, 1e4, 1e5])).shape == (2, 3)


@given(cost=COST, mtbf=MTBF, factor=st.floats(1.01, 10.0))
def test_the_best_interval_grows_with_cost_and_mtbf_and_goodput_with_the_mtbf(cost: float, mtbf: float, factor: float) -> None:
    for law in (ck.young_work_s, ck.exact_work_s):
        assert law(cost * factor, mtbf) >= law(cost, mtbf)
        assert law(cost, mtbf * factor) > law(cost, mtbf)
    work = ck.exact_work_s(cost, mtbf)
    assert 0.0 <= ck.goodput(work, cost, mtbf) <= ck.goodput(work, cost, mtbf * factor) <= 1.0
    assert ck.goodput(work, cost, mtbf, 1.0, 1.0) <= ck.goodput(work, cost, mtbf, 1.0) <= ck.goodput(work, cost, mtbf)


@given(work=COST, cost=COST, mtbf=MTBF, down=COST, restart=COST)
def test_the_breakdown_conserves_the_wall_clock(work: float, cost: float, mtbf: float, down: float, restart: float) -> None:
    parts = ck.breakdown(work, cost, mtbf, down, restart)
    shares = [parts.work, parts.checkpoint, parts.rework, parts.restart, parts.down]
    assert min(shares) >= 0.0
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)


@given(scale=st.floats(1e-3, 1e3), cost=COST, mtbf=MTBF)
def test_only_ratios_of_times_count(scale: float, cost: float, mtbf: float) -> None:
    assert ck.exact_work_s(cost * scale, mtbf * scale) == pytest.approx(scale * ck.exact_work_s(cost, mtbf), rel=1e-6)
    assert ck.goodput(cost, cost, mtbf) == pytest.approx(ck.goodput(cost * scale, cost * scale, mtbf * scale), rel=1e-9)


@given(cost=st.floats(1.0, 100.0), mtbf=st.floats(1e4, 1e6))
def test_young_daly_and_exact_meet_where_checkpoints_are_cheap(cost: float, mtbf: float) -> None:
    exact = ck.exact_work_s(cost, mtbf)
    assert ck.daly_work_s(cost, mtbf) == pytest.approx(exact, rel=0.01)
    assert ck.young_work_s(cost, mtbf) == pytest.approx(exact, rel=0.2)
    assert ck.goodput_first_order(exact, cost, mtbf) == pytest.approx(ck.goodput(exact, cost, mtbf), abs=0.02)


@settings(max_examples=25)
@given(shape=st.sampled_from([0.6, 0.8, 1.0, 1.5]), cost=st.floats(1.0, 200.0), mtbf=st.floats(1e3, 1e5))
def test_no_other_interval_beats_the_weibull_optimum(shape: float, cost: float, mtbf: float) -> None:
    best = tiers.weibull_work_s(cost, mtbf, shape)
    greatest = tiers.weibull_goodput(best, cost, mtbf, shape)
    around = tiers.weibull_goodput(best * np.geomspace(0.2, 5.0, 15), cost, mtbf, shape)
    assert around.max() <= greatest * (1 + 1e-9)


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0])
def test_weibull_goodput_agrees_with_a_simulation(shape: float) -> None:
    random, scale = stream(5, "weibull", shape), 7200.0 / math.gamma(1 + 1 / shape)
    lives = [random.weibullvariate(scale, shape) for _ in range(60_000)]
    kept = sum(600.0 * (life // 660.0) for life in lives) / (sum(lives) + 300.0 * len(lives))
    assert tiers.weibull_goodput(600.0, 60.0, 7200.0, shape, 300.0) == pytest.approx(kept, abs=0.01)


def test_weibull_tails_far_beyond_the_direct_sum() -> None:
    """k = 0.5: sum of exp(-sqrt(j h)) by brute force."""
    brute = float(np.sum(np.exp(-np.sqrt(np.arange(1, 3_000_000) * 1e-3))))
    assert tiers._finished_segments(1e-3, 1.0, 0.5) == pytest.approx(brute, rel=1e-9)


NOTHING = st.just(0.0)


@given(
    size=NOTHING | st.floats(1, 1e12), ranks=st.integers(1, 100_000), rate=st.floats(1e9, 1e12), latency=NOTHING | st.floats(1e-12, 1e-4)
)
def test_collectives_are_ordered(size: float, ranks: int, rate: float, latency: float) -> None:
    """Of nothing, or of a byte and more, and of a picosecond and more: below, the last digits of a float are lost."""
    ring = co.ring_all_reduce_s(size, ranks, rate, latency)
    assert ring == pytest.approx(2 * co.reduce_scatter_s(size, ranks, rate, latency))
    assert (ring == 0.0) if ranks == 1 else (ring >= size / rate * (1 - 1e-12))
    flat = co.hierarchical_all_reduce_s(size, ranks, 1, rate, rate, latency, latency)
    assert flat == pytest.approx(ring)
    assert co.double_tree_all_reduce_s(size, ranks, rate, latency) <= co.tree_all_reduce_s(size, ranks, rate, latency) * (1 + 1e-12)


@given(serial=st.floats(0, 1), ranks=st.integers(1, 10**6))
def test_speedups_have_their_bounds(serial: float, ranks: int) -> None:
    amdahl, gustafson = scaling.amdahl_speedup(serial, ranks), scaling.gustafson_speedup(serial, ranks)
    assert 1.0 - 1e-12 <= amdahl <= gustafson * (1 + 1e-12) <= ranks * (1 + 1e-12) ** 2
    if ranks > 1:
        assert scaling.serial_share(amdahl, ranks) == pytest.approx(serial, abs=1e-6)


def test_the_bubble_vanishes_with_micro_batches_and_chunks() -> None:
    shares = parallelism.pipeline_bubble(8, np.array([1, 8, 64, 1e9]))
    assert shares[0] == pytest.approx(7 / 8) and np.all(np.diff(shares) < 0) and shares[-1] < 1e-8
    assert parallelism.interleaved_bubble(8, 8, 1) == parallelism.pipeline_bubble(8, 8)
    assert parallelism.interleaved_bubble(8, 8, 4) < parallelism.pipeline_bubble(8, 8)


def test_zero_never_needs_more_and_conserves_the_state() -> None:
    totals = [memory.model_state(1e9, 2, 4, 16, zero).total_bytes for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert memory.model_state(1e9, 2, 4, 16, 3).total_bytes * 2 * 4 * 16 == pytest.approx(16e9)
    none, selective, full = (memory.layer_activation_bytes(2048, 4096, 32, recompute=mode) for mode in memory.RECOMPUTE)
    assert none > selective > full > 0


@settings(max_examples=30)
@given(units=st.integers(1, 3000), load=st.floats(0.1, 60.0), risk=st.sampled_from([0.1, 0.01, 0.001]))
def test_as_few_spares_as_the_risk_allows(units: int, load: float, risk: float) -> None:
    rate = load / units / 86_400
    enough = spares.spares_for_risk(units, rate, 86_400.0, risk)
    assert spares.machine_repair(units, enough, rate, 86_400.0).short_probability <= risk
    if enough:
        assert spares.machine_repair(units, enough - 1, rate, 86_400.0).short_probability > risk


def test_crews_that_cannot_keep_up_are_refused_with_how_many_could() -> None:
    with pytest.raises(ConfigError, match="nearest valid value is 48"):
        spares.spares_for_risk(12_500, 3.8e-3 / 86_400, 86_400.0, 0.01, crews=47)
    assert spares.spares_for_risk(1250, 3.8e-3 / 86_400, 86_400.0, 0.01, crews=8) > spares.spares_for_risk(
        1250, 3.8e-3 / 86_400, 86_400.0, 0.01
    )


def test_machine_repair_of_one_unit_is_its_availability() -> None:
    assert spares.machine_repair(1, 0, 1 / 300.0, 100.0).short_probability == pytest.approx(1 - spares.availability(300.0, 100.0))


def test_phi_has_its_exponential_and_its_far_tail() -> None:
    assert detection.phi_exponential(detection.phi_timeout_s(8.0, 0.5), 0.5) == pytest.approx(8.0)
    assert detection.false_accusation_share(8.0) == pytest.approx(1e-8)
    near, far = detection.phi_normal(29.999, 0.0 + 1e-9, 1.0), detection.phi_normal(30.001, 1e-9, 1.0)
    assert 0 < far - near < 0.05
    assert detection.phi_normal(1.0, 1.0, 0.2) == pytest.approx(math.log10(2))


def test_the_fleet_law_and_its_inversion() -> None:
    step = fleet_law.fleet_step_s(800.0, 100, 3.0, 0.5, 2.0)
    assert fleet_law.overlap_s(step, 800.0, 100, 3.0, 0.5) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="overlap_s"):
        fleet_law.fleet_step_s(1.0, 1, 0.5, 0.0, 0.6)
    for law in (fleet_law.compute_share, fleet_law.term_to_attack, fleet_law.levers):
        for compute_s, comm_s in ((1.0, 0.5), (0.5, 1.0)):
            with pytest.raises(ConfigError, match="overlap_s = 0.6.*nearest valid value is 0.5"):
                law(compute_s, comm_s, 0.0, 0.6)
    assert fleet_law.compute_share(1.0, 0.5, 0.0, 0.5) == 1.0
    ranked = fleet_law.levers(0.2, 0.8, 0.4)
    assert ranked[0].name == "T_comm" and ranked[0].speedup == pytest.approx(1.4)
    assert fleet_law.term_to_attack(1.0, 0.0, 0.0) == "T_compute"


def test_chinchilla_prefers_its_own_optimum() -> None:
    budget = training.training_flop(70e9, training.compute_optimal_tokens(70e9))
    assert training.compute_optimal_parameters(budget) == pytest.approx(70e9)
    losses = training.chinchilla_loss(np.array([1e9, 1e10, 1e11]), 1e12)
    assert np.all(np.diff(losses) < 0) and losses[-1] > training.LOSS_E


def test_published_energy_of_a_run_gives_its_published_carbon() -> None:
    """Llama 3.1 model card: 30.84M H100 hours for 405B, 8,930 t; 7.0M hours for 70B, 2,040 t. Both at the same grid, about 415 g/kWh."""
    for hours, tons in ((30.84e6, 8930), (7.0e6, 2040)):
        kwh = energy.energy_kwh(energy.fleet_power_w(1, 700.0), hours * 3600)
        assert energy.carbon_kg(kwh, 415.0) / 1000 == pytest.approx(tons, rel=0.01)


@pytest.mark.parametrize("model", [each for each in models.MODELS.values() if each.dense], ids=lambda each: each.name)
def test_the_shape_of_a_model_gives_its_parameters(model: models.Model) -> None:
    assert shape_parameters(model) == pytest.approx(model.parameters, rel=0.003)


def test_registries_have_sources_and_name_their_nearest() -> None:
    for each in (*ACCELERATORS.values(), *FABRICS.values(), *models.MODELS.values()):
        assert each.source
    assert accelerator("H100") is ACCELERATORS["h100"] and models.model("Llama-3 70B") is models.MODELS["llama3-70b"]
    with pytest.raises(ConfigError, match="Did you mean h100"):
        accelerator("h10")


@pytest.mark.parametrize(
    ("call", "field", "way_out"),
    [
        (lambda: parallelism.check_mapping(1000, 8, 16, 8), "data", "data = 8 with gpus = 1024"),
        (lambda: parallelism.largest_mapping(100, 8, 16), "gpus", "nearest valid value is 128"),
        (lambda: ck.young_work_s(60.0, 0.0), "mtbf_s", "greater than 0 will do, such as 1"),
        (lambda: ck.goodput(-2.0, 1.0, 10.0), "work_s", "greater than 0 will do, such as 1"),
        (lambda: ck.goodput(math.inf, 1.0, 10.0), "work_s", "must be finite"),
        (lambda: scaling.published_efficiency(16), "ranks", "nearest valid value is 32"),
        (lambda: memory.model_state(1e9, zero=4), "zero", "nearest valid value is 3"),
        (lambda: parallelism.largest_mapping(0, 8, 16), "gpus", "nearest valid value is 1"),
        (lambda: spares.spares_for_risk(10, 1e-6, 1e5, 1.0), "risk", ""),
        (lambda: detection.robust_z([1.0, 1.0, 1.0]), "values", "relative score"),
    ],
)
def test_the_impossible_is_refused_with_a_way_out(call: Callable[[], object], field: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert refused.value.field == field and refused.value.reason
    assert way_out in str(refused.value)


def test_units_are_found_at_the_end_of_a_name() -> None:
    assert unit_of("ridge_flop_per_byte") == "FLOP/B" and unit_of("young_work_s") == "s" and unit_of("goodput") == "1"
    assert all(key == suffix for key in UNITS for suffix in [key.strip("_")])
