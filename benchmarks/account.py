"""What does it take to account for a fleet, and how often is its forecast right?

One function for each figure, or for figures that are measured together.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.account_forecast import Made, figures_of, simulations
from benchmarks.account_step import STEP_S, step_overhead_all_us
from benchmarks.harness import Form, Part, in_parts, left_out, one_piece, run
from benchmarks.machine import step_overhead_us
from fleet.planning.traces.fit import fit
from fleet.planning.traces.importing import read_log
from tests.support.flops import MODELS, counted
from tests.support.logs import lanl

SHAPE, SEED = 0.75, 1
KEEP = "ACCOUNT_RUNS"
"""Environment variable: a folder for the real runs. Runs that it holds already are not run again; without it, runs are thrown away."""


def fits(form: Form) -> dict[str, Any]:
    """Read a log of the form of Los Alamos', and fit all that ``fleet experiment fit`` shows.

    Seconds of the processor are measured, too: on a shared machine the clock's seconds depend on its load.
    """
    rows = form.of(24_000, 24_000, 500)
    text = lanl(rows, SEED, SHAPE)
    samples: dict[str, list[float]] = {"fleet_fit_s": [], "fleet_fit_read_s": [], "fleet_fit_cpu_s": []}
    for _ in range(form.of(15, 5, 1)):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        log = read_log(text)
        samples["fleet_fit_read_s"].append(time.perf_counter() - begin_s)
        found = fit(log)
        samples["fleet_fit_s"].append(time.perf_counter() - begin_s)
        samples["fleet_fit_cpu_s"].append(time.process_time() - begin_cpu_s)
    best = found.between["all"].best
    note = f"{rows:,} rows by a Weibull law of shape {SHAPE}; fitted: {best.law} {best.parameters}" if best else f"{rows:,} rows, too few"
    figures = {name: statistics.median(values) for name, values in samples.items()}
    return {"settings": {"rows": rows, "seed": SEED}, "figures": figures, "samples": samples, "notes": [note]}


def forecasts(form: Form, folder: Path) -> Part:
    """Predictions and forecasts of real and of simulated runs, beside the true outcomes."""
    simulated = form.of(400, 400, 20)
    made = Made(folder, each=form.of(13, 1, 1), quiet=form.of(2, 0, 0), steps=form.of(90, 60, 40), limit_s=form.of(600.0, 150.0, 150.0))

    def reported(found: dict[str, Any]) -> dict[str, Any]:
        result = figures_of(made, found)
        unknown = [name for name, value in result["figures"].items() if math.isnan(value)]
        figures = {name: value for name, value in result["figures"].items() if name not in unknown}
        samples = {name: values for name, values in result["samples"].items() if values}
        notes = [left_out(name, "no run was long enough to say it") for name in unknown]
        notes += [] if made.quiet else [left_out("fleet_quiet_error_points_max", "runs without faults are for the full form")]
        settings = {**result["settings"], "simulated_runs": simulated}
        return {"settings": settings, "figures": figures, "samples": samples, "notes": notes}

    return Part(made.work() | simulations(simulated), reported)


def overheads(form: Form) -> dict[str, Any]:
    """The time of accounting in a step: with all of it on, and with the recorder alone, by turns."""
    alone, whole = "fleet_step_recorder_us", "fleet_step_overhead_all_us"
    samples: dict[str, list[float]] = {alone: [], whole: []}
    for _ in range(form.of(9, 5, 1)):
        samples[alone].append(step_overhead_us())
        samples[whole].append(step_overhead_all_us(form.of(2_000, 2_000, 100)))
    figures = {name: statistics.median(values) for name, values in samples.items()}
    note = f"figures are reported twice a second, as in a run, with steps of {STEP_S * 1e3:g} ms"
    return {"settings": {"step_s": STEP_S}, "figures": figures, "samples": samples, "notes": [note]}


def counts(form: Form) -> dict[str, Any]:
    """Counted FLOPs over those of the formulas, for a perceptron, convolutions and a transformer."""
    name, samples = "fleet_flops_error_ratio_max", []
    for made in MODELS:
        loss, _, expected = made()
        samples.append(abs(counted(lambda loss=loss: loss().backward()) / expected - 1.0))
    return {"settings": {}, "figures": {name: max(samples)}, "samples": {name: samples}, "notes": []}


def measure(form: Form) -> Mapping[str, Any]:
    """Measure the accounts, the time that they take, and the forecast."""
    alone = {"fits": fits, "overheads": overheads, "counts of FLOPs": counts}
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = Path(os.environ.get(KEEP) or thrown_away)
        return in_parts("account", [*(one_piece(what, partial(do, form)) for what, do in alone.items()), forecasts(form, folder)])


if __name__ == "__main__":
    run("account", measure)
