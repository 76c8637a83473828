"""A script of a common shape, ported: what it saves through faults is what it saves without, byte for byte. On real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fleet.protocol.records import Measurement, ProcessLost, Record
from fleet.settings.run import RunSettings
from tests.support import nano
from tests.support.plain import PlainFleet

STEPS = 30


def trained(train: Callable[[Any], None], folder: Path, **changes: int) -> list[Record]:
    folder.mkdir()
    settings = RunSettings(shards=8, seed=3, options={"flags": str(folder), "steps": str(STEPS)}, **changes)  # type: ignore[arg-type]
    with PlainFleet(train, settings, folder) as fleet:
        outcome = fleet.wait()
        assert outcome.status == "completed", outcome
        return fleet.records()


def figures(records: list[Record]) -> list[tuple[int, float]]:
    return [(record.state.step, record.value) for record in records if isinstance(record, Measurement) and record.name == "val_loss"]


def test_the_best_model_of_a_storm_is_the_twins_byte_for_byte(tmp_path: Path) -> None:
    through = trained(nano.injected, tmp_path / "storm", world=3, spares=1)
    twin = trained(nano.plain, tmp_path / "twin", world=2)
    assert {path.name for path in (tmp_path / "storm").iterdir()} >= {"step", "evaluation", "save"}, "all three have struck"
    assert sum(isinstance(record, ProcessLost) for record in through) == 3
    assert sorted(set(figures(through))) == figures(twin)
    assert (tmp_path / "storm" / "best.pt").read_bytes() == (tmp_path / "twin" / "best.pt").read_bytes()
    saved = torch.load(tmp_path / "storm" / "best.pt", weights_only=True)
    assert torch.equal(saved["head.weight"], saved["tokens.weight"])
