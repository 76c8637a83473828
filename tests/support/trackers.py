"""What has come to trackers, read back as each of them offers it, and their servers: each on 127.0.0.1, and ended by its pid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from dashboards.trackers.fold import TrackFold
from dashboards.trackers.port import Begun, Ended, RunFacts, Span, TrackedFigures, TrackedMark
from fleet.protocol.records import Record
from tests.support.seaweed import free_pairs
from tests.support.waiting import until

START_S = 120.0
STOP_S = 20.0
BLOCK_BYTES, HEAD_BYTES = 32_768, 7
ARTEFACTS = {"report.json", "report.txt", "marks.txt", "configuration.json"}


@dataclass
class Reported:
    """What a tracker has of a run. ``figures`` are (name, step, value), as often as it has them; so are ``marks`` (kind, step, text)."""

    figures: Counter[tuple[str, int, float]] = field(default_factory=Counter)
    marks: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    facts: dict[str, str] = field(default_factory=dict)
    spans: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    files: dict[str, str] = field(default_factory=dict)
    status: str = ""


def expected(records: Sequence[Record], every_s: float) -> Reported:
    """What follows from a journal."""
    reported, fold = Reported(), TrackFold(every_s)
    numbered = [each for record in records for each in fold.take(record)] + fold.finish()
    for item in (each.item for each in numbered):
        match item:
            case Begun(facts=facts) | RunFacts(facts=facts):
                reported.facts |= facts
            case TrackedFigures(step=step, values=values):
                reported.figures.update((name, step, value) for name, value in values.items())
            case TrackedMark(kind=kind, number=number, text=text, step=step):
                reported.marks[kind, step, text] += 1
                reported.figures[f"marks/{kind}", step, float(number)] += 1
            case Span(name=name, start_s=start_s, end_s=end_s):
                if name == "run":  # of a run that is resumed it is sent again, by the same number
                    reported.spans = Counter({each: count for each, count in reported.spans.items() if each[0] != "run"})
                reported.spans[name, round(start_s * 1e9), round(end_s * 1e9)] += 1
            case Ended(status=status):
                reported.status = status
    return reported


def singles(figures: Counter[tuple[str, int, float]]) -> Counter[tuple[str, int, float]]:
    """As a file of single floats has them."""
    found: Counter[tuple[str, int, float]] = Counter()
    for (name, step, value), count in figures.items():
        found[name, step, float(np.float32(value))] += count
    return found


# ---- TensorBoard -------------------------------------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Reported:
    """By TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    reported, tags = Reported(), reader.Tags()
    for tag in tags["scalars"]:
        reported.figures.update((tag, event.step, event.value) for event in reader.Scalars(tag))
    for tag in tags["tensors"]:
        name = tag.removesuffix("/text_summary")
        for event in reader.Tensors(tag):
            text = event.tensor_proto.string_val[0].decode()
            kind, _, rest = name.partition("/")
            if kind == "marks":
                reported.marks[rest, event.step, text] += 1
            elif kind == "artefacts":
                reported.files[rest] = "\n".join(line.removeprefix("    ") for line in text.splitlines())
            elif name == "ended":
                reported.status = text.partition(":")[0]
            elif name == "configuration":
                reported.facts |= dict(line.strip("| ").split(" | ", 1) for line in text.splitlines()[2:] if " | " in line.strip("| "))
            else:
                reported.facts[name] = text
    return reported


# ---- MLflow ------------------------------------------------------------------------------------------------------------------------------


@dataclass
class MlflowServer:
    """An ``mlflow server`` with its database in ``folder``."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Also after :meth:`kill`: at the same address, with what it had. Returns once it serves."""
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        places = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination", f"{self.folder}/artefacts"]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command, environment = [sys.executable, "-m", "mlflow", "server", *places, *where], {**os.environ, **quiet}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=environment, start_new_session=True
            )
        until(self.answers, f"MLflow's server answers; see {self.folder}/server.log", START_S, 0.1)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def pause(self) -> None:
        """It hangs: connections are taken by the kernel, and nobody answers until :meth:`go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """With the process that it has started for its requests: they are of one session."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
            self.process.wait(STOP_S)
            self.process = None


@contextlib.contextmanager
def mlflow_serving(folder: Path) -> Iterator[MlflowServer]:
    """Ready when the block begins, gone when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    server = MlflowServer(folder, free_pairs(1)[0])
    try:
        server.start()
        yield server
    finally:
        server.kill()


def read_mlflow(url: str, key: str, scratch: Path) -> Reported:
    """By MLflow's own client."""
    from mlflow import MlflowClient

    client, reported = MlflowClient(tracking_uri=url), Reported()
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`fleet.key` = '{key}'")
    for name in run.data.metrics:
        reported.figures.update((name, point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
    tags = {name.removeprefix("fleet."): value for name, value in run.data.tags.items()}
    for name, value in tags.items():
        kind, _, number = name.partition(".")
        if number.isdecimal():
            step, _, text = value.partition(": ")
            reported.marks[kind, int(step.removeprefix("step ")), text] += 1
    reported.facts, reported.status = {**tags, **run.data.params}, run.info.status
    for file in client.list_artifacts(run.info.run_id):
        path = client.download_artifacts(run.info.run_id, file.path, str(scratch))
        reported.files[file.path] = Path(path).read_text()
    return reported


# ---- Weights & Biases --------------------------------------------------------------------------------------------------------------------


def read_wandb(folder: Path) -> Reported:
    """From the file that ``wandb sync`` sends, by the records that the package describes."""
    from wandb.proto import wandb_internal_pb2

    (run,) = (folder / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    reported = Reported()

    def parsed() -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(data) for data in _log_records(file.read_bytes())]

    until(lambda: any(record.HasField("exit") for record in parsed()), "its own process has written the end of the run")
    for record in parsed():
        kind = record.WhichOneof("record_type")
        if kind == "history":
            _row(reported, {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
        elif kind in ("config", "run"):
            config = record.config if kind == "config" else record.run.config
            reported.facts |= {item.key or item.nested_key[0]: str(json.loads(item.value_json)) for item in config.update}
        elif kind == "summary":
            said = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
            reported.status = said.get("status", reported.status)
    reported.files = {path.name: path.read_text() for path in (run / "files").iterdir() if path.name in ARTEFACTS}
    return reported


def _row(reported: Reported, row: dict[str, Any]) -> None:
    step = row["step"]
    for name, value in row.items():
        if name.endswith("_text"):
            reported.marks[name.removeprefix("marks/").removesuffix("_text"), step, value] += 1
        elif name not in ("step", "at_s") and not name.startswith("_"):
            reported.figures[name, step, float(value)] += 1


def _log_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's format of logs: blocks, in which each part of a record has a head of checksum, length and place in the record."""
    at, parts = HEAD_BYTES, b""
    while at + HEAD_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEAD_BYTES:
            at += left
            continue
        _, length, place = struct.unpack("<IHB", data[at : at + HEAD_BYTES])
        if at + HEAD_BYTES + length > len(data):
            return  # its writer is not done with it
        parts += data[at + HEAD_BYTES : at + HEAD_BYTES + length]
        at += HEAD_BYTES + length
        if place in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


# ---- OpenTelemetry -----------------------------------------------------------------------------------------------------------------------


class OtlpReceiver:
    """An OTLP receiver over HTTP: it keeps the spans that it is sent, by trace and span number, as backends do."""

    def __init__(self) -> None:
        self.spans: dict[tuple[bytes, bytes], Any] = {}
        self.services: set[str] = set()
        self.parents: dict[tuple[bytes, bytes], bytes] = {}
        self.port = free_pairs(1)[0]
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kill(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id, span.span_id] = span

    def reported(self) -> Reported:
        found = Reported()
        found.spans.update((span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in self.spans.values())
        runs = [span for span in self.spans.values() if span.name == "run"]
        found.status = next((each.value.string_value for span in runs for each in span.attributes if each.key == "fleet.status"), "")
        return found
