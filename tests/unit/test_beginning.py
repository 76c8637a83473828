"""From the command to the first step somebody says what is waited for."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fleet.app import waiting as module
from fleet.app.beginning import Beginning
from fleet.app.waiting import Waiting
from fleet.protocol.records import Committed, ProcessUp, ViewPublished
from fleet.protocol.types import Member, Process, StateId, View
from tests.support.waiting import until

UP = ProcessUp(Member(0, 0), Process("node", 1, 1), "token", 1.0)
VIEW = ViewPublished(View(1, (Member(0, 0),), ((0, 8),), 0, (), StateId(0, 0), "a:1"), 2.0, "", False, ())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    return io.StringIO()


def test_it_says_at_once_and_again_what_is_waited_for(said: io.StringIO) -> None:
    now = [0.0]
    with Beginning(Console(file=said, width=100), lambda: now[0]) as beginning:
        beginning.say("a cluster is started")
        assert said.getvalue().strip() == "a cluster is started, 0 ms after the command"
        now[0] = 2.6
        until(lambda: "still: a cluster is started, 2.6 s after the command" in said.getvalue(), "it is said again")
        beginning.take(UP)
        beginning.take(UP)
        now[0] = 5.2
        until(lambda: "still: 2 ranks are up, 5.2 s after the command" in said.getvalue(), "what the journal tells is said")
        beginning.take(VIEW)
        now[0] = 7.8
        until(lambda: "still: the first view forms, 7.8 s after the command" in said.getvalue(), "and the view")
        beginning.take(Committed(StateId(0, 1), 8.0))
        now[0] = 100.0
    assert "the first view forms" in said.getvalue().splitlines()[-1], "after the first step it is silent"


def test_it_says_nothing_while_there_is_nothing_to_wait_for(said: io.StringIO) -> None:
    now = [0.0]
    with Beginning(Console(file=said), lambda: now[0]):
        now[0] = 60.0
    assert said.getvalue() == ""


def test_of_a_short_wait_nothing_is_said_and_of_a_long_one_ever_more_seldom(said: io.StringIO) -> None:
    now = [0.0]

    def lines() -> list[str]:
        return [line.strip() for line in said.getvalue().splitlines()]

    with Waiting(Console(file=said, width=100), lambda: now[0], "the store is read"):
        now[0] = 2.4
    assert not lines()
    now[0] = 0.0
    with Waiting(Console(file=said, width=100), lambda: now[0], "the store is read"):
        for now[0], count in ((2.5, 1), (7.5, 2), (17.5, 3), (37.5, 4), (77.5, 5), (137.5, 6), (197.5, 7)):
            until(lambda wanted=count: len(lines()) == wanted, "it is said again")  # type: ignore[misc]
    assert lines()[0] == "still: the store is read, 2.5 s after the command"
