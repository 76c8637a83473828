"""``fleet submit``, ``queue`` and ``cancel``: runs that wait until ``fleet up`` has room for all of their ranks."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.cli import prints as cli_print
from fleet.cli import run as cli_run
from fleet.cli.config import RUNS, Storage
from fleet.cli.watch import PRIVATE
from fleet.cluster.clock import unix_time_s
from fleet.cluster.processes import calling
from fleet.cluster.queue import RUNNING, WAITING, Job, RunQueue
from fleet.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from fleet.settings.run import RunSettings

console = cli_print.Terminal(stderr=True)
ANSWER_S = 30.0
PRIORITIES = range(-100, 101)
RESERVED = ("storage", "resume", "repeat", "changed_code")
"""Options of ``fleet run`` that are the queue's."""


def queue_of(folder: Path, slots: int) -> RunQueue:
    """The queue whose runs go to ``folder``."""
    from policies.admission import Waiting, admit

    def turn(waiting: Sequence[Job], free: int) -> list[str]:
        return admit([Waiting(job.name, job.slots, job.priority, job.submitted_unix_s) for job in waiting], free)

    return RunQueue(folder / PRIVATE / "queue", slots, turn, lambda job: _command(job, folder))


def _command(job: Job, folder: Path) -> list[str]:
    return calling("fleet.cli.main", "main", "run", job.script, *job.arguments, "--storage", str(folder), "--name", job.name)


class Submissions:
    """What the API may ask of a queue whose runs go to ``folder``: ``dashboards.server.QueuePort``.

    Bad input is refused here, before it waits for anything.
    """

    def __init__(self, queue: RunQueue, folder: Path) -> None:
        self._queue, self._folder = queue, folder

    def submit(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Hand in a run. Raises ConfigError."""
        from fleet.app import plans
        from storage.backends.trial import check_folder

        script, arguments, directory, priority = _fields(asked)
        if not Path(directory, script).is_file():
            raise ConfigError("script", script, f"no such file in {directory}")
        settings, name = _checked(script, arguments, directory)
        name = plans.checked_name(name, self._folder) if name else plans.new_name(script)
        job = Job(
            name=name, script=script, arguments=tuple(arguments), directory=directory, slots=settings.slots,
            priority=priority, submitted_unix_s=unix_time_s(),
        )  # fmt: skip
        check_folder(self._queue.folder)
        self._queue.submit(job)
        return job.plain()

    def cancel(self, name: str) -> dict[str, Any]:
        """Raises KeyError when there is no such job, ConfigError when it has ended."""
        return self._queue.cancel(name).plain()

    def listing(self) -> dict[str, Any]:
        return {"slots": self._queue.slots, "free": self._queue.free, "jobs": [job.plain() for job in self._queue.jobs()]}


def _fields(asked: Mapping[str, Any]) -> tuple[str, list[str], str, int]:
    from dashboards.server import check_fields

    usual: dict[str, Any] = {"script": "", "arguments": [], "directory": os.getcwd(), "priority": 0}
    check_fields(asked, {name: (type(value),) for name, value in usual.items()}, "a submission")
    known = usual | dict(asked)
    words = [known["script"], known["directory"], *known["arguments"]]
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ConfigError("arguments", str(words)[:200], "are not words")
    if known["priority"] not in PRIORITIES:
        raise ConfigError("priority", known["priority"], f"must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")
    if not Path(known["directory"]).is_dir():
        raise ConfigError("directory", known["directory"][:200], "no such folder")
    return known["script"], known["arguments"], known["directory"], known["priority"]


def _checked(script: str, arguments: Sequence[str], directory: str) -> tuple[RunSettings, str]:
    """(what it would train with, the name that it is to have, or "")."""
    settings, given, values = cli_run.checked(script, arguments, Path(directory))
    if values["plain"]:
        reason = "such a job runs beside the command that has started it, and the queue has none"
        raise ConfigError("--plain", "given", reason, "Use fleet run --plain.")
    for name in RESERVED:
        if name in given:
            raise ConfigError(f"--{name}", " ".join(arguments)[:200], "is the queue's to choose", "Leave it out, or use fleet run.")
    return settings, values["name"]


def note_path(root: Path) -> Path:
    """Where the service of this folder writes about itself."""
    return root / PRIVATE / "up.json"


def running(root: Path) -> dict[str, Any] | None:
    """What the service of this folder wrote about itself; None when none runs."""
    try:
        note: dict[str, Any] = json.loads(note_path(root).read_text())
        command = Path(f"/proc/{note['pid']}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return note if b"fleet.cli.up" in command else None


# ---- the commands ------------------------------------------------------------------------------------------------------------------------


def submit(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file with a function train(run); after it, options of fleet run.")],
    priority: Annotated[int, typer.Option(help="From -100 to 100; the greatest starts first.")] = 0,
    storage: Storage = RUNS,
) -> None:
    """Hand SCRIPT in to the service of `fleet up`: it starts when there is room for all of its ranks at once."""
    body = {"script": script, "arguments": context.args, "directory": os.getcwd(), "priority": priority}
    job = _ask(Path(storage), "POST", "/api/queue", body)
    console.print(f"[bold]{job['name']}[/] waits for {job['slots']} slots")


def queue(storage: Storage = RUNS) -> None:
    """The runs that wait, and those that go on."""
    told = _ask(Path(storage), "GET", "/api/queue")
    rows = [_row(job) for job in told["jobs"] if job["phase"] in (WAITING, RUNNING)]
    lines = cli_print.table(("run", "phase", "slots", "priority", "waited"), rows)
    cli_print.write(f"{told['free']} of {told['slots']} slots are free", *(lines if rows else ()))


def _row(job: Mapping[str, Any]) -> tuple[str, ...]:
    waited = f"{unix_time_s() - job['submitted_unix_s']:.0f} s" if job["phase"] == WAITING else ""
    return job["name"], job["phase"], str(job["slots"]), str(job["priority"]), waited


def cancel(name: Annotated[str, typer.Argument(metavar="RUN", help="Its name.")], storage: Storage = RUNS) -> None:
    """Take RUN out of the queue, or end it in order if it runs."""
    job = _ask(Path(storage), "DELETE", f"/api/queue/{name}")
    console.print(f"{name} is {'asked to stop' if job['phase'] == RUNNING else job['phase']}")


def _ask(folder: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    root = folder.absolute()
    note = running(root)
    if note is None:
        raise ConfigError("--storage", str(root), "nothing is up for this folder", "Start it with fleet up.")
    token = (root / PRIVATE / "token").read_text().strip()
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(note["url"] + path, data, headers, method=method), timeout=ANSWER_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as refusal:
        told = json.load(refusal)
        raise ConfigError(
            told.get("field", path), told.get("value", ""), told.get("reason", told["detail"]), told.get("way_out", "")
        ) from None
    except OSError as error:
        raise RunFailed(f"the service at {note['url']} does not answer", str(error)) from error


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(submit)
    for command in (queue, cancel):
        app.command()(command)
