"""Repeat one simulated run: ``python -m tests.simulation --seed 7 --trace``; or look for a seed that fails: ``--seeds 0 500``."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.runs import COMMAND, FAMILIES, simulate_family, simulate_flips, simulate_seed, simulate_slow


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--seed", type=int, help="the run to repeat")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), help="run all of these, stop at none")
    parser.add_argument("--slow", action="store_true", help="of the family of runs with slow ranks")
    parser.add_argument("--trace", action="store_true", help="print every line of the trace")
    parser.add_argument("--sharded", action="store_true", help="with the optimizer's state spread over the ranks")
    parser.add_argument("--flips", action="store_true", help="the run in which bits flip")
    parser.add_argument("--family", choices=tuple(FAMILIES), help="the run of this family")
    chosen = parser.parse_args()
    seeds = range(chosen.seeds[0], chosen.seeds[1] + 1) if chosen.seeds else [chosen.seed or 0]
    failed = 0
    for seed in seeds:
        if chosen.family:
            outcome = simulate_family(chosen.family, seed, chosen.trace)
        elif chosen.slow or chosen.flips:
            outcome = (simulate_slow if chosen.slow else simulate_flips)(seed, chosen.trace)
        else:
            outcome = simulate_seed(seed, chosen.trace, chosen.sharded)
        if outcome.broken:
            failed += 1
            print(outcome.report(COMMAND))
        elif not chosen.seeds:
            print(*outcome.trace, sep="\n")
            print(f"seed {seed}: {outcome.status}: {outcome.reason}")
    print(f"{failed} of {len(seeds)} runs broke an invariant")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
