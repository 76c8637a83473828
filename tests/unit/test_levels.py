"""The table of checkpoint levels: a request names its level, a URL too, whatever levels there are."""

from __future__ import annotations

import pytest

from fleet.protocol import levels
from fleet.protocol.levels import LEVELS, PEERS, STORE, Level, level_at, level_of, peers_url, places, request_number
from fleet.settings.run import RunSettings

SCRATCH = Level("scratch", "scratch://", lambda run: f"scratch:///fast/{run.seed}", lambda run: 2.0)


@pytest.fixture(params=[LEVELS, (*LEVELS, SCRATCH)], ids=["two", "three"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Level, ...]:
    monkeypatch.setattr(levels, "LEVELS", request.param)
    return tuple(request.param)


def test_every_request_has_a_number_of_its_own_that_tells_its_level(table: tuple[Level, ...]) -> None:
    numbers = {request_number(level.name, count): level.name for level in table for count in range(1, 40)}
    assert len(numbers) == 39 * len(table) and 0 not in numbers
    assert all(level_of(number) == name for number, name in numbers.items())


def test_a_url_tells_its_level(table: tuple[Level, ...]) -> None:
    found = [level_at(url) for url in (None, "", "step-1", "s3://elsewhere/step-1", peers_url(["a:1", "b:2"]))]
    assert found == [STORE] * 4 + [PEERS]
    assert level_at("scratch:///fast/step-1") == (STORE if SCRATCH not in table else "scratch")


def test_only_further_levels_have_a_place_of_their_own(table: tuple[Level, ...]) -> None:
    assert places(RunSettings(seed=7)) == ({} if SCRATCH not in table else {"scratch": "scratch:///fast/7"})
