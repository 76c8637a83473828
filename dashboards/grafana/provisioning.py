"""Files for Prometheus and Grafana: what ``fleet up`` writes for those of this machine, ``fleet dashboard write`` for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dashboards.grafana.boards import FOLDER_TITLE, SOURCE_UID, all_boards
from dashboards.grafana.push import SOURCE_NAME
from dashboards.metrics.rules import RUNBOOK, rules
from fleet.cluster.prometheus import scrape_configuration

RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where Ray's dashboard writes the addresses of its nodes' metrics."""
EVERY_S = 5.0
PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
"""Pinned: what a compose file starts is the same next year."""


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
    rule_file = write_yaml(folder / "fleet.rules.yml", rules(runbook=runbook))
    target_file = folder / "fleet.json"
    target_file.write_text(json.dumps([{"targets": [target]}]) + "\n")
    configuration = scrape_configuration([target_file], [Path(ray_targets or RAY_TARGETS)], [rule_file], EVERY_S, token_file)
    write_yaml(folder / "prometheus.yml", configuration)
    return configuration


def write_files(folder: Path, target: str, ray_targets: str | None, runbook: str = RUNBOOK) -> None:
    """Everything for ``docker compose up`` in ``folder``: Prometheus and Grafana beside Fleet's server on this host."""
    write_prometheus(folder / "prometheus", target, ray_targets, runbook)
    for model in all_boards():
        path = folder / "grafana" / "dashboards" / f"{model['uid']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(model, indent=1) + "\n")
    source = {"name": SOURCE_NAME, "uid": SOURCE_UID, "type": "prometheus", "access": "proxy", "url": "http://127.0.0.1:9090"}
    provisioning = folder / "grafana" / "provisioning"
    write_yaml(provisioning / "datasources" / "fleet.yml", {"apiVersion": 1, "datasources": [source]})
    options = {"path": "/var/lib/grafana/dashboards"}
    provider = {"name": "fleet", "folder": FOLDER_TITLE, "type": "file", "allowUiUpdates": False, "options": options}
    write_yaml(provisioning / "dashboards" / "fleet.yml", {"apiVersion": 1, "providers": [provider]})
    write_yaml(folder / "compose.yml", _compose(folder.absolute(), ray_targets))


def _compose(folder: Path, ray_targets: str | None) -> dict[str, Any]:
    """All on the host's network: Fleet listens on loopback. Prometheus sees its files under the names that they have outside.

    Ray's targets are there when they were asked for: Docker would make a folder of root's where there is none yet.
    """
    grafana = ["./grafana/provisioning:/etc/grafana/provisioning:ro", "./grafana/dashboards:/var/lib/grafana/dashboards:ro"]
    told = [Path(ray_targets).absolute().parent] if ray_targets else []
    prometheus = [f"{path}:{path}:ro" for path in (folder / "prometheus", *told)]
    return {
        "services": {
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                "command": [f"--config.file={folder}/prometheus/prometheus.yml", "--web.listen-address=127.0.0.1:9090"],
                "network_mode": "host",
                "volumes": prometheus,
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                "environment": {"GF_SERVER_HTTP_ADDR": "127.0.0.1"},
                "network_mode": "host",
                "volumes": grafana,
            },
        }
    }
