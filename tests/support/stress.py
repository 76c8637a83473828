"""``make stress TESTS=... TIMES=20``: the same tests again and again, beside a load that takes every core. All must pass each time.

A test that passes alone and fails here waits by time, or shows a bug. What a failed round printed is kept in ``runs/stress``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "runs/stress"


def burn(niceness: int) -> None:
    """Until it is ended, or its parent is gone."""
    parent = os.getppid()
    os.nice(niceness)
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextmanager
def load(processes: int, niceness: int) -> Iterator[None]:
    burning = [multiprocessing.get_context("spawn").Process(target=burn, args=(niceness,), daemon=True) for _ in range(processes)]
    for process in burning:
        process.start()
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.stress")
    parser.add_argument("tests", nargs="+", help="files or tests, as pytest takes them")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--nice", type=int, default=0, help="of the load; on hosts 15, as Ray's workers have there: they would starve")
    parser.add_argument("--tier", help="only those of this tier (tests/tiers.py)")
    chosen = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", *(["--tier", chosen.tier] if chosen.tier else []), *chosen.tests]
    KEPT.mkdir(parents=True, exist_ok=True)
    passed = 0
    with load(os.cpu_count() or 1, chosen.nice):
        for number in range(1, chosen.times + 1):
            began_s = time.monotonic()
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            passed += done.returncode == 0
            said = done.stdout.strip().splitlines() or [""]
            print(f"{number}/{chosen.times}: {said[-1].strip('= ')} ({time.monotonic() - began_s:.0f} s)", flush=True)
            if done.returncode:
                (KEPT / f"{number}.txt").write_text(done.stdout)
                print(
                    *(f"  {line}" for line in said if line.startswith(("FAILED", "ERROR"))), f"  kept in {KEPT / f'{number}.txt'}", sep="\n"
                )
    print(f"{passed} of {chosen.times} passed beside a load on {os.cpu_count()} cores")
    return 0 if passed == chosen.times else 1


if __name__ == "__main__":
    sys.exit(main())
