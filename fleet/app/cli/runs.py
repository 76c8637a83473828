"""``fleet runs`` with ``show``, ``diff``, ``prune`` and ``fold``: recorded runs, their facts and their differences."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.host.provenance import PATCH

if TYPE_CHECKING:
    from fleet.app.prune import Judged
    from fleet.host.follow import Follower
    from fleet.protocol.records import RunStarted

ABSENT = "-"
OUTCOME = ("status", "reason", "digest", "steps", "wall_s", "goodput", "scheduling_goodput", "median_step_s", "losses", "views")
DATA = ("samples", "batch_size", "data_sha256")
LIES_IN = {"snapshot": "fold.snapshot", "patch": PATCH, "twin": "twin", "ray": "ray"}
"""Artefacts in a run's folder beside its journal: name -> file."""
OF_ONE_RUN = ("artefacts.", "decisions.last")
"""Facts that differ between any two runs: their folders, and the times of their decisions."""


def record_of(folder: Path) -> dict[str, Any]:
    """All facts of a run: its settings, its outcome, its decisions, and its artefacts."""
    from fleet.host.follow import Follower
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
    facts = {
        "outcome": outcome,
        "measured": measured,
        "decisions": follower.decided(),
        "artefacts": artefacts_of(folder, started, follower),
    }
    return made | facts | ({"damage": follower.damage} if follower.damage else {})


def artefacts_of(folder: Path, started: RunStarted, follower: Follower) -> dict[str, str | list[str]]:
    """Paths of the artefacts that exist; the checkpoints' URL without credentials."""
    from fleet.app.plans import url_of
    from fleet.protocol.records import configuration
    from storage.backends.urls import redact

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


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value, value) of what two records do not have in common, but for what is of one run alone."""
    from fleet.protocol.records import dotted

    a, b = ({name: value for name, value in dotted(each).items() if not name.startswith(OF_ONE_RUN)} for each in (one, other))
    return [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b} if a.get(name, ABSENT) != b.get(name, ABSENT)]


def runs(
    context: typer.Context,
    storage: Storage = RUNS,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List runs under --storage, newest first; or watch, change, compare and clean them up."""
    if context.invoked_subcommand is None:
        list_runs(storage, json_)


def list_runs(storage: str, json_: bool) -> None:
    """All runs under ``storage``, newest first."""
    from dashboards.feeds import RunFeeds

    rows = RunFeeds(Path(storage)).runs()
    if json_:
        cli_print.write(json.dumps(rows, indent=1))
        return
    cells = [(row["name"], row["status"], _ranks(row), row.get("reason", "")) for row in rows]
    cli_print.write(*cli_print.table(("run", "status", "ranks", "how it ended"), cells))


def prune(
    older_than: Annotated[str, typer.Option(metavar="TIME", help="Runs that have not changed for so long: 30d, 12h, 90m, 2w.")] = "",
    keep: Annotated[int | None, typer.Option(metavar="N", help="Not the newest N of those that the other rules fit.")] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Runs that ended so: completed, stopped, failed, or silent for no end; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    storage: Storage = RUNS,
) -> None:
    """Remove the folders of runs that fit all rules, with their local checkpoints. A run that is going on is never touched."""
    from fleet.app.prune import PruneRule, duration_s, judge, remove
    from storage.backends.urls import redact

    rule = PruneRule(duration_s(older_than) if older_than else None, keep, tuple(status or ()))
    judged = judge(Path(storage), rule, time.time())
    went = [run for run in judged if not run.stays] if dry_run else remove(judged, time.time())
    names = {run.name for run in went}
    cells = [(run.name, run.status, _size(run.size_bytes), _fate(run, run.name in names)) for run in judged]
    cli_print.write(*cli_print.table(("run", "status", "size", ""), cells))
    freed = _size(sum(run.size_bytes for run in went))
    cli_print.write(f"{len(went)} of {len(judged)} runs {'would go, and free' if dry_run else 'went, and freed'} {freed}")
    cli_print.write(*(f"checkpoints of {run.name} stay in {redact(run.elsewhere)}" for run in went if run.elsewhere))


def _fate(run: Judged, goes: bool) -> str:
    return "goes" if goes else f"stays: {run.stays or 'it is going on'}"


def fold(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage.")], storage: Storage = RUNS
) -> None:
    """Make the journal of a run that does not go on short: old steps are put together, and no figure changes."""
    from fleet.app.plans import find_run
    from fleet.host.folds import fold_journal

    done = fold_journal(find_run(run, Path(storage)) / "journal.jsonl")
    cli_print.write(f"{_size(done.before_bytes)} before, {_size(done.after_bytes)} after")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def _ranks(row: Mapping[str, Any]) -> str:
    return f"{row['world']} + {row['spares']}" if row.get("spares") else str(row.get("world", ABSENT))


def show(run: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")], storage: Storage = RUNS) -> None:
    """Print settings, outcome and artefacts of RUN as JSON."""
    from fleet.app.plans import find_run

    cli_print.write(json.dumps(record_of(find_run(run, Path(storage))), indent=1))


def diff(
    one: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage.")],
    other: Annotated[str, typer.Argument(help="Another.")],
    storage: Storage = RUNS,
) -> None:
    """Compare two runs: settings, code, versions, chaos, outcome."""
    from fleet.app.plans import find_run

    found = differences(*(record_of(find_run(name, Path(storage))) for name in (one, other)))
    cells = [(name, str(first), str(second)) for name, first, second in found]
    cli_print.write(*cli_print.table(("", one, other), cells) if found else ("They do not differ.",))
