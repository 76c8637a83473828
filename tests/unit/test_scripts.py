"""A user's script: how it is found, executed and sent, what its first lines import, and which process is the main one."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fleet
from actors.rank.current import within
from actors.rank.preloads import imports_of
from actors.rank.script import Script
from actors.rank.script_loading import found, load_named, load_train, train_of
from fleet.app import plans
from fleet.app.cluster.joined import SUBMITTED, top_of
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.protocol.records import VERSION, RunStarted
from fleet.settings.run import RunSettings

UNPICKLABLE = """
import os, sys, threading
import torch
import fleet
from beside_me import LIMIT

LOCK, FILE, SQUARE, MODULE, BACKENDS = threading.Lock(), sys.__stderr__, lambda x: x * x, os, torch.backends.cuda.matmul
TOLD = [__name__, LIMIT, fleet.is_main(), *sys.argv]


def train(run):
    torch.backends.cuda.matmul.allow_tf32 = BACKENDS.allow_tf32
    with LOCK:
        run.reported = [SQUARE(3), FILE.closed, *TOLD]
"""


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script that is executed changes these."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "beside_me" in name or "job_of" in name or name.startswith("fleet_user"):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "job_of_mine.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "beside_me.py").write_text("LIMIT = 7\n")
    (folder / name).write_text(text)
    return str(folder / name)


def run_of(main: bool) -> Any:
    return SimpleNamespace(is_main=main, reported=None)


def test_a_script_that_names_what_cannot_be_pickled_is_sent_and_executed_there(tmp_path: Path) -> None:
    path = written(tmp_path, UNPICKLABLE)
    sent = pickle.loads(pickle.dumps(load_train(path, ("--lr", "3"))))
    run = run_of(True)
    with within(run):
        sent(run)
    assert run.reported == [9, False, "job_of_mine", 7, True, path, "--lr", "3"]
    assert sys.path[0] == str(tmp_path)


def test_to_look_at_a_script_leaves_this_process_its_arguments_and_makes_it_no_main_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.argv)
    path = written(tmp_path, "import fleet\nMAIN = fleet.is_main()\nprint('words')\n\ndef train(run):\n    pass\n")
    load_train(path, ("--lr", "3"))
    assert capsys.readouterr() == ("", "words\n"), "stdout is for reports"
    assert sys.argv == before
    assert load_named(path, "MAIN") is False
    assert fleet.is_main() is True, "behind it all is as before"


@pytest.mark.parametrize("main", [True, False])
def test_in_a_rank_it_is_said_what_run_is_main_says(main: bool) -> None:
    with within(run_of(main)):
        assert fleet.is_main() is main


def test_a_process_that_comes_later_executes_the_text_of_the_beginning(tmp_path: Path) -> None:
    path = written(tmp_path, "def train(run):\n    run.reported = 'first'\n")
    sent, run = load_train(path), run_of(True)
    Path(path).write_text("def train(run):\n    run.reported = 'edited'\n")
    sent(run)
    assert run.reported == "first"
    Path(path).unlink()
    assert "'first'" in inspect.getsource(train_of(sent))


@pytest.mark.parametrize(
    ("name", "called"), [("random.py", "fleet_user_random"), ("pytest.py", "fleet_user_pytest"), ("a-b.v2.py", "fleet_user_a_b_v2")]
)
def test_a_script_takes_the_name_of_no_other_module(tmp_path: Path, name: str, called: str) -> None:
    script = found(written(tmp_path, "def train(run):\n    pass\n", name))
    assert (script.name, script.is_module) == (called, False)
    train_of(script)
    assert sys.modules["random"] is __import__("random") and not hasattr(sys.modules["random"], "train")


def test_its_classes_can_be_pickled_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "class Rows:\n    pass\n\n\ndef train(run):\n    run.reported = Rows()\n")
    run = run_of(True)
    load_train(path)(run)
    assert type(pickle.loads(pickle.dumps(run.reported))) is type(run.reported)


# ---- modules of packages -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "job_of_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rows.py").write_text("COUNT = 5\n")
    text = "import sys\nfrom .rows import COUNT\n\ndef train(run):\n    run.reported = (__name__, __package__, COUNT, sys.argv[1:])\n"
    (folder / "fit.py").write_text(text)
    (folder / "__main__.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return folder.name


@pytest.mark.parametrize(("named", "inside"), [(".fit", ".fit"), ("", ".__main__")])
def test_a_module_is_executed_in_its_package(package: str, named: str, inside: str) -> None:
    script, run = load_train(package + named, ("--lr", "3"), module=True), run_of(True)
    script(run)
    assert run.reported == (package + inside, package, 5, ["--lr", "3"])
    assert script.is_module


@pytest.mark.parametrize("name", ["no_such_package.train", "job_of_package.none", "sys", ".x"])
def test_a_module_that_is_not_there_is_refused_by_name(package: str, name: str) -> None:
    with pytest.raises(ConfigError, match="python -m") as refused:
        load_train(name, module=True)
    assert (refused.value.field, refused.value.value) == ("script", name)


# ---- other machines ----------------------------------------------------------------------------------------------------------------------


def test_what_travels_is_found_below_the_working_directory() -> None:
    script = Script("train", "/home/me/job/src/train.py", b"", "/home/me/job/src")
    at = script.carried(Path("/home/me/job"))
    assert (at.file, at.folder) == ("src/train.py", "src")
    assert (script.carried(Path("/home/me/job/src")).file, script.carried(Path("/home/me/job/src")).folder) == ("train.py", ".")
    for elsewhere in (None, Path("/home/me/other")):
        assert (script.carried(elsewhere).file, script.carried(elsewhere).folder) == (script.file, "")


def test_in_a_job_that_was_submitted_ranks_have_the_jobs_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert top_of(tmp_path / "src") == tmp_path / "src"
    monkeypatch.setenv(SUBMITTED, "{}")
    script = Script("train", str(tmp_path / "src/train.py"), b"", str(tmp_path / "src"))
    assert script.carried(top_of(tmp_path / "src")).folder == "src"


def test_there_it_is_executed_with_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    path = written(here, "from beside_me import LIMIT\n\ndef train(run):\n    run.reported = (LIMIT, __file__)\n")
    script = load_train(path).carried(here)
    written(there, "raise RuntimeError\n")
    (there / "beside_me.py").write_text("LIMIT = 8\n")
    del sys.modules["beside_me"]
    sys.path.remove(str(here))
    monkeypatch.chdir(there)
    run = run_of(True)
    script(run)
    assert run.reported == (8, str(there / "job_of_mine.py"))


# ---- ahead of time -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ahead"),
    [
        (
            '"""Words."""\nfrom __future__ import annotations\nimport os\nimport numpy as np\nfrom torch import nn\n',
            ["import numpy as np", "from torch import nn"],
        ),
        ("import os\nos.environ['A'] = '1'\nimport numpy\n", []),
        ("import numpy\nprint('words')\nimport torch\n", ["import numpy"]),
        ("LR = 0.1\ndef f(): pass\nclass A: pass\nimport numpy\n", ["import numpy"]),
        ("LR = float('1')\nimport numpy\n", []),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None\nimport torch\n", ["import numpy", "import torch"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nimport numpy\n", ["import numpy"]),
        ("if 1:\n    import torch\nimport numpy\n", []),
        ("import no_such_module_at_all\nimport numpy\n", ["import numpy"]),
        ("import beside_me\nimport torch\n", ["import numpy", "import torch"]),
        ("from in_a_package.part import A\nimport torch\n", []),
        ("from . import x\nimport torch\n", []),
        ("import (\n", []),
    ],
)  # fmt: skip
def test_imports_of_the_first_lines_may_be_carried_out_ahead(tmp_path: Path, text: str, ahead: list[str]) -> None:
    (tmp_path / "beside_me.py").write_text("import numpy\nimport beside_me\n")
    (tmp_path / "in_a_package").mkdir()
    (tmp_path / "in_a_package" / "__init__.py").write_text("")
    (tmp_path / "in_a_package" / "part.py").write_text("import os\nos.environ['A'] = '1'\nimport numpy\n")
    assert imports_of(text.encode(), tmp_path) == ahead


# ---- runs that are had again -------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_had_again_has_its_arguments_and_its_module(package: str, tmp_path: Path) -> None:
    train = load_train(f"{package}.fit", ("--lr", "3"), module=True)
    plan = plans.RunPlan(name="old", folder=tmp_path / "old", settings=RunSettings(), train=train, script=train.file)
    writer = JournalWriter(plan.journal)
    writer.append(RunStarted(VERSION, "old", 0.0, 0.0, 4, 1, 16, plans.describe(plan)))
    writer.close()
    for again in (plans.resumed_plan(plan.folder, plans.Executed()), plans.repeated_plan(plan.folder, plans.Executed(), tmp_path)):
        assert (again.train, again.script) == (train, plan.script)
    other = written(tmp_path / "other", "def train(run):\n    pass\n")
    replaced = plans.resumed_plan(plan.folder, plans.Executed(other))
    assert (cast(Script, replaced.train).file, cast(Script, replaced.train).arguments) == (other, ("--lr", "3"))
    assert cast(Script, plans.resumed_plan(plan.folder, plans.Executed(other, ("--lr", "4"))).train).arguments == ("--lr", "4")
    assert dataclasses.replace(train, arguments=()) == found(f"{package}.fit", module=True)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def test_a_script_that_raises_is_refused_with_its_own_lines_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "x = 1\nx / 0\n")
    with pytest.raises(ConfigError, match="it raises when it is executed") as refused:
        load_train(path)
    assert "line 2, in <module>" in str(refused.value) and "script.py" not in str(refused.value)
    assert "job_of_mine" not in sys.modules


def test_to_look_at_a_script_loads_neither_ray_nor_torch(tmp_path: Path) -> None:
    path = written(tmp_path, "def train(run):\n    pass\n")
    code = f"import sys\nfrom actors.rank.script_loading import load_train\nload_train({path!r})\n"
    code += "print('ray' in sys.modules, 'torch' in sys.modules)"
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert reported.stdout.split() == ["False", "False"]
