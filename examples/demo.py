"""The program of `make demo`: gpt.py through a storm of faults, then its twin. It takes as many steps as this machine has time for.

python examples/demo.py OPTIONS OF fleet run
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RUN_S = 30.0
"""Seconds that each of the two runs may compute."""
FEWEST, MOST = 30, 200
WARM_S, MEASURED_S = 0.3, 1.0
SHARDS, SAMPLES = 16, 4
"""Shards of a step, which the cores share, and samples of a shard."""
BESIDE = 1.5
"""Time of a step over that of its arithmetic: ranks exchange gradients, and are lost and healed."""


def step_s() -> float:
    """Seconds of one step's arithmetic on this machine: each core computes shards for a second, within a quota."""
    import torch
    from gpt import CONTEXT, build, loss_fn

    def compute(until_s: float) -> int:
        torch.set_num_threads(1)
        model, batch, shards = build(MOST)[0].train(), torch.randint(256, (SAMPLES, CONTEXT + 1)), 0
        while time.monotonic() < until_s:
            loss_fn(model, batch).backward()
            shards += 1
        return shards

    compute(time.monotonic() + WARM_S)
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        began_s = time.monotonic()
        shards = sum(pool.map(compute, [began_s + MEASURED_S] * cores))
        return (time.monotonic() - began_s) / max(1, shards) * SHARDS


def main() -> None:
    print("the pace of this machine is measured, so that the demo ends in time", flush=True)
    one_s = step_s()
    steps = round(min(MOST, max(FEWEST, RUN_S / (BESIDE * one_s))))
    print(f"a step takes some {BESIDE * one_s * 1000:.0f} ms here: the run takes {steps} steps, and so does its twin", flush=True)
    script = str(Path(__file__).with_name("gpt.py"))
    os.execv(sys.executable, [sys.executable, "-m", "fleet", "run", script, "--set", f"steps={steps}", *sys.argv[1:]])


if __name__ == "__main__":
    main()
