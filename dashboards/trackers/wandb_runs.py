"""Weights & Biases. Its own process keeps what it is given in a file of its own, in the run's folder, and sends it when it can; with
``WANDB_MODE=offline`` it sends nothing, and ``wandb sync FOLDER`` does so later."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboards.trackers.port import Begun, Ended, Span, TrackedMark, TrackerAway, TrackerPlace, short

ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""For this process, unless its user has said otherwise: Fleet sends nothing to anybody whom its user has not named."""
OFFLINE = ("offline", "dryrun")


class WandbRuns:
    """One run in the project ``place.project``. Offline, what an earlier process wrote is removed, and all is written anew."""

    def __init__(self, place: TrackerPlace) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.refused, self.why, self.where = 0, "", ""
        self.anew = os.environ.get("WANDB_MODE", "") in OFFLINE
        self._place, self._ended = place, False
        self._run: Any = None

    def begin(self, run: Begun) -> None:
        import wandb

        id = hashlib.sha256(run.key.encode()).hexdigest()[:16]
        with _taking():
            if self.anew:
                for before in (self._place.folder / "wandb").glob(f"offline-run-*-{id}"):
                    shutil.rmtree(before)
            (self._place.folder / "wandb").mkdir(parents=True, exist_ok=True)  # else it would take a temporary folder
            self._run = wandb.init(
                project=self._place.project, id=id, name=run.run, dir=str(self._place.folder), config=dict(run.facts),
                resume=None if self.anew else "allow", settings=_quiet(),
            )  # fmt: skip
            self._run.define_metric("*", step_metric="step")
        self.where = str(self._run.url or Path(self._run.dir).parent)

    def figures(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        with _taking():
            self._run.log({**values, "step": step, "at_s": at_s})

    def facts(self, facts: Mapping[str, str]) -> None:
        with _taking():
            self._run.config.update(dict(facts), allow_val_change=True)

    def mark(self, mark: TrackedMark) -> None:
        with _taking():
            number, text = f"marks/{mark.kind}", f"marks/{mark.kind}_text"
            self._run.log({number: mark.number, text: mark.text, "step": mark.step, "at_s": mark.at_s})

    def span(self, span: Span) -> None:
        """It has no place for stretches of time that are no calls of models."""

    def artefact(self, path: Path) -> None:
        with _taking():
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def end(self, ended: Ended) -> None:
        with _taking():
            self._run.summary.update({"status": ended.status, "reason": ended.reason})
        self._ended = True

    def flush(self) -> None:
        """What was given is in its own file already."""

    def close(self) -> None:
        """Where it sends, it waits until all is sent. A run that has not ended is left open there."""
        if self._run is not None and (self._ended or self.anew):
            with _taking():
                self._run.finish()
            self._run = None


def _quiet() -> Any:
    """Only what it is given: neither output of this process, nor its code, nor the state of this machine."""
    import wandb

    return wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True)


@contextlib.contextmanager
def _taking() -> Iterator[None]:
    from wandb.errors import Error

    try:
        yield
    except (Error, OSError) as error:
        raise TrackerAway(short(error)) from error
