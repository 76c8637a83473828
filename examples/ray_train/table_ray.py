"""A classifier of rows in Parquet files, after the example for Ray Data in Ray Train's documentation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

BATCH_SIZE, STEPS = 32, 16
"""Of each of two workers, and how many steps make an epoch of 1,024 rows."""
CONFIG = {"lr": 0.02, "epochs": 3}


def write_table(folder: Path) -> str:
    """1,024 points in four files; those outside of a circle have the label 1."""
    points = np.random.default_rng(0).uniform(-1.0, 1.0, (4, 256, 2)).astype(np.float32)
    for number, part in enumerate(points):
        rows = {"x": list(part), "label": (np.square(part).sum(1) > 0.6).astype(np.int64)}
        pq.write_table(pa.table(rows), folder / f"{number}.parquet")
    return str(folder)


def train_func(config: dict[str, Any]) -> None:
    """One worker's part."""
    rows = ray.train.get_dataset_shard("train")
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    probe = torch.tensor([[0.0, 0.0], [0.9, 0.9]])
    for _ in range(config["epochs"]):
        model.train()
        for batch in rows.iter_torch_batches(batch_size=BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        inside, outside = model.eval()(probe).argmax(1).tolist()
        ray.train.report({"inside": inside, "outside": outside})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        table = write_table(Path(folder))
        trainer = TorchTrainer(
            train_func,
            train_loop_config=CONFIG,
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),  # the rest is for reading
            datasets={"train": lambda: ray.data.read_parquet(table)},
        )
        print(trainer.fit().metrics)
