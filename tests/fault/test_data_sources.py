"""A rank is killed while it reads Parquet files and makes its batches itself: the run ends with the bits of one in which nobody was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.rank.data.lineage import Lineage
from fleet.data import Parquet, ShardedDataset
from fleet.ledger.lineage import DataHistory
from fleet.protocol.records import DataFiles, DataRead, ProcessLost
from tests.fault.test_bad_luck import of, settings, train_through
from tests.support import trains

ROWS, BATCH, STEPS = 300, 32, 16


def write(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        x = draw.standard_normal((ROWS // 2, trains.FEATURES)).astype(np.float32)
        names = {"name": [f"row {row}" for row in range(len(x))], "id": [number * (ROWS // 2) + row for row in range(len(x))]}
        table = pa.table({"x": list(x), "y": x.sum(1), **names})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)


def noisy(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Draws, as maskers of tokens do."""
    x = torch.stack([sample["x"] for sample in samples])
    return x + 0.01 * torch.randn(x.shape), torch.tensor([[sample["y"]] for sample in samples]), [sample["id"] for sample in samples]


def note(folder: Path, step: Any, ids: list[int]) -> None:
    """What this rank was given for a shard, under its own name: it is computed again where a rank is lost."""
    folder.mkdir(exist_ok=True)
    (folder / f"{step.number}-{step.shard}-{os.getpid()}").write_text(json.dumps(ids))


def seen(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(step, shard) -> the samples, which all who computed it must have been given alike."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in folder.iterdir():
        step, shard, _ = map(int, path.name.split("-"))
        assert found.setdefault((step, shard), json.loads(path.read_text())) == json.loads(path.read_text())
    return found


def check_lineage(folder: Path, records: list[Any], data: Path) -> None:
    """What the journal says of each shard of each step is what ranks were given, and each file's digest is that of its bytes."""
    answer = Lineage(DataHistory().apply_all(records))
    given = seen(folder)
    shards = records[0].shards
    assert sorted(given) == [(step, shard) for step in range(STEPS) for shard in range(shards)]
    for (step, shard), ids in given.items():
        (took,) = answer.took(step, shard)
        assert list(took.indices) == ids and not took.unknown
        assert [(place.path, place.record) for place in took.places if place] == [
            (str(data / f"{index // (ROWS // 2)}.parquet"), index % (ROWS // 2)) for index in ids
        ]
    for number in (0, 1):
        uses = {(use.step, shard): count for use in answer.uses(f"{number}.parquet") for shard, count in use.shards.items()}
        counts = {key: sum(index // (ROWS // 2) == number for index in ids) for key, ids in given.items()}
        assert uses == {key: count for key, count in counts.items() if count}
    files = of(DataFiles, records)[-1].files
    assert [file.digest for file in files] == [f"sha256:{hashlib.sha256(Path(file.path).read_bytes()).hexdigest()}" for file in files]


def from_parquet(run: Any) -> None:
    """Slot 1 is killed with step 7 half computed, once, if the test says so."""
    data = ShardedDataset(run.options["data"], Parquet(["x", "y", "id"], window_bytes=3000))
    model, optimizer, _ = trains.build(norm="layer")
    state = run.track(model=model, optimizer=optimizer, data=data)
    for step in run.steps(state, total=STEPS):
        for x, y, ids in step.batches(data, batch_size=BATCH, collate_fn=noisy):
            note(Path(run.options["seen"]), step, ids)
            if run.options["kill"] == "yes" and run.slot == 1 and step.number == 7 and len(step.losses) == 1 and trains.once(run, "kill"):
                trains.die()
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()


def test_a_kill_while_parquet_is_read_changes_no_bit(tmp_path: Path) -> None:
    write(tmp_path / "data")
    digests = {}
    for kill, world in (("yes", 3), ("no", 2)):
        folder = tmp_path / kill
        chosen = settings(
            folder, world=world, options={"data": str(tmp_path / "data"), "kill": kill, "seen": str(tmp_path / f"seen-{kill}")}
        )
        outcome, records, digests[kill] = train_through(from_parquet, chosen, folder)
        assert outcome.status == "completed", outcome
        assert bool(of(ProcessLost, records)) == (kill == "yes")
        assert [(read.samples, read.batch_size) for read in of(DataRead, records)] == [(ROWS, BATCH)]
        check_lineage(tmp_path / f"seen-{kill}", records, tmp_path / "data")
    assert digests["yes"] == digests["no"] != ""
