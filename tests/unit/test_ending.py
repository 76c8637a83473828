"""The last lines of a run, and what ``--expect`` makes of its report."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fleet.app import expects, twins
from fleet.app.cli import run as cli_run
from fleet.app.ending import EndContext, JoinedPlace, ending
from fleet.app.plans import RunPlan, RunResult, place_of, without_twin
from fleet.app.result import report_data
from fleet.errors import ConfigError
from fleet.ledger.checkers import violated
from fleet.ledger.factors import Factors
from fleet.ledger.figures import figure, share, with_prefix
from fleet.ledger.report import build_report
from fleet.ledger.summary import STEP_NAMES
from fleet.protocol.exit_codes import Exit
from fleet.settings.run import RunSettings
from tests.golden.journals import Story
from tests.unit.test_report import golden_story

CONTEXT = EndContext("story", "file:///runs/story")


def data(story: Story | None = None, **more: Any) -> dict[str, Any]:
    return json.loads(build_report((story or golden_story()).records).to_json()) | more


def lines(given: dict[str, Any], context: EndContext = CONTEXT) -> dict[str, str]:
    return dict(ending(given, context))


def test_a_run_that_completed_ends_with_eight_lines_at_most_and_how_to_load_its_model() -> None:
    twin = twins.verdict("ab", "ab", True, "completed", "", 2)
    found = ending(data(twin=twin), CONTEXT)
    assert [head for head, _ in found] == ["run", "goodput", "lost", "faults", "factors", "saved", "twin", "more", "next"]
    reported = dict(found)
    assert reported["run"].startswith("completed; 60 steps in 7.3 s")
    assert reported["goodput"].endswith("% of 2 ranks' time")
    assert reported["lost"].startswith("init 1")
    unknown = "goes_on (no fault has stopped or slowed the run), bits (no bit was flipped, and no twin has run to compare with)"
    assert (
        reported["faults"]
        == f"1 struck (1 kill_rank), 1 suppressed (the run is about to end); 1 rank lost while training; 5 checks ok; not known: {unknown}"
    )
    assert reported["saved"] == "step 60, in file:///runs/story"
    assert reported["twin"] == "equal, bit for bit, without faults, world 2: sha256 ab"
    load = 'torch.load("model.pt", weights_only=True)["model"], or as run.track named it'
    assert reported["next"] == f"fleet checkpoint export story --output model.pt, then {load}"


def test_its_figures_can_be_read() -> None:
    assert [figure(value) for value in (0.0, 1.43217, 0.00612345, 12345.678, 6.1e-5, -2500.4)] == [
        "0", "1.432", "0.006123", "12,346", "6.1e-05", "-2,500",
    ]  # fmt: skip
    assert (with_prefix(5.32e10, "FLOP/s"), with_prefix(12.0, "B/s")) == ("53.2 GFLOP/s", "12 B/s")
    assert (share(0.9123), share(0.00042), share(0.0)) == ("91.2%", "0.042%", "0.0%")
    said = str(Factors(0.95, 0.91, 0.00042, "measured"))
    assert said == "scheduling 95.0% x runtime 91.0% x program 0.042% (measured) = 0.036%"
    twin = twins.verdict("ab" * 32, "ab" * 32, True, "completed", "", 2)
    assert lines(data(twin=twin))["twin"].endswith("sha256 abababababab...")


def test_a_check_that_is_violated_is_named() -> None:
    wrong = {"check": "ranks_left", "verdict": "violated", "reason": "no new view"}
    assert lines(data(checks=[wrong]))["faults"].endswith("; VIOLATED ranks_left: no new view")


def test_goodput_of_all_slots_and_what_was_lost_add_up() -> None:
    given = data()
    spent = given["categories"] | {"idle_spare": sum(given["categories"].values()) / 2}
    whole = sum(spent.values())
    steps = sum(spent[name] for name in STEP_NAMES)
    reported = lines(given | {"spares": 1, "categories": spent, "scheduling_goodput": steps / whole})
    shares = [float(share) for line in ("goodput", "lost") for share in re.findall(r"([\d.]+)%", reported[line])]
    assert "of all 3 slots" in reported["goodput"]
    assert sum(shares[1:]) == pytest.approx(100.0, abs=0.3), "the first is of the world's ranks alone"


def test_what_did_not_go_well_is_said() -> None:
    story = golden_story()
    story.records.pop()
    story.ended(7340, status="failed")
    failed = lines(data(story), EndContext("a run", "file:///x", storage="/my runs"))
    assert "failed: all steps are committed" in failed["run"]
    assert failed["next"] == "fleet run --resume 'a run' --storage '/my runs'"
    bare = Story(world=1)
    bare.ended(1000, status="stopped")
    nothing = lines(data(bare))
    assert (nothing["saved"], nothing["next"]) == ("nothing: no checkpoint became durable", "fleet report story --diagnose")
    twin = twins.verdict("ab", "cd", True, "completed", "", 2)
    assert lines(data(twin=twin))["twin"] == "DIFFERENT, world 2: run ab, twin cd"


def test_what_has_failed_twice_is_not_advised_once_more() -> None:
    """The same resume was advised after each of three that came to the same step."""
    story = golden_story()
    story.records.pop()
    story.ended(7340, status="failed")
    reported = [lines(data(story), EndContext("run", "file:///x", returns=returns))["next"] for returns in range(3)]
    assert reported[0] == "fleet run --resume run"
    assert reported[1].startswith("fleet run --resume run, which begins from an older checkpoint")
    assert "--resume" not in reported[2] and "mend the script" in reported[2]


def test_a_twin_that_came_to_no_end_is_neither_equal_nor_different() -> None:
    """It was called DIFFERENT, and the check of the bits violated."""
    cut = twins.verdict("ab", "", False, "stopped", "Ctrl-C", 2)
    assert cut["verdict"] == "not completed" and cut["equal"] is None
    report = build_report(golden_story().records)
    reported = report_data(report, "", cut)
    assert not violated(reported["checks"])
    assert lines(data(twin=cut))["twin"] == "not completed, so nothing was compared: it ended as stopped: Ctrl-C"
    none = twins.not_run("failed", "a crash loop", 2)
    assert lines(data(twin=none))["twin"] == "not run: this run ended as failed: a crash loop"
    assert [twins.found_in(each) for each in (cut, none)] == [twins.Sameness.NOT_COMPLETED, twins.Sameness.NOT_RUN]


@pytest.mark.parametrize(
    ("run", "twin", "code"),
    [
        ("completed", twins.verdict("ab", "ab", True, "completed", "", 2), Exit.DONE),
        ("completed", twins.verdict("ab", "cd", True, "completed", "", 2), Exit.FAILED),
        ("completed", twins.verdict("ab", "", False, "failed", "a bug", 2), Exit.FAILED),
        ("completed", twins.verdict("ab", "", False, "stopped", "Ctrl-C", 2), Exit.STOPPED),
        ("stopped", twins.not_run("stopped", "Ctrl-C", 2), Exit.STOPPED),
        ("failed", twins.not_run("failed", "a bug", 2), Exit.FAILED),
    ],
)
def test_the_exit_code_takes_no_twin_that_was_cut_off_for_one_that_differs(run: str, twin: dict[str, Any], code: Exit) -> None:
    plan = RunPlan(name="run", folder=Path("run"), settings=RunSettings(), train=print)
    assert cli_run._exit_code(RunResult(plan=plan, status=run, reason="", detail=""), twin) == code


def test_a_run_whose_user_stopped_it_when_it_had_just_ended_gets_no_twin() -> None:
    """Once the twin was trained all the same, and the experiment was held."""
    result = RunResult(
        plan=RunPlan(name="run", folder=Path("run"), settings=RunSettings(), train=print), status="completed", reason="", detail=""
    )
    found = without_twin(result, "SIGINT", 2)
    assert cli_run._exit_code(result, found) == Exit.STOPPED
    assert lines(data(twin=found))["twin"] == "not run: this run ended as stopped: SIGINT, when all its steps were taken"


def test_chaos_that_did_not_strike_is_no_test() -> None:
    story = Story(world=1)
    story.ended(9000)
    reported = lines(data(story, trained_s=7.0), EndContext("story", "", 41.0))
    due = "the first was due after 41.0 s of training, and the run was over after 7.0 s"
    assert reported["faults"] == f"no fault struck: {due}; 0 ranks lost while training"
    assert lines(data(story))["faults"] == "none were planned; 0 ranks lost while training"


def test_faults_that_were_suppressed_are_told_with_their_reasons() -> None:
    """Once a run in which chaos left the last rank of each coordinate said only that no fault struck."""
    story = Story(world=1)
    for number, reason in enumerate(("it would leave no rank at tensor=1", "it would leave no rank at tensor=1", "its slot is empty")):
        story.fault(f"gpu-{number}", "kill_rank", "suppressed", 1000.0 * number, detail=reason)
    story.ended(9000)
    reported = lines(data(story, trained_s=7.0), EndContext("story", "", 1.0))["faults"]
    reasons = "it would leave no rank at tensor=1; its slot is empty"
    assert reported == f"no fault struck, 3 suppressed ({reasons}); 0 ranks lost while training"


# ---- what is expected ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["goodput>0.5", "faults>=1", " faults == 1 ", "status==completed", "status != failed", "steps==60", "losses<2"]
)
def test_an_expectation_that_holds_says_nothing(text: str) -> None:
    assert expects.unmet([expects.parse(text)], data()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults>=3", "expected faults>=3: faults is 1"),
        ("goodput>0.99", "expected goodput>0.99: goodput is 0.68"),
        ("status==failed", "expected status==failed: status is completed"),
        ("twin", "expected twin: no twin ran"),
        ("loss<1", "expected loss<1: the report has no loss"),
    ],
)
def test_an_expectation_that_does_not_hold_comes_with_the_figure(text: str, words: str) -> None:
    [line] = expects.unmet([expects.parse(text)], data())
    assert line.startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("goodput", "not of the form"), ("goodput>>1", "is no number"), ("goodput>most", "is no number"), ("bliss>1", "no figure bliss"),
        ("status>1", "is a word"), ("", "not of the form"), ("__import__('os')==1", "not of the form"), ("twin", "without --twin"),
    ],
)  # fmt: skip
def test_a_malformed_expectation_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        expects.parse_all([text], twin=False)
    assert refused.value.field == "--expect" and refused.value.way_out


def test_every_figure_is_in_the_report() -> None:
    assert all(isinstance(read(data()), (int, float, type(None))) for read in expects.FIGURES.values())
    assert expects.parse_all(["twin"], twin=True)[0].name == "twin"


def test_the_last_lines_of_a_joined_run_are_whole_commands_and_name_the_place_of_its_checkpoints() -> None:
    """From any node of the cluster: neither the folder of this process nor that of the head is what checkpoints lie in."""
    for storage, place, there in (
        ("s3://bucket/runs", "s3://bucket/runs/story", "s3://bucket/runs/story"),
        ("/shared/my runs", "file:///shared/my runs/story", "'/shared/my runs/story'"),
    ):
        context = EndContext("story", place, joined=JoinedPlace("10.0.0.1:6379", storage, place))
        assert lines(data(), context)["next"].startswith(f"fleet checkpoint export {there} --output model.pt")
        stopped = lines(data(status="stopped"), context)["next"]
        assert stopped == f"fleet run --resume story --storage {shlex.quote(storage)} --address 10.0.0.1:6379"
    on_the_head = EndContext("story", "~/.fleet/runs/story of the cluster's head", joined=JoinedPlace("auto", "runs", ""))
    assert lines(data(status="stopped"), on_the_head)["next"] == "fleet run --resume story --address auto"
    assert lines(data(status="stopped"), on_the_head)["saved"] == "step 60, in ~/.fleet/runs/story of the cluster's head"
    taken = EndContext("story", "s3://bucket/runs/story", taken_over=True)
    assert lines(data(status="stopped"), taken)["next"] == "nothing: the run goes on there, and this record ends here"


def test_checkpoints_of_a_joined_run_lie_under_its_storage_and_not_beside_the_copy(tmp_path: Path) -> None:
    for storage, address, place in (
        ("s3://bucket/runs", "auto", "s3://bucket/runs/story"),
        ("/shared/runs", "auto", "file:///shared/runs/story"),
        ("runs", "auto", ""),
        ("runs", "", f"file://{tmp_path}/story"),
    ):
        plan = RunPlan(name="story", folder=tmp_path / "story", settings=RunSettings(storage=storage), train=print)
        assert place_of(plan, address) == place
