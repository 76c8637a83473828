from __future__ import annotations

from functools import partial

import pytest

from chaos.checkers import (
    FAIL,
    PASS,
    UNKNOWN,
    check,
    commits_exact,
    faults_accounted,
    ledger_other,
    standard_checkers,
    views_follow_kills,
    world_full_again,
)
from fleet.causes import ProcessEnded
from fleet.records import Committed, FaultRecord, LineageBegun, ProcessLost, Record, RunEnded, RunStarted, Spans, ViewPublished
from fleet.types import Fault, Member, StateId, View

START = RunStarted(1, "run", 0.0, 0.0, 3, 0, 16, "{}")
END = RunEnded("completed", "", 60.0, "d", "")
FULL = ("0.0", "1.0", "2.0")


def member(name: str) -> Member:
    slot, incarnation = name.split(".")
    return Member(int(slot), int(incarnation))


def view(generation: int, at_s: float, names: tuple[str, ...], step: int = 0, lineage: int = 0) -> ViewPublished:
    members = tuple(member(name) for name in names)
    ranges = tuple((i, i + 1) for i in range(len(members)))
    return ViewPublished(View(generation, members, ranges, 0, (), StateId(lineage, step), "s:1"), at_s, "", False, ())


def fault(name: str, phase: str, at_s: float, kind: str = "kill_rank", hit: str = "2.0") -> FaultRecord:
    return FaultRecord(Fault(name, at_s, "gpu", kind, 2), phase, at_s, (member(hit),), "")


def lost(name: str, at_s: float) -> ProcessLost:
    return ProcessLost(member(name), ProcessEnded(), at_s, None, 1, 5, -1, "")


def committed(step: int, lineage: int = 0) -> Committed:
    return Committed(StateId(lineage, step), float(step))


def spans(name: str, first: int, commits: int, lineage: int = 0) -> Spans:
    return Spans(member(name), 1, lineage, first, 0, (1, 0) * commits, "cK" * commits)


STORM = [START, view(1, 1.0, FULL), fault("a", "executed", 10.0), view(2, 10.5, ("0.0", "1.0"))]
HEALED = [*STORM, view(3, 15.0, ("0.0", "1.0", "2.1")), END]


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        (HEALED, PASS),
        ([START, view(1, 1.0, FULL), fault("a", "executed", 10.0), END], FAIL),
        ([*STORM[:3], view(2, 13.0, ("0.0", "1.0")), END], FAIL),
        ([*STORM[:3], view(2, 10.5, FULL), END], FAIL),
        (STORM[:3], UNKNOWN),
        ([START, view(1, 1.0, FULL), fault("a", "executed", 59.5), END], PASS),
        ([START, view(1, 1.0, ("0.0", "1.0")), fault("a", "executed", 10.0), END], UNKNOWN),
        ([*STORM[:3], committed(20)], FAIL),
    ],
    ids=["answered", "never", "late", "still a member", "journal cut", "run ended", "not in view", "journal goes on"],
)
def test_every_kill_in_view_is_answered(records: list[Record], verdict: str) -> None:
    assert views_follow_kills(records, bound_s=2.0).verdict == verdict


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        (HEALED, PASS),
        ([*STORM, view(3, 30.0, ("0.0", "1.0", "2.1")), END], FAIL),
        ([*STORM, END], FAIL),
        ([*STORM, RunEnded("completed", "", 12.0, "d", "")], UNKNOWN),
        ([*STORM, view(3, 15.0, ("0.0", "1.0", "2.1")), lost("1.0", 17.0), END], FAIL),
        ([START, view(1, 1.0, FULL), END], UNKNOWN),
        ([START, view(1, 1.0, FULL), fault("s", "executed", 10.0, "slow"), END], PASS),
        (HEALED[1:], UNKNOWN),
    ],
    ids=["full again", "too late", "never", "ended first", "lost again", "no fault", "slowed only", "no start"],
)
def test_world_is_full_again(records: list[Record], verdict: str) -> None:
    assert world_full_again(records, bound_s=10.0).verdict == verdict


TWO_RANKS = [spans("0.0", 0, 3), spans("1.0", 0, 2), spans("0.0", 3, 1), spans("1.1", 3, 1)]


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        ([view(1, 0.0, FULL), committed(2), committed(4), *TWO_RANKS], PASS),
        ([committed(2), committed(2), *TWO_RANKS], FAIL),
        ([committed(2), committed(1), *TWO_RANKS], FAIL),
        ([committed(4), view(2, 5.0, FULL, step=3), *TWO_RANKS], FAIL),
        ([committed(4), view(2, 5.0, FULL, step=4), *TWO_RANKS], PASS),
        ([committed(4), *TWO_RANKS, spans("0.0", 2, 1)], FAIL),
        ([committed(9), *TWO_RANKS], FAIL),
        ([committed(4)], UNKNOWN),
        ([], UNKNOWN),
        (
            [
                committed(4),
                *TWO_RANKS,
                LineageBegun(1, StateId(0, 2), 5.0, "restart"),
                view(2, 6.0, FULL, 2, 1),
                committed(3, 1),
                spans("0.1", 2, 1, 1),
            ],
            PASS,
        ),
    ],
    ids=[
        "exact",
        "doubled",
        "backwards",
        "view lost one",
        "view keeps all",
        "doubled by a rank",
        "nobody did it",
        "no spans",
        "empty",
        "lineage",
    ],
)
def test_commits_are_exact(records: list[Record], verdict: str) -> None:
    assert commits_exact(records).verdict == verdict


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        ([fault("a", "planned", 0.0), fault("b", "planned", 0.0), fault("a", "executed", 1.0), fault("b", "suppressed", 2.0), END], PASS),
        ([fault("a", "planned", 0.0), END], FAIL),
        ([fault("a", "planned", 0.0)], UNKNOWN),
        ([fault("a", "executed", 0.0), fault("a", "executed", 1.0)], FAIL),
    ],
)
def test_faults_are_accounted_for(records: list[Record], verdict: str) -> None:
    assert faults_accounted(records).verdict == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.004, PASS), (0.02, FAIL), (-0.1, FAIL), (None, UNKNOWN)])
def test_share_of_other(share: float | None, verdict: str) -> None:
    assert ledger_other([], share=share).verdict == verdict


def test_a_checker_that_crashes_says_unknown() -> None:
    def broken(_: object) -> object:
        raise KeyError("step")

    verdict = check([], [("broken", broken)])[0]  # type: ignore[list-item]
    assert (verdict.checker, verdict.verdict) == ("broken", UNKNOWN)
    assert "KeyError" in verdict.reason


def test_standard_checkers_all_speak_under_their_names() -> None:
    journal = [*HEALED[:-1], fault("b", "suppressed", 16.0), committed(4), *TWO_RANKS, END]
    checkers = standard_checkers(reaction_s=2.0, full_again_s=10.0, other_share=0.001)
    verdicts = check(journal, checkers)
    assert [v.checker for v in verdicts] == [name for name, _ in checkers]
    assert [v.verdict for v in verdicts] == [PASS] * 5
    assert all(isinstance(checker, partial) or callable(checker) for _, checker in checkers)
