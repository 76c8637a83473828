"""`partition`: the cost of a short cut of a host's link, steps that are committed twice, and the pace with lost packets.

The hosts, the step and the event logs are those of `hosts`. A head and three workers have room for exactly four ranks and a spare. In each
round a worker that has a rank in view is cut off from all others in silence, for 0.1 to 0.95 s, and mended. The next round begins once the
world has been full for a while. No peer takes part in the cuts: torchft's processes wait for a closed connection or a time-out of many
seconds.

- lossy goodput ratio: steps while each worker loses 1% of the packets that it sends, over steps in an equal time before, in the same run.
  Runs of both systems take turns. The kernel's packet filter draws the packets; one that was sent as a whole is lost as a whole.
- blip stall: the longest gap between two steps around the cut, less the median step. The cut itself is part of it.
- evictions: ranks that were in view before a cut, and are not once the world is full again.
- double commits: steps that the job's ranks have committed in more than one view.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from benchmarks.hosts import (
    CPUS,
    LIMITS,
    SYSTEMS,
    Limits,
    Samples,
    full,
    never,
    note_of_load,
    systems,
    until_full,
    used,
    victim,
    workload,
)
from benchmarks.peers import fleet_hosts
from benchmarks.peers.common import SETTLE_STEPS, Commit, Settings, median_step_s, stall_s
from benchmarks.peers.on_hosts import HostsRun, Site
from fleet.simulation.rng import stream

LENGTH_S = (0.1, 0.95)
STALLS, LENGTHS, EVICTIONS = "fleet_blip_stall_s", "fleet_blip_length_s", "fleet_blip_evictions"


@dataclass(frozen=True)
class Sizes:
    """Number of cuts, and most steps of the full world before each. Number of runs with lost packets, and seconds of each of the two times
    that are compared; a run has ``spans`` such pairs."""

    blips: int
    steps: int
    lossy_runs: int
    spans: int
    span_s: float


FULL, QUICK, SMOKE = Sizes(20, 30, 2, 4, 15.0), Sizes(5, 20, 1, 2, 6.0), Sizes(2, 1, 1, 1, 2.0)
LOSS = """nft -f - <<END
table inet lossy {
  chain output { type filter hook output priority 0; meta l4proto tcp oif != "lo" numgen random mod 100 < 1 counter drop; }
}
END"""


def measure(form: Form) -> dict[str, Any]:
    """Measure the cost of short cuts, and of lost packets."""
    busy, (names, notes) = note_of_load(), systems(form)
    samples: Samples = defaultdict(list)
    sizes, limits = form.of(FULL, QUICK, SMOKE), LIMITS[form]
    settings = workload(form)
    commits: list[Commit] = []
    lossy_runs = [(name, number) for number in range(sizes.lossy_runs) for name in names]
    cuts = [f"cut {number + 1}" for number in range(sizes.blips)]
    way = on_the_way("partition", ["hosts boot", *cuts, *(f"{name} with lost packets" for name, _ in lossy_runs)])
    if names:
        next(way)
        with tempfile.TemporaryDirectory(prefix="bench-partition-", ignore_cleanup_errors=True) as outputs, Site(CPUS) as site:
            run = fleet_hosts.start(site, "blips", settings, Path(outputs) / "blips.txt")
            try:
                for number in range(sizes.blips):
                    next(way)
                    blip(run, settings, sizes, limits, number, samples)
                commits = run.commits()
            finally:
                run.stop()
            for name, number in lossy_runs:
                next(way)
                run = SYSTEMS[name](site, f"lossy-{name}-{number}", settings, Path(outputs) / f"lossy-{name}-{number}.txt")
                lossy(run, name, settings, sizes, limits, samples)
    return {"settings": used(settings, sizes), "figures": figures(samples, commits), "samples": dict(samples), "notes": notes + busy}


def lossy(run: HostsRun, name: str, settings: Settings, sizes: Sizes, limits: Limits, samples: Samples) -> None:
    """Add the share of the pace that is left while packets are lost, ``spans`` times in one run."""
    try:
        until_full(run, settings, 0.0, SETTLE_STEPS, limits.start_s)
        for _ in range(sizes.spans):
            before = steps_in(run, sizes.span_s)
            _on_all(run.site, LOSS)
            during = steps_in(run, sizes.span_s)
            _on_all(run.site, "nft delete table inet lossy")
            samples[f"{name}_lossy_goodput_ratio"].append(during / before if before else float("nan"))
    finally:
        run.stop()


def steps_in(run: HostsRun, span_s: float) -> int:
    """Steps that are committed in the next ``span_s`` seconds."""
    begin_s = time.monotonic()
    time.sleep(span_s)
    return len({commit.step for commit in run.commits() if begin_s <= commit.t_s < begin_s + span_s})


def _on_all(site: Site, command: str) -> None:
    for worker in site.workers:
        worker.run(["sh", "-c", command])


def blip(run: HostsRun, settings: Settings, sizes: Sizes, limits: Limits, number: int, samples: Samples) -> None:
    """Cut a worker off for a moment, once the world has been full for some steps; wait until it is full again."""
    rng = stream(settings.seed, "blips", number)
    since_s, limit_s = (time.monotonic(), limits.full_again_s) if number else (0.0, limits.start_s)
    until_full(run, settings, since_s, SETTLE_STEPS + rng.randrange(sizes.steps), limit_s)
    before, length_s = run.ranks(), rng.uniform(*LENGTH_S)
    cut = run.inject("cut", victim(run, "kill", rng.randrange(settings.world)))
    time.sleep(length_s)
    run.host_of(cut.pid).mend()
    if not full(run, settings, cut.t_s, SETTLE_STEPS, limits.full_again_s):
        raise RuntimeError(never(run, limits.full_again_s))
    commits = run.commits()
    stall = stall_s(commits, cut.t_s, median_step_s(commits))
    samples[STALLS].append(float("nan") if stall is None else stall)
    samples[LENGTHS].append(length_s)
    samples[EVICTIONS].append(float(len(set(before.values()) - set(run.ranks().values()))))


def doubled(commits: Sequence[Commit]) -> int:
    """Steps that were committed in more than one membership."""
    return sum(count > 1 for count in Counter(commit.step for commit in commits).values())


def figures(samples: Mapping[str, Sequence[float]], commits: Sequence[Commit]) -> dict[str, float]:
    """95th percentile of the stalls, number of evictions, and of steps that were committed twice."""
    if not samples:
        return {}
    stalls = np.array(samples[STALLS])
    lossy = {name: float(np.median(values)) for name, values in samples.items() if name.endswith("lossy_goodput_ratio")}
    return lossy | {
        f"{STALLS}_p95": float(np.percentile(stalls, 95)),
        f"{STALLS}_median": float(np.median(stalls)),
        EVICTIONS: sum(samples[EVICTIONS]),
        "fleet_double_commits": float(doubled(commits)),
    }


if __name__ == "__main__":
    harness.run("partition", measure)
