"""``fleet dashboard``: Grafana's dashboards, pushed."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.host.extras import need

console = cli_print.Terminal()


def push(
    grafana: Annotated[str, typer.Option(help="URL of the Grafana; its token is read from GRAFANA_TOKEN.")],
    prometheus: Annotated[str, typer.Option(help="URL under which Grafana reaches Prometheus.")] = "http://127.0.0.1:9090",
) -> None:
    """Data source, folder and dashboards; what somebody changed is left alone."""
    need("grafana_foundation_sdk", "grafana", "dashboard", "push")
    from dashboards.grafana.push import connect, push

    face = connect(grafana, os.environ.get("GRAFANA_TOKEN", ""))
    with closing(face.api.s):
        for title, done in push(face, prometheus).items():
            console.print(f"{title}: {done}")
