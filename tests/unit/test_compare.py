"""Paired comparisons: the interval holds at all times, and decides as soon as it can."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from fleet.app.comparisons import check_policies, of_recorded, of_simulated, sentence
from fleet.app.scenarios import PlanInput, Scenario
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.simulation.compare import Sequential, compare
from fleet.simulation.fleet_model import Partial
from tests.golden.journals import Story, one_loss


def test_it_is_rarely_wrong_however_often_one_looks() -> None:
    """Looking after every pair: Student's interval excludes the truth at some time in far more than 5% of runs, this one does not."""
    rng = np.random.default_rng(1)
    wrong = naive = 0
    for _ in range(60):
        test, was_wrong, was_naive = Sequential(), False, False
        for value in np.where(rng.random(120) < 0.5, 0.3, -0.3):
            verdict = test.add(float(value))
            was_wrong |= not verdict.low <= 0.0 <= verdict.high
            was_naive |= verdict.pairs >= 10 and not verdict.fixed_low <= 0.0 <= verdict.fixed_high
        wrong, naive = wrong + was_wrong, naive + was_naive
    assert wrong / 60 <= 0.05 < naive / 60


@pytest.mark.parametrize(("mean", "decided"), [(0.2, "first"), (-0.2, "second"), (0.0, "same")])
def test_it_decides_and_stops(mean: float, decided: str) -> None:
    rng = np.random.default_rng(2)
    pairs = ((0.5 + mean + 0.01 * rng.standard_normal(), 0.5) for _ in range(5000))
    verdicts = list(compare(pairs, Sequential(least=0.02)))
    assert verdicts[-1].decided == decided and not any(verdict.decided for verdict in verdicts[:-1])
    assert verdicts[-1].low <= mean <= verdicts[-1].high
    assert all(later.high - later.low <= earlier.high - earlier.low + 1e-12 for earlier, later in itertools.pairwise(verdicts))


def test_in_place_loses_less_than_a_restart_of_all() -> None:
    one, other = (
        Scenario(plan=PlanInput(recovery=name, restart_s=900.0), days=10, stragglers=False) for name in ("in-place", "restart")
    )  # fmt: skip
    verdict = of_simulated(one, other, 400, 0, 0.05, 0.005, lambda done: None, Partial())
    assert verdict.decided == "first" and verdict.pairs < 400 and 0.03 < verdict.mean < 0.2
    assert "in-place loses less than restart" in sentence("in-place", "restart", verdict, 0.05)


def recorded(folder: Path, story: Story) -> str:
    folder.mkdir()
    writer = JournalWriter(folder / "journal.jsonl")
    for record in story.records:
        writer.append(record)
    writer.close()
    return str(folder)


def test_recorded_runs_are_compared_in_pairs(tmp_path: Path) -> None:
    def planned(name: str) -> Story:
        story = one_loss("gpu-1")
        story.fault(name, "kill_rank", "planned", 0, slot=1)
        story.records.insert(1, story.records.pop())
        return story

    one, two, other = (recorded(tmp_path / str(n), planned(name)) for n, name in enumerate(("gpu-1", "gpu-1", "gpu-2")))
    verdict = of_recorded([f"{one},{two}"], tmp_path, 0.05, 0.01)
    assert verdict.pairs == 1 and verdict.mean == 0.0 and verdict.decided == ""
    with pytest.raises(ConfigError, match="not to meet the same faults"):
        of_recorded([f"{one},{other}"], tmp_path, 0.05, 0.01)
    with pytest.raises(ConfigError, match="two different runs"):
        of_recorded([one], tmp_path, 0.05, 0.01)


def test_policies_are_checked_by_name() -> None:
    assert check_policies(["in-place", "restart:daly"]) == ["in-place", "restart:daly"]
    for names in (["in-place"], ["in-place", "in-place"], ["in-place", "hope"]):
        with pytest.raises(ConfigError, match="policies"):
            check_policies(names)
