"""What faults should cost and what will come, on journals written by hand: what is priced, what is learned, and what reaches the reader."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from chaos.arrivals import save_trace
from chaos.settings import ChaosSettings
from fleet.app.plans import RunPlan, describe
from fleet.app.report import build_report, render_table
from fleet.ledger.forecast import (
    JOIN_STEPS,
    PAUSE_S,
    REFILL_S,
    RESTORE_S,
    SEND_S,
    SETTLE_S,
    VACANT_S,
    FaultImpact,
    Mean,
    MeanInterval,
    Price,
    RecoveryTimes,
    Terms,
    coming,
    fault_cost,
    forecast,
    predict,
    worths,
)
from fleet.ledger.goodput import Ledger
from fleet.ledger.rates import Gamma, Rate, prior
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.causes import AgentHungUp, Cause, Evicted, NoHeartbeat, ProcessEnded, Superseded
from fleet.protocol.records import ProcessLost, Record, RunEnded, RunStarted, Spans, ViewPublished
from fleet.protocol.types import Fault, Member
from fleet.settings.run import RunSettings
from tests.golden.journals import Story, one_loss

ENDED = ProcessEnded(-9)


def summary_of(reported: Story | list[Record]) -> LedgerSummary:
    return Ledger().apply_all(reported if isinstance(reported, list) else reported.records).summary()


def plan(folder: Path, **changes: Any) -> RunPlan:
    chaos = ChaosSettings(mtbf_s=20.0, kinds=("kill_rank", "hang"), duration_s=200.0)
    return RunPlan(**{"name": "r", "folder": folder, "settings": RunSettings(world=2, nodes=1), "train": print, "chaos": chaos} | changes)


def losses(count: int, *, config: str = "{}", cause: Cause = ENDED, fault: str | None = None, kind: str = "kill_rank") -> Story:
    """Two ranks start in 4 s and train; every 20 s rank 1 is lost, and another trains 3 s later: 1 s empty, 1 s start, 1 s restore."""
    reported = Story(world=2)
    assert isinstance(reported.records[0], RunStarted)
    reported.records[0] = dataclasses.replace(reported.records[0], config=config)
    reported.view(1, [(0, 0), (1, 0)], 4_000)
    for slot in (0, 1):
        reported.spans(slot, 0, "i4000", generation=-1)
    step, generation = 0, 1
    for number in range(count + 1):
        at = 4_000 + 20_000 * number
        late = 3 if number else 0
        reported.spans(0, 0, "c1000 K " * 20, generation=generation, step=step)
        reported.spans(1, number, "c1000 K " * (20 - late), generation=generation, step=step + late, at=at)
        step += 20
        reported.committed(step, at + 20_000)
        if number == count:
            break
        if fault is not None:
            reported.fault(f"{fault}{number}", kind, "executed", at + 20_000, slot=1)
        reported.lost(1, number, at + 20_000, generation=generation, fault=None if fault is None else f"{fault}{number}", cause=cause)
        generation += 1
        reported.view(generation, [(0, 0)], at + 20_000, step, causes=(f"1.{number}",))
        reported.spans(1, number + 1, "i1000 r1000", generation=-1, at=at + 21_000)
        generation += 1
        reported.view(generation, [(0, 0), (1, number + 1)], at + 23_000, step + 3, graceful=True, causes=(f"1.{number}",))
    reported.ended(4_000 + 20_000 * (count + 1))
    return reported


TERMS = Terms.of(RunSettings(world=4, nodes=2))
KILL = FaultImpact(kind="kill_rank", lost=1, in_view=1)


def test_what_a_fault_costs_follows_from_its_kind_the_time_outs_and_the_spares() -> None:
    fresh = RecoveryTimes.of(3.0)
    assert fault_cost(KILL, TERMS, fresh).lost_s == pytest.approx(4 * PAUSE_S + REFILL_S)
    spared = fault_cost(dataclasses.replace(KILL, spares=1), TERMS, fresh)
    assert spared.lost_s == pytest.approx(4 * PAUSE_S + SETTLE_S + RESTORE_S)
    assert spared.charged_s == pytest.approx(4 * PAUSE_S + REFILL_S), "its slot is filled again all the same"
    hang = fault_cost(dataclasses.replace(KILL, kind="hang"), TERMS, fresh)
    assert hang.lost_s == pytest.approx(4 * (3.0 + PAUSE_S) + REFILL_S), "after three seconds without a heartbeat"
    patient = Terms.of(RunSettings(world=4, timeouts=dataclasses.replace(RunSettings().timeouts, heartbeat_s=4.0)))
    assert fault_cost(dataclasses.replace(KILL, kind="hang"), patient, fresh).lost_s == pytest.approx(hang.lost_s + 4.0)
    late = fault_cost(dataclasses.replace(KILL, training_s=0.5, run_s=2.0), TERMS, fresh)
    assert (late.missing_s, late.refill_s) == (0.5, 2.0), "a seat is missed until training ends, a slot until the run does"
    assert fault_cost(dataclasses.replace(KILL, in_view=0), TERMS, fresh).lost_s == 0, "a spare that is lost is nobody's seat"
    assert fault_cost(FaultImpact(kind="slow", lost=0, in_view=0), TERMS, fresh).charged_s == 0
    assert fault_cost(dataclasses.replace(KILL, back_s=10.0), TERMS, fresh).lost_s == pytest.approx(4 * (PAUSE_S + 10.0) + REFILL_S)


def test_a_run_that_stalls_in_a_partition_waits_as_long_as_it_was_told() -> None:
    stalls = Terms.of(RunSettings(world=4, on_partition="stall"))
    cut = FaultImpact(kind="partition", lost=2, in_view=2)
    waited_s = stalls.timeouts["stall_s"] - stalls.timeouts["node_s"]
    assert fault_cost(cut, stalls, RecoveryTimes.of(3.0)).lost_s - fault_cost(cut, TERMS, RecoveryTimes.of(3.0)).lost_s == pytest.approx(
        4 * waited_s
    )


def test_what_a_run_has_measured_counts_for_more_with_every_fault() -> None:
    reported = summary_of(losses(5))
    found = predict(reported)
    costs = [found.costs[f"loss-1.{number}"].charged_s for number in range(5)]
    assert costs[0] == pytest.approx(2 * PAUSE_S + VACANT_S + 4.0 + SEND_S + JOIN_STEPS * 1.0), "it starts as the first ones did, in 4 s"
    assert costs == sorted(costs, reverse=True) and costs[-1] == pytest.approx(3.0, abs=1.0), "which take 3 s"
    assert abs(found.error) < 0.05
    assert sum(term.measured for term in found.terms) == pytest.approx(1 - reported.goodput)
    assert sum(term.predicted for term in found.terms) == pytest.approx(1 - found.goodput, abs=0.01)


def test_a_replacement_that_dies_before_it_trains_leaves_its_seat_empty() -> None:
    reported = losses(1)
    again = summary_of(reported)
    twice = losses(1)
    at = next(number for number, record in enumerate(twice.records) if isinstance(record, ProcessLost)) + 1
    twice.records.insert(at, dataclasses.replace(twice.records[at - 1], member=Member(1, 1), at_s=25.0, generation=-1))
    for number, record in enumerate(twice.records):
        if isinstance(record, Spans) and record.member == Member(1, 1):
            twice.records[number] = dataclasses.replace(record, member=Member(1, 2))
        if isinstance(record, ViewPublished) and len(record.view.members) == 2 and record.graceful:
            view = dataclasses.replace(record.view, members=(Member(0, 0), Member(1, 2)))
            twice.records[number] = dataclasses.replace(record, view=view)
    costs = predict(summary_of(twice)).costs
    assert costs["loss-1.0"].missing_s == pytest.approx(1.0), "until the next is lost"
    assert costs["loss-1.1"].missing_s > 0 and predict(again).costs["loss-1.0"].missing_s > 1.0


def test_a_fault_free_run_has_the_goodput_that_is_predicted() -> None:
    """Start-up and end are no fault's, however short the run is: it would be off by as much as they are long."""
    found = predict(summary_of(losses(0)))
    assert abs(found.error) <= 0.02 and found.terms[0].measured == pytest.approx(4 / 24)


def test_a_run_of_which_nothing_is_known_yet() -> None:
    reported = Story(world=2)
    summary = summary_of(reported)
    assert predict(summary).goodput == 0.0 and forecast(summary) is None


def test_steps_that_were_taken_back_are_the_price_of_the_last_rank_that_held_them() -> None:
    reported = losses(1)
    ended = reported.records.pop()
    at = 44_000
    reported.lost(0, 0, at, generation=3)
    reported.lost(1, 1, at, generation=3)
    reported.history(1, 30, at + 100)
    reported.view(4, [(0, 1), (1, 2)], at + 100, 30, history=1, causes=("0.0", "1.1"))
    assert isinstance(ended, RunEnded)
    reported.records.append(dataclasses.replace(ended, at_s=50.0))
    summary = summary_of(reported)
    assert [(each.to_step, each.steps) for each in summary.rollbacks] == [(30, 10)]
    costs = predict(summary).costs
    assert max(costs["loss-0.0"].pause_s, costs["loss-1.1"].pause_s) == pytest.approx(2 * (10 * 1.0 + PAUSE_S), abs=0.5)
    assert [(each.saved_s, each.uses) for each in worths(summary) if each.name == "checkpoints"] == [(pytest.approx(60.0), 1)]


# ---- what will come ----------------------------------------------------------------------------------------------------------------------


def test_rates_start_from_what_was_written_down_and_move_with_what_comes(tmp_path: Path) -> None:
    config = describe(plan(tmp_path))
    rates = json.loads(config)["fault_rates"]
    assert sum(rates.values()) == pytest.approx(1 / 20) and set(rates) == {"kill_rank", "hang"}
    quiet, stormy = forecast(summary_of(losses(0, config=config))), forecast(summary_of(losses(5, config=config)))
    assert quiet is not None and stormy is not None
    assert quiet.all.mean < 1 / 20 and quiet.all.low < quiet.all.mean < quiet.all.high
    assert stormy.rates["kill_rank"].mean == pytest.approx((2 + 5) / (2 / rates["kill_rank"] + 120), rel=0.01)
    assert stormy.rates["hang"].mean < rates["hang"], "none came"
    assert stormy.goodput.low <= stormy.goodput.mean <= stormy.goodput.high
    assert stormy.goodput.high - stormy.goodput.low < quiet.goodput.high - quiet.goodput.low, "it knows more"


def test_planned_or_not_counts_the_same_and_by_its_kind() -> None:
    met = [summary_of(losses(3)).met.events, summary_of(losses(3, fault="f")).met.events]
    assert met == [{"kill_rank": 3}] * 2
    assert summary_of(losses(2, cause=Evicted(NoHeartbeat(3.1)))).met.events == {"hang": 2}
    assert summary_of(losses(2, cause=AgentHungUp())).met.events == {"lose_node": 2}
    assert summary_of(losses(2, cause=Evicted(Superseded()))).met.events == {}, "nobody's fault"


def test_a_run_that_the_catalogue_has_not_foretold_stops_believing_it(tmp_path: Path) -> None:
    config = describe(plan(tmp_path, chaos=ChaosSettings()))
    assert 0 < json.loads(config)["fault_rates"]["kill_rank"] < 1e-6, "two GPUs fail once in years"
    found = forecast(summary_of(losses(5, config=config)))
    assert found is not None and found.all.low < 5 / 120 < found.all.high


def test_a_trace_is_what_is_expected_of_it(tmp_path: Path) -> None:
    faults = [Fault(f"f{number}", 1.0 + number, "gpu", "kill_rank", slot=1) for number in range(6)]
    save_trace(faults, tmp_path / "trace.csv")
    chaos = ChaosSettings(trace=str(tmp_path / "trace.csv"), duration_s=60.0)
    assert chaos.rates_per_s(world=2, nodes=1) == {"kill_rank": pytest.approx(0.1)}


@pytest.mark.parametrize("config", ["{}", "no JSON", '{"fault_rates": 3, "settings": {"timeouts": "x", "recovery": 5}}'])
def test_a_journal_that_says_less_is_read_on(config: str) -> None:
    found = forecast(summary_of(losses(2, config=config)))
    assert found is not None and set(found.rates) == {"kill_rank"}


def test_its_own_forecasts_are_scored_when_their_time_is_over() -> None:
    steady = summary_of(losses(9)).met
    assert steady.scored >= 2 and steady.inside == steady.scored
    sudden = Story(world=1)
    sudden.view(1, [(0, 0)], 0)
    sudden.spans(0, 0, "c1000 K " * 200)
    for step in range(1, 101):
        sudden.committed(step, 1000 * step)
    for number in range(60):
        sudden.fault(f"f{number}", "kill_rank", "executed", 100_000)
    for step in range(101, 201):
        sudden.committed(step, 1000 * step)
    met = summary_of(sudden).met
    assert met.inside < met.scored


def test_what_will_come_is_the_sum_over_kinds() -> None:
    known = {"kill_rank": Rate(((1.0, Gamma(1e6, 1e8)),))}
    sure = coming(known, {"kill_rank": Price(2.0, 0.0, 1000)}, 10_000.0, 4, 0.0)
    assert sure.mean == pytest.approx(1 - 0.01 * 2.0 / 4)
    assert coming(known, {"kill_rank": Price(2.0)}, 10_000.0, 4, 0.5).mean == pytest.approx(sure.mean / 2)
    rare = coming({"kill_rank": prior(1e-9)}, {"kill_rank": Price(2.0)}, 100.0, 4, 0.0)
    assert rare.high == 1.0 and rare.low > 0.99


def test_a_mean_learns_and_knows_how_much_its_measurements_differ() -> None:
    mean = Mean(4.0)
    assert mean.value_s == 4.0
    for value_s in (2.0,) * 7:
        mean.add(value_s)
    assert mean.value_s == pytest.approx(2.25) and mean.unlike < 0.5
    mean.add(100.0, count=0)
    assert mean.value_s == pytest.approx(14.75), "what still lasts has lasted so far"


def test_more_faults_want_more_spares() -> None:
    def wanted(count: int) -> int:
        found = forecast(summary_of(losses(count)))
        assert found is not None
        return found.spares

    assert wanted(0) <= wanted(9) and wanted(9) >= 1


def test_the_report_says_all_of_it() -> None:
    report = build_report(losses(3).records)
    text, data = render_table(report), report.to_dict()
    assert "predicted for the faults that came, error" in text and "forecast  next" in text and "worth  checkpoints" in text
    assert max(map(len, text.splitlines())) <= 120
    assert {"goodput", "error", "terms"} == set(data["prediction"])
    assert {"goodput", "rates", "spares", "scored"} <= set(data["forecast"])
    assert [each["name"] for each in data["worth"]] == ["checkpoints"]


def test_an_interval_holds_its_bounds() -> None:
    assert MeanInterval(0.5, 0.4, 0.6).holds(0.4) and not MeanInterval(0.5, 0.4, 0.6).holds(0.39)


def test_one_loss_is_priced_with_its_seat() -> None:
    [item] = summary_of(one_loss()).incidents
    assert (item.in_view, item.like) == (1, "kill_rank")
