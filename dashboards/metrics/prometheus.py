"""Prometheus for runs on this machine: what it scrapes, and the server itself where it is installed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from fleet.errors import ConfigError, RunFailed
from fleet.host.ports import free_port, try_to_listen

RETENTION = "30d"


def scrape_configuration(
    fleet_files: Sequence[Path], ray_files: Sequence[Path], rule_files: Sequence[Path], every_s: float, token_file: Path | None = None
) -> dict[str, Any]:
    """The content of ``prometheus.yml``: Fleet's and Ray's targets from files that change as runs and clusters come and go.

    Args:
        fleet_files: service-discovery files of servers with Fleet's ``/metrics``.
        ray_files: those that Ray writes for its clusters, or patterns of them.
        rule_files: recording and alert rules.
        every_s: seconds between scrapes, and between evaluations of the rules.
        token_file: holds the token that Fleet's servers ask readers for; None: they ask for none.
    """
    every = f"{round(every_s * 1000)}ms"
    jobs = [("fleet", fleet_files), ("ray", ray_files)]
    scrapes: list[dict[str, Any]] = [
        {
            "job_name": job,
            "honor_labels": job == "ray",
            "file_sd_configs": [{"files": [str(path.absolute()) for path in files], "refresh_interval": "5s"}],
        }
        for job, files in jobs
        if files
    ]
    if token_file is not None:
        scrapes[0]["authorization"] = {"type": "Bearer", "credentials_file": str(token_file.absolute())}
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path.absolute()) for path in rule_files],
        "scrape_configs": scrapes,
    }


def installed() -> str | None:
    """The ``prometheus`` of this machine."""
    return shutil.which("prometheus")


class Prometheus:
    """A server on loopback. Use as a context manager, or ``start`` and ``stop``.

    Args:
        folder: for its configuration, its data and its log.
        configuration: see :func:`scrape_configuration`.
        program: the server; None: the one that is installed.
        port: 0 takes a free one.

    Raises:
        ConfigError: there is no such program, or its port is taken.
        RunFailed: it did not come up; its log is quoted.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any], program: str | None = None, port: int = 0) -> None:
        self._folder, self._configuration = folder, configuration
        found = program or installed()
        if found is None:
            raise ConfigError(
                "prometheus", None, "is not installed here", "Install it (Debian: apt-get install prometheus), or go on without."
            )
        self._program, self.port = found, port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, limit_s: float = 30.0) -> Prometheus:
        try:
            try_to_listen("127.0.0.1", self.port)
        except OSError as error:
            raise ConfigError("--prometheus-port", self.port, "another program listens there", "Choose another, or 0.") from error
        self._folder.mkdir(parents=True, exist_ok=True)
        path, log = self._folder / "prometheus.yml", self._folder / "prometheus.log"
        path.write_text(json.dumps(self._configuration, indent=1))  # JSON is YAML
        arguments = {
            "config.file": path, "web.listen-address": f"127.0.0.1:{self.port}", "storage.tsdb.path": self._folder / "data",
            "storage.tsdb.retention.time": RETENTION,
        }  # fmt: skip
        command = [self._program, *(f"--{name}={value}" for name, value in arguments.items())]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        self._await(log, limit_s)
        return self

    def _await(self, log: Path, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise RunFailed("Prometheus did not come up", log.read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/-/ready", timeout=2).ok
        except requests.RequestException:
            return False

    def stop(self) -> None:
        """End it. Stopping twice does no harm."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)

    def __enter__(self) -> Prometheus:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
