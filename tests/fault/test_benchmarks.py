"""Every benchmark runs: in its smoke form, as `make bench` starts it. No speed is asserted here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import BENCHMARKS
from tests.support.smoke_forms import check

LIMIT_S = 280.0
ON_HOSTS = {"hosts", "partition"}
"""Tested where hosts are: `tests/hosts`."""


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in ON_HOSTS])
def test_the_benchmark_runs_and_has_its_figures(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, LIMIT_S)
