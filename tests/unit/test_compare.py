"""Paired comparisons: the interval holds at all times, and decides as soon as it can."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
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


def test_goodput_while_training_is_compared_apart_from_start_up(tmp_path: Path) -> None:
    """The second run took longer to start; its steps are the same."""

    def started(after: int) -> Story:
        story = Story(world=1)
        story.view(1, [(0, 0)], after)
        story.spans(0, 0, f"i{after}", generation=-1)
        story.spans(0, 0, "f100 " + "c60 x40 K " * 10)
        for step in range(1, 11):
            story.committed(step, after + 100 + 100 * step)
        story.ended(after + 1200)
        return story

    one, two = (recorded(tmp_path / str(after), started(after)) for after in (1000, 4000))
    whole, training = (of_recorded([f"{one},{two}"], tmp_path, 0.05, 0.01, each) for each in (False, True))
    assert whole.mean > 0.1 and training.mean == pytest.approx(0.0, abs=0.02)
    with pytest.raises(ConfigError, match="--training = .given.: it is for pairs of recorded runs"):
        CliRunner().invoke(app, ["experiment", "compare", "in-place", "restart", "--training"], catch_exceptions=False)


def test_what_is_not_decided_says_how_many_pairs_would() -> None:
    test = Sequential(least=0.02)
    for value in (0.2, 0.1, 0.3):
        verdict = test.add(value)
    wanted = test.would_decide()
    assert verdict.decided == "" and wanted is not None and 3 < wanted < 100
    for number in range(3, wanted):
        assert test.verdict().decided == ""
        verdict = test.add((0.2, 0.1, 0.3)[number % 3])
    assert verdict.decided == "first" and test.would_decide() is None
    assert f"about {wanted} pairs would decide" in sentence("a", "b", replace(verdict, decided="", would_decide=wanted), 0.05)
    assert "would decide" not in sentence("a", "b", verdict, 0.05)


def test_too_few_pairs_or_too_small_a_difference_tell_no_number() -> None:
    test = Sequential(least=0.0001)
    one = test.add(0.0)
    assert test.would_decide() is None and "one pair does not tell" in sentence("a", "b", one, 0.05)
    two = test.add(0.0)
    assert test.would_decide() is None and "more than 2,000 pairs would decide" in sentence("a", "b", two, 0.05)


def test_policies_are_checked_by_name() -> None:
    assert check_policies(["in-place", "restart:daly"]) == ["in-place", "restart:daly"]
    for names in (["in-place"], ["in-place", "in-place"], ["in-place", "hope"]):
        with pytest.raises(ConfigError, match="policies"):
            check_policies(names)
