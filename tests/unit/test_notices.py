"""Nodes that will be taken away: what Ray says of them is told once, and users name them by index or name."""

from __future__ import annotations

import pytest

from actors.coordinator import called
from fleet.app.notices import UNSAID_S, Notices

NODES = {"1a7f": 0, "9c00": 1, "1b22": 2}


@pytest.mark.parametrize(("text", "nodes"), [("1", ["9c00"]), ("0", ["1a7f"]), ("1b", ["1b22"]), ("7", []), ("9c00", ["9c00"])])
def test_an_index_comes_before_the_first_letters_of_a_name(text: str, nodes: list[str]) -> None:
    assert called(text, NODES) == nodes


def test_letters_that_several_names_begin_with_mean_all_of_them() -> None:
    assert called("1", {"1a7f": 4, "1b22": 5}) == ["1a7f", "1b22"]


def test_a_notice_is_told_once_and_again_with_another_time() -> None:
    notices = Notices()
    assert notices.news({"a": 130.0}, ["a", "b"], 100.0) == [("a", 30.0)]
    assert notices.news({"a": 130.0}, ["a", "b"], 101.0) == []
    assert notices.news({"a": 190.0}, ["a", "b"], 102.0) == [("a", 88.0)]
    assert notices.news({}, ["a", "b"], 103.0) == [("a", None)]
    assert notices.news({}, ["a", "b"], 104.0) == []


def test_a_node_of_others_is_not_told_of_before_the_run_has_it_and_one_without_a_time_has_half_a_minute() -> None:
    notices = Notices()
    assert notices.news({"a": 0.0}, [], 100.0) == []
    assert notices.news({"a": 0.0}, ["a"], 100.0) == [("a", UNSAID_S)]
