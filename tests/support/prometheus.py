"""Real Prometheus: its rule tester, and a server that scrapes for the time of a test."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from dashboards.metrics.prometheus import Prometheus, scrape_configuration
from dashboards.metrics.rules import LATE_S
from tests.support.programs import program
from tests.support.waiting import until

LIMIT_S = 60.0
SECONDS = {"s": 1, "m": 60, "h": 3600}


def promtool(*arguments: str, given: str = "") -> str:
    """What promtool says, with ``given`` as its input. Raises AssertionError with it when it finds fault."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def filled(expr: str, run: str, rate_interval: str = "2s") -> str:
    """A panel's ``expr`` as Grafana asks it, with its variables filled in."""
    return expr.replace("$run", run).replace("$__rate_interval", rate_interval)


def quick(content: dict[str, Any], scale: float) -> dict[str, Any]:
    """A rules file with each of its times ``scale`` times as long, for a run that does not last for hours."""

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{round(1000 * scale * int(match[2]) * SECONDS[match[3]])}ms{match[4]}"

    text = re.sub(r'(\[|"for": "|offset )(\d+)([smh])(\]|"|)', shorter, json.dumps(content))
    found: dict[str, Any] = json.loads(text.replace(f"> {LATE_S:g} + ", f"> {LATE_S * scale:g} + "))
    return found


class Server:
    """A running Prometheus, asked over its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises AssertionError when Prometheus refuses it."""
        answer = requests.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=LIMIT_S).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def history(self, expr: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """The series of a range query between two Unix times. Raises AssertionError when Prometheus refuses it."""
        asked = {"query": expr, "start": start_s, "end": end_s, "step": 0.5}
        answer = requests.get(f"{self.url}/api/v1/query_range", params=asked, timeout=LIMIT_S).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}

    def until(self, expr: str, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """What ``expr`` gives once it gives something."""
        until(lambda: bool(self.query(expr)), f"Prometheus has an answer to {expr}", limit_s)
        return self.query(expr)


@contextmanager
def scraping(folder: Path, targets: list[str], rules: dict[str, Any], every_s: float = 0.5) -> Iterator[Server]:
    """A server on a free port, with its data in ``folder``, that scrapes ``targets`` and evaluates ``rules``."""
    folder.mkdir(parents=True, exist_ok=True)
    rule_file, target_file = folder / "rules.yml", folder / "targets.json"
    rule_file.write_text(json.dumps(rules))
    target_file.write_text(json.dumps([{"targets": targets}]))
    configuration = scrape_configuration([target_file], [], [rule_file], every_s)
    with Prometheus(folder, configuration, program("prometheus")) as running:
        yield Server(running.url)
