"""Files for Prometheus and Grafana, as ``fleet dashboard write`` writes them. Grafana's SDK makes its boards: the extra ``grafana``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dashboards.grafana.boards import FOLDER_TITLE, SOURCE_UID, all_boards
from dashboards.grafana.push import SOURCE_NAME
from dashboards.metrics.files import write_prometheus, write_yaml
from dashboards.metrics.rules import RUNBOOK

PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
"""Pinned: what a compose file starts is the same next year."""


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
    given = [Path(ray_targets).absolute().parent] if ray_targets else []
    prometheus = [f"{path}:{path}:ro" for path in (folder / "prometheus", *given)]
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
