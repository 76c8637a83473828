"""``fleet diagnose``: why a recorded run was slow."""

from __future__ import annotations

import json
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
    from fleet.goodput import Ledger
    from fleet.journal import read_journal
    from fleet.plans import find_run

    summary = Ledger().apply_all(read_journal(find_run(name, Path(storage)) / "journal.jsonl")).summary()
    findings = diagnosis.diagnose(summary)
    if json_:
        print(json.dumps({"run": summary.run, "goodput": summary.goodput, "findings": diagnosis.plain(findings)}, indent=2))
    else:
        print(diagnosis.explain(summary, findings), end="")
