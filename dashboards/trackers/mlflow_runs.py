"""MLflow: a run of an experiment, on a tracking server.

The server tells figures apart by name, step, time and value: what is sent again after a time-out, it does not have twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dashboards.trackers.port import Begun, Ended, Span, TrackedMark, TrackerAway, TrackerPlace, short

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # Fleet sends nothing to anybody whom its user has not named
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # who calls tries again, and knows when to stop
}
"""For this process, unless its user has said otherwise."""
KEY = "fleet.key"
"""The tag by which a run is found again."""
MOST = {"metrics": 1000, "params": 100, "tags": 100}
"""A request may have so many."""
NAME_CHARACTERS, PARAM_CHARACTERS, TAG_CHARACTERS = 250, 6000, 5000
MOST_MARKS = 1000
"""So many marks become tags; all of them are in ``marks.txt``."""
STATUS = {"failed": "FAILED", "stopped": "KILLED"}
"""How a run ended -> MLflow's word; FINISHED for all others."""
UNUSABLE = re.compile(r"[^\w\-. :/]")
NEVER = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")
"""What MLflow says of what it will not take the next time either."""


class MlflowRuns:
    """One run in the experiment ``place.project`` of the server ``place.url``."""

    anew = False

    def __init__(self, place: TrackerPlace) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self.refused, self.why, self.where = 0, "", _less_credentials(place.url)
        self._place, self._client = place, MlflowClient(tracking_uri=place.url)
        self._id = ""
        self._waiting: dict[str, list[Any]] = {name: [] for name in MOST}
        self._files: list[Path] = []
        self._ended: Ended | None = None
        self._over = False  # the server has the run as ended

    def begin(self, run: Begun) -> None:
        from mlflow.entities import Param

        with _answering():
            experiment = self._experiment()
            found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{_quoted(run.key)}'", max_results=1)
            if found:
                self._id, self._over = found[0].info.run_id, found[0].info.status != "RUNNING"
            else:
                made = self._client.create_run(experiment, round(run.started_s * 1000), {KEY: run.key}, run.run)
                self._id = made.info.run_id
        self.where = f"{_less_credentials(self._place.url)}/#/experiments/{experiment}/runs/{self._id}"
        self._waiting["params"] = [Param(_name(name), value[:PARAM_CHARACTERS]) for name, value in run.facts.items()]
        self._tag(_sources(run.facts))
        self.flush()

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        project = self._place.project
        found = self._client.get_experiment_by_name(project)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(project))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._experiment()  # another run has made it meanwhile

    def figures(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        from mlflow.entities import Metric

        self._waiting["metrics"] += [Metric(_name(name), value, round(at_s * 1000), step) for name, value in values.items()]

    def facts(self, facts: Mapping[str, str]) -> None:
        self._tag(facts)

    def mark(self, mark: TrackedMark) -> None:
        self.figures(mark.step, {f"marks/{mark.kind}": float(mark.number)}, mark.at_s)
        if mark.number <= MOST_MARKS:
            self._tag({f"{mark.kind}.{mark.number:04d}": f"step {mark.step}: {mark.text}"})

    def span(self, span: Span) -> None:
        """MLflow's traces are of calls of models."""

    def artefact(self, path: Path) -> None:
        self._files.append(path)

    def end(self, ended: Ended) -> None:
        self._tag({"status": ended.status, "reason": ended.reason})
        self._ended = ended

    def flush(self) -> None:
        if self._over and self._waiting["metrics"]:  # it was resumed
            with _answering():
                self._client.update_run(self._id, status="RUNNING")
            self._over = False
        for kind in MOST:
            while batch := self._waiting[kind][: MOST[kind]]:
                self._send(kind, batch)
                del self._waiting[kind][: len(batch)]
        while self._files:
            with _answering():
                self._client.log_artifact(self._id, str(self._files[0]))
            del self._files[0]
        if self._ended is not None:
            with _answering():
                self._client.set_terminated(self._id, STATUS.get(self._ended.status, "FINISHED"), round(self._ended.at_s * 1000))
            self._ended = None

    def close(self) -> None:
        """There is nothing open between two requests."""

    def _send(self, kind: str, batch: Sequence[Any]) -> None:
        """What MLflow will never take is found by halves, counted, and left out."""
        from mlflow.exceptions import MlflowException

        try:
            with _answering():
                self._client.log_batch(self._id, **{kind: batch}, synchronous=True)
        except MlflowException as error:
            if len(batch) > 1:
                self._send(kind, batch[: len(batch) // 2])
                self._send(kind, batch[len(batch) // 2 :])
                return
            self.refused, self.why = self.refused + 1, " ".join(str(error).split())[:300]

    def _tag(self, facts: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._waiting["tags"] += [RunTag(_name(_tag_name(name)), value[:TAG_CHARACTERS]) for name, value in facts.items()]


def _tag_name(name: str) -> str:
    return name if name.startswith("mlflow.") else f"fleet.{name}"


def _sources(facts: Mapping[str, str]) -> dict[str, str]:
    """What MLflow itself shows of a run's code, in its own words."""
    known = {"mlflow.source.name": facts.get("script", ""), "mlflow.source.git.commit": facts.get("made_of.commit", "")}
    ours = {name: facts.get(f"made_of.{name}", "") for name in ("commit", "script_sha256", "diff_sha256")}
    return {name: value for name, value in {**known, **ours}.items() if value}


def _name(name: str) -> str:
    return UNUSABLE.sub("_", name)[:NAME_CHARACTERS]


def _less_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _quoted(text: str) -> str:
    return text.replace("'", "_")


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """A server that is not there, is late, or has trouble of its own, may take it later. Raises MlflowException for what it never takes."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        yield
    except MlflowException as error:
        if error.error_code in NEVER:
            raise
        raise TrackerAway(short(error)) from error
    except (RequestException, OSError) as error:
        raise TrackerAway(short(error)) from error
