"""What real loops use, where ranks keep the model in chunks: through a kill it has the bits of whole replicas, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.protocol.records import HistoryBegun, ViewPublished
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import loops
from tests.support.plain import PlainFleet

Saved = dict[str, torch.Tensor]
Truth = Callable[[str], tuple[str, Saved]]


def chosen(folder: Path, build: str, **changes: Any) -> RunSettings:
    return settings(folder, options={"build": build, "steps": "10"}, **changes)


def saved(folder: Path) -> Saved:
    found: Saved = torch.load(folder / "flags" / "model.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """By what is built, the digest of an undisturbed run of whole replicas, and the model that it has saved."""
    known: dict[str, tuple[str, Saved]] = {}

    def find(build: str) -> tuple[str, Saved]:
        if build not in known:
            folder = tmp_path_factory.mktemp(build)
            outcome, _, digest = train_through(loops.train, chosen(folder, build, world=2), folder)
            assert outcome.status == "completed", outcome
            known[build] = digest, saved(folder)
        return known[build]

    return find


def kill_one(fleet: PlainFleet) -> None:
    fleet.wait_for(lambda: fleet.step >= 3 or fleet.ended.done())
    fleet.kill(1)


@pytest.mark.parametrize(
    ("build", "sharding"), [*((build, "fsdp") for build in loops.BUILDS), ("halved", "none"), ("scaled", "none"), ("scaled", "zero1")]
)
def test_a_kill_changes_no_bit(build: str, sharding: str, tmp_path: Path, truth: Truth) -> None:
    digest, model = truth(build)
    through = train_through(loops.train, chosen(tmp_path, build, world=3, optimizer_sharding=sharding), tmp_path, kill_one)
    survived(*through, digest)
    assert len(of(ViewPublished, through[1])) >= 2
    assert not of(HistoryBegun, through[1])
    found = saved(tmp_path)
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert {name: each.tolist() for name, each in found.items()} == {name: each.tolist() for name, each in model.items()}


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("average", "a copy of the parameter first.weight"),
        ("averaged model", "an AveragedModel reads all of the parameters"),
        ("untracked average", "a function given to step.on_commit read model.first.weight"),
        ("second optimizer", "Give each parameter to one optimizer"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(mistake: str, said: str, tmp_path: Path) -> None:
    asked = settings(tmp_path, world=1, optimizer_sharding="fsdp", options={"mistake": mistake})
    outcome, records, _ = train_through(loops.mistaken, asked, tmp_path)
    assert outcome.status == "failed"
    assert said in outcome.reason
    assert all(record.view.state.step < 2 for record in of(ViewPublished, records))
