"""Every benchmark runs: in its smoke form, as `make bench` starts it. No speed is asserted."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import BENCHMARKS, tables

ROOT = Path(__file__).resolve().parents[2]
MAY_BE_NONE = re.compile(r"accusations|evictions|double_commits|_lost_|_suppressed$|recall|precision|_peak_bytes$|_error_ratio_max$")
"""Counts and shares that are nothing where all is well, where a detector finds nothing, or where so little needs no more memory."""
MAY_BE_NEGATIVE = re.compile(r"excess|overhead_ratio|stall_s|^unit_s$|^fixed_s$")
"""Differences, which noise decides in a run as short as this one."""
SHAPE = {"benchmark": str, "machine": dict, "versions": dict, "settings": dict, "figures": dict, "samples": dict, "notes": list}


def check(name: str, folder: Path, limit_s: float) -> None:
    """Run the smoke form of a benchmark, and check its result."""
    result = _smoke(name, folder / f"{name}.json", limit_s)
    assert {part: type(value) for part, value in result.items()} == SHAPE
    assert result["benchmark"] == name and result["settings"]["form"] == "smoke"
    left_out = [note.partition(" left out: ")[0] for note in result["notes"] if " left out: " in note]
    missing = {figure for figure in _named(name) - set(result["figures"]) if not any(word in figure for word in left_out)}
    assert not missing, f"neither measured nor said to be left out: {sorted(missing)}; {result['notes']}"
    unsound = {figure: value for figure, value in result["figures"].items() if not _sound(figure, value)}
    assert not unsound, unsound
    assert all(result["samples"].values()) and all(math.isfinite(x) for values in result["samples"].values() for x in values)
    with pytest.raises(ValueError, match="smoke form"):
        tables(folder)


def _smoke(name: str, file: Path, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout
    result: dict[str, Any] = json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{name}: {word} is no JSON"))
    assert all(figure[:20] in done.stdout for figure in result["figures"]), done.stdout
    return result


def _named(name: str) -> set[str]:
    """The figures of a benchmark that its table must have, and those that the page shows."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    section = re.search(rf"^## {name}$(.*?)(?=^## |^<!-- end)", page, re.M | re.S)
    assert section is not None
    return {*BENCHMARKS[name].targets, *re.findall(r"^\| `(\w+)` \|", section[1], re.M)}


def _sound(figure: str, value: float) -> bool:
    if MAY_BE_NEGATIVE.search(figure):
        return math.isfinite(value)
    return math.isfinite(value) and (value > 0 or (value == 0 and MAY_BE_NONE.search(figure) is not None))
