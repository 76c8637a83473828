"""One probe for each row of the table in docs/from-ray-train.md: what of Ray Train's API holds in a loop that ``fleet.Trainer`` runs.

A probe returns whether what the row says is so. It is called in each rank, before the loop, but for those of ``BEHIND_COMMIT``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray.train
import ray.train.collective
import ray.train.torch
import torch

from fleet.errors import LoopError

AS_IS, OTHER, REFUSED = "as in Ray Train", "another meaning", "refused"


def refused(call: Callable[[], Any]) -> Callable[[Any, Any], bool]:
    """The call raises, and is named."""

    def probe(run: Any, own: Any) -> bool:
        try:
            call()
        except LoopError as error:
            return "ray.train" in str(error)
        return False

    return probe


def upload(**arguments: Any) -> Callable[[Any, Any], bool]:
    return refused(lambda: ray.train.report({"x": 1}, **arguments))


def _is_world(run: Any, own: Any) -> bool:
    """What the run wants, whatever Ray Train's own says, which counts spares."""
    return bool(ray.train.get_context().get_world_size() == run.config.world != own.get_world_size())


def _prepared(run: Any, own: Any) -> bool:
    model = torch.nn.Linear(1, 1)
    return ray.train.torch.prepare_model(model) is model


def _loader(run: Any, own: Any) -> bool:
    loader = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    return ray.train.torch.prepare_data_loader(loader) is loader


def _shard(run: Any, own: Any) -> bool:
    return len(ray.train.get_dataset_shard("train")) == 256 and ray.train.get_dataset_shard("no-such") is None


def same(method: str) -> Callable[[Any, Any], bool]:
    return lambda run, own: bool(getattr(ray.train.get_context(), method)() == getattr(own, method)())


ROWS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "get_context().get_world_size()": (OTHER, _is_world),
    "get_context().get_world_rank()": (OTHER, lambda run, own: ray.train.get_context().get_world_rank() == run.rank),
    "get_context().get_local_rank()": (AS_IS, same("get_local_rank")),
    "get_context().get_local_world_size()": (AS_IS, same("get_local_world_size")),
    "get_context().get_node_rank()": (AS_IS, same("get_node_rank")),
    "get_context().get_experiment_name()": (AS_IS, lambda run, own: ray.train.get_context().get_experiment_name() == run.folder.name),
    "get_context().get_storage()": (REFUSED, refused(lambda: ray.train.get_context().get_storage())),
    "report(metrics, checkpoint=...)": (OTHER, lambda run, own: ray.train.report({"probe": 1}) is None),
    "report(checkpoint_upload_fn=...)": (REFUSED, upload(checkpoint_upload_fn=print)),
    "report(checkpoint_upload_mode=NO_UPLOAD)": (REFUSED, upload(checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)),
    "report(validation=...)": (REFUSED, upload(validation=True, checkpoint=ray.train.Checkpoint("/tmp"))),
    "get_checkpoint()": (OTHER, lambda run, own: ray.train.get_checkpoint() is None),
    "get_all_reported_checkpoints()": (REFUSED, refused(ray.train.get_all_reported_checkpoints)),
    "get_dataset_shard(name)": (OTHER, _shard),
    "get_preemption_info()": (REFUSED, refused(ray.train.get_preemption_info)),
    "collective.barrier()": (REFUSED, refused(ray.train.collective.barrier)),
    "collective.broadcast_from_rank_zero()": (REFUSED, refused(lambda: ray.train.collective.broadcast_from_rank_zero(1))),
    "torch.prepare_model(model)": (OTHER, _prepared),
    'torch.prepare_model(parallel_strategy="fsdp")': (
        REFUSED, refused(lambda: ray.train.torch.prepare_model(torch.nn.Linear(1, 1), parallel_strategy="fsdp")),
    ),
    "torch.prepare_data_loader(loader)": (OTHER, _loader),
    "torch.get_device()": (AS_IS, lambda run, own: ray.train.torch.get_device() == torch.device("cpu")),
}  # fmt: skip


def probed(run: Any, own: Any) -> dict[str, bool]:
    """Row -> whether it is as the table says. ``own`` is Ray Train's own context."""
    return {row: probe(run, own) for row, (_, probe) in ROWS.items()}
