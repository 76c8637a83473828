"""What users install: the wheel has all that is in the tree, the source archive builds the same one, and what is installed trains.

The environment is empty but for what Fleet depends on, which it borrows from the one that runs the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleet.host.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = ("__pycache__", "*.so", "*.egg-info", ".*", "runs", "build", "dist", "tests", "docs")
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({to!r}))"
SCRIPT = """
import torch

def train(run):
    model = torch.nn.Linear(2, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
    for step in run.steps(state, total=3):
        for x, y in step.batches(data, batch_size=8):
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        step.commit()
"""


def done(command: list[str], folder: Path, code: int = 0) -> str:
    """What a command says that ends with ``code``, in ``folder`` and with nothing of this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONFAULTHANDLER"] = "1"  # who hangs tells where, when it is ended below
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, reported = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            said, reported = process.communicate(timeout=20)
    assert process.returncode == code, said + reported
    return reported + said


def built(kind: str, source: Path, to: Path) -> Path:
    said = done([sys.executable, "-c", BUILD.format(kind=kind, to=str(to))], source)
    return to / said.splitlines()[-1]


@dataclass(frozen=True)
class Archives:
    """The same version as wheel and as source archive."""

    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    folder = tmp_path_factory.mktemp("archives")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return Archives(built("wheel", folder / "tree", folder), built("sdist", folder / "tree", folder))


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, which sees the packages of this one but neither Fleet's checkout nor its command."""

    folder: Path

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder), "platbase": str(self.folder)}))

    def python(self, *arguments: str, code: int = 0) -> str:
        return done([str(self.folder / "bin" / "python"), *arguments], self.folder, code)

    def fleet(self, *arguments: str, code: int = 0) -> str:
        return done([str(self.folder / "bin" / "fleet"), *arguments], self.folder, code)


@pytest.fixture(scope="module")
def installed(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A folder on the path by a ``.pth`` file has its own ``.pth`` files left alone, and so the editable install is not seen."""
    made = Installed(tmp_path_factory.mktemp("environment"))
    venv.create(made.folder)
    pip = [sys.executable, "-m", "pip", "--python", str(made.folder / "bin" / "python"), "--disable-pip-version-check"]
    done([*pip, "install", "--quiet", "--no-deps", "--no-index", str(archives.wheel)], made.folder)
    (made.packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    (made.folder / "script.py").write_text(SCRIPT)
    return made


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tree() -> dict[str, bytes]:
    """All files of the six packages, but for what Python and the compiler make of them."""
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    kept = [path for path in paths if path.parent.name != "__pycache__" and path.suffix != ".so"]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in kept}


def test_the_wheel_holds_what_is_in_the_tree_and_nothing_else(archives: Archives) -> None:
    found, expected = contents(archives.wheel), tree()
    assert {"fleet/py.typed", "chaos/catalogue.csv", "dashboards/static/vendor/uPlot.esm.js"} <= set(expected)
    assert {name: found.get(name) for name in expected} == expected
    beside = {name for name in set(found) - set(expected) if ".dist-info/" not in name}
    assert all(name.startswith("actors/rank/state/_stream.") and name.endswith(".so") for name in beside), beside


def test_one_wheel_is_for_every_python_that_is_promised(archives: Archives) -> None:
    assert archives.wheel.name.split("-")[2:4] == ["cp311", "abi3"]


def test_the_source_archive_builds_the_same_wheel(archives: Archives, tmp_path: Path) -> None:
    with tarfile.open(archives.source) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    again = built("wheel", folder, tmp_path)
    assert again.name == archives.wheel.name
    one, other = contents(archives.wheel), contents(again)
    assert set(one) == set(other)
    compiled = {name for name in one if name.endswith((".so", "/RECORD"))}  # the second has digests of the first
    assert {name for name in one if one[name] != other[name]} <= compiled


def test_what_is_installed_is_what_runs(installed: Installed) -> None:
    said = installed.python("-c", f"import {', '.join(PACKAGES)}\nfor each in ({', '.join(PACKAGES)}): print(each.__file__)")
    assert {Path(line).parent.parent for line in said.split()} == {installed.packages}
    assert "Train SCRIPT on a local cluster" in installed.fleet("--help")
    assert "rank-second" in installed.python("-m", "fleet", "--help")
    installed.fleet("init", "begun.py")
    assert (installed.folder / "begun.py").exists()


def test_what_is_installed_trains(installed: Installed) -> None:
    options = ["--world", "1", "--nodes", "1", "--shards", "2", "--storage", "runs", "--name", "first", "--html", "report.html"]
    installed.fleet("run", "script.py", *options)
    assert "completed" in installed.fleet("report", "first")
    assert "<html" in (installed.folder / "report.html").read_text()


@pytest.fixture
def injected(installed: Installed) -> Iterator[Path]:
    """A file of ours that another distribution writes over."""
    path = installed.packages / "chaos" / "__init__.py"
    before = path.read_bytes()
    path.write_text("raise RuntimeError('another chaos')\n")
    yield path
    path.write_bytes(before)


def test_a_package_that_another_distribution_wrote_over_is_refused(installed: Installed, injected: Path) -> None:
    said = installed.fleet("runs", code=2)
    assert f"package = 'chaos': {injected} is not the file that came with Fleet" in said
    assert "pip install --force-reinstall --no-deps FLEET, where FLEET is the wheel or" in said
