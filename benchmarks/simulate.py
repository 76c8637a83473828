"""How fast is a fleet planned and simulated, and how does the same model in SimPy compare, event for event?

The fleet has 100,000 GPUs (12,500 nodes) for 26 days, faults at the rates of the catalogue, two tiers of checkpoints, spares and repairs.
For the comparison it has no slow spells, which the simulator lays over a finished run.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Form, left_out, on_the_way, run
from fleet.app.scenarios import Prepared, Scenario, prepare
from fleet.host.processes import calling
from fleet.planning.inputs import PlanInput
from fleet.simulation.fleet_arrivals import draw_arrivals
from fleet.simulation.fleet_run import FleetRun
from fleet.simulation.monte_carlo import monte_carlo

RUNS, SMOKE_RUNS = 10_000, 100
PLANS = 5
PLAN = calling("fleet.app.cli.main", "main", "plan", "--gpus", "16384", "--model", "llama3-70b", "--json", "-")


def scenario() -> Prepared:
    """100,000 GPUs for 26 days, with stragglers."""
    return prepare(Scenario(plan=PlanInput(gpus=100_000, batch_tokens=2.0**25), days=26.0))


def _timed_ms(action: Callable[[], Any], repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        samples.append(1e3 * (time.perf_counter() - begin))
    return samples


def measure(form: Form) -> Mapping[str, Any]:
    """Measure Fleet's simulators, vectorised and event-driven, and SimPy."""
    prepared = scenario()
    plain = replace(prepared.model, slow=())
    repeats, runs = form.of(30, 7, 1), form.of(RUNS, RUNS, SMOKE_RUNS)
    measures: dict[str, Callable[[], list[float]]] = {
        "fleet_run_100k_ms": lambda: _timed_ms(lambda: prepared.run(draw_arrivals(prepared.model, 1)), repeats),
        "fleet_plain_run_100k_ms": lambda: _timed_ms(lambda: _ours(prepared, plain), repeats),
        "fleet_plan_s": lambda: [_process_s(PLAN) for _ in range(form.of(PLANS, PLANS, 1))],
    }
    way = on_the_way("simulate", [*measures, f"{runs:,} runs", "SimPy"])
    samples = {name: measures[name]() for name in itertools.islice(way, len(measures))}
    outcome = prepared.run(draw_arrivals(prepared.model, 1))
    next(way)
    begin = time.perf_counter()
    sample = monte_carlo(prepared.model, prepared.recovery, prepared.intervals, runs=runs, seed=1)
    figures: dict[str, float] = {
        "fleet_run_100k_ms": statistics.median(samples["fleet_run_100k_ms"]),
        "fleet_run_100k_events": outcome.events,
        "fleet_plain_run_100k_ms": statistics.median(samples["fleet_plain_run_100k_ms"]),
        "fleet_10k_runs_s": time.perf_counter() - begin,
        "fleet_peak_bytes": _peak_bytes(prepared),
        "fleet_plan_s": statistics.median(samples["fleet_plan_s"]),
    }
    next(way)
    mean, half = sample.interval()
    notes = [f"goodput of {runs:,} runs side by side: {mean:.4%} +- {half:.4%}; faults a run: {sample.faults.mean():,.1f}"]
    notes += _simpy(prepared, plain, form.of(5, 1, 1), figures, samples)
    settings = {"gpus": 100_000, "nodes": 12_500, "days": 26, "runs": runs, "seed": 1}
    return {"settings": settings, "figures": figures, "samples": samples, "notes": notes}


def _process_s(command: Sequence[str]) -> float:
    """Seconds of a new process from its start to its end: the wait of a user who types the command."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _ours(prepared: Prepared, plain: Any) -> dict[str, float]:
    return FleetRun(plain, draw_arrivals(plain, 1), prepared.recovery, prepared.intervals).run().shares


def _simpy(prepared: Prepared, plain: Any, repeats: int, figures: dict[str, float], samples: dict[str, list[float]]) -> list[str]:
    try:
        from benchmarks.peers.simpy_fleet import SimpyFleet
    except ImportError as error:
        return [left_out("simpy", str(error))]
    shares: list[dict[str, float]] = []
    samples["simpy_run_100k_ms"] = _timed_ms(
        lambda: shares.append(SimpyFleet(plain, draw_arrivals(plain, 1), prepared.recovery, prepared.intervals).run()), repeats
    )
    figures["simpy_run_100k_ms"] = statistics.median(samples["simpy_run_100k_ms"])
    figures["fleet_over_simpy_run_ratio"] = figures["fleet_plain_run_100k_ms"] / figures["simpy_run_100k_ms"]
    worst = max(abs(shares[0][name] - share) for name, share in _ours(prepared, plain).items())
    return [f"SimPy and Fleet differ by at most {worst:.1e} in any share of the same run"]


def _peak_bytes(prepared: Prepared) -> int:
    """Peak bytes that Python and numpy hold during a run, beyond those before it."""
    tracemalloc.start()
    try:
        prepared.run(draw_arrivals(prepared.model, 1))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    run("simulate", measure)
