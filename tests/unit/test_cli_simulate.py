"""``fleet simulate`` and ``fleet experiment compare`` as commands, on small fleets: what they answer, keep, and say before they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fleet.app import comparisons
from fleet.app.cli import plan as cli_plan
from fleet.app.cli import simulate as cli_simulate
from fleet.app.cli.main import app
from fleet.errors import ConfigError
from fleet.planning.inputs import PlanInput
from fleet.simulation.compare import PairedVerdict, Sequential
from fleet.simulation.fleet_model import Partial

SMALL = ("--gpus", "256", "--model", "llama3-8b")


def fleet(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = fleet(*arguments, "--json", "-")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_run_as_a_table_and_as_json() -> None:
    done = fleet("simulate", *SMALL, "--days", "5")
    assert done.exit_code == 0 and "goodput" in done.stdout and "32 nodes" in done.stdout
    found = answer("simulate", *SMALL, "--days", "5")
    assert found["complete"] and found["method"] == "events" and found["nodes"] == 32
    assert sum(share["mean"] for share in found["shares"].values()) == pytest.approx(1.0)


def test_many_runs_are_made_side_by_side() -> None:
    found = answer("simulate", *SMALL, "--days", "60", "--runs", "60", "--no-stragglers", "--mttf-hours", "5000")
    assert found["method"] == "vectorised" and found["runs"] == 60 and found["complete"]
    assert found["shares"]["goodput"]["mean"] == pytest.approx(found["expected_goodput"], abs=0.02)
    assert found["faults"] == pytest.approx(found["expected_faults"], rel=0.1)


def test_how_often_gpus_fail_holds_for_the_closed_form_too() -> None:
    assert answer("simulate", *SMALL, "--mttf-hours", "900")["expected_faults"] == pytest.approx(54 * 24 * 256 / 900)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("simulate", "--set", "in_place_share=0.5"), "--set in_place_share"),
        (("simulate", "--set", "gpu_mttf_hours=900"), "--set gpu_mttf_hours"),
        (("simulate", "--runs", "0"), "runs"), (("simulate", "--days", "0"), "days"), (("simulate", "--mttf-hours", "-1"), "mttf_hours"),
        (("simulate", "--interval", "0"), "checkpoint.interval_s"), (("simulate", "--interval", "-5"), "checkpoint.interval_s"),
        (("experiment", "compare", "in-place"), "policies"), (("experiment", "compare", "in-place", "hope"), "policies"),
        (("experiment", "compare", "in-place", "restart", "--pairs", "0"), "pairs"),
        (("experiment", "compare", "in-place", "restart", "--alpha", "0"), "alpha"),
    ],
)  # fmt: skip
def test_the_impossible_is_refused_by_name(arguments: tuple[str, ...], field: str) -> None:
    refused = fleet(*arguments, *SMALL).exception
    assert isinstance(refused, ConfigError) and refused.field == field and refused.way_out


def test_a_saved_trace_is_the_run_again(tmp_path: Path) -> None:
    """Half of this fleet is away at a time, so that many of the faults that were drawn strike nobody."""
    fleet_, trace = (*SMALL, "--spares", "0", "--mttf-hours", "200", "--set", "repair_hours=72"), str(tmp_path / "t.csv")
    first = answer("simulate", *fleet_, "--save-trace", trace)
    again = answer("simulate", *fleet_, "--trace", trace, "--save-trace", str(tmp_path / "u.csv"))
    assert first["faults"] < 0.8 * first["expected_faults"]
    assert again["counts"] == first["counts"]
    assert {name: share["mean"] for name, share in again["shares"].items()} == pytest.approx(
        {name: share["mean"] for name, share in first["shares"].items()}, abs=1e-9
    )
    assert (tmp_path / "u.csv").read_text().count("\n") <= (tmp_path / "t.csv").read_text().count("\n")


# ---- compare -----------------------------------------------------------------------------------------------------------------------------

POLICIES = ("in-place", "restart", "restart:daly")


def test_two_policies_until_it_is_decided() -> None:
    found = answer("experiment", "compare", *POLICIES[:2], *SMALL, "--mttf-hours", "500", "--days", "20")
    assert found["complete"] and found["alpha_each"] == found["alpha"] == 0.05
    verdict = found["against"]["restart"]
    assert verdict["decided"] == "first" and verdict["low"] > 0 and verdict["pairs"] < 1000
    said = fleet("experiment", "compare", *POLICIES[:2], *SMALL, "--mttf-hours", "500", "--days", "20").stdout
    assert "in-place loses less than restart" in said and "with 95% at any time" in said


def test_three_policies_share_the_probability_of_being_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []

    class Noted(Sequential):
        def __init__(self, alpha: float, **rest: float) -> None:
            used.append(alpha)
            super().__init__(alpha, **rest)

    monkeypatch.setattr(comparisons, "Sequential", Noted)
    found = answer("experiment", "compare", *POLICIES, *SMALL, "--mttf-hours", "500", "--days", "5", "--pairs", "2", "--alpha", "0.1")
    assert used == [0.05, 0.05] and found["alpha_each"] == 0.05 and found["alpha"] == 0.1
    assert "with 97.5% at any time" in fleet("experiment", "compare", *POLICIES, *SMALL, "--days", "5", "--pairs", "2").stdout


def test_an_interrupted_comparison_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the first two are compared: their pairs are kept, the third policy is not begun, and all of it is marked."""
    real = comparisons.of_simulated

    def interrupted(*arguments: Any) -> PairedVerdict:
        *most, report, partial = arguments
        assert isinstance(partial, Partial)

        def then(done: int) -> None:
            report(done)
            partial.stop = done == 3

        return real(*most, then, partial)

    monkeypatch.setattr(comparisons, "of_simulated", interrupted)
    found = answer("experiment", "compare", *POLICIES, *SMALL, "--days", "5", code=130)
    assert found["complete"] is False and list(found["against"]) == ["restart"] and found["against"]["restart"]["pairs"] == 3


# ---- what is said before ---------------------------------------------------------------------------------------------------------------


def test_long_runs_say_for_how_long_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of nothing, what is said of a short wait is what is said of a long one."""
    monkeypatch.setattr(cli_simulate, "TIMED_FROM_FAULTS", 0.0)
    monkeypatch.setattr(cli_simulate, "SLOW_S", 0.0)
    for runs, words in (("60", "60 runs will take about "), ("1", "1 run will take about ")):
        said = fleet("simulate", *SMALL, "--runs", runs, "--json", "-").stderr.splitlines()
        assert said[0].startswith(words) and "Ctrl-C keeps what there is" in said[0]


def test_a_comparison_that_stops_when_it_is_decided_promises_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_simulate, "SLOW_S", 0.0)
    said = fleet("experiment", "compare", *POLICIES[:2], *SMALL, "--mttf-hours", "500", "--days", "20", "--json", "-").stderr
    assert "not decided yet after 1 pair; it goes on to at most 1000" in said
    assert "left" not in said and "will take" not in said


def test_a_long_sweep_says_for_how_long_before_its_first_point(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fleet.planning import sweep

    real, made = sweep.make_plan, list[float]()

    def counted(asked: PlanInput, levers: bool) -> Any:
        made.append(asked.detect_s)
        return real(asked, levers)

    monkeypatch.setattr(sweep, "make_plan", counted)
    monkeypatch.setattr(cli_plan, "SLOW_S", 0.0)
    said = fleet("plan", "--set", "tp=8", "--set", "pp=1", "--sweep", "detect_s=0:60:+1", "--json", "-").stderr.splitlines()
    assert said[0].startswith("61 points will take about ") and made[:2] == [30.0, 0.0] and len(made) == 62
    assert said[1].startswith("6 of 61 points, about ")
