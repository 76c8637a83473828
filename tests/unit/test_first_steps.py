"""``fleet run`` has one process try two steps of a script: mistakes are shown with the user's own lines, and nothing is left of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.first_steps import FirstSteps
from actors.rank.script_loading import load_train
from fleet.app import first_steps
from fleet.app.cli import main as cli
from fleet.app.cli import run as cli_run
from fleet.errors import ConfigError, RunFailed
from fleet.settings.run import RunSettings

LIMIT_S = 120.0
SCRIPT = """
import os, threading, time
from pathlib import Path
import torch
import fleet


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def train(run):
    print("from the script")
    model = torch.nn.Linear(4, {outputs})
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    {before}
    for step in run.steps(state, total=10):
        for batch in step.batches(Rows(), batch_size=32):
            {body}
        step.commit()
"""
GOOD = "step.backward(model(batch).mean())"


def written(folder: Path, body: str = GOOD, before: str = "", outputs: int = 1, name: str = "mine") -> str:
    path = folder / f"{name}.py"
    path.write_text(SCRIPT.format(body=body, before=before, outputs=outputs))
    return str(path)


@pytest.fixture(autouse=True)
def as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that is executed changes these."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def trial(script: str, joins: bool = False, settings: RunSettings | None = None) -> str:
    """Why nothing is known of the script; empty: it could be tried. Raises ConfigError."""
    with FirstSteps(load_train(script), settings or RunSettings(), joins) as steps:
        assert steps.wait(LIMIT_S)
        return steps.why_unknown


def test_a_script_that_is_right_leaves_nothing_and_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("data.txt").write_text("here")
    before = "assert Path('data.txt').read_text() == 'here' and not run.is_main; Path('new.txt').write_text('of the trial')"
    assert trial(written(tmp_path, before=before)) == ""
    assert sorted(os.listdir()) == ["data.txt"]
    assert "from the script" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        ("step.backward(torch.nn.functional.linear(batch, torch.ones(3, 3)).mean())", "torch.ones(3, 3)", "cannot be multiplied"),
        ("import nowhere_to_be_found", "import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("step.backward(1 / 0)", "step.backward(1 / 0)", "ZeroDivisionError"),
        ("step.backward(model(batch))", "step.backward(model(batch))", "only one element tensors can be converted"),
        ("raise SystemExit(0)", "raise SystemExit(0)", "SystemExit"),
        ("pass", "for batch in step.batches", "did not call step.backward(loss)"),
    ],
)
def test_a_mistake_is_shown_with_its_line_and_what_was_printed(tmp_path: Path, body: str, line: str, says: str) -> None:
    script = written(tmp_path, body, outputs=3)
    with pytest.raises(ConfigError) as raised:
        trial(script)
    said = str(raised.value)
    number = next(number for number, text in enumerate(Path(script).read_text().splitlines(), 1) if line in text)
    assert f'File "{script}", line {number}, in train' in said and line in said and says in said
    assert "It has printed:\nfrom the script" in said
    assert not any(f"{os.sep}actors{os.sep}{file}" in said for file in ("rank", "first_steps")) and "multiprocessing" not in said


def test_what_only_the_second_step_meets_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the second step"):
        trial(written(tmp_path, f"{GOOD}\n            assert step.number < 1, 'the second step'"))


def test_a_batch_that_does_not_divide_into_the_runs_shards_is_refused(tmp_path: Path) -> None:
    script = written(tmp_path)
    with pytest.raises(ConfigError, match="batch_size = 32: the global batch has to divide into 64 batch shards") as raised:
        trial(script, settings=RunSettings(shards=64))
    numbers = (number for number, text in enumerate(Path(script).read_text().splitlines(), 1) if "step.batches(" in text)
    assert f"{script}, line {next(numbers)}: for batch in step.batches(" in str(raised.value), "the line of the call"


def test_a_train_function_without_a_loop_is_refused_without_a_line(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("def train(run):\n    pass\n")
    with pytest.raises(ConfigError, match="took no step") as raised:
        trial(str(path))
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("open({outside!r}, 'w')", "it changes {outside}"),
        ("Path({outside!r}).write_text('')", "it changes {outside}"),
        ("os.makedirs({outside!r})", "it changes {outside}"),
        ("os.remove({kept!r})", "it changes {kept}"),
        ("os.rename({kept!r}, 'mine')", "it changes {kept}"),
        ("run.once(lambda: os.system('true'))", "it starts a program in a function of run.once"),
        ("thread = threading.Thread(target=lambda: open({outside!r}, 'w')); thread.start(); thread.join()", "it changes {outside}"),
        ("os.kill(os.getpid(), 9)", "its process has ended with -9"),
        ("raise MemoryError", "it does not fit into the memory of one process here"),
        ("raise Exception('CUDA out of memory')", "it does not fit into the memory of one process here"),
        ("run.track(large=torch.nn.Linear(1 << 25, 1 << 25, device='meta'))", "a model of 4.19e+06 GiB"),
        ("open('../beside.txt')", "it needs a file or connection that the trial does not have"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_told_the_run_goes_on_and_nothing_was_changed(tmp_path: Path, before: str, why: str) -> None:
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    kept.write_text("kept")
    Path("../beside.txt").write_text("")
    script = written(tmp_path, before=before.format(outside=str(outside), kept=str(kept)))
    assert trial(script).startswith(why.format(outside=outside, kept=kept))
    assert not outside.exists() and kept.read_text() == "kept"


def test_a_file_that_only_nodes_have_is_no_mistake_of_a_run_on_a_cluster(tmp_path: Path) -> None:
    script = written(tmp_path, before="open('/data/of/the/nodes')")
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        trial(script)
    assert trial(script, joins=True).startswith("it needs a file or connection that the trial does not have")


def test_a_trial_that_is_given_up_is_gone_with_what_it_has_started(tmp_path: Path) -> None:
    before = "Path('pids').write_text(str(os.getpid())); __import__('subprocess').Popen(['sleep', '600']); time.sleep(600)"
    with FirstSteps(load_train(written(tmp_path, before=before)), RunSettings(), False) as steps:
        assert not steps.wait(0.0)
        pid = steps._process.pid
    assert not psutil.pid_exists(pid) and steps.wait(0.0)


# ---- of the command ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``fleet run``, which comes to no cluster: (exit code, what it says)."""

    @contextmanager
    def ground(*_: Any) -> Iterator[Any]:
        raise ConfigError("a cluster", "started", "nothing has stopped it")
        yield

    monkeypatch.setattr(cli_run, "_ground", ground)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fleet", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def train(run):\n    for\n", "line 2"),
        (SCRIPT.format(before="", outputs=1, body="import nowhere_to_be_found"), "import nowhere_to_be_found"),
        (SCRIPT.format(before="", outputs=1, body="step.backward(model(batch.reshape(-1, 3)).mean())"), "batch.reshape(-1, 3)"),
        (SCRIPT.format(before="", outputs=1, body="step.backward(model(batch).mean() / 0 // None)"), "/ 0 // None"),
    ],
    ids=["a_syntax_error", "a_missing_package", "a_wrong_shape", "an_exception_in_the_loss"],
)
def test_a_mistake_ends_the_command_before_a_cluster(
    tmp_path: Path, run: Callable[..., tuple[int, str]], text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_steps, "ALONE_S", LIMIT_S)
    path = tmp_path / "wrong.py"
    path.write_text(text)
    code, said = run(str(path), "--world", "2")
    assert code == 2 and line in said and f'File "{path}"' in said and "a cluster" not in said, said
    assert not Path("runs").exists()


def test_without_a_trial_and_behind_one_the_run_goes_on(
    tmp_path: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_steps, "ALONE_S", LIMIT_S)
    assert "a cluster" in run(written(tmp_path, "1 / 0"), "--no-trial")[1]
    assert "a cluster" in run(written(tmp_path))[1]
    assert "could not be tried first: it changes" in run(written(tmp_path, before=f"open({str(tmp_path / 'outside')!r}, 'w')"))[1]


def test_a_mistake_that_is_found_beside_a_cluster_that_does_not_start_is_told(
    tmp_path: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        """A trial that has an answer from the second look on."""

        looks = 0

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Late:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def wait(self, limit_s: float) -> bool:
            Late.looks += 1
            if Late.looks > 1:
                raise ConfigError("script", "late.py", "it raises in its first steps")
            return False

    def ground(*_: Any) -> None:
        raise RunFailed("node 0 of the local cluster did not come up")

    monkeypatch.setattr("actors.first_steps.FirstSteps", Late)
    monkeypatch.setattr(cli_run, "_ground", ground)
    code, said = run(written(tmp_path), "--world", "2")
    assert code == 2 and "it raises in its first steps" in said and "did not come up" not in said, said


def test_what_takes_long_is_waited_for_twice_and_then_given_up(tmp_path: Path) -> None:
    from fleet.app.plans import RunPlan

    now_s, said = [0.0], list[str]()
    train = load_train(written(tmp_path, before="time.sleep(600)"))
    plan = RunPlan(name="slow", folder=tmp_path, settings=RunSettings(), train=train)
    with first_steps.tried_first(plan, False, lambda: now_s[0], said.append) as wait:
        wait(0.5)
        assert said == []
        now_s[0] = first_steps.LIMIT_S
        wait(first_steps.LIMIT_S)
        assert said == [f"two steps of the script take longer than {first_steps.LIMIT_S:g} s in one process: it is not tried first"]


def test_ranks_that_belong_together_are_not_tried(tmp_path: Path) -> None:
    from fleet.app.plans import RunPlan

    said = list[str]()
    settings = RunSettings(world=4, optimizer_sharding="fsdp", replica_size=2)
    plan = RunPlan(name="groups", folder=tmp_path, settings=settings, train=load_train(written(tmp_path, "1 / 0")))
    with first_steps.tried_first(plan, False, lambda: 0.0, said.append) as wait:
        wait(first_steps.LIMIT_S)
    assert said == ["the script is not tried first: its ranks belong together in groups of 2, and one process is none"]
