"""A rank is killed while it reads Parquet files and makes its batches itself: the run ends with the bits of one in which nobody was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fleet.data import Parquet, ShardedDataset
from fleet.protocol.records import DataRead, ProcessLost
from tests.fault.test_bad_luck import of, settings, train_through
from tests.support import trains

ROWS = 300


def write(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        x = draw.standard_normal((ROWS // 2, trains.FEATURES)).astype(np.float32)
        table = pa.table({"x": list(x), "y": x.sum(1), "name": [f"row {row}" for row in range(len(x))]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)


def noisy(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws, as maskers of tokens do."""
    x = torch.stack([sample["x"] for sample in samples])
    return x + 0.01 * torch.randn(x.shape), torch.tensor([[sample["y"]] for sample in samples])


def from_parquet(run: Any) -> None:
    """Slot 1 is killed with step 7 half computed, once, if the test says so."""
    data = ShardedDataset(run.options["data"], Parquet(["x", "y"], window_bytes=3000))
    model, optimizer, _ = trains.build(norm="layer")
    state = run.track(model=model, optimizer=optimizer, data=data)
    for step in run.steps(state, total=16):
        for x, y in step.batches(data, batch_size=32, collate_fn=noisy):
            if run.options["kill"] == "yes" and run.slot == 1 and step.number == 7 and len(step.losses) == 1 and trains.once(run, "kill"):
                trains.die()
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()


def test_a_kill_while_parquet_is_read_changes_no_bit(tmp_path: Path) -> None:
    write(tmp_path / "data")
    digests = {}
    for kill, world in (("yes", 3), ("no", 2)):
        folder = tmp_path / kill
        chosen = settings(folder, world=world, options={"data": str(tmp_path / "data"), "kill": kill})
        outcome, records, digests[kill] = train_through(from_parquet, chosen, folder)
        assert outcome.status == "completed", outcome
        assert bool(of(ProcessLost, records)) == (kill == "yes")
        assert [(read.samples, read.batch_size) for read in of(DataRead, records)] == [(ROWS, 32)]
    assert digests["yes"] == digests["no"] != ""
