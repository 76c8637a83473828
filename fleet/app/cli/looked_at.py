"""The folder of a run that is looked at: it may be a copy, and it may be deleted meanwhile."""

from __future__ import annotations

from pathlib import Path

from fleet.app.cli import prints as cli_print
from fleet.errors import OutOfSight

console = cli_print.Terminal(stderr=True)


def looked_at(run: str, storage: str) -> Path:
    """The folder of ``run``; of a copy it is said whose it is. Raises ConfigError when there is none."""
    from fleet.app.plans import TWIN, find_run
    from fleet.host.follow import last_words

    folder = find_run(run, Path(storage))
    first, name = last_words(folder / "journal.jsonl")[0], folder.resolve().name
    if first is not None and name not in (first.run, TWIN):
        console.print(f"{folder} is a copy of run {first.run}: it ends where it was copied", markup=False, soft_wrap=True)
    return folder


def check_there(folder: Path) -> None:
    """Raises OutOfSight when nothing of the run is in its folder any more."""
    if not (folder / "journal.jsonl").exists():
        raise OutOfSight(f"run {folder.name}: {folder} was deleted while it was looked at; the run itself may go on")
