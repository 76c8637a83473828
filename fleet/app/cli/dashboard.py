"""``fleet dashboard``: Grafana's dashboards, pushed or written as files."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
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


def write(
    folder: Annotated[str, typer.Argument(help="Where to write; files of the same names are replaced.")],
    target: Annotated[str, typer.Option(help="host:port of `fleet up`.")] = "127.0.0.1:8700",
    ray_targets: Annotated[str, typer.Option(help="Ray's service-discovery file; empty: where Ray puts it.")] = "",
    runbook: Annotated[str, typer.Option(help="URL or path of the runbook that alerts link to.")] = "docs/runbook.md",
) -> None:
    """Rules, scrape configuration, dashboards, provisioning and a compose file."""
    need("grafana_foundation_sdk", "grafana", "dashboard", "write")
    from dashboards.grafana.provisioning import write_files

    write_files(Path(folder), target, ray_targets or None, runbook)
    console.print(f"written to {folder}; `docker compose up` there starts Prometheus and Grafana")
