"""What a rank of a sharded model holds, counted in real ranks, beside the law of it."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fleet.laws.memory import chunked_state, replicated_state
from fleet.settings.run import CheckpointSettings, Timeouts
from tests.fault.test_bad_luck import settings, train_through

WIDTH, LAYERS, STEPS, COUNTED = 512, 8, 5, 3
NONE = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=3600.0)
"""A snapshot would be (1 + moments) / ranks of the parameters more."""
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


def count_in_step(train: Any, file: Path) -> None:
    """Once, the most that is held: when this rank has come to the sum, and when the mean gradient is there.

    With fsdp gradients leave in the backward, and the first is left out: what has come of slower ranks by then is by chance.
    """
    found, reduce, stepping = list[int](), train.reducer.reduce, train.layout.stepping

    def reducing(*given: Any, **named: Any) -> None:
        found.append(held_bytes())
        train.reducer.reduce = reduce
        reduce(*given, **named)

    def applying(**named: Any) -> Any:
        found.append(held_bytes())
        file.write_text(json.dumps(max(found)))
        train.layout.stepping = stepping
        return stepping(**named)

    train.layout.stepping = applying
    if not train.gradients.layout.leaving:
        train.reducer.reduce = reducing


def weighs(run: Any) -> None:
    """Notes what is held in one step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    for each in (*model[:-1], model):
        fully_shard(each, mesh=run.mesh)
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in run.steps(state, total=STEPS):
        if step.number == COUNTED:
            count_in_step(run._train_step, Path(run.options["flags"], f"held-{run.slot}"))
        for batch in step.batches(Data(), batch_size=run.shards):
            step.backward(model(batch).square().mean())
        step.commit()


@pytest.mark.parametrize(("world", "copies"), [(4, 1), (3, 0)])
def test_a_rank_holds_what_the_law_says(world: int, copies: int, tmp_path: Path) -> None:
    found = held(tmp_path, world, optimizer_sharding="fsdp", optimizer_copies=copies)
    law = chunked_state(PARAMETER_BYTES, world, copies).total_bytes
    assert max(found) == pytest.approx(law, rel=0.1), f"{[round(each / PARAMETER_BYTES, 3) for each in found]} of the parameters"


@pytest.mark.parametrize(("world", "copies", "sharding"), [(3, 1, "none"), (4, 1, "zero1")])
def test_a_rank_with_all_parameters_holds_what_the_law_says(world: int, copies: int, sharding: str, tmp_path: Path) -> None:
    found = held(tmp_path, world, optimizer_sharding=sharding, optimizer_copies=copies, overlap_cores=math.inf)
    law = replicated_state(PARAMETER_BYTES, world, copies, spread=sharding == "zero1").total_bytes
    assert max(found) == pytest.approx(law, rel=0.1), f"{[round(each / PARAMETER_BYTES, 3) for each in found]} of the parameters"


def held(folder: Path, world: int, **changes: Any) -> list[int]:
    """By each rank."""
    reported = settings(folder, world=world, **changes)
    chosen = dataclasses.replace(reported, shards=world, timeouts=Timeouts(), checkpoint=NONE)  # to count takes a while
    outcome, _, _ = train_through(weighs, chosen, folder)
    assert outcome.status == "completed", outcome.reason
    found = [json.loads(path.read_text()) for path in folder.rglob("held-*")]
    assert len(found) == world
    return found
