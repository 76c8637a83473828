"""Every Python block of the documents runs: train functions on real processes, a few steps each, and the rest as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fleet.host.ports import free_port
from fleet.settings.run import RunSettings
from tests.support.blocks import MODEL, ROOT, Block, Program, blocks_of, pages
from tests.support.plain import PlainFleet

WALKED = "docs/guide.md"
"""Its blocks run in tests/fault/test_guide.py, in order, as a reader would."""

BEFORE = "from DDP"
"""Marker of a diff of which both sides run."""

BLOCKS = [
    block for page in pages() for block in blocks_of(page) if block.language == "python" and page != WALKED and not block.stands_alone
]
DIFFS = [block for page in pages() for block in blocks_of(page) if block.language == "diff" and block.marker == BEFORE]
TRAINS = [block for block in (*BLOCKS, *DIFFS) if block.trains]
REST = [block for block in BLOCKS if not block.trains]
STEPS = 4


@pytest.mark.parametrize("block", TRAINS, ids=str)
def test_a_train_function_of_the_documents_trains(block: Block, tmp_path: Path) -> None:
    (np.arange(20_000) % 200).astype(np.uint16).tofile(tmp_path / "corpus.bin")
    (tmp_path / "model.py").write_text(MODEL)
    options = {"folder": str(tmp_path), "data": str(tmp_path / "corpus.bin")}
    settings = RunSettings(world=2, shards=4, steps=STEPS, options=options)
    with PlainFleet(Program(block), settings, tmp_path) as fleet:
        outcome = fleet.wait(60.0)
        assert outcome.status == "completed", outcome
        assert fleet.step == STEPS
    for saved in tmp_path.glob("*.pt"):
        assert torch.load(saved, weights_only=True), saved


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run, whose last checkpoint is that of step ``STEPS``."""
    folder = tmp_path_factory.mktemp("ran")
    train = next(block for block in blocks_of("docs/loops.md") if block.trains)
    settings = RunSettings(world=1, nodes=1, shards=4, steps=STEPS, options={"folder": str(folder)})
    with PlainFleet(Program(train), settings, folder) as fleet:
        assert fleet.wait(60.0).status == "completed"
    return folder


def put(ran: Path, runs: Path, texts: str) -> None:
    """The run under the names that the documents use for one, and its checkpoint under those that they name."""
    runs.mkdir()
    (runs / "demo").symlink_to(ran)
    [checkpoint] = (ran / "checkpoints").iterdir()
    (runs / "NAME" / "checkpoints").mkdir(parents=True)
    for name in re.findall(r"checkpoints/([\w-]+)", texts):
        (runs / "NAME" / "checkpoints" / name).symlink_to(checkpoint)


@pytest.mark.parametrize("page", sorted({block.page for block in REST}))
def test_the_programs_of_a_page_run(page: str, ran: Path, tmp_path: Path) -> None:
    blocks = [block for block in REST if block.page == page]
    put(ran, tmp_path / "runs", "".join(block.text for block in blocks))
    run_all({f"line_{block.line}.py": block.program for block in blocks}, tmp_path)


@pytest.mark.parametrize("block", DIFFS, ids=str)
def test_what_was_there_before_runs_too(block: Block, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    run_all({"before.py": block.side("-")}, tmp_path, **alone)


def run_all(programs: dict[str, str], folder: Path, **variables: str) -> None:
    """One after the other in a process of their own, which imports torch once."""
    for name, text in programs.items():
        (folder / name).write_text(text)
    each = "import runpy, sys\nfor name in sys.argv[1:]: runpy.run_path(name)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-c", each, *programs]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
