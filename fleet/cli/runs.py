"""``fleet runs``, ``show`` and ``diff``: what was run, of what it was made, and in what two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.cli import prints as cli_print
from fleet.cli.config import RUNS, Storage
from fleet.cluster.provenance import PATCH

if TYPE_CHECKING:
    from fleet.app.follow import Follower
    from fleet.protocol.records import RunStarted

ABSENT = "-"
OUTCOME = ("status", "reason", "digest", "steps", "wall_s", "goodput", "scheduling_goodput", "median_step_s", "losses", "views")
DATA = ("samples", "batch_size", "data_sha256")
LIES_IN = {"snapshot": "fold.snapshot", "patch": PATCH, "twin": "twin", "ray": "ray"}
"""What may lie in a run's folder beside its journal."""
OF_ONE_RUN = ("artefacts.", "decisions.last")
"""What no two runs have in common, so that it is no difference: where they lie, and when they decided."""


def record_of(folder: Path) -> dict[str, Any]:
    """All that is known of a run: how it was made, what it came to, what was decided on the way, and what is left of it."""
    from fleet.app.follow import Follower
    from fleet.protocol.records import configuration

    follower = Follower(folder / "journal.jsonl").read()
    started, summary = follower.started, follower.summary()
    if started is None or summary is None:
        return {"damage": follower.damage or "the journal is empty"}
    measured = {name: value for name, (_, value) in summary.measurements.items()}
    named = {"losses": summary.losses_total, "views": summary.views_total}
    outcome = {name: named.get(name, getattr(summary, name, None)) for name in OUTCOME}
    made = {"run": started.run, "started_unix_s": started.unix_time_s, **configuration(started.config)}
    made |= {"data": {name: getattr(follower.data, name) for name in DATA}} if follower.data is not None else {}
    told = {"outcome": outcome, "measured": measured, "decisions": follower.decided(), "artefacts": artefacts_of(folder, started, follower)}
    return made | told | ({"damage": follower.damage} if follower.damage else {})


def artefacts_of(folder: Path, started: RunStarted, follower: Follower) -> dict[str, str | list[str]]:
    """Where that lies which the run has left, as far as it is there; the checkpoints' URL without credentials."""
    from fleet.app.plans import url_of
    from fleet.protocol.records import configuration
    from storage.urls import redact

    evidence = follower.look(lambda report: [str(item["path"]) for item in report.history["evidence"]]) or []
    storage = configuration(started.config).get("settings", {}).get("storage")
    found: dict[str, str | list[str]] = {"journal": str(folder / "journal.jsonl")}
    found |= {name: str(folder / file) for name, file in LIES_IN.items() if (folder / file).exists()}
    found |= {"checkpoints": redact(url_of(storage, started.run, folder))} if storage else {}
    kinds = {"evidence": _there(folder / name for name in evidence), "reports": _there(folder.glob("*.html"), folder.glob("*.json"))}
    return found | {name: paths for name, paths in kinds.items() if paths}


def _there(*paths: Iterable[Path]) -> list[str]:
    """Those that exist, each once and in order."""
    return sorted({str(path) for some in paths for path in some if path.is_file()})


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value, value) of what two records do not have in common, but for what is of one run alone."""
    a, b = ({name: value for name, value in flat(each).items() if not name.startswith(OF_ONE_RUN)} for each in (one, other))
    return [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b} if a.get(name, ABSENT) != b.get(name, ABSENT)]


def runs(storage: Storage = RUNS, json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """All runs under --storage, newest first."""
    from dashboards.feeds import Feeds

    rows = Feeds(Path(storage)).runs()
    if json_:
        cli_print.write(json.dumps(rows, indent=1))
        return
    cells = [(row["name"], row["status"], _ranks(row), row.get("reason", "")) for row in rows]
    cli_print.write(*cli_print.table(("run", "status", "ranks", "how it ended"), cells))


def _ranks(row: Mapping[str, Any]) -> str:
    return f"{row['world']} + {row['spares']}" if row.get("spares") else str(row.get("world", ABSENT))


def show(run: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")], storage: Storage = RUNS) -> None:
    """How RUN was made, and what it came to, as JSON."""
    from fleet.app.plans import find_run

    cli_print.write(json.dumps(record_of(find_run(run, Path(storage))), indent=1))


def diff(
    one: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")],
    other: Annotated[str, typer.Argument(help="Another.")],
    storage: Storage = RUNS,
) -> None:
    """In what two runs differ: settings, code, versions, chaos, outcome."""
    from fleet.app.plans import find_run

    found = differences(*(record_of(find_run(name, Path(storage))) for name in (one, other)))
    cells = [(name, str(first), str(second)) for name, first, second in found]
    cli_print.write(*cli_print.table(("", one, other), cells) if found else ("They do not differ.",))


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    for command in (runs, show, diff):
        app.command()(command)
