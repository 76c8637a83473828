"""What real loops use, where ranks keep the model in chunks: through a kill it has the bits of whole replicas, or it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import LineageBegun, ViewPublished
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import loops
from tests.support.plain import PlainFleet


def chosen(folder: Path, build: str, **changes: Any) -> RunSettings:
    return settings(folder, options={"build": build, "steps": "10"}, **changes)


def kill_one(fleet: PlainFleet) -> None:
    fleet.wait_for(lambda: fleet.step >= 3 or fleet.ended.done())
    fleet.kill(1)


@pytest.mark.parametrize("build", loops.BUILDS)
def test_a_kill_changes_no_bit(build: str, tmp_path: Path) -> None:
    truth = train_through(loops.train, chosen(tmp_path / "whole", build, world=2), tmp_path / "whole")[2]
    through = train_through(loops.train, chosen(tmp_path, build, world=3, optimizer_sharding="fsdp"), tmp_path, kill_one)
    survived(*through, truth)
    assert len(of(ViewPublished, through[1])) >= 2
    assert not of(LineageBegun, through[1])


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("average", "a copy of the parameter first.weight"),
        ("averaged model", "an AveragedModel reads all of the parameters"),
        ("untracked average", "a function given to step.on_commit read model.first.weight"),
        ("scaler", "GradScaler"),
        ("second optimizer", "Track exactly one optimizer"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(mistake: str, said: str, tmp_path: Path) -> None:
    asked = settings(tmp_path, world=1, optimizer_sharding="fsdp", options={"mistake": mistake})
    outcome, records, _ = train_through(loops.mistaken, asked, tmp_path)
    assert outcome.status == "failed"
    assert said in outcome.reason
    assert not [record for record in of(ViewPublished, records) if record.view.state.step > 1]
