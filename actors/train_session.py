"""Ray Train's session on Fleet: ``ray.train.report`` and similar functions in a loop that ``fleet.Trainer`` runs.

A table in docs/from-ray-train.md lists them.
"""

from __future__ import annotations

import inspect
import numbers
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import ray.train

from actors import ray_internals
from actors.rank.loop import Run
from actors.rank.verify.body import users_line
from fleet.errors import LoopError

REPORT = "ray.train.report"
"""The name of a report among the works that are done once."""
HELD = "fleet-reported-"
OURS = ("loss",)
"""Figures that Fleet itself notes under this name."""


class FoldersPort(Protocol):
    """Keeps reported folders; ``storage`` implements it. All methods raise OSError."""

    def put(self, name: str, folder: Path) -> None: ...

    def remove(self, name: str) -> None: ...

    def where(self, name: str) -> tuple[str, Any]: ...


@dataclass(frozen=True)
class Retention:
    """Which reported checkpoints are kept: the ``most`` best by the metric ``by``, or the newest ones without a metric; always the newest
    one.

    ``most`` None keeps all; ``order`` is ``max`` or ``min``.
    """

    most: int | None = None
    by: str | None = None
    order: str = "max"

    def chosen(self, there: Sequence[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
        """The checkpoints to keep among these (name, score), oldest first."""
        if self.most is None or len(there) <= self.most:
            return list(there)
        best = sorted(range(len(there)), key=lambda at: self._goodness(there[at][1], at))[-self.most :]
        best = best if len(there) - 1 in best else [*best[1:], len(there) - 1] if self.most > 1 else [len(there) - 1]
        return [there[at] for at in sorted(best)]

    def _goodness(self, score: float | None, at: int) -> tuple[float, int]:
        if self.by is None or score is None:
            return (float("-inf") if self.by else 0.0, at)
        return (score if self.order == "max" else -score, at)

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """The score of a checkpoint. None where the metric is missing."""
        found = metrics.get(self.by) if self.by else None
        return float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True)
class TrainLoop:
    """A train loop for Ray Train, as ``train(run)`` for ranks.

    Attributes:
        loop: ``train_loop_per_worker``, pickled. It is loaded once Ray Train's utilities are replaced by Fleet's.
        config: its argument; None where it takes none.
        name: of the run.
        folders: keeps reported checkpoints.
        begins_with: the name of the folder for ``get_checkpoint``; empty: none.
        datasets: the datasets for ``get_dataset_shard``, by name.
    """

    loop: bytes
    config: Mapping[str, Any] | None
    name: str
    folders: FoldersPort
    begins_with: str
    datasets: Mapping[str, Any]
    retention: Retention

    def __call__(self, run: Run) -> None:
        session = Session(run, self)
        session.install()
        try:
            pickle.loads(self.loop)(*([dict(self.config)] if self.config is not None else []))
        finally:
            session.close()


def takes_config(loop: Callable[..., Any]) -> bool:
    """Whether the loop has a parameter: then Ray Train calls it with its configuration."""
    return len(inspect.signature(loop).parameters) > 0


class Session:
    """One rank's side. Its methods replace Ray Train's own."""

    def __init__(self, run: Run, train_loop: TrainLoop) -> None:
        self._run, self._train_loop = run, train_loop
        self._held: list[tuple[int, Reported]] = []
        self._context = Context(run, train_loop.name, ray_internals.own_context())

    def install(self) -> None:
        """Replace Ray Train's functions from now on, also in modules that have imported them."""
        for method in ("report", "get_checkpoint", "get_dataset_shard", "get_context", "get_all_reported_checkpoints"):
            ray_internals.replace_in_train_function(method, getattr(self, method))
        ray_internals.replace_in_torch("prepare_model", self.prepare_model)
        ray_internals.replace_in_torch("prepare_data_loader", self.prepare_data_loader)

    # ---- ray.train -----------------------------------------------------------------------------------------------------------------------

    def report(
        self, metrics: Mapping[str, Any], checkpoint: ray.train.Checkpoint | None = None, checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: Any = ray.train.CheckpointUploadMode.SYNC, delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Any = None, validation: Any = False,
    ) -> None:  # fmt: skip
        """See ``ray.train.report``. It counts once, when the current step is committed, and no rank waits for it.

        Raises LoopError for arguments that Fleet does not support.
        """
        _refuse_uploads(checkpoint_upload_mode, checkpoint_upload_fn, validation)
        plain = {str(name): _plain(str(name), value) for name, value in metrics.items()}
        reported = Reported(plain, _local(checkpoint) if checkpoint is not None else None, checkpoint_dir_name or "")
        self._drop_held(self._run.steps_taken)
        if self._run.once_behind(partial(self._keep, reported), name=REPORT) and reported.hold():
            self._held.append((self._run.steps_taken, reported))
        if delete_local_checkpoint_after_upload and checkpoint is not None:
            shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _drop_held(self, step: int) -> None:
        """Drop the files of reports of steps before ``step``: this or another rank has kept their checkpoints."""
        for at, reported in self._held:
            if at < step:
                reported.forget()
        self._held = [(at, reported) for at, reported in self._held if at >= step]

    def close(self) -> None:
        """After the loop: drop all held files."""
        for _, reported in self._held:
            reported.forget()

    def get_checkpoint(self) -> ray.train.Checkpoint | None:
        """The last reported checkpoint at the begin of a resumed run, else None. It is the same on all ranks, for the whole run."""
        return checkpoint_of(self._train_loop.folders, self._train_loop.begins_with) if self._train_loop.begins_with else None

    def get_all_reported_checkpoints(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise _refusal("get_all_reported_checkpoints()", "no rank knows them", "trainer.fit().best_checkpoints has them.")

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """The trainer's dataset of this name, for ``step.batches``, which gives each batch shard its samples. None: there is no such
        name."""
        return self._train_loop.datasets.get(dataset_info.dataset_name)

    def get_context(self) -> Context:
        return self._context

    # ---- ray.train.torch -----------------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, move_to_device: Any = True, parallel_strategy: str | None = "ddp",
        parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """The model on this rank's device, without a wrapper, as ``run.steps`` sums gradients. Raises LoopError for another strategy."""
        if parallel_strategy not in ("ddp", None) or parallel_strategy_kwargs:
            asked = f"prepare_model(parallel_strategy={parallel_strategy!r}, parallel_strategy_kwargs={parallel_strategy_kwargs!r})"
            raise _refusal(asked, "ranks hold the whole model", "For a sharded optimizer, set optimizer_sharding='zero1'.")
        device = move_to_device if not isinstance(move_to_device, bool) else ray.train.torch.get_device()
        return model.to(device) if move_to_device else model

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The unchanged loader: give its dataset to ``step.batches``."""
        return data_loader

    # ---- inside --------------------------------------------------------------------------------------------------------------------------

    def _keep(self, reported: Reported, before: dict[str, Any] | None) -> dict[str, Any]:
        """On one rank: keep the report's checkpoint, and return the record for the journal."""
        folders, retention = self._train_loop.folders, self._train_loop.retention
        for old in (before or {}).get("drop", ()):  # safe, as the journal has the record of their replacement
            folders.remove(old)
        there = [(one, score) for one, score in (before or {}).get("kept", ())]
        name = "" if self._run.is_twin else reported.put(folders, self._run.steps_taken)  # a twin's checkpoints are not used
        there += [(name, retention.score(reported.metrics))] if name else []
        for figure, value in reported.metrics.items():
            if isinstance(value, int | float) and figure not in OURS:
                self._run.measure(figure, float(value))
        record = {"metrics": reported.metrics, "checkpoint": name}
        if retention.most is None:
            return record
        stay = retention.chosen(there)
        return {**record, "kept": stay, "drop": [one for one, _ in there if one not in dict(stay)]}


class Reported:
    """One report: its metrics, the folder of its checkpoint, and the user's name for that."""

    def __init__(self, metrics: dict[str, Any], folder: Path | None, called: str) -> None:
        self.metrics, self._folder, self._called, self._holds = metrics, folder, called, False

    def hold(self) -> bool:
        """Keep the files under a name of Fleet, by links where possible: the user's folder may be deleted before they are needed."""
        if self._folder is None:
            return False
        into = Path(tempfile.mkdtemp(prefix=HELD, dir=self._folder.absolute().parent))
        shutil.copytree(self._folder, into, copy_function=_link_or_copy, dirs_exist_ok=True)
        self._folder, self._holds = into, True
        return True

    def put(self, folders: FoldersPort, step: int) -> str:
        """Keep the checkpoint, and return its name; empty without a checkpoint. Each name is used once, so that two ranks never write to
        one."""
        if self._folder is None:
            return ""
        name = f"{step:09d}-{token_hex(6)}/{self._called or f'checkpoint_{step:09d}'}"
        folders.put(name, self._folder)
        return name

    def forget(self) -> None:
        """Remove the held files."""
        if self._holds and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Context(ray.train.TrainContext):  # type: ignore[misc]
    """The result of ``ray.train.get_context()``: values of the run, and Ray Train's own ones for places on nodes."""

    def __init__(self, run: Run, name: str, own: Any) -> None:
        self._run, self._name, self._own = run, name, own

    def get_experiment_name(self) -> str:
        return self._name

    def get_world_size(self) -> int:
        """How many ranks the run wants. Fewer may train now, but a loop must not depend on that."""
        return self._run.config.world

    def get_world_rank(self) -> int:
        """This rank's number in the present view: exactly one training rank has 0. Before it trains, this is its slot."""
        return self._run.rank

    def get_local_rank(self) -> int:
        return int(self._own.get_local_rank())

    def get_local_world_size(self) -> int:
        return int(self._own.get_local_world_size())

    def get_node_rank(self) -> int:
        return int(self._own.get_node_rank())

    def get_storage(self) -> Any:
        raise _refusal("get_context().get_storage()", "Ray Train stores nothing here", "Use run.folder, or run.save(path).")


def checkpoint_of(folders: FoldersPort, name: str) -> ray.train.Checkpoint:
    """A reported checkpoint that is kept under ``name``."""
    path, files = folders.where(name)
    return ray.train.Checkpoint(path, files)


def _refusal(call: str, reason: str, way_out: str) -> LoopError:
    return LoopError(f"ray.train: {call} was called at {users_line()}: {reason}. {way_out}")


def _refuse_uploads(mode: Any, upload: Any, validation: Any) -> None:
    if upload is not None:
        raise _refusal("report(checkpoint_upload_fn=...)", "Fleet keeps the folder under the run's storage", "Leave it out.")
    if mode is ray.train.CheckpointUploadMode.NO_UPLOAD:
        raise _refusal("report(checkpoint_upload_mode=NO_UPLOAD)", "Fleet keeps the folder under the run's storage", "Leave it out.")
    if validation:
        raise _refusal("report(validation=...)", "a run has no validation tasks", "Use run.evaluate(fn, every=...).")


def _plain(name: str, value: Any) -> Any:
    """A metric as a value that JSON can hold: numbers of numpy and torch become Python's. Raises LoopError."""
    if (hasattr(value, "item") and getattr(value, "size", 1) == 1) or (callable(getattr(value, "numel", None)) and value.numel() == 1):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if value is None or (isinstance(value, str | bool | numbers.Number) and not isinstance(value, complex)):
        return value
    raise _refusal(f"report() with the metric {name!r}", f"it is a {type(value).__name__}, which is no plain data", "Report numbers.")


def _local(checkpoint: ray.train.Checkpoint) -> Path:
    folder = Path(checkpoint.path)
    if not folder.is_dir() or checkpoint.filesystem.type_name != "local":
        raise _refusal(f"report(checkpoint={checkpoint})", "it is no folder of this machine", "Use Checkpoint.from_directory(folder).")
    return folder


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
