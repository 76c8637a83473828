"""Trackers: what is refused before anything starts, what they are told of, and the process that sends it beside a run."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from dashboards.metrics.table import METRICS
from dashboards.trackers import choice
from dashboards.trackers.fold import ITS_OWN, TrackFold, values_of
from dashboards.trackers.otel_spans import OtelSpans
from dashboards.trackers.port import Begun, Span, TrackedFigures, TrackerAway, TrackerPlace, short
from dashboards.trackers.session import StandingFile, path_of, standing
from fleet.app import plans, tracking
from fleet.app.configuration import configured
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.host.ports import free_port
from fleet.ledger.goodput import Ledger
from fleet.protocol import records as r
from fleet.protocol.journal import encode_line
from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings
from fleet.settings.track import TrackSettings
from tests.golden.journals import one_loss
from tests.support.trackers import expected, read_tensorboard, singles

ROOT = Path(__file__).parents[2]


def senders() -> list[psutil.Process]:
    """Processes of trackers that this one has started. Other tests may have left children that have ended."""
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in alive if any("fleet.app.tracking" in word for word in each.cmdline())]


@pytest.mark.parametrize(
    ("given", "field", "way_out"),
    [
        ({"to": ("grafana",)}, "track.to", "mlflow"),
        ({"to": ("mlflow", "mlflow")}, "track.to", "once"),
        ({"every_s": 0.0}, "track.every_s", ""),
        ({"end_s": -1.0}, "track.end_s", ""),
        ({"project": ""}, "track.project", "fleet"),
        ({"mlflow_url": "http://me:secret@host:5000"}, "track.mlflow_url", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, object], field: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrackSettings(**given)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert way_out in refused.value.way_out
    assert "secret" not in str(refused.value)


def test_a_tracker_that_is_not_installed_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(choice.ADAPTERS["wandb"], needs=("there_is_no_such_module.inside",))
    monkeypatch.setitem(choice.ADAPTERS, "wandb", absent)
    with pytest.raises(ConfigError, match=r"pip install 'fleet-train\[wandb\] @ FLEET'"):
        choice.check(TrackSettings(to=("wandb",)), {})
    choice.check(TrackSettings(to=("tensorboard",)), {})


def test_mlflow_is_refused_while_nobody_says_where_it_is() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        choice.check(TrackSettings(to=("mlflow",)), {})
    choice.check(TrackSettings(to=("mlflow",)), {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"})


@pytest.mark.parametrize("given", ["mlflow", ["mlflow"], {"to": ["mlflow"]}])
def test_python_may_name_a_tracker_alone(given: object) -> None:
    assert configured({"track": given}).run.track.to == ("mlflow",)


def test_a_run_that_is_driven_elsewhere_takes_along_where_its_trackers_are() -> None:
    here = {"MLFLOW_TRACKING_URI": "http://here:1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://here:2/"}
    found = choice.located(TrackSettings(to=("mlflow", "otel"), mlflow_url="http://said:1"), here)
    assert (found.mlflow_url, found.otlp_url) == ("http://said:1", "http://here:2/v1/traces")
    assert choice.located(found, here, over=True).mlflow_url == "http://here:1"
    assert choice.located(TrackSettings(), here) == TrackSettings()


def test_a_twin_has_no_trackers(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(encode_line(one_loss().records[0]))
    settings = RunSettings(track=TrackSettings(to=("tensorboard",)))
    plan = plans.RunPlan(name="run", folder=tmp_path, settings=settings, train=plans.elsewhere)
    assert plans.twin_of(plan).settings.track == TrackSettings()


@pytest.mark.parametrize("module", ["fleet", "fleet.app.cli.main", "dashboards.trackers.choice", "fleet.app.tracking"])
def test_no_trackers_library_is_loaded_before_it_is_wanted(module: str) -> None:
    program = f"import sys, {module}; print([m for m in ('mlflow', 'wandb', 'tensorboardX', 'opentelemetry.sdk') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# ---- what is told ------------------------------------------------------------------------------------------------------------------------


def test_what_metrics_shows_is_told_but_for_single_ranks_and_what_has_steps_of_its_own() -> None:
    records = [*one_loss("f1").records]
    records.insert(-1, r.Measurement(None, StateId(0, 60), "loss", 0.5, at_s=7.3))
    reported = values_of(Ledger().apply_all(records).summary())
    assert reported["fleet_rank_seconds_total/compute"] == pytest.approx(6.0)
    assert reported["fleet_faults_total/kill_rank/executed"] == 1.0
    assert not [name for name in reported if name.startswith((ITS_OWN, "fleet_slot_seconds"))]
    assert "fleet_faults_total/hang/executed" not in reported, "it did not happen"
    assert ITS_OWN in {spec.name for spec in METRICS}


def test_the_older_a_run_the_rarer_its_samples() -> None:
    fold = TrackFold(every_s=10.0)
    day_s = 86_400
    journal = [one_loss().records[0], *(r.Committed(StateId(0, step), 5.0 * step) for step in range(1, day_s // 5))]
    at_s = [each.item.at_s - 1.7e9 for record in journal for each in fold.take(record) if isinstance(each.item, TrackedFigures)]
    assert at_s[:3] == [10.0, 20.0, 30.0]
    assert 500 < len(at_s) < 2500
    assert at_s[-1] - at_s[-2] == pytest.approx(0.002 * day_s, abs=10.0)


# ---- how far it is -----------------------------------------------------------------------------------------------------------------------


def test_one_process_at_a_time_sends_a_run_to_a_tracker(tmp_path: Path) -> None:
    kept = StandingFile(tmp_path, "mlflow")
    with pytest.raises(ConfigError, match="another process"):
        StandingFile(tmp_path, "mlflow")
    kept.standing.sent = 7
    kept.save()
    kept.close()
    again = StandingFile(tmp_path, "mlflow")
    assert again.standing.sent == 7
    again.close()


def test_a_file_that_says_something_else_counts_for_nothing(tmp_path: Path) -> None:
    path_of(tmp_path, "mlflow").parent.mkdir()
    path_of(tmp_path, "mlflow").write_text('{"tracker": "mlflow", "colour": 1}')
    assert standing(tmp_path, "mlflow").sent == 0


# ---- beside a run ------------------------------------------------------------------------------------------------------------------------


def test_a_process_beside_the_run_sends_it_and_ends_with_it(tmp_path: Path) -> None:
    story, settings = one_loss("f1").records, TrackSettings(to=("tensorboard",), every_s=0.5, end_s=60.0)
    writer = JournalWriter(tmp_path / "journal.jsonl")
    with tracking.tracked(tmp_path, settings):
        for record in story:
            writer.append(record)
        writer.close()
    assert not senders()
    assert tracking.in_words(tmp_path, settings) == [f"tensorboard: all of it at {tmp_path / 'tensorboard'}"]
    reported = read_tensorboard(tmp_path / "tensorboard")
    assert reported.figures == singles(expected(story, 0.5).figures)
    assert json.loads(reported.files["report.json"])["run"] == "story"


class Page(BaseHTTPRequestHandler):
    """Of a server that wants a login first: under ``/elsewhere`` it sends to its page."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(302 if self.path.startswith("/elsewhere") else 200)
        self.send_header("Location", "/login")
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """The test reads no log."""


@pytest.mark.parametrize("path", ["/v1/traces", "/elsewhere"])
def test_a_page_takes_no_spans(tmp_path: Path, path: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        tracker = OtelSpans(TrackerPlace(url=f"http://127.0.0.1:{server.server_port}{path}"))
        tracker.begin(Begun("r", "r@1", 1.0, {}))
        tracker.span(Span("run", "run", 1.0, 2.0, {}))
        with pytest.raises(TrackerAway, match="is that an OTLP receiver"):
            tracker.flush()
        tracker.close()
        server.shutdown()


def test_a_collector_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(encode_line, one_loss("f1").records)))
    settings, kept = TrackSettings(to=("otel",), otlp_url=f"http://127.0.0.1:{free_port()}/v1/traces"), StandingFile(tmp_path, "otel")
    tries: list[float] = []

    def thrice(seconds: float) -> bool:
        tries.append(seconds)
        return len(tries) == 3

    found = tracking.send(tmp_path, "otel", settings, kept, lambda: True, thrice)
    kept.close()
    assert not found.done and "refused" in found.away and len(tries) == 3
    [line] = caplog.records
    assert "\n" not in line.getMessage() and " object at 0x" not in line.getMessage()


def test_an_error_has_the_same_words_at_each_try() -> None:
    said = {short(OSError(f"pool: <urllib3.connection.HTTPConnection object at {hex(1 << number)}>: refused")) for number in range(8, 20)}
    assert said == {"pool: refused"}


def test_a_tracker_that_never_answers_holds_up_the_end_for_its_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(encode_line, one_loss("f1").records)))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces"
        settings = TrackSettings(to=("otel",), end_s=0.5, otlp_url=url)
        with tracking.tracked(tmp_path, settings):
            deaf.settimeout(120.0)
            line, _ = deaf.accept()  # it has been asked, and says nothing
        line.close()
    assert not senders()
    [said] = tracking.in_words(tmp_path, settings)
    assert f"fleet runs track {tmp_path} --track otel" in said
    assert not standing(tmp_path, "otel").done
