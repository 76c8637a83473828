"""An extra that is missing is named, with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import pytest
from typer.testing import CliRunner

from actors.rank.integrations.surroundings import be_alone, check_versions
from fleet.app import experiment
from fleet.app.cli.main import app
from fleet.errors import ConfigError
from fleet.host.extras import is_there, need


def test_what_is_there_is_not_asked_for() -> None:
    need("json", "json", "FILE", "x")
    assert is_there("json")
    assert not is_there("no_such_module")
    assert not is_there("no_such_module.inner")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No extra is installed."""
    right = importlib.util.find_spec
    missing = ("chaoslib", "grafana_foundation_sdk")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else right(name, *rest))


@pytest.mark.usefixtures("without")
def test_an_experiment_names_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"FILE = 'x.json': it needs chaoslib, .*'fleet-train\[chaostoolkit\] @ FLEET'"):
        experiment.load("x.json")


@pytest.mark.usefixtures("without")
def test_dashboards_name_their_extra() -> None:
    done = CliRunner().invoke(app, ["cluster", "dashboards", "--grafana", "http://127.0.0.1:1"])
    assert isinstance(done.exception, ConfigError)
    assert "fleet-train[grafana] @ FLEET" in str(done.exception)


@pytest.mark.usefixtures("without")
def test_a_trainer_of_others_names_its_extra_and_the_versions_that_it_was_tested_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"import = 'fleet.integrations.grafana': it needs chaoslib, .*'fleet-train\[grafana\] @ FLEET'"):
        check_versions("grafana", {"chaoslib": ("1.44",)})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "7.8.9")
    check_versions("json", {"json": ("7.7", "7.8")})
    with pytest.raises(ConfigError, match=r"json = '7.8.9': .* was tested with 7.7. Run pip install 'json==7.7.\*'"):
        check_versions("json", {"json": ("7.7",)})


def test_a_rank_with_such_a_trainer_is_alone_in_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "HOME": "/home"})
    be_alone()
    assert os.environ == {"RANK": "0", "WORLD_SIZE": "1", "HOME": "/home"}
