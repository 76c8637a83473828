"""`pairs`: is one commit of Fleet slower than another? Both run in turn, so that the machine's drift falls on both.

``python -m benchmarks.pairs OLD NEW --pairs 8 --json FILE`` takes two checkouts, each of which has its own ``.venv``. In each pair every
measure below runs once in each checkout, and the one that begins alternates. A measure is Fleet's own part of a benchmark, in a short form.
The figure is the mean of the log of new over old, with its 95% interval (Student's t over pairs). It says "slower" only where the whole
interval lies on the slower side of 1. The file is written anew after each pair, so that a comparison can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness import complete, show

LIMIT_S = 600.0
ONLY_FLEET = "m.installed_systems = lambda only=(), find=m.installed_systems: find(('fleet',)); "
LEGS = {
    "recovery": ONLY_FLEET + "m.QUICK = m.Sizes(3, 1, 0)",
    "storm": ONLY_FLEET + "m.QUICK = m.Sizes(6.0, 24.0, 1, 30)",
    "reduction": "m.SIZES_MB = {4: 4, 16: 2}",
    "snapshot": "m._others = lambda training, saves, samples: [samples[name].append(1.0) for name in samples if not samples[name]]",
    "straggler": "m.QUICK = m.Sizes(1, 20, 60, 5, 0.02)",
    "machine": "pass",
}
"""What makes each benchmark short, as code that runs in the checkout: peers and sizes that are not asked for here are left out."""

CALL = """
import importlib, json, os, sys
from actors.rank.environment import RANK_ENVIRONMENT
name, change = sys.argv[1:]
if name == "snapshot" and any(os.environ.get(key) != value for key, value in RANK_ENVIRONMENT.items()):
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **RANK_ENVIRONMENT})
m = importlib.import_module("benchmarks." + name)
exec(change)
print("\\n" + json.dumps(m.measure(m.Form.QUICK)["figures"]), flush=True)
"""

COMPARED = {
    "recovery": {"fleet_stall_s_median": 1},
    "storm": {"fleet_committed_samples": -1},
    "reduction": {f"fleet_{world}_ranks_{size}_mb_ms_median": 1 for world in (2, 3, 4) for size in (4, 16)},
    "snapshot": {"fleet_blocked_over_memcpy_ratio": 1, "fleet_step_inflation_ratio": 1},
    "straggler": {"fleet_over_best_split_ratio": -1},
    "machine": {"fleet_fold_events_per_s": -1, "fleet_heartbeats_per_s": -1, "fleet_step_overhead_us": 1},
}
"""The figures of each that are compared: 1 where more is slower, -1 where less is."""

Samples = dict[str, list[tuple[float, float]]]


def leg(checkout: Path, name: str) -> Mapping[str, float]:
    """Fleet's figures of benchmark ``name`` in this checkout. Raises RuntimeError with the end of its output where it fails."""
    command = [str(checkout / ".venv/bin/python"), "-c", CALL, name, LEGS[name]]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} in {checkout} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def one_pair(old: Path, new: Path, names: Sequence[str], new_first: bool, samples: Samples) -> None:
    """Every measure once in each checkout; appends (old, new) of each compared figure."""
    for name in names:
        found = {checkout: leg(checkout, name) for checkout in ((new, old) if new_first else (old, new))}
        for figure in COMPARED[name]:
            if figure in found[old] and figure in found[new]:
                samples[figure].append((found[old][figure], found[new][figure]))


def figures(samples: Samples) -> dict[str, float]:
    """Ratio new over old of each figure, and its 95% interval where there are two pairs or more."""
    result: dict[str, float] = {}
    for name, pairs in samples.items():
        logs = np.log([new / old for old, new in pairs])
        result[f"{name}_new_over_old_ratio"] = float(np.exp(logs.mean()))
        if len(logs) > 1:
            half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
            result[f"{name}_new_over_old_ratio_low"] = float(np.exp(logs.mean() - half))
            result[f"{name}_new_over_old_ratio_high"] = float(np.exp(logs.mean() + half))
    return result


def slower(found: Mapping[str, float]) -> list[str]:
    """Figures whose whole interval lies on the slower side of 1."""
    signs = {figure: sign for compared in COMPARED.values() for figure, sign in compared.items()}
    bound = {1: "low", -1: "high"}
    return [
        figure
        for figure, sign in signs.items()
        if (edge := found.get(f"{figure}_new_over_old_ratio_{bound[sign]}")) is not None and (edge - 1.0) * sign > 0.0
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=sorted(LEGS), default=list(LEGS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    samples: Samples = defaultdict(list)
    result: dict[str, Any] = {}
    for number in range(options.pairs):
        one_pair(options.old, options.new, options.only, number % 2 == 1, samples)
        found = figures(samples)
        notes = [f"slower: {', '.join(slower(found)) or 'none'} (the whole 95% interval lies on the slower side of 1)"]
        result = complete("pairs", {"settings": {"pairs": number + 1}, "figures": found, "samples": {**samples}, "notes": notes})
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
