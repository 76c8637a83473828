"""Which trackers there are, what each needs, and the one that a run is sent to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dashboards.trackers.port import Tracker, TrackerPlace
from fleet.errors import ConfigError
from fleet.host.extras import need
from fleet.settings.track import TrackSettings

MLFLOW_URL = "MLFLOW_TRACKING_URI"
OTLP_TRACES, OTLP = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Adapter:
    """``module``, of ours, has class ``name``; it needs the modules ``needs``, of the extra that is called as the tracker is."""

    module: str
    name: str
    needs: tuple[str, ...]


ADAPTERS = {
    "tensorboard": Adapter("tensorboard_events", "TensorBoardEvents", ("tensorboardX",)),
    "mlflow": Adapter("mlflow_runs", "MlflowRuns", ("mlflow",)),
    "wandb": Adapter("wandb_runs", "WandbRuns", ("wandb",)),
    "otel": Adapter("otel_spans", "OtelSpans", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
}


def check(settings: TrackSettings, environment: Mapping[str, str]) -> None:
    """Refuse, before anything starts, what cannot be sent from here. Raises ConfigError."""
    for name in settings.to:
        for module in ADAPTERS[name].needs:
            need(module, name, "--track", name)
        if name == "mlflow" and not (settings.mlflow_url or environment.get(MLFLOW_URL)):
            way_out = f"Set {MLFLOW_URL}, such as http://127.0.0.1:5000, or track.mlflow_url."
            raise ConfigError("--track", name, "nobody says where MLflow's server is", way_out)


def located(settings: TrackSettings, environment: Mapping[str, str], *, over: bool = False) -> TrackSettings:
    """Settings for a process in which ``environment`` is not to be had, or an older one: with where trackers are, as that says.

    With ``over`` it wins over what settings say; without trackers nothing changes. Raises ConfigError for an address with credentials.
    """
    if not settings.to:
        return settings
    base = environment.get(OTLP, "").rstrip("/")
    traces, mlflow = environment.get(OTLP_TRACES) or (f"{base}/v1/traces" if base else ""), environment.get(MLFLOW_URL, "")
    if over:
        return replace(settings, mlflow_url=mlflow or settings.mlflow_url, otlp_url=traces or settings.otlp_url)
    return replace(settings, mlflow_url=settings.mlflow_url or mlflow, otlp_url=settings.otlp_url or traces)


def made(name: str, run: Path, settings: TrackSettings, environment: Mapping[str, str]) -> Tracker:
    """Tracker ``name`` for the run in folder ``run``."""
    adapter, place = ADAPTERS[name], _place(name, run, settings, environment)
    tracker: Tracker = getattr(importlib.import_module(f"dashboards.trackers.{adapter.module}"), adapter.name)(place)
    return tracker


def _place(name: str, run: Path, settings: TrackSettings, environment: Mapping[str, str]) -> TrackerPlace:
    if name == "tensorboard":
        return TrackerPlace(folder=Path(settings.folder, run.name) if settings.folder else run / "tensorboard")
    urls = {"mlflow": settings.mlflow_url or environment.get(MLFLOW_URL, ""), "otel": settings.otlp_url}
    return TrackerPlace(settings.project, run / "track", urls.get(name, ""))
