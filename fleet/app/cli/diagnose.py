"""The journal of a recorded run, told: its largest costs, the story of one loss, its post-mortem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.app.cli import prints as cli_print
from fleet.app.cli.looked_at import check_there

if TYPE_CHECKING:
    from fleet.app.report import Report


def print_diagnosis(folder: Path, *, as_json: bool) -> None:
    """The largest costs of a run, their causes, their remedies, and where each cost would move."""
    from fleet.ledger import diagnosis

    report, damage = load_report(folder)
    summary = report.summary
    findings = diagnosis.diagnose(summary)
    if as_json:
        head = {"run": summary.run, "damage": damage, "goodput": summary.goodput, "fleet_law": diagnosis.law_plain(summary)}
        print(json.dumps(head | {"findings": diagnosis.plain(findings)}, indent=2))
    else:
        print(diagnosis.explain(summary, findings), end="")


def load_report(folder: Path) -> tuple[Report, str]:
    """The report of a run, as far as its journal is good, and where that ends before the journal does: a warning says so."""
    from fleet.host.follow import open_report

    with _there(folder):
        report, damage = open_report(folder / "journal.jsonl")
    _warn(damage)
    return report, damage


@contextmanager
def _there(folder: Path) -> Iterator[None]:
    """A block that reads a run. Raises OutOfSight when its folder is deleted meanwhile."""
    try:
        yield
    except FileNotFoundError:
        check_there(folder)
        raise


def print_why(folder: Path, rank: str, *, as_json: bool) -> None:
    """The story of the loss of ``rank``, as far as the run's journal is good."""
    from fleet.host.follow import good_records
    from fleet.ledger.story import why

    with _there(folder):
        records, damage = good_records(folder / "journal.jsonl")
    _warn(damage)
    story = why(records, rank)
    cli_print.write(json.dumps(story.plain() | {"damage": damage}, indent=2) if as_json else str(story).rstrip("\n"))


def write_post_mortem(folder: Path, file: str) -> None:
    """The page about a run, as far as its journal is good; ``-``: on the terminal."""
    from fleet.host.follow import good_records
    from fleet.ledger.post_mortem import post_mortem

    report, _ = load_report(folder)
    with _there(folder):
        page = post_mortem(report, good_records(folder / "journal.jsonl")[0])
    if file == "-":
        print(page, end="")
        return
    Path(file).write_text(page)
    cli_print.write(f"{file} has the post-mortem of {report.summary.run}")


def _warn(damage: str) -> None:
    if damage:
        words = f"The journal is damaged, and only what lies before is told: {damage}"
        cli_print.Terminal(stderr=True).print(words, style="yellow", markup=False)
