"""``fleet.Trainer``: a trainer with the arguments of Ray Train's ``TorchTrainer``, whose run is one of Fleet's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray.data
import ray.train

from actors.train_session import REPORT, Retention, TrainLoop, checkpoint_of, takes_config
from fleet.app import launching, plans
from fleet.app.launching import LaunchRequest
from fleet.app.shipping import check_callable, name_of, packed
from fleet.errors import ConfigError, RunFailed
from fleet.host.journal import read_journal
from fleet.ledger.reports import ReportMade, reports
from fleet.settings.run import RunSettings
from storage.reported import ReportedFolders

if TYPE_CHECKING:
    from fleet.app.result import Result

log = logging.getLogger("fleet.trainer")
NOTHING_TO_SHARE = ("dataset_config", "validation_config", "metadata", "resume_from_checkpoint")
ASKED = ("name", "resume", "address", "working_dir", "twin", "progress")
"""Arguments of ``fleet.launch`` that are no settings."""


class TrainingFailed(ray.train.TrainingFailedError, RunFailed):  # type: ignore[misc]
    """The run failed. Code for Ray Train catches it, and code for Fleet, too."""


@dataclass
class TrainerResult(ray.train.Result):  # type: ignore[misc]
    """A ``ray.train.Result``, with Fleet's own result.

    Attributes:
        fleet: the run's ``fleet.Result``.
    """

    fleet: Result | None = None


class Trainer:
    """Trains with a loop for Ray Train, through losses of its ranks.

    The arguments are those of ``ray.train.torch.TorchTrainer``; docs/from-ray-train.md says what each of them means here. In the loop
    ``fleet.current_run`` gives the ``fleet.Run``, whose ``track`` and ``steps`` take the place of the loop over batches.

    Args:
        train_loop_per_worker: is called in each rank, with ``train_loop_config`` if it has a parameter.
        train_loop_config: a mapping.
        scaling_config: ``num_workers`` ranks train; of (least, most) the most are wanted, and with fewer than the least the run waits.
        run_config: name and place of the run. A run of that name that is not completed goes on. ``checkpoint_config`` is about the
            checkpoints that the loop reports; for Fleet's own, use ``checkpoint={"keep": 3}``.
        datasets: by name, data for ``ray.train.get_dataset_shard``: data that ``step.batches`` takes; a ``ray.data.Dataset`` that only
            reads Parquet files; or a function that makes either. A Ray that such a function starts is shut down again.
        settings: all arguments of ``fleet.launch`` but the world and the name.

    Attributes:
        notes: arguments that have no effect here, and why.

    Raises:
        ConfigError: an argument asks for something that a run of Fleet's does not have.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: Any = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        metadata: Any = None,
        resume_from_checkpoint: Any = None,
        **settings: Any,
    ) -> None:
        takes = callable(train_loop_per_worker) and takes_config(train_loop_per_worker)
        self._loop, self._config = train_loop_per_worker, dict(train_loop_config or {}) if takes else None
        check_callable(train_loop_per_worker, "train_loop_per_worker", (None,) if takes else ())
        _refuse_given(zip(NOTHING_TO_SHARE, (dataset_config, validation_config, metadata, resume_from_checkpoint), strict=True))
        scaling = scaling_config or ray.train.ScalingConfig()
        self.notes = [*_notes(scaling, run_config), *(["torch_config: ranks form their groups themselves"] if torch_config else [])]
        self._settings, self._asked = _split(settings)
        self._settings |= _scaled(scaling)
        self._name, self._retention = _run_named(run_config, self._settings)
        self._datasets = {name: readable(name, dataset) for name, dataset in (datasets or {}).items()}

    def fit(self) -> TrainerResult:
        """Train to the end, and return the result, also of a run that was stopped in order.

        Raises:
            ConfigError: as for ``fleet.launch``.
            TrainingFailed: the run failed: a ``ray.train.TrainingFailedError`` and a ``fleet.errors.RunFailed``.
        """
        for note in self.notes:
            log.warning("%s", note)
        name, storage = self._name or plans.new_name(_stem(self._loop)), str(self._settings.get("storage", RunSettings().storage))
        folder = plans.root_of(storage) / name
        plans.fetch_journal(storage, name, folder.parent)
        there = (folder / "journal.jsonl").is_file()
        folders = ReportedFolders(plans.url_of(storage, name, folder))
        begins_with = _begins_with(folder, storage, folders) if there else ""
        pickled = packed(self._loop, self._loop, "train_loop_per_worker").pickled
        loop = TrainLoop(pickled, self._config, name, folders, begins_with, self._datasets, self._retention)
        train = packed(loop, self._loop, "train_loop_config")
        request = LaunchRequest(**{**self._asked, "name": "" if there else name, "resume": name if there else "", "check": False})
        return _result(launching.launched(train, [*launching.layers_of(self._settings)], request), folders)


# ---- arguments ---------------------------------------------------------------------------------------------------------------------------


def _refuse_given(given: Iterator[tuple[str, Any]]) -> None:
    for name, value in given:
        if value is not None:
            raise ConfigError(name, value, "it has no meaning for a run of Fleet's", "Leave it out; see docs/from-ray-train.md.")


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, other arguments)."""
    ways = {"world": "Use scaling_config=ScalingConfig(num_workers=...).", "name": "Use run_config=RunConfig(name=...)."}
    ways |= {"resume": "Give the name of the run in run_config: one that is there goes on.", "check": "fit() raises when the run fails."}
    for name, way_out in ways.items():
        if name in settings:
            raise ConfigError(name, settings[name], "a trainer has Ray Train's argument for it", way_out)
    return {k: v for k, v in settings.items() if k not in ASKED}, {k: v for k, v in settings.items() if k in ASKED}


def _scaled(scaling: ray.train.ScalingConfig) -> dict[str, Any]:
    """The world, as settings. Raises ConfigError for a resource that a local cluster's ranks cannot have."""
    refused = {
        "use_tpu": (bool(scaling.use_tpu), "ranks train with PyTorch on CPUs", "Leave it out."),
        "accelerator_type": (scaling.accelerator_type is not None, "ranks of a local cluster have none", "Leave it out."),
        "trainer_resources": (scaling.trainer_resources is not None, "the coordinator takes no resources", "Leave it out."),
        "label_selector": (isinstance(scaling.label_selector, list), "ranks are alike", "Give one selector, as a dict."),
        "placement_strategy": (
            scaling.placement_strategy.startswith("STRICT"), "ranks are spread over nodes, as far as there is room", "Set nodes=...",
        ),
    }  # fmt: skip
    for name, (given, reason, way_out) in refused.items():
        if given:
            raise ConfigError(f"scaling_config.{name}", getattr(scaling, name), reason, way_out)
    wanted = scaling.num_workers
    least, most = wanted if isinstance(wanted, tuple) else (0, wanted)
    if most < 1:
        raise ConfigError("scaling_config.num_workers", wanted, "a run has at least one rank", "Use num_workers=1.")
    return {"world": most, **({"min_ranks": least} if least else {}), **_per_rank(scaling)}


def _per_rank(scaling: ray.train.ScalingConfig) -> dict[str, Any]:
    """Ray's resources for each rank, as settings. On a local cluster CPUs are not counted: ranks have slots there."""
    takes = {name: float(amount) for name, amount in (scaling.resources_per_worker or {}).items() if amount and name != "CPU"}
    gpus = takes.pop("GPU", 1.0 if scaling.use_gpu else 0.0)
    found: dict[str, Any] = {"gpus": gpus} if gpus else {}
    found |= {"resources": tuple(f"{name}={amount:g}" for name, amount in takes.items())} if takes else {}
    labels = [f"{key}={condition}" for key, condition in (scaling.label_selector or {}).items()]
    return {"per_rank": found | ({"labels": tuple(labels)} if labels else {})} if found or labels else {}


def _run_named(run: ray.train.RunConfig | None, settings: dict[str, Any]) -> tuple[str, Retention]:
    """(name of the run, its rule for reported checkpoints). Puts its place into ``settings``. Raises ConfigError."""
    if run is None:
        return "", Retention()
    if run.storage_filesystem is not None:
        way_out = "Give storage_path as a URL that fsspec knows, such as s3://bucket/runs."
        raise ConfigError("run_config.storage_filesystem", run.storage_filesystem, "ranks open the store by its URL", way_out)
    if run.callbacks:
        raise ConfigError("run_config.callbacks", run.callbacks, "no controller of Ray Train's calls them", "Use progress=function.")
    if run.worker_runtime_env:
        raise ConfigError("run_config.worker_runtime_env", run.worker_runtime_env, "ranks have this process's environment", "Leave it out.")
    if "storage" in settings:
        raise ConfigError("storage", settings["storage"], "run_config has a place already", "Use run_config=RunConfig(storage_path=...).")
    settings["storage"] = str(run.storage_path)
    kept = run.checkpoint_config
    return str(run.name), Retention(kept.num_to_keep, kept.checkpoint_score_attribute, kept.checkpoint_score_order)


def _notes(scaling: ray.train.ScalingConfig, run: ray.train.RunConfig | None) -> Iterator[str]:
    if (scaling.resources_per_worker or {}).get("CPU"):
        yield "scaling_config.resources_per_worker: CPUs have no effect; per_rank.cpus is for a joined cluster"
    if run is not None and run.failure_config != ray.train.FailureConfig():
        yield "run_config.failure_config: the run goes on; it ends by itself when the same slot is lost again and again (budgets)"
    if run is not None and run.logging_config != ray.train.LoggingConfig():
        yield "run_config.logging_config: the ranks' output is in the run's folder, see fleet logs"


def readable(name: str, dataset: Any) -> Any:
    """A dataset of the trainer's as ``step.batches`` takes it. Raises ConfigError for one that it cannot take."""
    from fleet.app.cluster.ray_internals import parquet_paths
    from fleet.data import Parquet, Reader, ShardedDataset, Streams

    if isinstance(dataset, ShardedDataset | Streams):
        return dataset
    if callable(dataset) and not hasattr(dataset, "__getitem__"):
        with _ray_as_before():
            return readable(name, dataset())
    if isinstance(dataset, ray.data.Dataset):
        paths = parquet_paths(dataset)
        if paths is None:
            reason = "its rows have no numbers, so a step cannot choose them; only a dataset that just reads Parquet files has them"
            way_out = "Write it once, ds.write_parquet(path), and give fleet.data.ShardedDataset(path, Parquet()); or use Streams."
            raise ConfigError(f"datasets[{name!r}]", type(dataset).__name__, reason, way_out)
        return ShardedDataset(paths, cast("Reader", Parquet()))
    try:
        return ShardedDataset(dataset)
    except ConfigError as error:
        raise ConfigError(f"datasets[{name!r}]", error.value, error.reason, error.way_out) from error


@contextmanager
def _ray_as_before() -> Iterator[None]:
    """Shut down a Ray that is started meanwhile, as Ray Data does: a run needs the process to itself."""
    before = ray.is_initialized()
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _stem(loop: Callable[..., Any]) -> str:
    return launching.stem_of(name_of(loop))


# ---- a run that is there already, and one that has ended ---------------------------------------------------------------------------------


def _begins_with(folder: Path, storage: str, folders: ReportedFolders) -> str:
    """The newest checkpoint that the loop reported in steps which a resumed run does not take again; empty without one."""
    from storage.checkpoint.parts import newest_checkpoint

    newest = newest_checkpoint(plans.url_of(storage, folder.name, folder), folder.name)
    known = [each for each in _reports(folder) if each.state is None or (newest is not None and each.state.step <= newest[1].step)]
    names = [str(each.outcome["checkpoint"]) for each in known if each.outcome["checkpoint"]]
    return next((name for name in reversed(names) if folders.there(name)), "")


def _reports(folder: Path) -> list[ReportMade]:
    return reports(read_journal(folder / "journal.jsonl", spans=False), REPORT)


def _result(found: Result, folders: ReportedFolders) -> TrainerResult:
    """The result as Ray Train has it. Raises TrainingFailed."""
    import pandas as pd  # type: ignore[import-untyped]

    reported = [each.outcome for each in _reports(found.folder)]
    kept = dict(reported[-1]["kept"]) if reported and "kept" in reported[-1] else None
    there = [each for each in reported if each["checkpoint"] and (kept is None or each["checkpoint"] in kept)]
    _tidy(folders, {each["checkpoint"] for each in there})
    best = [(checkpoint_of(folders, each["checkpoint"]), each["metrics"]) for each in there]
    error = TrainingFailed(found.reason) if found.status == "failed" else None
    result = TrainerResult(
        metrics=reported[-1]["metrics"] if reported else None, checkpoint=best[-1][0] if best else None, error=error,
        path=str(found.folder), best_checkpoints=best,
        metrics_dataframe=pd.DataFrame([each["metrics"] for each in reported]) if reported else None, fleet=found,
    )  # fmt: skip
    if error is not None:
        error.result = result
        raise error
    return result


def _tidy(folders: ReportedFolders, kept: set[str]) -> None:
    """Remove folders that no record names: of ranks that died while they wrote, and those that were replaced last."""
    first_parts = {name.partition("/")[0] for name in kept}
    for name in folders.names():
        if name not in first_parts:
            folders.remove(name)
