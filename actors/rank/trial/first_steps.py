"""Two steps of a script before its run begins, to find out whether it raises. The process ends with them, and no file is left."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from actors.rank.current import within
from actors.rank.device import rank_device
from actors.rank.main import user_traceback
from actors.rank.state.room import GIB, free_bytes
from actors.rank.trial.held_back import HeldBack, Untried
from actors.rank.trial.recording import Book
from actors.rank.trial.trial import TrialPlan, Trying, alone, play, settle
from fleet.errors import ConfigError, LoopError
from fleet.ledger.sameness import TrialRequest
from fleet.settings.run import RunSettings

Train = Callable[[Any], None]
SHARDS = 2
"""A step of one shard would not show effects of a first shard on a second."""
COPIES = 4
"""The memory of a step, in sizes of the parameters: parameters, gradients, and two moments."""
TRACKERS_OFF = {"WANDB_MODE": "disabled", "OTEL_SDK_DISABLED": "true", "MLFLOW_TRACKING_URI": "file:mlruns"}
"""Variables that switch off trackers in the script."""
WORK = "work"
NO_MEMORY = ("can't allocate memory", "out of memory")
FORKED = "in forked subprocess"
"""torch's words when a forked process uses a GPU that its parent has used before."""


def take_first_steps(load: Callable[[], Train], file: str, run: RunSettings, folder: Path, joins: bool) -> ConfigError | None:
    """The error of the script; None: two steps show none.

    Args:
        load: gives the train function, within the trial.
        file: the script's path.
        run: the run's settings.
        folder: for the trial's files; the caller deletes it.
        joins: the run will be on a cluster of other machines, which may have files that this one lacks.

    Raises:
        Untried: the trial cannot decide, for the given reason.
    """
    if joins and run.per_rank.gpus and not torch.cuda.is_available():
        raise Untried("its ranks have GPUs, and this machine has none")
    here, settings = Path.cwd(), alone(run, math.gcd(run.shards, SHARDS))
    held = _settle_in(folder, here)
    settle(settings)
    plan = TrialPlan(
        TrialRequest(timed=True), share=run.shards // settings.shards, of_shards=run.shards, main=False, once=held.once,
        tracking=lambda objects: _check_room(objects, settings),
    )  # fmt: skip
    trying = Trying(settings, folder, Book(timed=True), plan)
    try:
        with within(trying):
            play(trying, load())
    except ConfigError as refused:
        return _located(file, refused)
    except LoopError as mistake:
        return _mistaken(file, mistake)
    except Exception as error:  # noqa: BLE001 - any error of the script is the result
        _check_blame(error, here, joins)
        return _raising(file, error)
    except SystemExit as end:
        return _raising(file, end)
    return None


def _located(file: str, refused: ConfigError) -> ConfigError:
    """The refusal with the line of the script that made the refused call; as it was if no line of the script did."""
    frames = [frame for frame in traceback.extract_tb(refused.__traceback__) if frame.filename == file]
    if not frames:
        return refused
    called = f"{file}, line {frames[-1].lineno}: {frames[-1].line}"
    return ConfigError(refused.field, refused.value, refused.reason, f"{refused.way_out}\n  {called}".lstrip())


def _raising(file: str, error: BaseException) -> ConfigError:
    reason = "it raises in its first steps, which one process has tried before anything was started (--no-trial leaves that out)"
    return ConfigError("script", file, reason, f"\n\n{user_traceback(error).rstrip()}")


def _mistaken(file: str, mistake: LoopError) -> ConfigError:
    """The refusal for a mistake in the loop. If the train function has returned, it has no line."""
    lines = user_traceback(mistake).rstrip()
    return ConfigError("script", file, str(mistake).rstrip("."), f"\n\n{lines}" if file in lines else "")


def _settle_in(folder: Path, here: Path) -> HeldBack:
    """Change to a working directory with links to the files in ``here``. New files go there, and changes of other files are held back."""
    work = folder / WORK
    work.mkdir()
    for entry in os.scandir(here):
        (work / entry.name).symlink_to(Path(entry.path).absolute())
    os.chdir(work)
    tempfile.tempdir = str(folder)
    os.environ |= {**TRACKERS_OFF, "TMPDIR": str(folder)}
    sys.dont_write_bytecode = True
    return HeldBack(folder)


def _check_room(tracked: Mapping[str, Any], settings: RunSettings) -> None:
    """Raises Untried: one process cannot hold the whole model with its gradients and its optimizer."""
    modules = [one for one in tracked.values() if isinstance(one, torch.nn.Module)]
    parameters = [one for module in modules for one in module.parameters()]
    size = sum(one.nbytes for one in parameters)
    needed = COPIES * size - sum(one.nbytes for one in parameters if not one.is_meta)
    free = free_bytes(rank_device(settings.per_rank.gpus))
    if needed > free:
        raise Untried(f"a model of {size / GIB:.3g} GiB with its gradients and its optimizer does not fit into one process here")


def _check_blame(error: Exception, here: Path, joins: bool) -> None:
    """Raises Untried for an error that a rank would not meet."""
    said = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in said for words in NO_MEMORY):
        raise Untried("it does not fit into the memory of one process here") from error
    if FORKED in said:
        raise Untried("its first lines have asked for a GPU, which a trial of ranks without one cannot have") from error
    if isinstance(error, OSError):
        elsewhere = isinstance(error.filename, str) and Path(here, error.filename).exists()
        if joins or elsewhere:
            raise Untried(f"it needs a file or connection that the trial does not have: {error}") from error
