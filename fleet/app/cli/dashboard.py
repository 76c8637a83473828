"""``fleet cluster dashboards``: Grafana's dashboards, pushed."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.host.extras import need

console = cli_print.Terminal()


def dashboards(
    grafana: Annotated[str, typer.Option(help="URL of the Grafana; its token is read from GRAFANA_TOKEN.")],
    prometheus: Annotated[str, typer.Option(help="URL under which Grafana reaches Prometheus.")] = "http://127.0.0.1:9090",
) -> None:
    """Push data source, folder, dashboards and alerts to Grafana; changes that a user made there stay."""
    need("grafana_foundation_sdk", "grafana", "cluster", "dashboards")
    from dashboards.grafana.push import connect, push

    face = connect(grafana, os.environ.get("GRAFANA_TOKEN", ""))
    with closing(face.api.s):
        for title, done in push(face, prometheus).items():
            console.print(f"{title}: {done}")
