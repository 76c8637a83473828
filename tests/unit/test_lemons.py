"""Repeat offenders are kept out; bad luck, old sins and bad days of the whole fleet are not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.ledger.health import NodeHistory, NodeIncident, histories
from fleet.protocol.causes import EndWhy, Evicted, Outvoted, ProcessEnded, TrainRaised
from fleet.protocol.records import ProcessLost, ProcessUp, RunEnded, RunStarted
from fleet.protocol.types import Member, Process
from policies.lemons import Lemons
from storage import nodes

NOW_H = 2000.0


def node(name: str, faults: int, hours: float = 500.0, kind: str = "lost", ago_h: float = 1.0) -> NodeHistory:
    incidents = tuple(NodeIncident(NOW_H - ago_h, kind, f"run{number}") for number in range(faults))
    return NodeHistory(name, ((NOW_H - hours, NOW_H),), incidents)


@pytest.mark.parametrize(("faults", "action"), [(0, "admit"), (1, "admit"), (6, "keep_out")])
def test_one_fault_is_bad_luck_and_six_are_not(faults: int, action: str) -> None:
    decision = Lemons().judge(node("a", faults), NOW_H)
    assert decision.action == action and decision.fields["runs"] == faults


def test_one_proven_corruption_counts_for_three() -> None:
    policy = Lemons(certainty=0.5)
    assert policy.judge(node("a", 1, kind="corruption"), NOW_H).fields["faults"] == pytest.approx(3, rel=0.01)
    assert policy.judge(node("a", 1, kind="corruption"), NOW_H).action == "keep_out"


def test_old_faults_fade() -> None:
    policy = Lemons()
    recent, old = (policy.judge(node("a", 6, ago_h=ago), NOW_H) for ago in (1.0, 8 * policy.half_life_h))
    assert recent.action == "keep_out" and old.action == "admit"


@given(st.floats(0, 20), st.floats(0, 1e5), st.floats(0.1, 5), st.floats(1, 1e4))
def test_more_faults_are_worse_and_more_hours_are_better(faults: float, hours: float, more: float, longer: float) -> None:
    policy = Lemons()
    certain = policy.probability(faults, hours)
    assert 0 <= certain <= 1
    assert policy.probability(faults + more, hours) >= certain - 1e-12 >= policy.probability(faults, hours + longer) - 2e-12


def test_the_posterior_of_nothing_is_the_prior() -> None:
    assert Lemons(factor=5.0, prior_faults=1.0).probability(0.0, 0.0) == pytest.approx(2.718281828**-5, rel=1e-6)
    assert Lemons(factor=5.0).probability(0.0, 0.0) == pytest.approx(1 / 20, rel=0.1)


def test_no_more_than_a_tenth_stays_out_and_the_worst_first() -> None:
    histories = [node(f"n{number:02}", 6 + number % 3) for number in range(20)]
    out = Lemons().keep_out(histories, NOW_H)
    assert len(out) == 2 and all(len(h.incidents) == 8 for h in histories if h.node in out)
    assert Lemons().keep_out([node("a", 9), *(node(f"b{n}", 0) for n in range(19))], NOW_H).keys() == {"a"}


def fleet_rate_per_h(histories: Iterable[NodeHistory], prior_rate_per_h: float, prior_faults: float = 1.0) -> float:
    """Faults of an ordinary node an hour, from what all nodes did: the posterior mean with the prior worth ``prior_faults``.

    The most faulty tenth of the nodes is left out, so that lemons do not make themselves look ordinary.
    """
    known = sorted(histories, key=lambda history: len(history.incidents) / history.hours if history.hours > 0 else 0.0)
    ordinary = known[: math.ceil(0.9 * len(known))]
    faults, hours = sum(len(history.incidents) for history in ordinary), sum(history.hours for history in ordinary)
    return (prior_faults + faults) / (prior_faults / prior_rate_per_h + hours)


@given(st.integers(1, 50), st.floats(1, 1e4))
def test_the_fleet_rate_is_not_made_by_its_lemons(nodes: int, hours: float) -> None:
    good = [node(f"g{number}", 1, hours) for number in range(9 * nodes)]
    bad = [node(f"b{number}", 100, hours) for number in range(nodes)]
    assert fleet_rate_per_h([*bad, *good], 1e-3, 1.0) == pytest.approx((1 + 9 * nodes) / (1e3 + 9 * nodes * hours))


def test_what_has_no_weight_and_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="lemons.kind = 'mood'"):
        Lemons().judge(node("a", 1, kind="mood"), NOW_H)


def test_what_nodes_did_is_read_from_the_journal_and_survives_the_run(tmp_path: Path) -> None:
    process = [Process("n1", 1, 1), Process("n1", 2, 2), Process("n2", 3, 3)]
    members = [Member(slot, 0) for slot in range(3)]
    records = [
        RunStarted(1, "demo", 100.0, 3600.0 * 1000 + 100.0, 3, 0, 8, "{}"),
        *(ProcessUp(member, one, "t", 100.0) for member, one in zip(members, process, strict=True)),
        ProcessLost(members[0], ProcessEnded(), None, 1, 5, 0, "", at_s=200.0),
        ProcessLost(members[1], ProcessEnded(-9), None, 1, 5, 0, "", at_s=200.1),
        ProcessLost(members[2], Evicted(Outvoted("weights", 9)), None, 2, 9, 0, "", at_s=300.0),
        ProcessLost(members[2], ProcessEnded(), "fault-1", 2, 9, 0, "", at_s=300.0),
        ProcessLost(members[2], TrainRaised("ValueError"), None, 2, 9, 0, "", at_s=300.0),
        RunEnded("completed", "", 3700.0, "", "", EndWhy.ALL_STEPS),
    ]
    found = histories(records, {"n1": "host/1", "n2": "host/2"})
    assert [(one.node, [each.kind for each in one.incidents]) for one in found] == [("host/1", ["lost"]), ("host/2", ["corruption"])]
    assert found[0].hours == 1.0
    path = tmp_path / "runs" / nodes.NAME
    nodes.append(path, found)
    nodes.append(path, found)
    again = nodes.load(path)
    assert [(one.node, one.hours, len(one.incidents)) for one in again] == [("host/1", 2.0, 2), ("host/2", 2.0, 2)]
    assert again[1].incidents[0] == found[1].incidents[0]
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="nodes.jsonl:1"):
        nodes.load(path)
