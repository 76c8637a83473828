"""No command is silent for long: each shows what goes on, or says what it waits for."""

from __future__ import annotations

import inspect
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.app import plans, waiting
from fleet.app.cli import main as cli
from fleet.errors import ConfigError
from tests.support.waiting import until

EVERY = {command for commands in (*cli.COMMANDS.values(), *(group.commands for group in cli.GROUPS.values())) for command in commands}


def test_each_command_shows_what_goes_on_or_has_words_for_it() -> None:
    named = [*cli.SHOW, *cli.WAITS]
    assert len(named) == len(set(named))
    assert set(named) == EVERY | {cli.cli_runs.runs}, "`fleet runs` is a group that does something by itself"


@pytest.mark.parametrize("command", cli.WAITS, ids=lambda command: f"{command.__module__.rpartition('.')[2]}.{command.__name__}")
def test_its_words_name_arguments_that_it_has_and_that_are_no_secret(command: Callable[..., Any]) -> None:
    fields = {name for _, name, _, _ in string.Formatter().parse(cli.WAITS[command]) if name}
    assert fields <= set(inspect.signature(command).parameters)
    assert "where" not in fields, "a URL may have credentials in it"


@pytest.mark.parametrize(
    ("typed", "seam", "words"),
    [
        ("report one", "find_run", "still: the journal of one is read"),
        ("runs set one world=2", "find_run", "still: the coordinator of one is asked"),
        ("runs data one", "find_run", "still: the journal of one is read"),
        ("checkpoint list one", "find_run", "still: the store of the checkpoints answers"),
        ("run --resume one --storage s3://bucket/runs", "fetch_journal", "still: the run is planned, with what its journal and its store"),
    ],
)
def test_a_command_that_does_not_come_back_says_what_it_waits_for(
    typed: str, seam: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back when that was said."""
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return words in said

    def hangs(*arguments: Any) -> None:
        until(is_said, words, 30)
        raise ConfigError("RUN", "one", "is not there")

    monkeypatch.chdir(tmp_path)
    for name in ("EVERY_S", "CHECK_S"):
        monkeypatch.setattr(waiting, name, 0.01)
    monkeypatch.setattr(plans, seam, hangs)
    monkeypatch.setattr(sys, "argv", ["fleet", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
