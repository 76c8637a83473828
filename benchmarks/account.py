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
from pathlib import Path
from typing import Any

from benchmarks.account_forecast import measure_forecast
from benchmarks.account_step import STEP_S, step_overhead_all_us
from benchmarks.harness import Form, left_out, run, together
from benchmarks.machine import step_overhead_us
from fleet.planning.traces.fit import fit
from fleet.planning.traces.importing import read_log
from tests.support.flops import MODELS, counted
from tests.support.logs import lanl

SHAPE, SEED = 0.75, 1
KEEP = "ACCOUNT_RUNS"
"""Environment: a folder for the real runs. Those that it holds are not run again; without it they are thrown away."""


def fits(form: Form) -> dict[str, Any]:
    """A log of the form of Los Alamos' is read, and all is fitted that ``fleet traces fit`` shows.

    The processor's seconds are there, too: beside others the clock says how busy the machine is.
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


def forecasts(form: Form) -> dict[str, Any]:
    """Predictions and forecasts of real and of simulated runs, beside what became of them."""
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = Path(os.environ.get(KEEP) or thrown_away)
        found = measure_forecast(folder, each=form.of(13, 1, 1), quiet=form.of(2, 1, 0), simulated=form.of(400, 400, 20))
    unknown = [name for name, value in found["figures"].items() if math.isnan(value)]
    figures = {name: value for name, value in found["figures"].items() if name not in unknown}
    samples = {name: values for name, values in found["samples"].items() if values}
    notes = [left_out(name, "no run was long enough to say it") for name in unknown]
    return {**found, "figures": figures, "samples": samples, "notes": notes}


def overheads(form: Form) -> dict[str, Any]:
    """What accounting takes of a step with all of it on, and of the recorder alone beside it, by turns."""
    alone, whole = "fleet_step_recorder_us", "fleet_step_overhead_all_us"
    samples: dict[str, list[float]] = {alone: [], whole: []}
    for _ in range(form.of(9, 5, 1)):
        samples[alone].append(step_overhead_us())
        samples[whole].append(step_overhead_all_us(form.of(2_000, 2_000, 100)))
    figures = {name: statistics.median(values) for name, values in samples.items()}
    note = f"figures are told twice a second, as in a run, with steps of {STEP_S * 1e3:g} ms"
    return {"settings": {"step_s": STEP_S}, "figures": figures, "samples": samples, "notes": [note]}


def counts(form: Form) -> dict[str, Any]:
    """FLOPs as they are counted, over those of the formulas, for a perceptron, convolutions and a transformer."""
    name, samples = "fleet_flops_error_ratio_max", []
    for made in MODELS:
        loss, _, expected = made()
        samples.append(abs(counted(lambda loss=loss: loss().backward()) / expected - 1.0))
    return {"settings": {}, "figures": {name: max(samples)}, "samples": {name: samples}, "notes": []}


MEASURES = (fits, overheads, counts, forecasts)
"""All that is measured, in order."""


def measure(form: Form) -> Mapping[str, Any]:
    """Each of ``MEASURES``, in one result."""
    return together(each(form) for each in MEASURES)


if __name__ == "__main__":
    run("account", measure)
