"""The wind tunnel: what is matched, what is predicted, and what is said about the difference."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet.app import recipes, rehearsal
from fleet.app.cli import rehearse as cli_rehearse
from fleet.app.cli.main import app
from fleet.app.rehearsal import (
    IMPOSED,
    MATCHED,
    UNMATCHED,
    Constants,
    MeasuredRun,
    Rehearsal,
    chaos_of,
    choose,
    constants,
    measured,
    predict,
    reasons,
    recovered,
    rows,
    target_of,
)
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.protocol.records import ProcessLost, ProcessUp, Received, ViewPublished
from fleet.protocol.types import Fault, Member, Process
from tests.golden.journals import one_loss

REAL = Constants(step_s=0.05, stalls_s=(0.2, 0.3), refills_s=(6.0, 7.0), blocked_s=0.005, latency_s=0.1, absences_s=(1.0,))
FLEET = target_of(16_384, 54, "in-place")
RESTARTED = target_of(16_384, 54, "restart")


def recorded(fault: str | None = None) -> list[Any]:
    """The story of one loss, in which the members of each view have their state 70 ms later."""
    found = []
    for record in one_loss(fault).records:
        found.append(record)
        if isinstance(record, ViewPublished):
            found.append(Received(0, "Formed", record.at_s + 0.07, record.view.members[0], generation=record.view.generation))
    return found


def verdicts(scale) -> dict[str, str]:
    return {group.name: group.verdict for group in scale.groups}


def test_with_time_enough_no_constant_of_this_machine_dominates() -> None:
    scale = choose(FLEET, REAL, 4, "in-place", 10, 1e6)
    assert scale.dominating == "" and scale.compression == pytest.approx(1 / FLEET.model.rate_per_s / scale.mtbf_s)
    found = verdicts(scale)
    assert found["replacement"] == MATCHED and found["stall"] in (MATCHED, IMPOSED)
    assert found["capacity lost with a node"] == UNMATCHED and found["law of arrivals"] == MATCHED


def test_a_delay_makes_a_fast_recovery_as_slow_as_the_fleets() -> None:
    quick = replace(REAL, stalls_s=(0.01,), refills_s=(6.0,))
    scale = choose(FLEET, quick, 4, "in-place", 10, 1e6)
    assert scale.delay_s > 0 and verdicts(scale)["stall"] == IMPOSED
    stall = next(group for group in scale.groups if group.name == "stall")
    assert stall.real == pytest.approx(stall.target)


def test_a_step_that_is_as_long_as_it_should_be_because_it_waits_is_imposed() -> None:
    scale = choose(FLEET, REAL, 4, "in-place", 10, 1e6, mtbf_s=1000.0)
    step = next(group for group in scale.groups if group.name == "step")
    assert step.verdict == IMPOSED and "wait" in step.why and scale.wait_s > 0
    assert step.real == pytest.approx(step.target)


def test_in_a_short_time_it_says_what_dominates() -> None:
    scale = choose(FLEET, REAL, 4, "in-place", 10, 60.0)
    assert scale.mtbf_s == 6.0 and scale.dominating in ("stall", "replacement")
    assert verdicts(scale)["replacement"] == UNMATCHED
    with pytest.raises(ConfigError, match="faults"):
        choose(FLEET, REAL, 4, "in-place", 0, 60.0)


def prediction(recovery: str = "in-place"):
    target = FLEET if recovery == "in-place" else RESTARTED
    real = REAL if recovery == "in-place" else replace(REAL, stalls_s=(9.0, 10.0))
    scale = choose(target, real, 4, recovery, 12, 180.0)
    faults = chaos_of(scale, 3).plan(seed=3, world=4, nodes=2)
    return predict(target, real, scale, faults, 4, recovery, 3)


def test_the_prediction_is_sealed_and_orders_the_policies() -> None:
    one, again, other = prediction(), prediction(), prediction("restart")
    assert one == again and one.seal == one.sealed().seal
    assert replace(one, run=(0.9, 0.8, 1.0)).sealed().seal != one.seal
    assert other.run[0] < one.run[0] < 1 and one.run[1] < one.run[0] < one.run[2]
    assert one.closed_form == FLEET.plan.faults.goodput


def test_what_losses_cost_here_is_read_from_a_journal() -> None:
    found = constants(recorded("gpu-1"))
    assert found.absences_s == found.refills_s, "when no process was noted the view is all there is"
    assert found.stalls_s == pytest.approx((0.17,)) and found.refills_s == pytest.approx((2.05,)) and found.step_s == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="no loss in it was recovered from"):
        constants(recorded()[:20])
    assert constants(recorded()[:20], otherwise=REAL) is REAL
    assert constants(recorded("gpu-1"), delay_s=0.12).stalls_s == pytest.approx((0.05,)), "what was added is no time of the machine"
    records = recorded("gpu-1")
    place, lost = next((place, record) for place, record in enumerate(records) if isinstance(record, ProcessLost))
    again = Member(lost.member.slot, lost.member.incarnation + 1)
    records.insert(place + 1, ProcessUp(again, Process("n0", 1, 1), "token", lost.at_s + 0.5))
    assert constants(records).absences_s == pytest.approx((0.5,))


def test_a_loss_within_a_stall_begins_it_again() -> None:
    records = recorded("gpu-1")
    place, lost = next((place, record) for place, record in enumerate(records) if isinstance(record, ProcessLost))
    records.insert(place + 1, replace(lost, at_s=lost.at_s + 0.05))
    assert constants(records).stalls_s == pytest.approx((0.12,))


def test_what_is_due_while_all_restart_strikes_nobody() -> None:
    faults = [Fault(f"f{n}", at_s, "gpu", "kill_rank", slot=0) for n, at_s in enumerate((0.5, 2.0, 2.4, 9.0, 2.6))]
    assert rehearsal._that_find_a_rank(faults, [2.0] * 5) == [0.5, 2.6, 9.0]
    assert rehearsal._that_find_a_rank(faults, [0.0] * 5) == [0.5, 2.0, 2.4, 2.6, 9.0]
    assert rehearsal._that_find_a_rank([], []) == []


def test_a_newcomer_that_is_struck_before_it_is_in_a_view_restarts_all_again() -> None:
    scale = choose(RESTARTED, REAL, 4, "restart", 12, 180.0)
    faults = [Fault(f"f{n}", at_s, "gpu", "kill_rank", slot=0) for n, at_s in enumerate((20.0, 22.0))]
    slow = replace(REAL, stalls_s=(3.0, 3.0))
    nobody, somebody = (
        predict(RESTARTED, replace(slow, absences_s=(absent_s,)), scale, faults, 4, "restart", 3).run[0] for absent_s in (3.0, 1.0)
    )
    assert nobody - somebody == pytest.approx(0.75 * 2.0 / scale.duration_s, rel=0.1)  # one place of four stands empty


def test_start_up_is_not_counted() -> None:
    found = measured(one_loss("gpu-1").records)
    assert found.window_s == pytest.approx(6.34) and found.losses == 1
    assert found.goodput == pytest.approx(10.0 / (2 * 6.34))
    assert found.shares["init"] == pytest.approx(0.8 / (2 * 6.34))


def test_the_sentences_say_what_differs() -> None:
    made = prediction()
    found = MeasuredRun(made.run[0] - 0.2, 11, 180.0, {})
    shown = Rehearsal(gpus=16_384, days=54, recovery="in-place", prediction=made, measured=found, hindsight=found.goodput + 0.01)
    assert not shown.inside and "outside the interval" in reasons(shown)[0] and "-20.00 points" in reasons(shown)[0]
    assert shown.model_error == pytest.approx(-0.01) and "-1.00 points are its own error" in reasons(shown)[1]
    assert [name for name, _, _ in rows(shown)][2:] == ["this run, predicted", "this run, measured"]


def test_the_prediction_is_written_between_calibration_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The order of things, with runs that were recorded in place of real ones."""
    made: list[str] = []

    def trained(cluster: Any, settings: Any, chaos: Any, folder: Path, enough: Any, limit_s: float) -> None:
        made.append(folder.name + ("+prediction" if (tmp_path / "r" / "prediction.json").exists() else ""))
        assert settings.recovery.policy == "in-place" and chaos.on and limit_s > 0
        folder.mkdir(parents=True, exist_ok=True)
        writer = JournalWriter(folder / "journal.jsonl")
        for record in recorded("gpu-1"):
            writer.append(record)
        writer.close()

    monkeypatch.setattr(cli_rehearse, "_train", trained)
    base = cli_rehearse.settings_of(2, "in-place", 0)
    done = cli_rehearse.carry_out(None, FLEET, base, tmp_path / "r", faults=5, budget_s=60.0, losses=1)  # type: ignore[arg-type]
    found = Rehearsal(gpus=16_384, days=54, recovery="in-place", **done)
    assert made == ["calibration", "run+prediction"]
    assert json.loads((tmp_path / "r" / "prediction.json").read_text())["seal"] == found.prediction.seal
    json.dumps(found.to_dict(), allow_nan=False)
    cli_rehearse._show(found, tmp_path / "r")
    shown = capsys.readouterr().out
    assert "this run, measured" in shown and found.prediction.seal[:16] in shown and "unmatched" in shown


@pytest.mark.parametrize(
    ("option", "value", "way_out"),
    [
        ("world", "1", "nearest valid value is 2"), ("losses", "0", "nearest valid value is 1"),
        ("faults", "0", "nearest valid value is 1"),
        ("minutes", "0", "4 is the default"), ("minutes", "nan", "4 is the default"), ("mtbf-s", "-3", "0 chooses it"),
        ("gpus", "0", "nearest valid value is 1"), ("days", "0", "greater than 0"), ("recovery", "hope", "in-place"),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(
    option: str, value: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(settings: Any) -> None:
        raise AssertionError(f"a cluster was started with {option} = {value}")

    monkeypatch.setattr(recipes, "local_cluster", started)
    refused = CliRunner().invoke(app, ["experiment", "rehearse", f"--{option}", value]).exception
    assert isinstance(refused, ConfigError), refused
    assert refused.field == option.replace("-", "_") and way_out in str(refused)


def test_a_calibration_is_over_when_the_world_has_trained_again() -> None:
    records = one_loss("gpu-1").records
    over = [length for length in range(1, len(records) + 1) if recovered(records[:length], 1)]
    full = next(n for n, record in enumerate(records, 1) if isinstance(record, ViewPublished) and record.view.generation == 3)
    assert over == list(range(full, len(records) + 1)), "the story tells the step that ends after this view before it"
    assert not recovered(records, 2)


def test_losses_of_a_calibration_come_as_the_law_says_however_few_they_are() -> None:
    """Every seed has as many short gaps as there should be: replacements at once take longer."""
    for seed in range(20):
        gaps_s = cli_rehearse.gaps_s(cli_rehearse.settings_of(3, "in-place", seed), 5.0, 12)
        assert np.mean(gaps_s) == pytest.approx(5.0)
        assert np.mean(np.array(gaps_s) < 1.6) == pytest.approx(1 - math.exp(-1.6 / 5.0), abs=0.5 / 12)
    orders = [tuple(cli_rehearse.gaps_s(cli_rehearse.settings_of(3, "in-place", seed), 5.0, 12)) for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert min(cli_rehearse.gaps_s(cli_rehearse.settings_of(3, "restart", 0), 5.0, 12)) == cli_rehearse.RESTART_S
