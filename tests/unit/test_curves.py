"""The curves of a run's page, how far it was when, what is left of it, and what the categories mean."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from dashboards.pages import curves as module
from dashboards.pages.curves import curves, fault_marks, thinned
from dashboards.pages.run import COLOURS
from dashboards.pages.state import run_state
from fleet.ledger.categories import MEANINGS, PENDING
from fleet.ledger.pace import Pace, remaining_s
from fleet.ledger.report import Report, build_report
from fleet.ledger.timeline import STEP
from fleet.protocol import records as r
from fleet.protocol.types import StateId
from tests.golden.journals import Story, one_loss


def learning(fault: str = "f1") -> Story:
    """The golden story, with a loss that falls by one a step."""
    story = one_loss(fault)
    commits = [record for record in story.records if isinstance(record, r.Committed)]
    story.records[-1:-1] = [r.Measurement(None, record.state, "loss", 100.0 - record.state.step, at_s=record.at_s) for record in commits]
    return story


def curve(report: Report, name: str) -> dict[str, object]:
    return next(each for each in curves(report) if each["name"] == name)


def test_a_run_with_a_floor_shows_what_is_left_of_its_pace_beside_it() -> None:
    story = learning()
    commits = [record for record in story.records if isinstance(record, r.Committed)]
    last = commits[-1]
    slow = [replace(last, state=replace(last.state, step=last.state.step + n), at_s=last.at_s + 2.0 * n) for n in range(1, 40)]
    report = build_report([*(record for record in story.records if not isinstance(record, r.RunEnded)), *slow])
    assert not [each for each in curves(report) if each["name"] == "pace"]
    [found] = [each for each in curves(report, 0.4) if each["name"] == "pace"]
    assert found["series"] == ["floor", "over 30 s"] and {point[2] for point in found["points"]} == {40.0}
    kept = [point[3] for point in found["points"]]
    assert kept[0] > 20.0 and max(kept[-5:]) < 10.0, "a step takes twenty times as long, and the window fills with them"
    config = json.dumps({"chaos": {"floor": 0.4}})
    assert "pace" in [each["name"] for each in run_state(report, [], config)["curves"]]


def test_a_measurement_has_its_step_and_its_time() -> None:
    found = curve(build_report(learning().records), "loss")
    assert (found["x"], found["series"]) == ("step", ["loss"])
    assert found["points"][0] == [1, pytest.approx(1.2), 99.0]
    assert found["points"][-1] == [60, pytest.approx(7.32), 40.0]


def test_goodput_so_far_ends_at_the_ledgers() -> None:
    report = build_report(learning().records)
    found = curve(report, "goodput")
    assert found["unit"] == "%" and 0 < len(found["points"]) <= module.STRETCHES
    assert found["points"][-1][3] == pytest.approx(100 * report.summary.goodput, abs=0.5)
    assert found["points"][0][2] == 0.0, "nothing is committed while it starts"
    assert max(point[2] for point in found["points"]) > 95.0


def test_speed_is_steps_a_second_and_stands_still_with_the_run() -> None:
    points = curve(build_report(learning().records), "speed")["points"]
    assert max(point[2] for point in points) == pytest.approx(10.0, rel=0.01)
    assert min(point[2] for point in points) == pytest.approx(1 / 0.32, rel=0.01), "no step from the loss until the next view"


def test_faults_lie_where_they_struck() -> None:
    report = build_report(learning().records)
    assert fault_marks(report) == [{"id": "f1", "text": "f1: kill_rank (gpu)", "time": pytest.approx(2.149), "step": 10}]
    assert fault_marks(build_report(one_loss().records))[0]["id"] == "loss-1.0"


def test_what_never_struck_has_no_mark() -> None:
    story = one_loss()
    story.fault("kept", "kill_rank", "suppressed", 500)
    assert [mark["id"] for mark in fault_marks(build_report(story.records))] == ["loss-1.0"]


@pytest.mark.parametrize("count", [0, 1, 2, 239, 240, 241, 5_000])
def test_thinned_points_are_few_and_end_where_they_ended(count: int) -> None:
    points = list(range(count))
    kept = thinned(points)
    assert len(kept) <= module.MAX_POINTS + 1
    assert kept[-1:] == points[-1:] and kept[:1] == points[:1] and sorted(set(kept)) == kept


def test_a_run_without_a_step_has_no_curve_that_breaks() -> None:
    for length in range(1, 12):
        state = run_state(build_report(learning().records[:length]), [], "{}")
        assert all(len(point) == 2 + len(each["series"]) for each in state["curves"] for point in each["points"])


def test_pace_forgets_what_was_rolled_back_and_stays_small() -> None:
    pace = Pace(most=100)
    for step in range(1, 501):
        pace.add(r.Committed(StateId(0, step), 1.0 * step))
    assert len(pace.points) <= 100 and pace.points[0] == (1.0, 1) and pace.points[-1] == (500.0, 500)
    pace.add(r.HistoryBegun(1, StateId(0, 250), 510.0, "no rank holds a clean state"))
    assert max(step for _, step in pace.points) <= 250
    assert pace.step_s is None
    for step in (251, 252, 253):
        pace.add(r.Committed(StateId(1, step), 600.0 + 2 * step))
    assert pace.step_s == 2.0
    assert [step for _, step in pace.points] == sorted({step for _, step in pace.points})


def test_the_speed_now_is_that_of_the_newest_steps() -> None:
    pace, at_s, draw = Pace(), 0.0, random.Random(0)
    for step in range(1, 301):
        at_s += (0.1 if step < 200 else 0.5) + 0.01 * draw.random()
        pace.add(r.Committed(StateId(0, step), at_s))
    assert pace.step_s == pytest.approx(0.505, abs=0.01)


def test_time_left_is_said_only_when_it_is_known() -> None:
    assert remaining_s(60, 100, 0.5, 0.8) == pytest.approx(25.0)
    assert remaining_s(100, 100, 0.5, 0.8) == 0.0
    assert remaining_s(60, None, 0.5, 0.8) is None
    assert remaining_s(60, 100, None, 0.8) is None
    assert remaining_s(0, 100, 0.5, 0.0) is None


def test_only_a_run_that_goes_on_has_time_left() -> None:
    reports = [replace(build_report(records), total_steps=100) for records in (learning().records, learning().records[:-1])]
    ended, going_on = (run_state(report, [], "{}")["now"] for report in reports)
    assert (ended["total_steps"], ended["eta_s"]) == (100, None)
    assert ended["recent_step_s"] == pytest.approx(0.1)
    assert going_on["eta_s"] >= 40 * 0.1


def test_every_category_has_its_meaning_and_pending_too() -> None:
    assert set(MEANINGS) == {*r.CATEGORIES.values(), STEP, PENDING}
    assert len(r.CATEGORIES) == 18
    assert set(COLOURS) <= set(MEANINGS)
    for name, meaning in MEANINGS.items():
        assert meaning.endswith(".") and 20 < len(meaning) < 140, name
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_pending_is_not_among_the_losses() -> None:
    report = build_report(learning().records[:20])
    assert report.summary.pending_s > 0
    state = run_state(report, [], "{}")
    assert PENDING not in [row["name"] for row in state["waterfall"]]
    assert state["pending"]["rank_s"] == pytest.approx(report.summary.pending_s)
    assert state["pending"]["colour"] not in [row["colour"] for row in state["waterfall"]]
