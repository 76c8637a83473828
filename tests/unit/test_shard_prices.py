"""``fleet doctor --shards``: which numbers of shards are tried, and what is told of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.rank.script_loading import found as found_script
from actors.script_trials import Stepping
from fleet.app.cli.main import app
from fleet.errors import ConfigError, FleetError
from fleet.ledger.shard_prices import ShardPrice, candidates, prices
from fleet.settings.run import RunSettings
from tests.support import planted


@pytest.mark.parametrize(
    ("world", "batch_size", "found"),
    [(1, 128, [1, 2, 4, 8, 16]), (3, 48, [3, 6, 12, 24, 48]), (2, 12, [2, 4]), (3, 9, [3]), (4, 6, [])],
)
def test_multiples_of_the_world_that_divide_the_batch(world: int, batch_size: int, found: list[int]) -> None:
    assert candidates(world, batch_size) == found


def test_a_price_is_a_median_and_told_against_the_fewest_shards() -> None:
    rows = [(2, [1.0, 9.0, 2.0], [0.5, 0.1, 0.2], 300, 100), (4, [3.0, 3.0, 30.0], [0.0] * 3, 250, 260)]
    assert prices(2, 16, rows) == [ShardPrice(2, 1, 8, 2.0, 1.0, 0.2, 300, 200), ShardPrice(4, 2, 4, 3.0, 1.5, 0.0, 250, 0)]


def test_the_command_measures_each_number_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "clean.py"
    path.write_text(planted.script().replace("total=4", "total=1000"))
    answer = CliRunner().invoke(app, ["doctor", "--shards", str(path), "--world", "4", "--json"])
    reported = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert (reported["world"], reported["batch_size"]) == (4, 16)
    assert [(one["shards"], one["per_rank"], one["samples"]) for one in reported["prices"]] == [(4, 1, 4), (8, 2, 2), (16, 4, 1)]
    assert all(one["step_s"] > 0 and one["peak_bytes"] > one["step_bytes"] >= 0 for one in reported["prices"])


def test_a_script_that_has_too_few_steps_and_a_world_that_does_not_divide_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(planted.script().replace("total=4", "total=1"))
    rank = Stepping(found_script(str(path)), RunSettings(), 1, 1)
    assert rank.step().batch_size == 16
    with pytest.raises(FleetError, match="over before enough steps were timed"):
        rank.step()
    rank.close()
    rank = Stepping(found_script(str(path)), RunSettings(), 3, 3)
    with pytest.raises(ConfigError, match="does not divide into 3 ranks"):
        rank.step()
    rank.close()
