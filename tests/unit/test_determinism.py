"""``fleet doctor --determinism``: planted causes are found by name, clean scripts are clean; comparison, naming and price are pure."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.rank.script_loading import found as found_script
from actors.rank.script_loading import train_of
from actors.rank.trial.trial import attempt, tried
from actors.script_trials import InProcesses
from fleet.app.cli.main import app
from fleet.errors import ConfigError, FleetError
from fleet.ledger import sameness
from fleet.ledger.sameness import (
    AT_ONCE,
    BATCH,
    GRADIENT,
    HASH,
    IN_GRADIENT,
    INPUT,
    LATE,
    LOOP,
    LOSS,
    OP,
    ORDER,
    OUT_GRADIENT,
    OUTPUT,
    RATE,
    SEEDED,
    START,
    UPDATED,
    VARIED,
    Trial,
    TrialMark,
    TrialRequest,
    first_difference,
    first_operation,
)  # fmt: skip
from fleet.settings.run import RunSettings
from policies import determinism
from policies.determinism import AGAIN, DeterminismFinding, examine, priced
from tests.support import planted
from tests.support.planted import Planted

SETTINGS = RunSettings(world=1, shards=4)
EXAMPLES = Path(__file__).parents[2] / "examples"


def written(folder: Path, name: str, text: str) -> str:
    (folder / "between.txt").write_text("")
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def examined(script: str) -> list[DeterminismFinding]:
    """All trials in this process: quick, and without another PYTHONHASHSEED."""

    def one(asked: TrialRequest, begins: Path | None, ends: Path | None) -> Trial:
        return attempt(lambda: train_of(found_script(script)), SETTINGS, asked, begins, ends)

    return examine(lambda asked: tried(one, asked))


@pytest.fixture(autouse=True)
def arguments_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is executed has its own."""
    monkeypatch.setattr(sys, "argv", sys.argv)


# ---- scripts -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(planted.ALL)), ids=[one.name.replace(" ", "_") for one in planted.ALL])
def test_a_planted_cause_is_found_by_name(number: int, tmp_path: Path) -> None:
    one: Planted = planted.ALL[number]
    found = examined(written(tmp_path, f"planted_{number}", one.script))
    assert found, "nothing differs"
    reported = found[0]
    assert reported.place == one.place, reported
    assert not one.varied or (reported.varied, reported.cause) == (one.varied, one.cause), reported
    assert one.operation in reported.operation, reported
    assert not one.call or any(one.call in call.what for call in reported.calls), reported
    assert reported.reason and reported.way_out and reported.what
    assert reported.cause != "state" or reported.kept, "what is kept has a line"


@pytest.mark.parametrize("number", range(len(planted.CARRIED)), ids=[one.name.replace(" ", "_") for one in planted.CARRIED])
def test_what_is_carried_from_step_to_step_is_named_with_its_line(number: int, tmp_path: Path) -> None:
    one = planted.CARRIED[number]
    reported = examined(written(tmp_path, f"carried_{number}", one.script))
    if not one.what:
        assert reported == []
        return
    [found] = reported
    assert (found.varied, found.cause) == (LATE, "carried") or (found.varied, found.cause) == (ORDER, "state"), found
    line = next(at for at, text in enumerate(one.script.splitlines(), 1) if text.strip() == one.line.strip())
    assert f"carried_{number}.py:{line}" in [kept.line for kept in found.kept if one.what in kept.what], found.kept


def test_a_script_without_any_is_clean(tmp_path: Path) -> None:
    assert examined(written(tmp_path, "clean", planted.script())) == []


@pytest.mark.parametrize("name", ["digits", "nano", "gpt"])
def test_an_example_is_clean(name: str) -> None:
    assert examined(str(EXAMPLES / f"{name}.py")) == []


def test_what_is_another_in_each_process_is_found_by_processes(tmp_path: Path) -> None:
    trials = InProcesses(found_script(written(tmp_path, "by_hash", planted.BY_HASH)), SETTINGS)
    first = trials(TrialRequest())
    found = first_difference(first, trials(TrialRequest(frozenset({HASH}))))
    assert found is not None
    assert (found.place, found.kind) == ("model.odd", OUTPUT)
    trials = InProcesses(found_script(written(tmp_path, "by_process", planted.BY_PROCESS)), SETTINGS)
    first = trials(TrialRequest())
    found = first_difference(first, trials(TrialRequest()))
    assert found is not None
    assert (found.place, found.kind) == ("Rows", BATCH)
    assert "os.getpid()" in {call.what for call in first.calls}


TOP_LEVEL = """
import sys
import torch
import fleet
torch.set_default_dtype(torch.float64)
TOP = [fleet.is_main(), fleet.current_run().is_twin, *sys.argv[1:]]
"""


def test_a_trial_executes_the_script_as_a_rank_does(tmp_path: Path) -> None:
    body = "raise ValueError([*TOP, str(model[0].weight.dtype), run.is_main])"
    script = found_script(written(tmp_path, "top_level", planted.loop(top=TOP_LEVEL, body=body)), ("--lr", "3"))
    with pytest.raises(FleetError, match=r"ValueError: \[True, True, '--lr', '3', 'torch.float64', True\]"):
        InProcesses(script, SETTINGS)(TrialRequest())


def test_what_a_script_raises_is_told_and_what_cannot_be_loaded_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"the script raised ZeroDivisionError"):
        InProcesses(found_script(written(tmp_path, "raises", "def train(run):\n    1 / 0\n")), SETTINGS)(TrialRequest())
    with pytest.raises(ConfigError, match="no such file"):
        InProcesses(found_script(str(tmp_path / "nowhere.py")), SETTINGS)(TrialRequest())
    assert "took no step" in attempt(lambda: lambda run: None, SETTINGS, TrialRequest()).error


def test_a_draw_of_its_own_is_the_same_with_its_form_and_is_priced(tmp_path: Path) -> None:
    one = next(each for each in planted.ALL if each.name == "the kernel's entropy")
    script = written(tmp_path, "entropy", one.script)
    asked: list[TrialRequest] = []

    def run(what: TrialRequest) -> Trial:
        asked.append(what)
        return attempt(lambda: train_of(found_script(script)), SETTINGS, what)

    [found] = examine(run)
    cost = priced(found, run).cost
    assert cost is not None
    assert (cost.form, cost.holds) == (SEEDED, True)
    assert min(cost.step_s, cost.form_step_s, cost.module_s, cost.form_module_s) > 0
    assert [what.form for what in asked if what.timed] == ["", SEEDED, "", SEEDED]


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def test_the_command_tells_field_value_reason_way_out_and_cost(tmp_path: Path) -> None:
    one = next(each for each in planted.ALL if each.cause == "written")
    script = written(tmp_path, "writes", one.script)
    answer = CliRunner().invoke(app, ["doctor", "--determinism", script, "--config", "shards=4"])
    assert answer.exit_code == 1
    assert f"{script}: model.odd = 'parameter model.odd.scale': it differs from shard to shard: the forward writes to it" in answer.stdout
    assert "step.on_commit(fn)" in answer.stdout
    assert "  cost: a step takes " in answer.stdout


def test_a_clean_script_ends_with_0(tmp_path: Path) -> None:
    script = written(tmp_path, "clean", planted.script())
    answer = CliRunner().invoke(app, ["doctor", "--determinism", script, "--json", "--config", "shards=4"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout) == {"script": script, "clean": True, "trials": 4, "findings": []}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--determinism", "a.py", "--shards", "a.py"], "contradicts --determinism"),
        (["--cluster", "--determinism", "a.py"], "contradicts --cluster"),
        (["--", "a.py"], "ARGUMENTS = ['a.py']: it is about a script"),
        (["-m"], "--module = True: it is about a script"),
        (["--set", "a=1"], "it is about a script, and none is given"),
        (["--determinism", "a.py", "--set", "steps"], "not of the form key=value"),
        (["--determinism", "a.py", "--spares", "1"], "tries one rank"),
        (["--determinism", "a.py", "--world", "2"], "tries one rank"),
        (["--shards", "a.py", "--world", "0"], "at least one rank"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], says: str) -> None:
    answer = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(answer.exception, ConfigError)
    assert says in str(answer.exception)


# ---- the comparison ----------------------------------------------------------------------------------------------------------------------


def marks(*rows: str, shard: int = 0) -> list[TrialMark]:
    """``kind|where|digest|within`` each."""
    found = []
    for row in rows:
        kind, where, digest, *within = row.split("|")
        found.append(TrialMark(kind, where, digest, 0, shard, within[0] if within else LOOP))
    return found


def trial(*rows: str, error: str = "") -> Trial:
    return Trial(tuple(marks(*rows)), error=error)


def place(one: Trial, other: Trial) -> str | None:
    found = first_difference(one, other)
    return None if found is None else found.place


def test_the_innermost_module_whose_output_differs_is_named() -> None:
    rows = [f"{INPUT}|model|a", f"{INPUT}|model.0|a|model", f"{OUTPUT}|model.0|{{}}|model", f"{OUTPUT}|model|{{}}", f"{LOSS}|loss|{{}}"]
    one, other = (trial(*(row.format(value) for row in rows)) for value in "xy")
    assert place(one, other) == "model.0"
    assert place(one, one) is None
    other = trial(*(row.format("x") for row in rows[:3]), *(row.format("y") for row in rows[3:]))
    assert place(one, other) == "model"


def test_what_goes_into_a_module_is_the_doing_of_the_one_around_it() -> None:
    one, other = (trial(f"{BATCH}|Rows|b", f"{INPUT}|model|a", f"{INPUT}|model.0|{value}|model") for value in "xy")
    assert place(one, other) == "model"
    one, other = (trial(f"{BATCH}|Rows|b", f"{INPUT}|model|{value}") for value in "xy")
    assert place(one, other) == LOOP


def test_shards_are_compared_with_the_same_shards_whatever_their_order() -> None:
    shards = [marks(f"{OUTPUT}|model|{shard}", shard=shard) for shard in range(3)]
    one, other = (Trial(tuple(itertools.chain(*each))) for each in (shards, shards[::-1]))
    assert first_difference(one, other) is None


def test_another_way_through_the_modules_is_the_doing_of_who_calls() -> None:
    one = trial(f"{INPUT}|model|a", f"{INPUT}|model.0|a|model")
    other = trial(f"{INPUT}|model|a", f"{INPUT}|model.1|a|model")
    assert place(one, other) == "model"
    found = first_difference(one, other)
    assert found is not None
    assert "input of model.0 in one trial, and input of model.1 in the other" in determinism.described(found)


def test_a_backward_is_blamed_on_the_innermost_module_that_was_given_the_same() -> None:
    rows = [f"{OUT_GRADIENT}|model.1|a", f"{OUT_GRADIENT}|model.1.0|a", f"{IN_GRADIENT}|model.1.0|{{}}", f"{OUT_GRADIENT}|model.0|{{}}"]
    rows += [f"{IN_GRADIENT}|model.1|{{}}", f"{GRADIENT}|model.0.weight|{{}}"]
    one, other = (trial(*(row.format(value) for row in rows)) for value in "xy")
    assert place(one, other) == "model.1.0"
    one, other = (trial(f"{OUT_GRADIENT}|model.0|a", f"{GRADIENT}|model.0.weight|{value}") for value in "xy")
    assert place(one, other) == "model.0"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (f"{START}|model.0.weight|", "model.0"),
        (f"{RATE}|learning rate of group 0|", LOOP),
        (f"{LOSS}|loss|", LOOP),
        (f"{UPDATED}|model.0.weight in the optimizer|", "model.0"),
        (f"{BATCH}|Rows|", "Rows"),
    ],
)
def test_each_kind_has_its_place(row: str, named: str) -> None:
    assert place(trial(row + "x"), trial(row + "y")) == named


def test_a_trial_that_ended_early_is_compared_as_far_as_it_came() -> None:
    rows = [f"{INPUT}|model|a", f"{OUTPUT}|model|b"]
    assert place(trial(*rows), trial(rows[0], error="it was ended")) is None
    assert place(trial(*rows), trial(f"{INPUT}|model|c", error="it was ended")) == LOOP
    assert place(trial(*rows), trial(rows[0])) == LOOP


def test_an_operation_is_named_when_it_was_given_the_same() -> None:
    def ops(*each: tuple[str, str, str]) -> Trial:
        return Trial(tuple(TrialMark(OP, name, gave, 0, 0, given=given) for name, given, gave in each))

    one = ops(("aten::mul", "a", "b"), ("mine::noisy", "b", "c"))
    found = first_operation(one, ops(("aten::mul", "a", "b"), ("mine::noisy", "b", "d")))
    assert found is not None
    assert found.where == "mine::noisy"
    assert first_operation(one, ops(("aten::mul", "x", "y"), ("mine::noisy", "y", "d"))) is None
    assert first_operation(one, one) is None


def test_few_trials_where_nothing_differs_and_each_alone_where_something_does() -> None:
    asked: list[TrialRequest] = []

    def run(what: TrialRequest, guilty: str = "") -> Trial:
        asked.append(what)
        return trial(f"{OUTPUT}|model|{'y' if guilty in what.varied else 'x'}")

    assert examine(run) == []
    assert [what.varied for what in asked] == [frozenset(), frozenset(), AT_ONCE, frozenset({LATE})]
    for guilty in VARIED:
        [found] = examine(lambda what, guilty=guilty: run(what, guilty))  # type: ignore[misc]
        assert (found.place, found.varied) == ("model", guilty)


def test_what_differs_now_and_then_is_not_blamed_on_what_was_varied() -> None:
    values = iter("xxyzzz")
    [found] = examine(lambda asked: trial(f"{OUTPUT}|model|{next(values)}"))
    assert found.varied == AGAIN


def test_what_takes_several_things_at_once_is_told_as_such() -> None:
    [found] = examine(lambda asked: trial(f"{OUTPUT}|model|{len(asked.varied) > 1}"))
    assert found.varied == determinism.TOGETHER


def test_every_variation_has_words_a_cause_and_a_way_out() -> None:
    assert determinism.OTHERWISE.keys() == {*VARIED, determinism.TOGETHER}
    assert all(reason and way_out for _, reason, way_out, _ in determinism.OTHERWISE.values())
    assert sameness.FORMS.keys() >= {form for *_, forms in determinism.OTHERWISE.values() for form in forms}
