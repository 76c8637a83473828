"""Repeat one simulated run: ``python -m tests.simulation --family cuts --seed 7 --trace``; look for a seed that fails: ``--seeds 0 500``;
keep the plan of one that did: ``--keep "what it showed"``; repeat a kept one: ``--plan FILE``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.simulation import plans
from tests.simulation.runs import COMMAND, FAMILIES, again, simulate, simulate_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="random", help="which kind of troubles")
    parser.add_argument("--seed", type=int, default=0, help="the run to repeat")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), help="run all of these, stop at none")
    parser.add_argument("--plan", type=Path, help="the kept plan to repeat")
    parser.add_argument("--keep", metavar="FOUND", help=f"write the seed's plan into {plans.KEPT.name}/, with what its run showed")
    parser.add_argument("--trace", action="store_true", help="print every line of the trace")
    chosen = parser.parse_args()
    if chosen.seeds:
        seeds = range(chosen.seeds[0], chosen.seeds[1] + 1)
        reports = [outcome.report(again(chosen.family, seed)) for seed in seeds if (outcome := simulate_seed(chosen.family, seed)).broken]
        print(*reports, f"{len(reports)} of {len(seeds)} runs broke an invariant", sep="\n")
        return 1 if reports else 0
    plan = plans.read(chosen.plan).plan if chosen.plan else FAMILIES[chosen.family](chosen.seed)
    if chosen.keep:
        path = plans.KEPT / f"{chosen.family}-{chosen.seed}.json"
        plans.write(path, plans.Kept(chosen.keep, f"{chosen.family} {chosen.seed}", plan))
        print(f"kept as {path}")
    outcome = simulate(plan, keep_trace=chosen.trace)
    print(outcome.report() if outcome.broken else "\n".join([*outcome.trace, f"{outcome.status}: {outcome.reason}"]))
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
