"""`make pace` from end to end, on the smallest sizes: this checkout beside its own commit. No speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.common import REPOSITORY

SMALLEST = ["--launches", "1", "--blocks", "1", "--kills", "1", "--only", "pace4", "stall", "pace2"]


def test_a_commit_is_compared_with_this_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.pace", "HEAD", *SMALLEST, "--json", str(tmp_path / "pace.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads((tmp_path / "pace.json").read_text())["figures"]
    measured = {"step_ms_4_ranks", "cpu_us_4_ranks", "switches_4_ranks", "stall_s", "step_ms_2_ranks", "cpu_us_2_ranks", "switches_2_ranks"}
    assert {name.removesuffix("_ratio") for name in figures if name.endswith("_ratio")} == measured
    assert all(value > 0 for value in figures.values())
