"""What a rank of a sharded model holds, counted in real ranks, beside the law of it."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fleet.laws.memory import chunked_state
from fleet.settings.run import CheckpointSettings, Timeouts
from tests.fault.test_bad_luck import settings, train_through

WIDTH, LAYERS, STEPS, COUNTED = 512, 8, 5, 3
NONE = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=3600.0)
"""A snapshot would be (1 + moments) / ranks of the parameters more."""
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4
PARAMETER_BYTES = (LAYERS * (WIDTH * WIDTH + WIDTH) + WIDTH + 1) * 4


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 64)


def held_bytes() -> int:
    """Memory of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def count_before_apply(engine: Any, file: Path) -> None:
    """Once, when the mean gradient is there."""
    apply = engine.apply

    def counted() -> None:
        file.write_text(json.dumps(held_bytes()))
        engine.apply = apply
        apply()

    engine.apply = counted


def weighs(run: Any) -> None:
    """Notes what is held in one step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    for each in (*model[:-1], model):
        fully_shard(each, mesh=run.mesh)
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in run.steps(state, total=STEPS):
        if step.number == COUNTED:
            count_before_apply(run._engine, Path(run.options["flags"], f"held-{run.slot}"))
        for batch in step.batches(Data(), batch_size=run.shards):
            step.backward(model(batch).square().mean())
        step.commit()


@pytest.mark.parametrize(("world", "copies", "sync"), [(4, 1, "step"), (4, 1, "shard"), (3, 0, "shard")])
def test_a_rank_holds_what_the_law_says(world: int, copies: int, sync: str, tmp_path: Path) -> None:
    weigh(tmp_path, world, sync, {"copies": copies}, optimizer_copies=copies)


@pytest.mark.parametrize(("world", "parity", "sync"), [(4, 3, "step"), (4, 3, "shard"), (4, 1, "step")])
def test_a_rank_with_parity_holds_less_and_what_the_law_says(world: int, parity: int, sync: str, tmp_path: Path) -> None:
    weigh(tmp_path, world, sync, {"parity": parity}, parity=parity)


def weigh(folder: Path, world: int, sync: str, chosen: dict[str, int], **changes: int) -> None:
    told = settings(folder, world=world, optimizer_sharding="fsdp", gradient_sync=sync, **changes)
    run = dataclasses.replace(told, shards=world, timeouts=Timeouts(), checkpoint=NONE)  # to count takes a while
    outcome, _, _ = train_through(weighs, run, folder)
    assert outcome.status == "completed", outcome.reason
    law = chunked_state(PARAMETER_BYTES, world, leave=sync == "shard", **chosen).total_bytes
    found = [json.loads(path.read_text()) for path in folder.rglob("held-*")]
    assert len(found) == world
    told_of = f"{[round(each / PARAMETER_BYTES, 3) for each in found]} of the parameters"
    assert max(found) == pytest.approx(law, rel=0.1, abs=1.25 * UNIT_BYTES), told_of
