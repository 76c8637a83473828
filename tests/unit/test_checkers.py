from __future__ import annotations

import dataclasses
import json
from contextlib import closing, nullcontext
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from fleet.app import recipes
from fleet.app.cli.main import app
from fleet.app.plans import RunResult
from fleet.app.report import render_table
from fleet.host.journal import JournalWriter
from fleet.ledger.checkers import (
    CHECKERS,
    OK,
    UNKNOWN,
    VIOLATED,
    Bits,
    Bounds,
    CommitsExact,
    FaultsAccounted,
    GoesOn,
    Judge,
    LedgerCloses,
    RanksLeft,
    WorldFullAgain,
    judged,
    violated,
    with_twin,
)
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import build_report
from fleet.protocol.exit_codes import Exit
from fleet.protocol.fault_kinds import Check
from fleet.protocol.records import (
    Committed,
    FaultRecord,
    HistoryBegun,
    ProcessLost,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    Spans,
    ViewPublished,
)
from fleet.protocol.types import Fault, Member, StateId, View
from fleet.settings.run import Timeouts
from tests.unit.test_report import golden_story

START = RunStarted(1, "run", 0.0, 0.0, 3, 0, 16, "{}")
END = RunEnded("completed", "", 60.0, "d", "")
FULL = ("0.0", "1.0", "2.0")


def member(name: str) -> Member:
    slot, incarnation = name.split(".")
    return Member(int(slot), int(incarnation))


def view(generation: int, at_s: float, names: tuple[str, ...], step: int = 0, history: int = 0, spares: int = 0) -> ViewPublished:
    members = tuple(member(name) for name in names)
    computing = len(members) - spares
    ranges = tuple((i, i + 1) for i in range(computing)) + ((computing, computing),) * spares
    return ViewPublished(View(generation, members, ranges, 0, (), StateId(history, step), "s:1"), at_s, "", False, ())


def fault(name: str, phase: str, at_s: float, kind: str = "kill_rank", hit: str = "2.0") -> FaultRecord:
    return FaultRecord(Fault(name, at_s, "gpu", kind, 2), phase, (member(hit),), "", at_s=at_s)


def lost(name: str, at_s: float) -> ProcessLost:
    return ProcessLost(member(name), "killed", None, 1, 5, -1, "", at_s=at_s)


def verdict(checker: Any, records: list[Record]) -> str:
    """With bounds of 2 s to react, 10 s to be full again, 3 s to hang."""
    judge = Judge((checker,), Bounds(2.0, 10.0, 3.0))
    some = [] if checker is FaultsAccounted else [fault("some", "planned", 0.0, "rack")]
    for record in [*some, *records]:
        judge.take(record)
    [one] = judge.judgements()
    assert one.check == checker.name and one.reason
    return one.verdict


def due(name: str, at_s: float) -> FaultRecord:
    """Planned when the run began to train, at 0 s."""
    planned = fault(name, "planned", 0.0)
    return dataclasses.replace(planned, fault=dataclasses.replace(planned.fault, at_s=at_s))


def done_at(at_s: float) -> Committed:
    return Committed(StateId(0, 7), at_s)


def ended(status: str, at_s: float) -> RunEnded:
    return RunEnded(status, "", at_s, "", "")


def committed(step: int, history: int = 0) -> Committed:
    return Committed(StateId(history, step), float(step))


def spans(name: str, first: int, commits: int, history: int = 0) -> Spans:
    return Spans(member(name), 1, history, first, 0, (1, 0) * commits, "cK" * commits)


STORM = [START, view(1, 1.0, FULL), fault("a", "executed", 10.0), view(2, 10.5, ("0.0", "1.0"))]
HEALED = [*STORM, view(3, 15.0, ("0.0", "1.0", "2.1")), END]


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        (HEALED, OK),
        ([START, view(1, 1.0, FULL), fault("a", "executed", 10.0), END], VIOLATED),
        ([*STORM[:3], view(2, 13.0, ("0.0", "1.0")), END], VIOLATED),
        ([*STORM[:3], view(2, 10.5, FULL), END], VIOLATED),
        (STORM[:3], UNKNOWN),
        ([START, view(1, 1.0, FULL), fault("a", "executed", 59.5), END], OK),
        ([START, view(1, 1.0, ("0.0", "1.0")), fault("a", "executed", 10.0), END], UNKNOWN),
        ([*STORM[:3], committed(20)], VIOLATED),
    ],
    ids=["answered", "never", "late", "still a member", "journal cut", "run ended", "not in view", "journal goes on"],
)
def test_every_kill_in_view_is_answered(records: list[Record], wanted: str) -> None:
    assert verdict(RanksLeft, records) == wanted


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        (HEALED, OK),
        ([*STORM, view(3, 30.0, ("0.0", "1.0", "2.1")), END], VIOLATED),
        ([*STORM, END], VIOLATED),
        ([*STORM, RunEnded("completed", "", 12.0, "d", "")], UNKNOWN),
        ([*STORM, view(3, 15.0, ("0.0", "1.0", "2.1")), lost("1.0", 17.0), END], VIOLATED),
        ([START, view(1, 1.0, FULL), END], UNKNOWN),
        ([START, view(1, 1.0, FULL), fault("s", "executed", 10.0, "slow"), END], OK),
        (HEALED[1:], UNKNOWN),
    ],
    ids=["full again", "too late", "never", "ended first", "lost again", "no fault", "slowed only", "no start"],
)
def test_world_is_full_again(records: list[Record], wanted: str) -> None:
    assert verdict(WorldFullAgain, records) == wanted


def test_a_world_that_is_resumed_after_its_end_has_to_be_full_again() -> None:
    again = [*HEALED, lost("0.0", 61.0), Resumed(70.0, 70.0, "resumed in a new cluster", "c2")]
    assert verdict(WorldFullAgain, [*HEALED, lost("0.0", 61.0)]) == OK, "processes leave at the end"
    assert verdict(WorldFullAgain, [*again, committed(90)]) == VIOLATED
    assert verdict(WorldFullAgain, [*again, view(4, 75.0, ("0.1", "1.1", "2.2")), committed(90)]) == OK
    assert verdict(WorldFullAgain, [*again, view(4, 75.0, ("0.1", "1.1", "2.2", "3.0"), spares=1), committed(90)]) == OK
    assert verdict(WorldFullAgain, [*again, view(4, 75.0, ("0.1", "1.1", "3.0"), spares=1), committed(90)]) == VIOLATED


TWO_RANKS = [spans("0.0", 0, 3), spans("1.0", 0, 2), spans("0.0", 3, 1), spans("1.1", 3, 1)]


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([view(1, 0.0, FULL), committed(2), committed(4), *TWO_RANKS], OK),
        ([committed(2), committed(2), *TWO_RANKS], VIOLATED),
        ([committed(2), committed(1), *TWO_RANKS], VIOLATED),
        ([committed(4), view(2, 5.0, FULL, step=3), *TWO_RANKS], VIOLATED),
        ([committed(4), view(2, 5.0, FULL, step=4), *TWO_RANKS], OK),
        ([committed(4), *TWO_RANKS, spans("0.0", 2, 1)], VIOLATED),
        ([committed(9), *TWO_RANKS], VIOLATED),
        ([committed(4)], UNKNOWN),
        ([], UNKNOWN),
        (
            [
                committed(4),
                *TWO_RANKS,
                HistoryBegun(1, StateId(0, 2), 5.0, "restart"),
                view(2, 6.0, FULL, 2, 1),
                committed(3, 1),
                spans("0.1", 2, 1, 1),
            ],
            OK,
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
        "history",
    ],
)
def test_commits_are_exact(records: list[Record], wanted: str) -> None:
    assert verdict(CommitsExact, records) == wanted


CUT = Resumed(30.0, 30.0, "resumed in a new cluster", "c2")


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([fault("a", "planned", 0.0), fault("b", "planned", 0.0), fault("a", "executed", 1.0), fault("b", "suppressed", 2.0), END], OK),
        ([fault("a", "planned", 0.0), END], VIOLATED),
        ([fault("a", "planned", 0.0)], UNKNOWN),
        ([fault("a", "executed", 0.0), fault("a", "executed", 1.0)], VIOLATED),
        ([fault("a", "executed", 1.0), fault("a", "executed", 1.0)], OK),
        ([due("a", 59.0), END], OK),
        ([due("a", 50.0), END], VIOLATED),
        ([due("a", 20.0), CUT, END], OK),
    ],
    ids=["accounted", "forgotten", "journal cut", "twice", "told twice", "not due yet", "due and forgotten", "run cut off"],
)
def test_faults_are_accounted_for(records: list[Record], wanted: str) -> None:
    assert verdict(FaultsAccounted, records) == wanted


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([fault("h", "executed", 10.0, "hang"), done_at(11.0), END], OK),
        ([fault("h", "executed", 58.0, "hang"), END], OK),
        ([fault("h", "executed", 10.0, "hang"), done_at(9.9), ended("failed", 12.0)], VIOLATED),
        ([fault("h", "executed", 10.0, "hang"), ended("stopped", 12.0)], UNKNOWN),
        ([fault("h", "executed", 10.0, "hang"), ended("stopped", 40.0)], VIOLATED),
        ([fault("h", "executed", 10.0, "hang"), done_at(30.0)], VIOLATED),
        ([fault("k", "executed", 10.0), END], UNKNOWN),
    ],
    ids=["goes on", "completed", "failed", "stopped soon", "stood still", "too late", "no such fault"],
)
def test_a_run_goes_on_after_what_stops_it(records: list[Record], wanted: str) -> None:
    assert verdict(GoesOn, records) == wanted


FLIPPED = fault("b", "executed", 10.0, "flip_weight")


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([FLIPPED, END], UNKNOWN),
        ([FLIPPED, lost("2.0", 10.5), END], OK),
        ([FLIPPED, HistoryBegun(1, StateId(0, 2), 12.0, ""), END], OK),
        ([FLIPPED, lost("1.0", 10.5), END], UNKNOWN),
        ([fault("g", "executed", 10.0, "flip_gradient"), END], UNKNOWN),
        ([fault("k", "executed", 10.0), END], UNKNOWN),
    ],
    ids=["not found", "evicted", "gone back", "another was evicted", "seen by nobody", "none"],
)
def test_what_was_wrong_is_gone(records: list[Record], wanted: str) -> None:
    assert verdict(Bits, records) == wanted


def test_a_twin_tells_of_the_bits() -> None:
    checks = [{"check": "bits", "verdict": UNKNOWN, "reason": ""}, {"check": "goes_on", "verdict": OK, "reason": ""}]
    assert [one["verdict"] for one in with_twin(checks, True)] == [OK, OK]
    assert [one["check"] for one in violated(with_twin(checks, False))] == ["bits"]
    assert with_twin(checks, None) == checks, "it came to no end"


@pytest.mark.parametrize(
    ("share", "closes", "wanted"), [(0.004, True, OK), (0.3, True, VIOLATED), (-0.1, True, VIOLATED), (0.0, False, VIOLATED)]
)
def test_the_ledger_closes_with_next_to_nothing_in_other(share: float, closes: bool, wanted: str) -> None:
    records = golden_story().records
    ledger = dataclasses.replace(Ledger().apply_all(records).summary(), other_ratio=share, closes=closes)
    reported = {one.check: one.verdict for one in judged(records, ledger)}
    assert reported[LedgerCloses.name] == wanted
    assert {one.check: one.verdict for one in judged(records)}[LedgerCloses.name] == UNKNOWN


class Broken(Bits):
    """Trips over what it takes, or over its verdict."""

    name = "broken"

    def take(self, record: Record) -> None:
        raise KeyError("step")


class BrokenLater(Bits):
    name = "broken later"

    def verdict(self, now_s: float) -> tuple[str, str]:
        raise KeyError("step")


@pytest.mark.parametrize("checker", [Broken, BrokenLater])
def test_a_checker_that_crashes_says_unknown(checker: type[Bits]) -> None:
    judge = Judge((checker,), Bounds(2.0, 10.0, 3.0))
    judge.take(FLIPPED)
    [one] = judge.judgements()
    assert (one.check, one.verdict) == (checker.name, UNKNOWN)
    assert "KeyError" in one.reason


def test_every_kind_is_survived_by_a_check_that_exists() -> None:
    assert {check.value for check in Check} <= {checker.name for checker in CHECKERS}


def test_a_run_without_chaos_is_not_judged() -> None:
    assert judged([START, view(1, 1.0, FULL), committed(2), END]) == ()


@pytest.mark.parametrize("settings", [{"timeouts": 5}, {"timeouts": {"node_s": "x"}}, {}])
def test_bounds_are_the_usual_ones_where_a_journal_says_nonsense(settings: dict[str, Any]) -> None:
    assert Bounds.of(settings) == Bounds(79.0, 139.0, Timeouts().progress_s)


def test_bounds_are_the_runs_own() -> None:
    reported = {"timeouts": {"node_s": 1, "quiesce_s": 2, "form_s": 3, "start_s": 4, "progress_s": 5}, "form_delay_s": 10}
    assert Bounds.of(reported) == Bounds(20.0, 24.0, 5.0)
    late = [view(1, 1.0, FULL), fault("a", "executed", 10.0), view(2, 40.0, ("0.0", "1.0")), END]
    for settings, wanted in ((reported, VIOLATED), ({}, OK)):
        start = dataclasses.replace(START, config=json.dumps({"settings": settings}))
        assert {one.check: one.verdict for one in judged([start, *late])}["ranks_left"] == wanted


def test_the_loss_may_be_told_before_the_fault() -> None:
    gone = dataclasses.replace(lost("2.0", 10.0), fault="a")
    records = [
        START,
        view(1, 1.0, FULL),
        fault("a", "planned", 1.0),
        gone,
        view(2, 10.2, ("0.0", "1.0")),
        fault("a", "executed", 10.3),
        END,
    ]
    assert verdict(RanksLeft, records) == OK


# ---- a run's journal, and what is changed in it ------------------------------------------------------------------------------------------


def checks_of(records: list[Record]) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in build_report(records).to_dict()["checks"]}


def test_the_report_has_the_checks_and_nothing_is_violated() -> None:
    report = build_report(golden_story().records)
    assert VIOLATED not in checks_of(golden_story().records).values()
    text = render_table(report)
    assert "checks after chaos" in text
    assert all(checker.name in text for checker in CHECKERS)


def without_the_answer(records: list[Record]) -> list[Record]:
    """The fault is executed, and no view follows; the run goes on for long."""
    injected = next(n for n, record in enumerate(records) if isinstance(record, FaultRecord) and record.phase == "executed")
    rest = [record for record in records[injected + 1 :] if not isinstance(record, ViewPublished | Spans | RunEnded)]
    return [*records[: injected + 1], *rest, ended("stopped", 10_000.0)]


def twice_committed(records: list[Record]) -> list[Record]:
    number = [n for n, record in enumerate(records) if isinstance(record, Committed)][1]
    return [*records[: number + 1], records[number], *records[number + 1 :]]


def twice_decided(records: list[Record]) -> list[Record]:
    number, injected = next((n, r) for n, r in enumerate(records) if isinstance(r, FaultRecord) and r.phase == "executed")
    return [*records[: number + 1], dataclasses.replace(injected, at_s=injected.at_s + 0.1), *records[number + 1 :]]


@pytest.mark.parametrize(
    ("mutate", "check"),
    [(without_the_answer, "ranks_left"), (twice_committed, "commits_exact"), (twice_decided, "faults_accounted")],
)
def test_a_changed_journal_violates_the_check(mutate: Any, check: str) -> None:
    records = golden_story().records
    assert checks_of(records)[check] == OK
    assert checks_of(mutate(records))[check] == VIOLATED


class Replayed:
    """In the place of a live run: its journal is there at once."""

    records: ClassVar[list[Record]] = []

    def __init__(self, plan: Any, cluster: Any) -> None:
        self.plan, self.shm, self.controls = plan, plan.folder, None

    def execute(self) -> Any:
        with closing(JournalWriter(self.plan.journal)) as journal:
            for record in self.records:
                journal.append(record)
        return RunResult(plan=self.plan, status="completed", reason="", detail="")

    def stop(self, reason: str) -> None:
        """There is nothing to stop."""


@pytest.mark.parametrize(("mutate", "code"), [(list, Exit.DONE), (twice_committed, Exit.VIOLATED), (twice_decided, Exit.VIOLATED)])
def test_a_violated_check_changes_the_exit_code(mutate: Any, code: Exit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text("def train(run): ...\n")
    monkeypatch.setattr(recipes, "local_cluster", lambda settings, script: nullcontext())
    monkeypatch.setattr(recipes, "LiveRun", Replayed)
    monkeypatch.setattr(Replayed, "records", mutate(golden_story().records))
    arguments = ["run", str(script), "--storage", str(tmp_path / "runs"), "--chaos", "mtbf=15s", "--json", str(report), "--no-trial"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    reported = json.loads(report.read_text())["checks"]
    assert bool(violated(reported)) == (code is Exit.VIOLATED)
    assert ("VIOLATED" in done.output) == (code is Exit.VIOLATED)


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_covered_in_any_order(seed: int) -> None:
    """Each of two ranks tells its steps in pieces, which come in any order."""
    pieces = [spans(f"{slot}.{n}", step, 2) for slot in (0, 1) for n, step in enumerate(range(0, 10, 2))]
    Random(seed).shuffle(pieces)
    gone = [piece for piece in pieces if piece.step != 4]
    assert verdict(CommitsExact, [committed(10), *pieces]) == OK
    assert verdict(CommitsExact, [committed(10), *gone]) == VIOLATED
