"""``fleet dashboard``: Grafana's dashboards, pushed or written as files."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.host.extras import need

console = cli_print.Terminal()


def push(
    grafana: Annotated[str, typer.Option(help="URL of the Grafana; its token is read from GRAFANA_TOKEN.")],
    prometheus: Annotated[str, typer.Option(help="URL under which Grafana reaches Prometheus.")] = "http://127.0.0.1:9090",
    run: Annotated[str, typer.Option(help="Write this run's faults as annotations, too.")] = "",
    storage: Storage = RUNS,
) -> None:
    """Data source, folder, dashboards and faults; what somebody changed is left alone."""
    need("grafana_foundation_sdk", "grafana", "dashboard", "push")
    from dashboards.grafana.push import connect, push, push_faults
    from fleet.app.plans import find_run
    from fleet.host.follow import Follower

    face = connect(grafana, os.environ.get("GRAFANA_TOKEN", ""))
    follower = Follower(find_run(run, Path(storage)) / "journal.jsonl").read() if run else None
    summary = follower.summary() if follower is not None else None
    with closing(face.api.s):
        for title, done in push(face, prometheus).items():
            console.print(f"{title}: {done}")
        if summary is not None:
            console.print(f"{push_faults(face, summary)} new annotations of faults")


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
