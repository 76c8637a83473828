"""Every Python block of the documents runs: train functions on real processes, a few steps each, and the rest as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fleet.config import RunSettings
from tests.support.blocks import ROOT, Block, Program, blocks_of, pages
from tests.support.plain import PlainFleet

WALKED = "docs/guide.md"
"""Its blocks run in tests/fault/test_guide.py, in order, as a reader would."""

BLOCKS = [block for page in pages() if page != WALKED for block in blocks_of(page) if block.language == "python"]
TRAINS = [block for block in BLOCKS if block.trains]
REST = [block for block in BLOCKS if not block.trains]
STEPS = 4


@pytest.mark.parametrize("block", TRAINS, ids=str)
def test_a_train_function_of_the_documents_trains(block: Block, tmp_path: Path) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "corpus.bin")
    options = {"folder": str(tmp_path), "data": str(tmp_path / "corpus.bin")}
    settings = RunSettings(world=2, shards=4, steps=STEPS, options=options)
    with PlainFleet(Program(block), settings, tmp_path) as fleet:
        outcome = fleet.wait(60.0)
        assert outcome.status == "completed", outcome
        assert fleet.step == STEPS
    for saved in tmp_path.glob("*.pt"):
        assert torch.load(saved, weights_only=True), saved


@pytest.mark.parametrize("block", REST, ids=str)
def test_a_program_of_the_documents_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block.program)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
