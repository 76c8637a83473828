"""The benchmarks on several hosts run in their smoke form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosts import needed
from tests.support.smoke_forms import check

LIMIT_S = 600.0
pytestmark = pytest.mark.timeout(LIMIT_S + 60)  # a benchmark that is too slow is ended by its own limit, which says what it printed


@pytest.mark.parametrize("name", ["hosts", "partition"])
def test_the_benchmark_runs_and_has_its_figures(name: str, tmp_path: Path) -> None:
    needed()
    check(name, tmp_path, LIMIT_S)
