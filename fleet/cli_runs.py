"""``fleet runs``, ``show`` and ``diff``: what was run, of what it was made, and in what two runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

console = Console(highlight=False, soft_wrap=True)
Storage = Annotated[str, typer.Option(help="Folder that holds the runs.")]
ABSENT = "-"
OUTCOME = ("status", "reason", "digest", "steps", "wall_s", "goodput", "scheduling_goodput", "median_step_s", "losses", "views")


def record_of(folder: Path) -> dict[str, Any]:
    """All that is known of a run: how it was made, and what it came to."""
    from fleet.follow import Follower
    from fleet.records import configuration

    follower = Follower(folder / "journal.jsonl").read()
    started, summary = follower.started, follower.summary()
    if started is None or summary is None:
        return {"damage": follower.damage or "the journal is empty"}
    measured = {name: value for name, (_, value) in summary.measurements.items()}
    named = {"losses": summary.losses_total, "views": summary.views_total}
    outcome = {name: named.get(name, getattr(summary, name, None)) for name in OUTCOME}
    made = {"run": started.run, "started_unix_s": started.unix_time_s, **configuration(started.config)}
    return made | {"outcome": outcome, "measured": measured}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value, value) of what two records do not have in common."""
    a, b = flat(one), flat(other)
    return [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b} if a.get(name, ABSENT) != b.get(name, ABSENT)]


def runs(storage: Storage = "runs", json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """All runs under --storage, newest first."""
    from dashboards.feeds import Feeds

    rows = Feeds(Path(storage)).runs()
    if json_:
        print(json.dumps(rows, indent=1))
        return
    table = Table(box=None)
    for name in ("run", "status", "ranks", "how it ended"):
        table.add_column(name)
    for row in rows:
        ranks = f"{row['world']} + {row['spares']}" if row.get("spares") else str(row.get("world", ABSENT))
        table.add_row(row["name"], row["status"], ranks, row.get("reason", ""))
    console.print(table)


def show(run: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")], storage: Storage = "runs") -> None:
    """How RUN was made, and what it came to, as JSON."""
    from fleet.plans import find_run

    print(json.dumps(record_of(find_run(run, Path(storage))), indent=1))


def diff(
    one: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")],
    other: Annotated[str, typer.Argument(help="Another.")],
    storage: Storage = "runs",
) -> None:
    """In what two runs differ: settings, code, versions, chaos, outcome."""
    from fleet.plans import find_run

    found = differences(*(record_of(find_run(name, Path(storage))) for name in (one, other)))
    table = Table(box=None)
    for name in ("", one, other):
        table.add_column(name, overflow="fold")
    for name, first, second in found:
        table.add_row(name, str(first), str(second))
    console.print(table if found else "They do not differ.")


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    for command in (runs, show, diff):
        app.command()(command)
