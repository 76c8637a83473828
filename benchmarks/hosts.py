"""`hosts`: the cost of the loss of a rank, a host and a link on several hosts, and the network's cost for a step.

Hosts are namespaces of this machine, each with an address, processes and folders of its own (`tests.support.hosts`), so root is needed. A
head holds Ray's control plane, and three workers have room for exactly four ranks and a spare; torchft's ranks are on the same workers. The
step, the event logs and the stall are those of `recovery`; systems take turns, round by round.

- kill: SIGKILL of one rank in view. Host loss: SIGKILL of all processes of a worker that has a rank in view. Link cut: all packets between
  such a worker and the others are lost in silence; the node time-out is subtracted.
- replaced: another machine boots in the place of the lost worker. The time begins at the later of two events: Ray has the new node, and Ray
  declares the old one dead. It ends with the first step of the full world with a rank on the new node.
- step over loopback: the median step without faults, over that of the same run with all ranks on one host. Both runs make a pair, and
  the one that goes first alternates. The interval is Student's t over the logs of the pairs' ratios.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import harness
from benchmarks.harness import Form, left_out, on_the_way
from benchmarks.peers import fleet_hosts, torchft_hosts
from benchmarks.peers.common import (
    SETTLE_STEPS,
    SMOKE_SETTINGS,
    Commit,
    Injection,
    Kill,
    Settings,
    calibrated,
    median_step_s,
    not_installed,
    stall_s,
    steady_steps,
    wait_until,
)
from benchmarks.peers.on_hosts import HostsRun, Site
from fleet.simulation.rng import stream
from tests.support.hosts import needed

CPUS, ALONE = (2, 2, 1), (5,)
SYSTEMS = {"fleet": fleet_hosts.start, "torchft": torchft_hosts.start}
FAULTS = {"fleet": ("kill", "host", "cut"), "torchft": ("kill", "host")}
SAID = {"kill": "kill", "host": "host loss", "cut": "link cut"}
FIGURE = {"kill": "kill_stall_s", "host": "host_loss_stall_s", "cut": "link_cut_stall_s"}
RATIO = "fleet_step_over_loopback_ratio"
SURVIVOR_STEPS = 10
"""Steps after the loss of a host, before another host takes its place."""

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Limits:
    """Most seconds to wait for a full world: when a run begins, and after a fault."""

    start_s: float
    full_again_s: float


LIMITS = {Form.FULL: Limits(300.0, 180.0), Form.QUICK: Limits(120.0, 60.0), Form.SMOKE: Limits(300.0, 180.0)}


@dataclass(frozen=True)
class Sizes:
    """How often each fault strikes each system in all, and in how many rounds; the number of ``pairs``, and of steps in each."""

    kills: int
    hosts: int
    cuts: int
    rounds: int
    pairs: int
    steps: int

    def of(self, kind: str) -> int:
        return {"kill": self.kills, "host": self.hosts, "cut": self.cuts}[kind]


FULL, QUICK, SMOKE = Sizes(10, 6, 6, 2, 6, 150), Sizes(3, 1, 1, 1, 0, 0), Sizes(1, 1, 1, 1, 2, 3)


def measure(form: Form) -> dict[str, Any]:
    """Measure the cost of losses on three hosts, and the network's cost for a step."""
    busy, (names, notes) = note_of_load(), systems(form)
    samples: Samples = defaultdict(list)
    sizes = form.of(FULL, QUICK, SMOKE)
    settings = workload(form)
    plans = {(name, number): plan(name, settings, sizes, number, form) for number in range(sizes.rounds) for name in names}
    faults = [
        f"{name}, {SAID[kind]} after {injection.steps} steps" for (name, _), injections in plans.items() for injection, kind in injections
    ]
    way = on_the_way("hosts", ["hosts boot", *faults, *(f"steps on one host, pair {number + 1}" for number in range(sizes.pairs))])
    if names:
        next(way)
        with tempfile.TemporaryDirectory(prefix="bench-hosts-", ignore_cleanup_errors=True) as outputs, Site(CPUS) as site:
            bench = Bench(site, settings, Path(outputs), LIMITS[form], way, samples, notes)
            for (name, _), injections in plans.items():
                bench.inject(name, injections)
            if sizes.pairs:
                bench.pairs(sizes)
        why = "two more runs for each pair, and one more host, are for the full form"
        notes += [left_out(what, why) for what in (RATIO, "fleet_hosts_step", "fleet_loopback_step") if not sizes.pairs]
    return {"settings": used(settings, sizes), "figures": figures(samples), "samples": dict(samples), "notes": notes + busy}


def workload(form: Form) -> Settings:
    """The step of `recovery`, by four ranks with room for a spare."""
    return calibrated(form.of(Settings(spares=1), Settings(spares=1), SMOKE_SETTINGS.replace(world=4, shards=4)))


def used(settings: Settings, sizes: object) -> dict[str, Any]:
    """The settings of a result."""
    return {**vars(settings), **vars(sizes), "node_timeout_s": fleet_hosts.SILENCE_S, "cpus": CPUS}


def systems(form: Form) -> tuple[list[str], list[str]]:
    """The systems that can run here, and a note for each that cannot."""
    try:
        needed()
    except pytest.skip.Exception as reason:
        return [], [left_out(name, str(reason)) for name in SYSTEMS]
    missing = form.of(not_installed("torchft"), not_installed("torchft"), "not asked for")
    return ["fleet"] if missing else list(SYSTEMS), [left_out("torchft", missing)] if missing else []


def note_of_load() -> list[str]:
    """A note for a machine on which other processes ran at the start: every step shares its cores with them."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return [f"others ran on this machine: {load:.0f} processes wanted its {cores} cores when this began"] if load >= 1.0 else []


def plan(name: str, settings: Settings, sizes: Sizes, number: int, form: Form) -> list[tuple[Injection, str]]:
    """The faults of one round, kinds mixed, each some steps after the world is full. They are the same for both systems, kind by kind."""
    longest = form.of(30, 10, 1)
    injections: list[tuple[Injection, str]] = []
    for index in range(max(sizes.kills, sizes.hosts, sizes.cuts)):
        for kind in FAULTS[name]:
            if index < sizes.of(kind) and index % sizes.rounds == number:
                rng = stream(settings.seed, "hosts", kind, index)
                injections.append((Injection(SETTLE_STEPS + rng.randrange(longest), rng.random(), rng.randrange(settings.world)), kind))
    return injections


@dataclass
class Bench:
    """Runs on ``site``; their results go into ``samples`` and ``notes``. ``way`` goes a step further with each fault, and each pair."""

    site: Site
    settings: Settings
    outputs: Path
    limits: Limits
    way: Iterator[str]
    samples: Samples
    notes: list[str]

    def __post_init__(self) -> None:
        self._runs = 0

    def inject(self, name: str, faults: Sequence[tuple[Injection, str]]) -> None:
        """Inject faults into runs of a system until the plan is done: a new run begins after each whose world did not become full again."""
        left = list(faults)
        next(self.way)
        while left:
            run = self._start(name, self.site)
            try:
                kills = inject_run(run, self.settings, left, self.limits, self.way)
                self._collect(name, run, kills)
            finally:
                run.stop()
            left = left[len(kills) :]
            self._whole()

    def pairs(self, sizes: Sizes) -> None:
        """Make all pairs, with one more host."""
        next(self.way)
        with Site(ALONE) as alone:
            for number in range(sizes.pairs):
                if number:
                    next(self.way)
                self.pair(alone, sizes.steps, number)

    def pair(self, alone: Site, steps: int, number: int) -> None:
        """Add the median step of a run without faults on several hosts, over that of a run on one host."""
        found: dict[Site, float] = {}
        for site in (self.site, alone) if number % 2 == 0 else (alone, self.site):
            run = self._start("fleet", site)
            try:
                until_full(run, self.settings, 0.0, SETTLE_STEPS + steps, self.limits.start_s)
                found[site] = median_step_s(run.commits()[-steps - 1 :])
            finally:
                run.stop()
        self.samples["fleet_hosts_step_s"].append(found[self.site])
        self.samples["fleet_loopback_step_s"].append(found[alone])

    def _start(self, name: str, site: Site) -> HostsRun:
        self._runs += 1
        called = f"{name}-{self._runs}"
        return SYSTEMS[name](site, called, self.settings, self.outputs / f"{called}.txt")

    def _whole(self) -> None:
        """Boot the workers again that the last run has lost."""
        for worker in self.site.workers:
            if not worker.alive:
                self.site.replace(worker)

    def _collect(self, name: str, run: HostsRun, kills: Sequence[Kill]) -> None:
        commits = run.commits()
        step_s = median_step_s(commits)
        for kill in kills:
            stall = stall_s(commits, kill.t_s, step_s)
            if stall is not None:
                self.samples[f"{name}_{FIGURE[kill.kind]}"].append(stall - (fleet_hosts.SILENCE_S if kill.kind == "cut" else 0.0))
            if kill.kind == "host" and name == "fleet" and (took_s := replaced_s(run, kill)) is not None:
                self.samples["fleet_host_replaced_s"].append(took_s)
        self.notes.append(f"{name}: median step {step_s:.4f} s over {len(commits)} steps, {len(kills)} faults{_over(run)}")


def _over(run: HostsRun) -> str:
    reason = run.failed()
    return f"; then it had ended: {reason}" if reason else ""


def inject_run(
    run: HostsRun, settings: Settings, faults: Sequence[tuple[Injection, str]], limits: Limits, way: Iterator[str]
) -> list[Kill]:  # fmt: skip
    """Inject faults into one run, while its world becomes full again. ``way`` goes a step further from the second fault on. Raises
    RuntimeError when the world is never full at first."""
    kills: list[Kill] = []
    since_s, limit_s, whole = 0.0, limits.start_s, True
    for injection, kind in faults:
        if kills:
            next(way)
        if not (whole := full(run, settings, since_s, injection.steps, limit_s)):
            break
        time.sleep(injection.phase * median_step_s(run.commits()))
        kill = run.inject(kind, victim(run, kind, injection.rank))
        kills.append(kill)
        since_s, limit_s = kill.t_s, limits.full_again_s
        if kind != "kill":
            wait_until(lambda at_s=since_s: _steps_since(run, at_s) >= SURVIVOR_STEPS, run, limits.full_again_s)  # type: ignore[misc]
            run.replace(run.host_of(kill.pid))
    if not kills:
        raise RuntimeError(never(run, limits.start_s))
    if whole:
        full(run, settings, since_s, SETTLE_STEPS, limit_s)
    return kills


def victim(run: HostsRun, kind: str, rank: int) -> int:
    """The slot to strike, out of all ranks in view; for the loss of a host, out of those on the hosts with most room."""
    members = run.ranks()
    most = max(run.site.cpus)
    roomy = [worker for worker, cpus in zip(run.site.workers, run.site.cpus, strict=True) if cpus == most]
    slots = [slot for slot, pid in sorted(members.items()) if kind == "kill" or run.host_of(pid) in roomy]
    return slots[rank % len(slots)]


def replaced_s(run: HostsRun, kill: Kill) -> float | None:
    """Seconds from the later of the new node's join and the old one's end until a step of the full world with the new node; None without
    one."""
    nodes = node_of_times(run.site.node_times(run.host_of(kill.pid)), kill.t_s)
    whole_s = whole_again_s(run.commits(), kill, run.settings.world, run.boot_after(kill.pid))
    return None if nodes is None or whole_s is None else whole_s - max(nodes)


def node_of_times(times: Sequence[tuple[float, float]], at_s: float) -> tuple[float, float] | None:
    """(end of the node that was there at a time, start of its successor), from (start, end) of all nodes; None without either."""
    old = max((node for node in times if node[0] < at_s), default=None)
    new = min((node for node in times if node[0] > at_s), default=None)
    return None if old is None or new is None or math.isinf(old[1]) else (old[1], new[0])


def whole_again_s(commits: Sequence[Commit], kill: Kill, world: int, boot: int) -> float | None:
    """When the full world first committed a step after the kill with a rank on a host that runs since ``boot``."""
    for commit in commits:
        if commit.t_s > kill.t_s and len(commit.members) >= world and any(HostsRun.boot_of(pid) == boot for pid in commit.members.values()):
            return commit.t_s
    return None


def full(run: HostsRun, settings: Settings, since_s: float, steps: int, limit_s: float) -> bool:
    return wait_until(lambda: steady_steps(run, since_s, settings.world) >= steps, run, limit_s)


def until_full(run: HostsRun, settings: Settings, since_s: float, steps: int, limit_s: float) -> None:
    if not full(run, settings, since_s, steps, limit_s):
        raise RuntimeError(never(run, limit_s))


def never(run: HostsRun, limit_s: float) -> str:
    said = run.output.read_text(errors="replace")[-2000:]
    return f"the world was not full for long enough within {limit_s:.0f} s: {run.failed() or 'still running'}; {said}"


def _steps_since(run: HostsRun, at_s: float) -> int:
    return sum(1 for commit in run.commits() if commit.t_s > at_s)


def figures(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of every sample, and the ratio of the steps' pairs with its 95% interval where there are two pairs or more."""
    result = {f"{name}_median": statistics.median(values) for name, values in samples.items()}
    if samples.get("fleet_loopback_step_s"):
        logs = np.log(np.array(samples["fleet_hosts_step_s"]) / np.array(samples["fleet_loopback_step_s"]))
        result[RATIO] = float(np.exp(logs.mean()))
        if len(logs) > 1:
            half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
            result[f"{RATIO}_low"], result[f"{RATIO}_high"] = float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))
    return result


if __name__ == "__main__":
    harness.run("hosts", measure)
