from __future__ import annotations

from pathlib import Path

import pytest

from chaos.arrivals import load_trace, save_trace
from chaos.catalogue import load_catalogue
from chaos.settings import ChaosSettings, parse_chaos, plan
from fleet.errors import ConfigError
from fleet.protocol.types import Fault


def test_parses_the_whole_line() -> None:
    text = "mtbf=15s,fleet_gpus=16384,kinds=kill_rank+lose_node+hang+slow,law=weibull, shape=0.8,duration=10m,quiet_start=500ms"
    text += ",repair=none,seed=7"
    assert parse_chaos(text) == ChaosSettings(
        mtbf_s=15.0, fleet_gpus=16_384, kinds=("kill_rank", "lose_node", "hang", "slow"), law="weibull", shape=0.8,
        duration_s=600.0, quiet_start_s=0.5, repair_s=None, seed=7,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["off", "", " off "])
def test_off_plans_nothing(text: str) -> None:
    settings = parse_chaos(text)
    assert not settings.on
    assert settings.plan(seed=1, world=4, nodes=2) == ()


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("mtbf=0s", "chaos.mtbf_s", "greater than 0"),
        ("mtbf=-3", "chaos.mtbf_s", "greater than 0"),
        ("mtbf=nan", "chaos.mtbf_s", "greater than 0"),
        ("compression=0", "chaos.compression", "greater than 0"),
        ("mtbf=soon", "chaos.mtbf", "not a time"),
        ("mtbf=15s,mtbf=16s", "chaos.mtbf", "twice"),
        ("mtbf=15s,compression=700", "chaos.compression", "contradicts mtbf_s"),
        ("mtbf=15s,trace=x.csv", "chaos.trace", "contradicts mtbf_s"),
        ("mtbf=15s,kinds=kill_rank+meteor", "chaos.kinds", "unknown kind"),
        ("mtbf=15s,kinds=", "chaos.kinds", "unknown kind"),
        ("mtbf=15s,law=pareto", "chaos.law", "unknown law"),
        ("mtbf=15s,law=weibull,shape=0", "chaos.shape", "shape"),
        ("mtbf=15s,fleet_gpus=0", "fleet.gpus", "at least 1"),
        ("mtbf=15s,fleet_gpus=many", "chaos.fleet_gpus", "a whole number"),
        ("mtbf=15s,duration=5s,quiet_start=5s", "chaos.quiet_start_s", "between"),
        ("mtbf=15s,severity=0.5", "chaos.severity", "full speed"),
        ("mtbf=15s,coordinate=tensor", "chaos.coordinate", "no coordinate"),
        ("mtbf=15s,burst=1.5", "chaos.burst", "at most 1"),
        ("mtbf=15s,burst=often", "chaos.burst", "a number"),
        ("mtbf=15s,burst=0.5,burst_s=0s", "chaos.burst_s", "greater than 0"),
        ("mtbf=15s,burst=0.5,rack_nodes=0", "chaos.rack_nodes", "at least 1"),
        ("frequency=15s", "chaos", "nor a setting of chaos"),
        ("strom", "chaos", "Write storm, or key=value"),
        ("fleet_gpus=16384", "chaos", "no number of them"),
    ],
)
def test_refuses_with_field_reason_and_way_out(text: str, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_chaos(text)
    assert error.value.field == field
    assert says in str(error.value)


def test_plan_comes_at_the_stated_mtbf_with_the_runs_seed_unless_it_has_its_own() -> None:
    settings = parse_chaos("mtbf=2s,duration=20m,kinds=kill_rank+lose_node")
    faults = settings.plan(seed=7, world=4, nodes=2)
    assert faults == settings.plan(seed=7, world=4, nodes=2)
    assert faults != settings.plan(seed=8, world=4, nodes=2)
    assert {fault.kind for fault in faults} == {"kill_rank", "lose_node"}
    assert len(faults) == pytest.approx(600, abs=100)
    assert parse_chaos("mtbf=2s,seed=7").plan(seed=8, world=4, nodes=2) == parse_chaos("mtbf=2s").plan(seed=7, world=4, nodes=2)


def test_durations_and_severities_are_the_catalogues_compressed_or_the_users() -> None:
    def planned(component: str, **own: float) -> tuple[Fault, ...]:
        chosen = load_catalogue().chosen([component])
        return plan(chosen, ChaosSettings(duration_s=2000.0, **own), 1, world=4, nodes=2, compression=5000.0)  # type: ignore[arg-type]

    hangs = planned("hang")
    assert sum(f.duration_s for f in hangs) / len(hangs) == pytest.approx(600 / 5000, rel=0.2)
    slow = planned("slow_network", mean_duration_s=20.0, severity=2.0)
    assert sum(f.duration_s for f in slow) / len(slow) == pytest.approx(20.0, rel=0.6)
    assert {f.severity for f in slow} == {2.0}
    kills = planned("gpu", mean_duration_s=20.0, severity=2.0)
    assert {(f.duration_s, f.severity) for f in kills} == {(0.0, 1.0)}


def test_what_has_no_operation_is_planned_all_the_same() -> None:
    faults = parse_chaos("mtbf=0.5s,duration=600s").plan(seed=1, world=4, nodes=2)
    assert "silent_corruption" in {fault.kind for fault in faults}


def test_trace_is_read_in_order_with_ids_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text(
        "at_s,component,kind,slot,node,duration_s,severity\n9,gpu,kill_rank,2,,,\n3.5,host_parts,lose_node,,1,,\n4,x,slow,,0,5,2\n"
    )
    faults = parse_chaos(f"trace={path}").plan(seed=1, world=4, nodes=2)
    assert [(f.id, f.at_s, f.kind, f.slot, f.node, f.duration_s, f.severity) for f in faults] == [
        ("trace-0003", 3.5, "lose_node", None, 1, 0.0, 1.0),
        ("trace-0004", 4.0, "slow", None, 0, 5.0, 2.0),
        ("trace-0002", 9.0, "kill_rank", 2, None, 0.0, 1.0),
    ]
    save_trace(faults, tmp_path / "again.csv")
    assert load_trace(tmp_path / "again.csv") == faults


def test_a_trace_travels_without_its_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("at_s,component,kind,slot,node,duration_s\n1.5,gpu,kill_rank,2,,\n9,net,partition,,1,3.5\n")
    there = parse_chaos(f"trace={path}")
    carried = there.carried()
    planned = there.plan(seed=1, world=4, nodes=2)
    path.unlink()
    assert carried.plan(seed=1, world=4, nodes=2) == planned and len(planned) == 2 and carried.carried() is carried
    with pytest.raises(ConfigError, match="cannot be read"):
        there.carried()
    assert parse_chaos("storm").carried() == parse_chaos("storm")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("soon,gpu,kill_rank,2,,,", "chaos.trace.at_s"),
        ("-1,gpu,kill_rank,2,,,", "chaos.trace.at_s"),
        ("1,gpu,meteor,2,,,", "chaos.trace.kind"),
        ("1,gpu,kill_rank,,,,", "chaos.trace.slot"),
        ("1,gpu,kill_rank,,1,,", "chaos.trace.slot"),
        ("1,gpu,lose_node,1,,,", "chaos.trace.slot"),
        ("1,gpu,slow,1,1,,", "chaos.trace.slot"),
        ("1,gpu,slow,1,,5,0.5", "chaos.trace.severity"),
    ],
)
def test_trace_refuses_a_bad_row(tmp_path: Path, row: str, field: str) -> None:
    path = tmp_path / "faults.csv"
    path.write_text(f"at_s,component,kind,slot,node,duration_s,severity\n{row}\n")
    with pytest.raises(ConfigError) as error:
        load_trace(path)
    assert error.value.field == field
    assert "faults.csv:2" in str(error.value)


def test_trace_that_is_not_there_or_repeats_an_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "twice.csv").write_text("id,at_s,component,kind,slot,node\na,1,gpu,kill_rank,1,\na,2,gpu,kill_rank,1,\n")
    with pytest.raises(ConfigError, match="same id"):
        load_trace(tmp_path / "twice.csv")
