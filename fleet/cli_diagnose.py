"""``fleet diagnose``: why a recorded run was slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(diagnose)


def diagnose(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
    storage: Annotated[str, typer.Option(help="Folder that holds the runs.")] = "runs",
) -> None:
    """What cost RUN most, why, what to do about it, and where the cost would move."""
    from fleet import diagnosis
    from fleet.follow import open_report
    from fleet.plans import find_run

    report, damage = open_report(find_run(name, Path(storage)) / "journal.jsonl")
    if damage:
        print(f"The journal is damaged, and only what lies before is told: {damage}", file=sys.stderr)
    summary = report.summary
    findings = diagnosis.diagnose(summary)
    if json_:
        print(
            json.dumps({"run": summary.run, "damage": damage, "goodput": summary.goodput, "findings": diagnosis.plain(findings)}, indent=2)
        )
    else:
        print(diagnosis.explain(summary, findings), end="")
