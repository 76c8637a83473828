"""Files for a Prometheus: what ``fleet cluster up`` writes for that of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dashboards.metrics.prometheus import scrape_configuration
from dashboards.metrics.rules import RUNBOOK, rules

RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where Ray's dashboard writes the addresses of its nodes' metrics."""
EVERY_S = 5.0


def write_yaml(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=1_000))
    return path


def write_prometheus(
    folder: Path, target: str, ray_targets: str | None, runbook: str = RUNBOOK, token_file: Path | None = None
) -> dict[str, Any]:
    """Rules, targets and configuration for a Prometheus in ``folder``; returns the configuration.

    Args:
        target: ``host:port`` of Fleet's server.
        ray_targets: Ray's service-discovery file; None: where Ray puts it.
        runbook: URL or path of the runbook that alerts link to.
        token_file: holds the token that the server asks readers for; None: it asks for none.
    """
    rule_file = write_yaml(folder / "fleet.rules.yml", rules(runbook))
    target_file = folder / "fleet.json"
    target_file.write_text(json.dumps([{"targets": [target]}]) + "\n")
    configuration = scrape_configuration([target_file], [Path(ray_targets or RAY_TARGETS)], [rule_file], EVERY_S, token_file)
    write_yaml(folder / "prometheus.yml", configuration)
    return configuration
