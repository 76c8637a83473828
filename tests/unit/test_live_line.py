"""The line that lives: what is in it, how wide it is, and what it foresees."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.app.live_line import Status, forewarning, hung, in_columns, parts

STATUS = Status(120, 2_000, 8.0, 256, 0.914, 3, 4, 2, {"loss": 3.14159, "val_loss": 3.3})
WHOLE = "step 120/2,000  loss 3.142  val_loss 3.3  8 steps/s  2,048 samples/s  ETA 3 m 55 s  goodput 91.4%  3 of 4 ranks  2 faults survived"


def test_all_of_it_where_there_is_room() -> None:
    assert in_columns(parts(STATUS)) == in_columns(parts(STATUS), 200) == WHOLE


@pytest.mark.parametrize("width", [10, 30, 44, 60, 80, 100, len(WHOLE) - 1])
def test_what_matters_most_stays_and_nothing_is_cut(width: int) -> None:
    line = in_columns(parts(STATUS), width)
    assert len(line) <= max(width, len("step 120/2,000"))
    assert line.startswith("step 120/2,000")
    assert set(line.split("  ")) <= set(WHOLE.split("  "))
    assert "loss 3.142" in line or width < 30


def test_what_is_not_known_is_left_out() -> None:
    early = Status(3, 0, None, 0, 0.0, 4, 4, 1)
    assert in_columns(parts(early)) == "step 3  goodput 0.0%  4 of 4 ranks  1 fault survived"


def test_a_line_that_is_too_long_for_a_terminal_goes_on_below_itself_and_no_word_is_broken() -> None:
    text = "saved    step 60, in file:///a/very/long-path/that-nobody/would-break"
    assert hung(text, 24, 9) == "saved    step 60, in\n         file:///a/very/long-path/that-nobody/would-break"
    assert hung(text, None, 9) == text


def test_chaos_that_cannot_strike_is_told_beforehand() -> None:
    short = dataclasses.replace(STATUS, total=200)
    words = "this run lasts some 20.0 s; the first fault is due after 41.0 s: no fault will strike"
    assert forewarning(short, 10.0, 41.0) == words
    assert forewarning(short, 10.0, 21.0) == "", "it may just strike"
    assert forewarning(STATUS, 10.0, 41.0) == ""
    assert forewarning(dataclasses.replace(short, per_s=None), 10.0, 41.0) == ""
