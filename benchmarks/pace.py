"""`pace`: is this checkout slower than another commit? ``make pace BASE=COMMIT``.

Both run the same script (`pace_loop`) by their own `fleet run`, with the libraries of this environment, and take turns:

- pace at 4 and at 2 ranks: a run of each stands ready, and they take blocks of steps in turn. The step of 4 ranks is that of `storm`. The
  step of 2 ranks is short and has no wait: it shows the costs of a step beside its arithmetic. Other figures are the microseconds of the
  processors in a rank and step, and the switches of its threads.
- stall: one rank is killed, each side in turn: the gap around the kill, less the median step.
- storm: one trace of kills for both: the samples committed in it.
- start: seconds from the command to the first step, one side after the other, and of its parts.

All is repeated in several launches, as a run's luck at its start lasts for its whole life. A figure is the median of new over old over all
pairs, with its 95% interval (bootstrap). It is called slower where the whole interval lies beyond `WORSE` on the slower side. Then the exit
status is 1; it is 2 where the commit cannot be compared. The file is written anew after each launch, so that a comparison can be stopped at
any time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import complete, on_the_way, show
from benchmarks.pace_sides import NoSuchCommit, Side, checkout, light
from benchmarks.peers.common import (
    REPOSITORY,
    Settings,
    calibrated,
    committed_between,
    median_step_s,
    stall_s,
    steady_steps,
    storm_trace,
    wait_until,
)
from benchmarks.turns import ratio_of

MEASURES = ("start", "pace4", "stall", "storm", "pace2")
WORSE = 0.01
BLOCK_STEPS = 20
STORM_S, STORM_MTBF_S = 24.0, 6.0
CALM_STEPS = 25
LIMIT_S = 120.0
FOLDER = REPOSITORY / "runs/pace"
SLOWER = {
    "step_ms_4_ranks": 1,
    "cpu_us_4_ranks": 1,
    "step_ms_2_ranks": 1,
    "cpu_us_2_ranks": 1,
    "stall_s": 1,
    "storm_samples": -1,
    "start_s": 1,
}
"""The figures that are judged -> 1 where more is slower, -1 where less is slower."""

Samples = dict[str, list[tuple[float, float]]]
"""Figure -> (old, new) of each pair."""


@dataclass(frozen=True)
class Sizes:
    """Launches of each kind, and pairs of blocks, kills and storms within each."""

    launches: int
    blocks: int
    kills: int
    storms: int


@dataclass(frozen=True)
class Pair:
    """The old and the new side of one launch."""

    old: Side
    new: Side

    def turns(self, new_first: bool) -> tuple[Side, Side]:
        return (self.new, self.old) if new_first else (self.old, self.new)


@contextmanager
def launched(base: Path, settings: Settings, new_first: bool) -> Iterator[Pair]:
    """A run of each checkout, ready."""
    workdir = Path(tempfile.mkdtemp(prefix="pace-"))
    places = {"old": base, "new": REPOSITORY}
    sides: dict[str, Side] = {}
    try:
        for name in sorted(places, reverse=not new_first):
            sides[name] = Side(name, places[name], workdir / name, settings, BLOCK_STEPS)
            sides[name].ready()
        yield Pair(sides["old"], sides["new"])
    finally:
        for side in sides.values():
            side.stop()
        shutil.rmtree(workdir, ignore_errors=True)


def both(pair: Pair, new_first: bool, measure: Callable[[Side], dict[str, float]], samples: Samples) -> None:
    """Measure each side once."""
    found = {side.name: measure(side) for side in pair.turns(new_first)}
    if lost := [name for name, figures in found.items() if not figures]:
        print(f"pace: a pair is left out, as a rank was lost in it: {', '.join(lost)}", file=sys.stderr, flush=True)
    for figure in found["old"].keys() & found["new"].keys():
        samples[figure].append((found["old"][figure], found["new"][figure]))


def block(side: Side) -> dict[str, float]:
    """Figures of one block: milliseconds a step, and microseconds of the processors and switches in each rank and step. Empty where a rank
    was lost in it."""
    ranks, count, members = side.settings.world, BLOCK_STEPS * side.settings.world, side.run.ranks()
    cpu_before_s, switches_before = side.used()
    step_s = side.block()
    cpu_s, switches = side.used()
    if side.run.ranks() != members:
        return {}
    return {
        f"step_ms_{ranks}_ranks": step_s * 1e3,
        f"cpu_us_{ranks}_ranks": (cpu_s - cpu_before_s) * 1e6 / count,
        f"switches_{ranks}_ranks": (switches - switches_before) / count,
    }


def stall(number: int) -> Callable[[Side], dict[str, float]]:
    """Kill one rank, and go on until the world was full again for some steps."""

    def one(side: Side) -> dict[str, float]:
        since_s = time.monotonic()
        side.go()
        _calm(side, since_s)
        kill = side.kill(number)
        _calm(side, kill.t_s)
        side.halt()
        commits = [commit for commit in side.run.commits() if commit.t_s > since_s]
        found = stall_s(commits, kill.t_s, median_step_s(commits))
        assert found is not None
        return {"stall_s": max(found, 1e-4)}

    return one


def _calm(side: Side, since_s: float) -> None:
    world = side.settings.world
    if not wait_until(lambda: steady_steps(side.run, since_s, world) > CALM_STEPS, side.run, LIMIT_S):
        raise RuntimeError(f"{side.name}: no {CALM_STEPS} steps at full world in {LIMIT_S:.0f} s: {side.run.failed() or 'it runs'}")


def storm(seed: int) -> Callable[[Side], dict[str, float]]:
    """The samples that are committed during one trace of kills."""

    def one(side: Side) -> dict[str, float]:
        side.go()
        begin_s = time.monotonic()
        for at_s, rank in storm_trace(seed, STORM_MTBF_S, STORM_S, side.settings.world):
            time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            if side.run.ranks():
                side.kill(rank)
        time.sleep(max(0.0, begin_s + STORM_S - time.monotonic()))
        _calm(side, begin_s + STORM_S)
        side.halt()
        return {"storm_samples": committed_between(side.run.commits(), begin_s, begin_s + STORM_S)}

    return one


def starts(base: Path, settings: Settings, new_first: bool, samples: Samples) -> None:
    """Measure a start of each side, one after the other."""
    found: dict[str, dict[str, float]] = {}
    for name, place in sorted({"old": base, "new": REPOSITORY}.items(), reverse=not new_first):
        workdir = Path(tempfile.mkdtemp(prefix="pace-"))
        side = Side(name, place, workdir / name, settings, BLOCK_STEPS)
        try:
            found[name] = side.begins()
        finally:
            side.stop()
            shutil.rmtree(workdir, ignore_errors=True)
    for figure in found["old"].keys() & found["new"].keys():
        samples[figure].append((found["old"][figure], found["new"][figure]))


def launch(base: Path, settings: Settings, sizes: Sizes, number: int, only: Sequence[str], samples: Samples, way: Iterator[str]) -> None:
    """Take all measures once. The sides take turns to be first. ``way`` goes a step further with each."""
    new_first = number % 2 == 1
    if "start" in only:
        next(way)
        starts(base, settings, new_first, samples)
    turns: dict[str, list[tuple[bool, Callable[[Side], dict[str, float]]]]] = {
        "pace4": [((turn % 2 == 1) != new_first, block) for turn in range(sizes.blocks)],
        "stall": [((turn % 2 == 1) != new_first, stall(number + turn)) for turn in range(sizes.kills)],
        "storm": [(new_first, storm(settings.seed + number + turn)) for turn in range(sizes.storms)],
    }
    if beside := [name for name in turns if name in only]:
        next(way)
        with launched(base, settings, new_first) as pair:
            for name in beside:
                if name != beside[0]:
                    next(way)
                for first, measure in turns[name]:
                    both(pair, first, measure, samples)
    if "pace2" in only:
        next(way)
        with launched(base, light(settings), new_first) as pair:
            for turn in range(2 * sizes.blocks):
                both(pair, (turn % 2 == 1) != new_first, block, samples)


def figures(samples: Samples) -> dict[str, float]:
    """Median of each side; the median ratio of new over old, and its 95% interval where there are two pairs or more."""
    result: dict[str, float] = {}
    for name, pairs in samples.items():
        old, new = zip(*pairs, strict=True)
        result[f"{name}_old"], result[f"{name}_new"] = statistics.median(old), statistics.median(new)
        result |= ratio_of(f"{name}_ratio", new, old)
    return result


def slower(found: Mapping[str, float]) -> list[str]:
    """Figures whose whole interval lies beyond `WORSE` on the slower side of 1."""
    bound = {1: "low", -1: "high"}
    edges = {figure: found.get(f"{figure}_ratio_{bound[sign]}") for figure, sign in SLOWER.items()}
    return [figure for figure, edge in edges.items() if edge is not None and SLOWER[figure] * math.log(edge) > math.log(1 + WORSE)]


def compare(base: Path, commit: str, sizes: Sizes, only: Sequence[str], target: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The result, and the figures that are slower."""
    settings = calibrated(Settings(spares=1, nodes=1))
    samples: Samples = defaultdict(list)
    result: dict[str, Any] = {}
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    way = on_the_way("pace", [f"launch {number + 1}, {name}" for number in range(sizes.launches) for name in MEASURES if name in only])
    for number in range(sizes.launches):
        launch(base, settings, sizes, number, only, samples, way)
        found = figures(samples)
        notes = [f"slower: {', '.join(slower(found)) or 'none'} (the whole 95% interval is more than {WORSE:.0%} on the slower side of 1)"]
        given = {"base": commit, **vars(settings), **vars(sizes), "launches_done": number + 1}
        result = complete("pace", {"settings": given, "figures": found, "samples": {**samples}, "notes": notes})
        if target is not None:
            target.write_text(json.dumps(result, indent=1) + "\n")
    return result, slower(result["figures"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="the commit that this checkout is compared with")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks in each launch")
    parser.add_argument("--kills", type=int, default=3, help="pairs of kills in each launch")
    parser.add_argument("--storms", type=int, default=1, help="pairs of storms in each launch")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="MEASURE", help=", ".join(MEASURES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        base = checkout(options.base, FOLDER)
    except NoSuchCommit as error:
        print(f"pace: {error}", file=sys.stderr)
        sys.exit(2)
    sizes = Sizes(options.launches, options.blocks, options.kills, options.storms)
    result, worse = compare(base, options.base, sizes, options.only, options.json)
    show(result)
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
