"""Worlds beyond those that were measured, what they cost, what is refused, and what ``fleet plan`` makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.app.scale import seen_in
from fleet.errors import ConfigError, RunFailed
from fleet.laws.scale_fit import SHAPES, Estimate, Fit, Visit, fit
from fleet.planning.measured import fields_of, read_measured, sentences
from fleet.planning.scale import (
    Failures,
    RankPrice,
    WorldRow,
    candidates,
    check_room,
    check_worlds,
    fastest,
    fit_plain,
    groups,
    judged,
    pays_up_to,
    rows,
)
from fleet.planning.scale_words import larger_lines, larger_table, law_lines, limits, measured_line, prediction_line
from tests.golden.journals import one_loss

QUIET = Failures(50_000.0, 25.0)
DEAR = RankPrice(2.0 / 3600, "USD", 64.0, "samples")


def law(**more: float) -> Fit:
    """A job of 1 s that scales well, but for what is said."""
    reported = {"compute": 1.0, **more}
    worlds = (1, 2, 4, 8)
    terms = [
        {name: sum(reported.get(each, 0.0) * s(w, 64) for each, s in shapes.items()) for name, shapes in SHAPES.items()} for w in worlds
    ]
    return fit([Visit(world, each) for world, each in zip(worlds, terms, strict=True)], 64)


def table(found: Fit, failures: Failures = QUIET, most: float = 2.0) -> list[WorldRow]:
    return rows(found, candidates((1, 2, 4, 8)), 3, failures, DEAR, most)


def test_worlds_beyond_are_looked_at_and_ranks_that_only_compute_pay_everywhere() -> None:
    found = table(law())
    assert [row.world for row in found] == [1, 2, 4, 8, 16, 32, 64]
    assert all(row.pays for row in found) and pays_up_to(found) == fastest(found) == 64
    assert [row.efficiency for row in found] == pytest.approx([1.0] * 7)
    assert found[0].cost == pytest.approx(2.0 / 3600 / 64 * 1e6, rel=1e-4)
    assert found[3].further_cost == pytest.approx(found[0].cost, rel=1e-2)


def test_adding_ranks_stops_paying_where_what_does_not_shrink_takes_over() -> None:
    found = table(law(update=0.1, exchange_peers=0.002))
    first_no = next(row for row in found if not row.pays)
    assert pays_up_to(found) == 4 and first_no.world == 8 and first_no.further_cost is not None
    assert first_no.further_cost > 2.0 * found[0].cost > (found[2].further_cost or 0.0)
    assert fastest(found) == 16 and found[-1].further_cost is None
    assert pays_up_to(table(law(update=0.1, exchange_peers=0.002), most=4.0)) == 8


def test_losses_make_large_worlds_dearer() -> None:
    often = Failures(1.0, 60.0)
    found, quiet = table(law(), often), table(law())
    assert [row.kept_share for row in found] == sorted((row.kept_share for row in found), reverse=True)
    assert found[-1].cost > 1.5 * quiet[-1].cost and pays_up_to(found) < 64
    back = Failures(1.0, 60.0, blocked_s=2.0, policy="restart")
    assert back.kept_share(64, 1.0) < often.kept_share(64, 1.0) < 1.0


def test_a_prediction_is_judged_by_what_is_measured_later() -> None:
    visits = [Visit(8, dict.fromkeys(SHAPES, 0.1)), Visit(8, dict.fromkeys(SHAPES, 0.2))]
    reported = judged(Estimate(1.0, 0.8, 1.2), visits)
    assert reported == {"step_s": pytest.approx(0.9), "visits": 2, "inside": True, "off": pytest.approx(-0.1)}
    assert not judged(Estimate(1.0, 0.95, 1.2), visits)["inside"]
    assert groups(visits[0].terms) == pytest.approx({"compute": 2 / 6, "communication": 1 / 6, "coordination": 3 / 6})


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "field", "way_out"),
    [
        ((8, 1, 2.0, None), "--worlds", "Use worlds up to 2, or give each rank the same part of a core: --cpu-quota 0.22."),
        ((2, 2, 2.0, None), "--worlds", "up to 1"),
        ((8, 1, 2.0, 0.5), "--cpu-quota", "The nearest valid value is 0.25."),
        ((1, 1, 2.0, 1.5), "--cpu-quota", "The nearest valid value is 1."),
        ((1, 1, 2.0, 0.0), "--cpu-quota", ""),
    ],
)
def test_ranks_that_would_take_each_others_cores_are_refused(arguments: Any, field: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_room(*arguments)
    assert caught.value.field == field and way_out in caught.value.way_out
    check_room(2, 1, 2.0, None)
    check_room(8, 1, 2.0, 0.25)


@pytest.mark.parametrize(
    ("worlds", "held_out", "field"),
    [((0, 2), 2, "--worlds"), ((2, 2), 2, "--worlds"), ((1, 2), 4, "--hold-out"), ((1, 32), 32, "--worlds")],
)
def test_worlds_that_cannot_be_are_refused(worlds: Sequence[int], held_out: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_worlds(worlds, held_out, 16)
    assert caught.value.field == field


SCRIPT = "def train(run): raise AssertionError('no rank may start')\n"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--worlds", "1,two"), "--worlds"),
        (("--worlds", "1,2", "--hold-out", "2"), "--worlds"),
        (("--worlds", "1,2,4", "--hold-out", "4", "--rounds", "1", "--cpu-quota", "0.1"), "--rounds"),
        (("--worlds", "1,2,512", "--hold-out", "512", "--config", "shards=512"), "--worlds"),
        (("--seconds", "0"), "--seconds"),
        (("--pays-up-to", "0.5"), "--pays-up-to"),
        (("--config", "chaos=storm"), "chaos"),
        (("--config", "wrld=3"), "wrld"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(tmp_path: Path, arguments: tuple[str, ...], field: str) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    file = tmp_path / "scale.json"
    ended = CliRunner().invoke(app, ["experiment", "scale", str(tmp_path / "job.py"), "--json", str(file), *arguments])
    assert isinstance(ended.exception, ConfigError) and ended.exception.field == field
    assert not file.exists()


def test_a_visit_in_which_a_rank_was_lost_is_no_measurement() -> None:
    with pytest.raises(RunFailed, match="has lost a rank while it was measured"):
        seen_in(4, "a run", 1e9, one_loss().records)


# ---- the file, and what a plan makes of it -----------------------------------------------------------------------------------------------

FILE: dict[str, Any] = {
    "format": "fleet-scale", "version": 1, "script": "train.py", "device": "h100", "cpu_quota": None,
    "plan": {"kernel_efficiency": 0.41, "overlap": None, "spread": 0.02},
}  # fmt: skip


def changed(**more: Any) -> str:
    return json.dumps(FILE | more)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("not json", "--measured"),
        ("[1, 2]", "--measured: format"),
        (changed(format="fleet-plan"), "--measured: format"),
        (changed(version=99), "--measured: version"),
        (changed(plan=None), "--measured: plan"),
        (changed(plan={"kernel_efficiency": 1.4, "spread": 0.1}), "--measured: kernel_efficiency"),
        (changed(plan={"overlap": -0.1, "spread": 0.1}), "--measured: overlap"),
        (changed(plan={}), "--measured: spread"),
        (changed(plan={"spread": "wide"}), "--measured: spread"),
        (changed(device=None), "--measured: device"),
        (changed(cpu_quota="a quarter"), "--measured: cpu_quota"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_its_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_measured(text)
    assert caught.value.field == field


def test_a_plan_takes_what_was_measured_and_says_what_was_not() -> None:
    found = read_measured(json.dumps(FILE))
    fields = fields_of(found, "h100", 1024)
    assert fields["kernel_efficiency"] == 0.41 and "overlap" not in fields and 0.9 < fields["slowest_speed"] < 0.95
    assert fields_of(found, "h100", 8)["slowest_speed"] > fields["slowest_speed"]
    assert "overlap" in sentences(found, fields)[1]
    with pytest.raises(ConfigError, match="measured on h100"):
        fields_of(found, "a100", 8)


def test_fleet_plan_plans_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    file.write_text(json.dumps(FILE))
    reported = CliRunner().invoke(app, ["plan", "--measured", str(file), "--json", "-"])
    plan = json.loads(reported.output)
    assert plan["asked"]["kernel_efficiency"] == 0.41 and any("train.py" in note for note in plan["notes"])
    given = CliRunner().invoke(app, ["plan", "--measured", str(file), "--set", "kernel_efficiency=0.5", "--json", "-"])
    assert json.loads(given.output)["asked"]["kernel_efficiency"] == 0.5
    assert "Measured with train.py" in CliRunner().invoke(app, ["plan", "--measured", str(file)]).output
    missing = CliRunner().invoke(app, ["plan", "--measured", str(tmp_path / "none.json")])
    assert isinstance(missing.exception, ConfigError) and missing.exception.field == "--measured"


def test_all_of_it_can_be_told() -> None:
    found = law(update=0.1, exchange_peers=0.002)
    said = {"world": 8, "step_s": asdict(found.step_s(8)), "law": fit_plain(found)}
    assert "world 8, not measured yet: 239 ms" in prediction_line(said)
    assert "outside" in measured_line(8, {"inside": False, "step_s": 0.3, "off": 0.2})
    assert any("update" in line for line in law_lines(fit_plain(found)))
    at = table(found)
    larger = {
        "rows": [asdict(row) for row in at], "pays_up_to": 4, "pays": 2.0, "fastest": 16, "price": {"goods": "samples", "money": "USD"},
        "failures": {"rank_mtbf_hours": 5e4, "recover_s": 25.0, "policy": "in-place"},
    }  # fmt: skip
    heads, cells = larger_table(larger)
    assert all(len(row) == len(heads) for row in cells) and cells[-1][-2:] == ["no gain", "no"]
    assert "Adding ranks pays up to 4" in next(larger_lines(larger))
    reported = {"shards": 32, "cpu_quota": 0.2, "larger": larger, "cores": 2.0, "visits": [{"world": 2, "load": 18.0}]}
    said = " ".join(limits(reported))
    assert "0.2 cores of one host" in said and "A step has 32 shards" in said and "a load of 18 at world 2" in said
    quiet = " ".join(limits(reported | {"shards": 64, "cpu_quota": None, "visits": [{"world": 2, "load": 1.0}]}))
    assert "cores" not in quiet and "shards" not in quiet and "load" not in quiet
