"""Logs of faults: what they are understood as, what is wrong in them, and the one format of traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.arrivals import load_trace
from chaos.settings import parse_chaos
from fleet.errors import ConfigError
from fleet.planning.traces import dates
from fleet.planning.traces.components import WORDS, component_of
from fleet.planning.traces.importing import FoundKind, Log, as_trace, from_trace, read_log
from fleet.planning.traces.mapping import SHIPPED, from_text, load
from fleet.planning.traces.trace import FleetTraceRow, as_text, is_trace, read_trace
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT, KINDS
from fleet.protocol.types import Fault
from fleet.simulation.fleet_arrivals import draw_arrivals, read_arrivals, write_trace
from fleet.simulation.fleet_model import FaultClass, FleetModel, SlowClass
from tests.support.logs import ACME, LANL_HEADER, LANL_SYSTEMS, SACCT, lanl, lanl_row

HOUR_S = 3600.0


def found(log: Log, what: FoundKind) -> list[tuple[int, str]]:
    """(line, detail) of each."""
    return [(each.line, each.detail) for each in log.findings if each.what is what]


# ---- published shapes --------------------------------------------------------------------------------------------------------------------


def test_a_row_of_lanls_log_is_understood_by_its_columns() -> None:
    text = f"""{LANL_HEADER}
2,cluster,49,6152,80,0,0,5-Apr,5-Jun,current,part,80,1,1,0,graphics.fe,6/21/2005 10:54,6/21/2005 11:00,6,,Graphics Accel Hdwr,,,,,No
2,cluster,49,6152,80,1,1,5-Apr,5-Jun,current,part,80,1,1,0,compute,6/22/2005 9:05,6/22/2005 12:05,180,,,,,Undetermined,,No
20,cluster,512,2048,4,7,7,2-Feb,2-Mar,current,part,16,1,1,0,compute,12/1/2004 0:00,12/1/2004 1:00,60,Power Outage,,,,,,No
"""
    log = read_log(text)
    assert log.mapping.name == "lanl" and log.rows == 3
    assert [(e.node, e.component, e.said, e.repair_s, e.line) for e in log.entries] == [
        ("20/7", "host_parts", "Facilities: Power Outage", HOUR_S, 4),
        ("2/0", "gpu", "Hardware: Graphics Accel Hdwr", 360.0, 2),
        ("2/1", "host_parts", "Undetermined", 3 * HOUR_S, 3),
    ]
    assert dates.shown(log.entries[1].at_s) == "2005-06-21 10:54"
    assert found(log, FoundKind.UNKNOWN_CAUSE) == [(3, "Undetermined")]
    assert {name: group.nodes for name, group in log.groups.items()} == {"20": 512, "2": 49}
    assert "Same Event" in log.unused and "Prob Started" not in log.unused


def test_a_whole_log_of_that_form_is_read_and_every_row_is_accounted_for() -> None:
    log = read_log(lanl(23_739, seed=3))
    assert len(log.entries) == log.rows == 23_739
    assert log.nodes == sum(LANL_SYSTEMS.values())
    assert {entry.component for entry in log.entries} == {"host_parts", "software", "switch_or_cable", "gpu"}
    assert not {what for what in log.counts() if "left out" in what}


def test_slurms_jobs_are_the_exposure_and_those_that_a_fault_ended_are_faults() -> None:
    log = read_log(SACCT)
    assert [(e.component, e.node, dates.shown(e.at_s)) for e in log.entries] == [
        ("host_parts", "gpu003", "2024-03-02 13:00"), ("software", "gpu002", "2024-03-03 06:00"), ("software", "", "2024-03-04 12:00"),
    ]  # fmt: skip
    assert found(log, FoundKind.STEP) == [(3, "")]
    assert [line for line, _ in found(log, FoundKind.NO_FAULT)] == [2, 6, 8, 9, 10]
    assert log.exposure_node_s == (4 * 24 + 4 * 12 + 6 + 2 + 2 * 12 + 2 * 24) * HOUR_S and log.exposure_of == "hours of all jobs"


def test_slurms_failed_jobs_alone_say_nothing_of_the_hours_of_the_others() -> None:
    failed = [line for line in SACCT.splitlines() if "FAIL" in line or line.startswith("JobID")]
    log = read_log("\n".join(failed), nodes=4)
    assert log.exposure_of == "nodes x time" and log.nodes == 4
    assert any("failed jobs only" in note for note in log.notes)


def test_acmes_jobs_name_no_nodes() -> None:
    log = read_log(ACME)
    assert [(e.component, e.node) for e in log.entries] == [("software", ""), ("host_parts", "")]
    assert log.exposure_node_s == (8 * 12 + 8 * 48 + 10 + 16 * 6) * HOUR_S


@pytest.mark.parametrize("name", SHIPPED)
def test_a_mapping_that_ships_names_components_that_exist(name: str) -> None:
    assert set(load(name).components.values()) <= {*KIND_OF_COMPONENT, "ignore", "unknown"}


# ---- guesses -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "form"),
    [
        ("2024-01-05T10:00:00", "iso"), ("2024-01-05 10:00:00+02:00", "iso"), ("2024-01-05", "iso"), ("1704448800", "unix"),
        ("1704448800000", "unix_ms"), ("12.5", "seconds"), ("1/5/2024 10:00", "%m/%d/%Y %H:%M"), ("25/1/2024 10:00", "%d/%m/%Y %H:%M"),
        ("5.1.2024 10:00:09", "%d.%m.%Y %H:%M:%S"), ("05-Jan-2024 10:00", "%d-%b-%Y %H:%M"),
    ],
)  # fmt: skip
def test_forms_of_dates_are_found(first: str, form: str) -> None:
    assert dates.fitting([first])[0] == form
    log = read_log(f"time,node,cause\n{first},n1,ECC error\n")
    assert log.mapping.dates == form and log.entries[0].component == "hbm"


def test_the_clock_of_a_date_is_checked() -> None:
    for wrong in ("1/5/2024 24:00", "1/5/2024 10:60", "1/5/2024 10", "2/30/2024 10:00"):
        with pytest.raises(ValueError):
            dates.reader("%m/%d/%Y %H:%M")(wrong)


def test_json_lines_with_names_of_their_own_are_guessed() -> None:
    rows = [
        {"hostname": "a", "Start Time": "2024-01-01T00:00:00", "downtime (min)": 30, "Root Cause": "NIC firmware"},
        {"hostname": "b", "Start Time": "2024-01-02T00:00:00", "downtime (min)": 90, "Root Cause": "XID 79", "ticket": 7},
    ]
    log = read_log("\n".join(map(json.dumps, rows)))
    assert [(e.node, e.component, e.repair_s) for e in log.entries] == [("a", "nic", 1800.0), ("b", "gpu", 5400.0)]
    assert log.unused == ("ticket",)


def test_a_mapping_says_what_no_guess_could() -> None:
    mapping = from_text(
        'start = "when"\nduration = "weg"\nduration_unit = "h"\nnode = ["hall", "box"]\ngroup = "hall"\ncause = "warum"\n'
        'dates = "%d.%m.%Y %H:%M"\n'
        '[components]\n"Lüfter" = "host_parts"\n"geplant" = "ignore"\n',
        "site.toml",
    )
    log = read_log("when;weg;hall;box;warum\n2.1.2024 00:00;2;A;7;LÜFTER\n3.1.2024 00:00;1;A;8;geplant\n", mapping, nodes=40)
    assert [(e.node, e.component, e.repair_s, dates.shown(e.at_s)) for e in log.entries] == [
        ("A/7", "host_parts", 7200.0, "2024-01-02 00:00")
    ]
    assert log.nodes == 40 and found(log, FoundKind.NO_FAULT) == [(3, "geplant")]


def test_words_of_causes() -> None:
    said = ("GPU fell off the bus", "IB switch port flap", "Planned maintenance", "NCCL watchdog", "os", "osprey", "silent data corruption")
    assert [component_of(each) for each in said] == ["gpu", "switch_or_cable", "host_maintenance", "hang", "software", "",
                                                         "silent_corruption"]  # fmt: skip
    assert {name for _, name in WORDS} <= set(KIND_OF_COMPONENT)


# ---- zones -------------------------------------------------------------------------------------------------------------------------------

BERLIN = 'start = "on"\nend = "off"\nnode = "box"\ncause = "why"\ndates = "iso"\nzone = "Europe/Berlin"\n'


def berlin(*rows: str, since: str = "", until: str = "") -> Log:
    return read_log("\n".join(("on,off,box,why", *rows)) + "\n", from_text(BERLIN, "site.toml"), since=since, until=until)


def test_times_are_those_of_the_zone_that_the_mapping_names() -> None:
    log = berlin("2026-01-05T10:00,2026-01-05T11:00,n1,gpu", "2026-07-05T10:00,2026-07-05T11:00,n1,gpu", "2026-07-06T10:00Z,,n2,gpu")
    assert [dates.shown(each.at_s) for each in log.entries] == ["2026-01-05 09:00", "2026-07-05 08:00", "2026-07-06 10:00"]
    assert not found(log, FoundKind.TWICE) and not found(log, FoundKind.NEVER)


def test_an_hour_that_came_twice_is_named_by_its_row_and_is_the_first_one() -> None:
    log = berlin("2026-10-25T02:30,2026-10-25T05:00,n1,gpu", "2026-10-25T03:30,2026-10-25T05:00,n2,gpu")
    assert [dates.shown(each.at_s) for each in log.entries] == ["2026-10-25 00:30", "2026-10-25 02:30"]
    assert found(log, FoundKind.TWICE) == [(2, "2026-10-25T02:30")]
    assert [each.repair_s for each in log.entries] == [3.5 * HOUR_S, 1.5 * HOUR_S]


def test_an_end_in_the_first_hour_before_its_beginning_is_in_the_second() -> None:
    log = berlin("2026-10-25T02:30,2026-10-25T02:10,n1,gpu")
    assert log.entries[0].repair_s == pytest.approx(40 * 60) and not found(log, FoundKind.NEGATIVE)
    assert found(log, FoundKind.TWICE) == [(2, "2026-10-25T02:30")]
    assert found(log, FoundKind.TWICE_LATE) == [(2, "2026-10-25T02:10")]


def test_an_hour_that_never_came_is_named_and_counts_on_from_the_hour_before() -> None:
    log = berlin("2026-03-29T01:30,2026-03-29T02:30,n1,gpu", "2026-03-29T02:30,2026-03-29T04:00,n2,gpu")
    assert dates.shown(log.entries[1].at_s) == "2026-03-29 01:30"
    assert [each.repair_s for each in log.entries] == [HOUR_S, 0.5 * HOUR_S]
    assert found(log, FoundKind.NEVER) == [(2, "2026-03-29T02:30"), (3, "2026-03-29T02:30")]


def test_a_row_that_is_no_fault_is_not_named_for_its_hour() -> None:
    log = berlin("2026-10-25T02:30,,n1,planned maintenance", "2026-10-26T02:30,,n1,gpu")
    ignored = from_text(BERLIN + '[components]\n"drill" = "ignore"\n', "site.toml")
    assert found(log, FoundKind.TWICE) == [(2, "2026-10-25T02:30")], "maintenance is a component"
    log = read_log("on,off,box,why\n2026-10-25T02:30,,n1,drill\n2026-10-26T02:30,,n1,gpu\n", ignored)
    assert found(log, FoundKind.NO_FAULT) == [(2, "drill")] and not found(log, FoundKind.TWICE)


def test_dates_of_the_user_are_in_the_zone_of_the_log_and_may_not_be_in_doubt() -> None:
    row = "2026-07-01T00:30,2026-07-01T01:00,n1,gpu"
    assert berlin(row, since="2026-07-01", until="2026-07-02").began_s == dates.moment("2026-06-30T22:00", "--since")
    with pytest.raises(ConfigError, match=r"--until = .2026-10-25T02:30.: this hour came twice in Europe/Berlin.*2026-10-25T02:30\+02:00"):
        berlin(row, until="2026-10-25T02:30")
    with pytest.raises(ConfigError, match="this hour never came"):
        berlin(row, until="2027-03-28T02:30")
    assert berlin(row, until="2026-10-25T02:30+01:00").ended_s == dates.moment("2026-10-25T01:30", "--until")


def test_a_zone_that_is_none_is_refused() -> None:
    for wrong in ("Europe/Bärlin", "Europe", "../etc/passwd", "+02:00"):
        with pytest.raises(ConfigError, match="is no zone that this host knows"):
            from_text(f'start = "t"\nzone = "{wrong}"\n', "site.toml")
    with pytest.raises(ConfigError, match=r"numbers \(unix\), which have no zone"):
        read_log("t,node\n1704448800,n1\n", from_text('start = "t"\nzone = "Europe/Berlin"\n', "site.toml"))


# ---- what is wrong in a log --------------------------------------------------------------------------------------------------------------

BAD = """start,end,node,component
2024-01-01T00:00:00,2024-01-01T01:00:00,n1,gpu
2024-01-01T00:00:00,2024-01-01T01:00:00,n1,gpu
2024-01-02T00:00:00,2024-01-01T23:00:00,n2,gpu
2024-01-03T00:00:00,,n3,gpu
2024-01-02T12:00:00,2024-01-02T13:00:00,n4,gremlin
soon,2024-01-04T00:00:00,n5,gpu
,2024-01-04T00:00:00,n5,gpu
2024-01-04T00:00:00,n6
2024-01-05T00:00:00,2024-01-07T00:00:00,n7,hbm
2024-01-06T00:00:00,2024-01-06T01:00:00,n7,hbm
"""


def test_all_that_is_wrong_is_counted_and_named_by_line() -> None:
    log = read_log(BAD)
    assert len(log.entries) == 6 and log.rows == 10
    assert [line for line, _ in found(log, FoundKind.DUPLICATE)] == [3]
    assert found(log, FoundKind.NEGATIVE) == [(4, "-3,600 s")]
    assert [line for line, _ in found(log, FoundKind.OPEN)] == [5]
    assert found(log, FoundKind.UNKNOWN_CAUSE) == [(6, "gremlin")]
    assert found(log, FoundKind.BACKWARDS)[0][0] == 6
    assert found(log, FoundKind.UNREADABLE) == [(7, "'soon' is no time"), (9, "2 columns instead of 4")]
    assert [line for line, _ in found(log, FoundKind.NO_TIME)] == [8]
    assert [line for line, _ in found(log, FoundKind.OVERLAP)] == [11]
    left_out = sum(len(found(log, what)) for what in (FoundKind.DUPLICATE, FoundKind.UNREADABLE, FoundKind.NO_TIME))
    assert left_out + len(log.entries) == log.rows, "each row is a fault, or is named as left out"
    repairs = {entry.line: entry.repair_s for entry in log.entries}
    assert repairs[4] is None and repairs[5] is None and repairs[2] == HOUR_S


def test_newest_first_is_an_order_and_a_gap_is_named() -> None:
    days = [*range(1, 21), *range(320, 340)]
    rows = [f"{86_400 * (20_000 + day)},n{day % 7},gpu" for day in days]
    forth, back = (read_log("\n".join(["time,node,component", *each]) + "\n") for each in (rows, rows[::-1]))
    assert not found(forth, FoundKind.BACKWARDS) and not found(back, FoundKind.BACKWARDS)
    assert found(forth, FoundKind.GAP) == [(22, "300.0 days after line 21")]
    assert forth.entries[0].at_s == back.entries[0].at_s


def test_a_cell_may_hold_marks_that_end_a_line_elsewhere() -> None:
    log = read_log('{"time": "2024-01-01", "node": "a", "cause": "fan\u2028gone"}\n{"time": "2024-01-02", "node": "b", "cause": 5}\nnull\n')
    assert [entry.line for entry in log.entries] == [1, 2] and found(log, FoundKind.UNREADABLE) == [(3, "no JSON object")]


def test_durations_that_contradict_their_ends() -> None:
    log = read_log("start,end,down time (min),node,cause\n2024-01-01T00:00:00,2024-01-01T02:00:00,5,a,gpu\n")
    assert found(log, FoundKind.DISAGREES) == [(2, "300 s and 7,200 s")] and log.entries[0].repair_s == 7200.0


def test_a_window_leaves_out_what_is_not_in_it_and_is_the_time_that_counts() -> None:
    log = read_log(BAD, since="2024-01-02", until="2024-02-01", nodes=10)
    assert (log.ended_s - log.began_s) / 86_400 == 30 and log.exposure_node_s == 300 * 86_400
    assert [line for line, _ in found(log, FoundKind.OUTSIDE)] == [2, 3]


@pytest.mark.parametrize(
    ("text", "asked", "says"),
    [
        ("", {}, "it is empty"),
        ("a,b\n1,2\n", {}, "no column looks like a time"),
        ("time,node\nlater,n1\n", {}, "is no time that Fleet knows"),
        ("[\n{}]", {}, "JSON list"),
        ("time,time\n1,2\n", {}, "two columns have this name"),
        ('time,node\n1,"' + "x" * 200_000, {}, "it is no CSV"),
        ("JobID|State|Start|End\n1|COMPLETED|2024-01-01|2024-01-02\n", {}, "no row of it is a fault"),
        ("time,node\n2024-01-01,a\n2024-01-02,b\n", {"nodes": 1}, "the log names 2 nodes"),
        ("time,node\n2024-01-01,a\n", {"since": "yesterday"}, "is no date"),
        ("time,node\n2024-01-01,a\n", {"since": "2024-02-01", "until": "2024-01-01"}, "it is not after"),
    ],
)
def test_what_is_no_log_is_refused(text: str, asked: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_log(text, **asked)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start = ", "no TOML"),
        ('begin = "x"', "no such setting"),
        ('node = "x"', "no column has the time"),
        ("start = 5", "it takes"),
        ('start = "x"\nduration_unit = "fortnight"', "no unit of time"),
        ('start = "x"\n[components]\nsun = "spots"', "no component of the fault catalogue"),
        ('start = "x"\nnode = [5]', "it takes"),
    ],
)
def test_a_mapping_that_says_nothing_sensible_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_text(text, "m.toml")


def test_a_mapping_for_another_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="the log has no column 'Prob Started'"):
        read_log("time,node\n2024-01-01,a\n", load("lanl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load("no-such.toml")


# ---- the one format ----------------------------------------------------------------------------------------------------------------------


def test_an_imported_log_comes_back_from_its_trace() -> None:
    log = read_log(lanl(300, seed=1))
    text = as_trace(log)
    assert is_trace(text) and not is_trace(SACCT)
    back = from_trace(read_trace(text))
    keep = lambda entries: [(e.node, e.component, e.said, e.repair_s) for e in entries]  # noqa: E731
    assert keep(back.entries) == keep(log.entries)
    assert [e.at_s for e in back.entries] == pytest.approx([e.at_s for e in log.entries])
    assert back.groups == log.groups and back.exposure_node_s == log.exposure_node_s


def test_a_trace_without_exposure_cannot_be_fitted() -> None:
    with pytest.raises(ConfigError, match="the time and the nodes"):
        from_trace(read_trace(as_text([FleetTraceRow(Fault("a", 1.0, "gpu", "kill_rank", slot=1))])))
    with pytest.raises(ConfigError, match="were changed"):
        from_trace(read_trace(as_trace(read_log(lanl(20))).replace(" nodes from", " from")))


MODEL = FleetModel(
    nodes=20, duration_s=1e6, faults=(FaultClass(name="gpu", rate_per_s=1e-5, nodes=1), FaultClass(name="software", rate_per_s=1e-5)),
    slow=(SlowClass(name="net", rate_per_s=1e-5, duration_s=900, severity=1.5),),
)  # fmt: skip


def test_chaos_reads_what_the_simulator_wrote_at_places_of_its_run(tmp_path: Path) -> None:
    arrivals = draw_arrivals(MODEL, 3)
    write_trace(MODEL, arrivals, tmp_path / "fleet.csv")
    settings = parse_chaos(f"trace={tmp_path / 'fleet.csv'}")
    planned = settings.plan(seed=1, world=4, nodes=2)
    assert len(planned) == len(arrivals) + len(arrivals.slow_from_s) and {fault.kind for fault in planned} == {"kill_rank", "slow"}
    assert {fault.slot for fault in planned if fault.kind == "kill_rank"} == {0, 1, 2, 3}
    for fault in planned:
        named = [place.field for place in KINDS[fault.kind].targets if getattr(fault, place.field) is not None]
        assert len(named) == 1
    assert settings.carried().plan(seed=1, world=4, nodes=2) == planned


def test_the_simulator_reads_the_trace_of_a_run_and_of_a_log(tmp_path: Path) -> None:
    slow = Fault("b", 4.0, "slow_compute", "slow", node=1, duration_s=5.0, severity=1.5)
    run = as_text([FleetTraceRow(Fault("a", 3.0, "gpu", "kill_rank", slot=2)), FleetTraceRow(slow)])
    (tmp_path / "run.csv").write_text(run)
    read = read_arrivals(MODEL, tmp_path / "run.csv")
    assert read.nodes.tolist() == [2] and read.slow_until_s.tolist() == [9.0]
    log = read_log("time,node,cause,down time (s)\n2024-01-01,a,gpu,60\n2024-01-02,b,software,\n")
    (tmp_path / "log.csv").write_text(as_trace(log))
    read = read_arrivals(MODEL, tmp_path / "log.csv")
    assert read.times_s.tolist() == [0.0, 86_400.0] and read.nodes.tolist() == [0, 1] and read.repairs_s[0] == 60.0
    assert len(load_trace(tmp_path / "log.csv", world=4, nodes=2)) == 2


def test_what_is_no_trace_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(LANL_HEADER + "\n" + lanl_row(2, 3, 60, 600, "Software", "OS") + "\n")
    for read in (load_trace, lambda path: read_arrivals(MODEL, path)):
        with pytest.raises(ConfigError, match="fleet experiment import"):
            read(tmp_path / "log.csv")
