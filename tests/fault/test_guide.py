"""Walks docs/guide.md: its commands and code blocks, in order, in an empty folder, as a reader would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.protocol.records import Committed
from tests.support.blocks import ROOT, Block, blocks_of
from tests.support.journals import NAME, records
from tests.support.processes import begin
from tests.support.waiting import until

LIMIT_S = 150


class Walk:
    """A reader with one folder, a terminal and, for ``meanwhile``, a second one. ``said`` is all that the commands have printed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, ""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.going: subprocess.Popen[str] | None = None

    def begin(self, words: list[str] | str) -> subprocess.Popen[str]:
        return begin(words, self.folder, self.environment, shell=isinstance(words, str))

    def end(self, process: subprocess.Popen[str]) -> str:
        said, _ = process.communicate(timeout=LIMIT_S)
        self.said += said
        assert process.returncode == 0, said
        return said

    def run(self, block: Block) -> None:
        for line in block.commands:
            self.end(self.begin(line))

    def run_until_step(self, block: Block, step: int) -> None:
        """Begins it, and comes back when the run has taken so many steps."""
        [line] = block.commands
        self.going = self.begin(line)
        folder = self.folder / "runs" / _option(line, "--name")
        until(lambda: self._over() or ((folder / NAME).exists() and _steps(folder) >= step), f"step {step} of {folder.name}", LIMIT_S)

    def _over(self) -> bool:
        assert self.going is not None
        return self.going.poll() is not None

    def meanwhile(self, block: Block) -> None:
        """``PID`` is the number that the line before has printed last."""
        assert self.going is not None and not self._over(), "the run is over already"
        said = ""
        for line in block.commands:
            found = re.findall(r"process (\d+)", said)
            if "PID" in line:
                assert found and psutil.pid_exists(int(found[-1])), said
                line = line.replace("PID", found[-1])
            said = self.end(self.begin(line))
        self.end(self.going)

    def leave(self) -> None:
        """Nothing goes on when a step has failed."""
        if self.going is not None and not self._over():
            for process in psutil.Process(self.going.pid).children(recursive=True):
                process.kill()
            self.going.communicate(timeout=LIMIT_S)

    def save(self, block: Block, name: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(block.text)

    def python(self, block: Block) -> None:
        self.end(self.begin([sys.executable, "-c", block.text]))

    def step(self, block: Block) -> None:
        """Does what the block's marker says. Fails for a block without one."""
        act = block.marker.removeprefix("walk: ")
        if match := re.fullmatch(r"run until step (\d+)", act):
            self.run_until_step(block, int(match[1]))
        elif match := re.fullmatch(r"run with (\d+) faults", act):
            self.run(block)
            assert faults(self.folder, _option(block.text, "--name")) >= int(match[1])
        elif match := re.fullmatch(r"save as (\S+)", act):
            self.save(block, match[1])
        elif not act.startswith("not run: "):
            {"run": self.run, "python": self.python, "meanwhile": self.meanwhile}[act](block)


def _option(line: str, name: str) -> str:
    return line.split(name)[1].split(maxsplit=1)[0]


def _steps(folder: Path) -> int:
    return max((record.state.step for record in records(folder) if isinstance(record, Committed)), default=0)


def report(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    with file.open("w") as out:
        command = [sys.executable, "-c", "from fleet.app.cli.main import main; main()", "report", name, "--json"]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=out, check=True)
    return dict(json.loads(file.read_text()))


def faults(folder: Path, name: str) -> int:
    """Those of the plan that struck."""
    return int(report(folder, name)["counts"]["executed"])


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    walk = Walk(tmp_path)
    yield walk
    walk.leave()


@pytest.mark.timeout(600)
def test_the_guide_leads_where_it_says(walk: Walk, tmp_path: Path) -> None:
    for block in blocks_of("docs/guide.md"):
        walk.step(block)
    assert "equal, bit for bit" in walk.said, "the storm and its twin"
    assert {"model.pt", "best.pt", "state.pt", "own.pt"} <= {path.name for path in tmp_path.iterdir()}
    storm = report(tmp_path, "storm")
    assert storm["status"] == "completed" and storm["closes"]
    own = report(tmp_path, "own")
    assert own["status"] == "completed" and own["counts"]["executed"] >= 3
