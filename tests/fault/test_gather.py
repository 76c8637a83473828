"""A loss over the whole batch, and state that shards carry, through a kill at each moment of a step: no bit changes.

With whole replicas, and with states that are spread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fleet
from actors.rank.step.representations import Representations
from fleet.protocol.records import HistoryBegun, ProcessLost
from fleet.settings.run import RunSettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.support import trains
from tests.zoo.loops.contrastive import nt_xent, views

DATA = torch.randn(256, 6, generator=torch.Generator().manual_seed(47), dtype=torch.float64)
STEPS, AT, LOST = 8, 3, 1
FIRST, EXCHANGE, SECOND = "first pass", "exchange", "second pass"
"""While a shard is looked at; with its representations on their way to all, of which some have theirs; and with those of all."""


def build(run: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(47)
    model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 8)).double()
    if run.config.optimizer_sharding == "fsdp":
        for each in (model[0], model[4], model):
            fully_shard(each, mesh=run.mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(run: Any) -> None:
    model, optimizer = build(run)
    seen = fleet.ShardState(lambda shard: torch.zeros(2, dtype=torch.float64))
    state = run.track(model=model, optimizer=optimizer, seen=seen)
    moment = run.options.get("moment", "")

    def killed_at(now: str, step: Any) -> None:
        if (now, step.number, run.slot) == (moment, AT, LOST) and not step._loop.rehearsing and trains.once(run, "killed"):
            trains.die()

    compare, steps = Representations._compare, list[Any]()

    def comparing(self: Representations, *arguments: Any) -> None:
        killed_at(EXCHANGE, steps[-1])
        compare(self, *arguments)

    Representations._compare = comparing  # type: ignore[method-assign]
    for step in run.steps(state, total=STEPS):
        steps.append(step)
        for batch in step.batches(DATA, batch_size=32):
            everyone = step.gather(views(model, batch) + seen.value[1])
            seen.value = seen.value + torch.stack([torch.ones(()), batch.mean()])
            killed_at(FIRST if step._gathered.looking else SECOND, step)
            step.backward(nt_xent(everyone))
        step.commit()


def chosen(folder: Path, sharding: str, world: int, **options: str) -> RunSettings:
    return settings(folder, world=world, optimizer_sharding=sharding, options=options)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the run of one rank."""
    folder = tmp_path_factory.mktemp("right")
    outcome, _, digest = train_through(train, chosen(folder, "none", 1), folder)
    assert outcome.status == "completed", outcome
    return digest


@pytest.mark.parametrize("moment", [FIRST, EXCHANGE, SECOND])
@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
def test_a_kill_changes_no_bit(sharding: str, moment: str, tmp_path: Path, right: str) -> None:
    through = train_through(train, chosen(tmp_path, sharding, 3, moment=moment), tmp_path)
    survived(*through, right)
    assert len(of(ProcessLost, through[1])) == 1
    assert not of(HistoryBegun, through[1])
