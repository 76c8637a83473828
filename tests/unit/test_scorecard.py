"""Accusations of slow ranks, held against what chaos has slowed down."""

from __future__ import annotations

import pytest

from fleet.app.report import render_table
from fleet.ledger.report import build_report
from fleet.ledger.verdicts import AFTER_S, Score, Scorecard
from fleet.protocol.decisions import Suspect
from fleet.protocol.records import DecisionMade, FaultRecord, ProcessLost, Record
from fleet.protocol.types import Fault, FaultPhase, Member
from tests.golden.journals import KILLED, Story


def fault(phase: FaultPhase, at_s: float, name: str = "f", kind: str = "slow", slots: tuple[int, ...] = (1,)) -> FaultRecord:
    return FaultRecord(Fault(name, 1.0, "test", kind, slots[0], severity=2.0), phase, tuple(Member(s, 0) for s in slots), "", at_s=at_s)


def accused(slot: int, at_s: float, incarnation: int = 0) -> DecisionMade:
    suspect = Suspect(float(slot), float(incarnation), 0.5, 0.99, 40.0, 60.0, "compute", {})
    return DecisionMade("straggler", "accuse", "it is slow", suspect, at_s)


def score(*records: Record) -> Score:
    card = Scorecard()
    for record in records:
        card.add(record)
    return card.now()


def test_what_is_found_is_counted_once_and_its_latency_is_that_of_the_first() -> None:
    found = score(fault("executed", 10.0), accused(1, 14.0), accused(1, 16.0), fault("healed", 20.0))
    assert found == Score(injected=1, found=1, right=2, wrong=0, latency_s=4.0)
    assert (found.precision, found.recall) == (1.0, 1.0)


@pytest.mark.parametrize(
    "wrong", [accused(2, 14.0), accused(1, 9.0), accused(1, 20.0 + AFTER_S + 0.1), accused(1, 14.0, incarnation=1)],
    ids=["another rank", "before", "long after", "its replacement"],
)  # fmt: skip
def test_an_accusation_without_a_reason_is_wrong(wrong: DecisionMade) -> None:
    records = [fault("planned", 0.0), fault("executed", 10.0), fault("healed", 20.0), wrong]
    assert score(*sorted(records, key=lambda record: record.at_s)) == Score(injected=1, found=0, right=0, wrong=1)


def test_who_is_accused_shortly_after_was_found_late() -> None:
    assert score(fault("executed", 10.0), fault("healed", 20.0), accused(1, 22.0)).latency_s == 12.0


def test_of_a_node_any_rank_is_right_and_it_is_over_when_the_last_is_gone() -> None:
    faulty = fault("executed", 10.0, slots=(2, 3))
    gone = [ProcessLost(Member(slot, 0), KILLED, None, 1, 0, 0, "", at_s=at_s) for slot, at_s in ((2, 11.0), (3, 12.0))]
    assert score(faulty, gone[0], accused(3, 25.0)).found == 1
    assert score(faulty, *gone, accused(3, 23.0)).found == 0


def test_what_was_suppressed_and_what_slows_nobody_is_not_injected_and_without_truth_nothing_is_counted() -> None:
    assert score(fault("suppressed", 10.0)) == Score()
    assert score(fault("executed", 10.0, kind="hang"), accused(1, 12.0)) == Score()
    assert Score().precision is None and Score().recall is None


def test_the_report_says_it() -> None:
    reported = Story(world=3)
    reported.view(1, [(0, 0), (1, 0), (2, 0)], 0)
    for slot in range(3):
        reported.spans(slot, 0, "c25000")
    reported.records += [fault("executed", 10.0), accused(1, 14.0), accused(2, 15.0), fault("healed", 20.0)]
    reported.ended(25_000)
    report = build_report(reported.records)
    card = report.to_dict()["stragglers"]["scorecard"]
    assert (card["precision"], card["recall"], card["slowdowns"][0]["ranks"]) == (0.5, 1.0, ["1.0"])
    text = " ".join(render_table(report).split())
    assert "detectors: 1 of 1 injected slowdowns found (recall 100%), 4.0 s after it began (median)" in text
    assert "1 of 2 accusations right (precision 50%)" in text


def test_what_is_told_twice_is_one_and_what_comes_again_is_another() -> None:
    assert score(fault("executed", 10.0), accused(1, 11.0), fault("executed", 10.0)) == Score(1, 1, 1, 0, 1.0)
    assert score(fault("executed", 10.0), accused(1, 11.0), fault("healed", 12.0), fault("executed", 90.0)).injected == 2


def test_a_lossy_link_need_not_be_found_but_is_a_reason() -> None:
    assert score(fault("executed", 10.0, kind="lossy_link"), accused(1, 11.0)) == Score(0, 0, 1, 0)
    assert score(fault("executed", 10.0, kind="busy_cores"), accused(2, 11.0)) == Score(0, 0, 1, 0), "others share the cores"
