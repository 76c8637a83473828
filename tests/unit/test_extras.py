"""An extra that is missing is named, with the command that installs it."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

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
@pytest.mark.parametrize("typed", [["write", "here"], ["push", "--grafana", "http://127.0.0.1:1"]])
def test_dashboards_name_their_extra(typed: list[str]) -> None:
    done = CliRunner().invoke(app, ["dashboard", *typed])
    assert isinstance(done.exception, ConfigError)
    assert "fleet-train[grafana] @ FLEET" in str(done.exception)
