"""Trackers that show a run, beside its own page."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from fleet.errors import ConfigError
from fleet.settings.fields import setting, within

TRACKERS = ("tensorboard", "mlflow", "wandb", "otel")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSettings:
    """Trackers that the run is sent to while it goes on."""

    to: tuple[str, ...] = setting((), f"Trackers that get the run, of {', '.join(TRACKERS)}.")
    every_s: float = setting(10.0, "Time from one sample of all metrics to the next; in a long run, 0.2% of its age.", above=0)
    end_s: float = setting(30.0, "How long the end of the run waits for trackers. fleet runs track sends the rest later.", least=0)
    project: str = setting("fleet", "Experiment of MLflow, project of Weights & Biases.")
    folder: str = setting("", "Folder for TensorBoard, which gets a folder of the run's name; empty: tensorboard in the run's folder.")
    mlflow_url: str = setting("", "Server of MLflow; empty: as MLFLOW_TRACKING_URI says.")
    otlp_url: str = setting("", "Where OpenTelemetry's traces go; empty: as OTEL_EXPORTER_OTLP_ENDPOINT says.")

    def __post_init__(self) -> None:
        for name in self.to:
            if name not in TRACKERS:
                raise ConfigError("track.to", name, "there is no such tracker", f"Choose of {', '.join(TRACKERS)}.")
        if len(set(self.to)) != len(self.to):
            raise ConfigError("track.to", ", ".join(self.to), "names a tracker twice", "Name each once.")
        within(self, "track.")
        if not self.project:
            raise ConfigError("track.project", self.project, "a tracker needs a name for it", "Leave it out: it is fleet then.")
        for name in ("mlflow_url", "otlp_url"):
            if "@" in urlsplit(getattr(self, name)).netloc:
                shown = getattr(self, name).rpartition("@")[2]
                way_out = "Use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or OTEL_EXPORTER_OTLP_HEADERS."
                raise ConfigError(f"track.{name}", shown, "it has credentials, which would be in the journal", way_out)
