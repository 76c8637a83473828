"""``fleet cluster submit``, ``queue`` and ``cancel``: runs that wait until ``fleet cluster up`` has room for all of their ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli import run as cli_run
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.watch import PRIVATE
from fleet.app.cluster.queue import RUNNING, WAITING, Job, OneMachine, QueueRoom, RunQueue
from fleet.errors import ConfigError, RunFailed
from fleet.host.clock import unix_time_s
from fleet.host.processes import calling
from fleet.protocol.queueing import ONE_SLOT, OTHERS, Asked, Decision, Node, Rules, Running

if TYPE_CHECKING:
    from dashboards.access import Audit
    from dashboards.identities import Identity
    from fleet.settings.run import RunSettings

console = cli_print.Terminal(stderr=True)
ANSWER_S = 30.0
DEFAULT = Rules()
RESERVED = ("storage", "resume", "resume_or_start", "repeat", "changed_code", "take_over", "address", "copy_to", "detach")
"""Options of ``fleet run`` that are the queue's."""
TOKEN = "FLEET_TOKEN"
"""Variable with the token of a user, where that is not the service's own user."""
AUDIT = "audit.jsonl"


def queue_of(
    folder: Path, slots: int, rules: Rules = DEFAULT, room: QueueRoom | None = None, address: str = "", audit: Audit | None = None
) -> RunQueue:
    """The queue whose runs go to ``folder``: on this machine, or on the cluster at ``address``, whose ``room`` is seen."""
    from dashboards.access import Audit

    book = audit or Audit(folder / PRIVATE / AUDIT)
    runs = ClusterRuns(folder, address) if address else LocalRuns(folder)

    def noted(action: str, job: Job, why: str) -> None:
        book.done(action, job.name, job.owner, job.team, why)

    return RunQueue(folder / PRIVATE / "queue", room or OneMachine(slots), ByRules(rules), runs, noted)


@dataclass(frozen=True)
class ByRules:
    """``policies.admission`` with the rules of a service: ``fleet.app.cluster.queue.Policy``."""

    rules: Rules

    def decide(self, waiting: Sequence[Asked], running: Sequence[Running], nodes: Sequence[Node]) -> list[Decision]:
        from policies.admission import decide

        return decide(waiting, running, nodes, self.rules)

    def never(self, one: Asked, nodes: Sequence[Node]) -> tuple[str, str]:
        from policies.admission import never

        return never(one, nodes, self.rules)


@dataclass(frozen=True)
class LocalRuns:
    """Runs that have a cluster of their own on this machine: ``fleet.app.cluster.queue.Runs``."""

    folder: Path
    tries: int = 1

    def command(self, job: Job) -> list[str]:
        return _run(job, "--storage", str(self.folder))

    def listens(self, job: Job) -> bool:
        return _has_begun(self.folder, job)

    def hurry(self, job: Job) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(job.pid, signal.SIGTERM)


@dataclass(frozen=True)
class ClusterRuns:
    """Runs that belong to the cluster at ``address``; their processes here follow them, and copy what they write to ``folder``."""

    folder: Path
    address: str
    tries: int = 5

    def command(self, job: Job) -> list[str]:
        return _run(job, "--address", self.address, "--copy-to", str(self.folder))

    def listens(self, job: Job) -> bool:
        return _has_begun(self.folder, job)

    def hurry(self, job: Job) -> None:
        """Not by the signal: it would end the process here, and leave the run."""
        command = calling("fleet.app.cli.main", "main", "stop", job.name, "--address", self.address)
        subprocess.Popen(command, cwd=job.directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _run(job: Job, *more: str) -> list[str]:
    name = "--resume-or-start" if job.starts else "--name"
    return calling("fleet.app.cli.main", "main", "run", *more, name, job.name, job.script, *job.arguments)


def _has_begun(folder: Path, job: Job) -> bool:
    """Whether the journal was written since the job's process was started: the process hears signals before it writes."""
    try:
        return (folder / job.name / "journal.jsonl").stat().st_mtime > job.started_unix_s
    except FileNotFoundError:
        return False


class Submissions:
    """The queue whose runs go to ``folder``, for the API: ``dashboards.server.QueuePort``.

    Bad input is refused here, before it waits for anything. With ``address`` runs go to that cluster, whose room is told in slots of
    ``shape``.
    """

    def __init__(
        self, queue: RunQueue, folder: Path, rules: Rules = DEFAULT, address: str = "", shape: Mapping[str, float] = ONE_SLOT
    ) -> None:
        self._queue, self._folder, self._rules, self._address, self._shape = queue, folder, rules, address, shape

    def submit(self, asked: Mapping[str, Any], who: Identity) -> dict[str, Any]:
        """Hand in a run. Raises ConfigError, RunFailed."""
        from fleet.app import plans
        from storage.backends.trial import check_folder

        fields = _fields(asked)
        script, arguments, directory = fields["script"], fields["arguments"], fields["directory"]
        if not Path(directory, script).is_file():
            raise ConfigError("script", script, f"no such file in {directory}")
        team = _team(fields["team"], who)
        settings, name = _checked(script, arguments, directory, self._address)
        name = plans.checked_name(name, self._folder) if name else plans.new_name(script)
        per_rank = settings.per_rank
        shape, selector = (per_rank.takes, per_rank.selector) if self._address else (dict(ONE_SLOT), {})
        job = Job(
            name=name, script=script, arguments=tuple(_unnamed(arguments)), directory=directory, slots=settings.slots, owner=who.name,
            priority=fields["priority"], submitted_unix_s=unix_time_s(), team=team, shape=shape, selector=selector,
        )  # fmt: skip
        check_folder(self._queue.folder)
        self._queue.submit(job)
        return job.plain()

    def cancel(self, name: str, who: Identity) -> dict[str, Any]:
        """Raises KeyError when there is no such job, ConfigError when it has ended, or is another team's."""
        job = self._queue.get(name)
        if not who.operator and job.team != who.team:
            raise ConfigError("name", name, f"it is a run of team {job.team or 'none'}, and your token is of team {who.team}")
        return self._queue.cancel(name).plain()

    def listing(self) -> dict[str, Any]:
        jobs = self._queue.jobs()
        has = Counter[str]()
        for job in jobs:
            has[job.team] += job.slots if job.phase == RUNNING else 0
        answer = {"jobs": [job.plain() for job in jobs], "teams": self._teams(has), "trouble": self._queue.trouble}
        return self._room(jobs) | answer

    def _room(self, jobs: Sequence[Job]) -> dict[str, Any]:
        from fleet.settings.per_rank import room

        try:
            most = sum(room(node.resources, self._shape) for node in self._queue.room.most())
            nodes, running = self._queue.room.nodes([job for job in jobs if job.phase == RUNNING])
        except RunFailed:
            return {"slots": 0, "free": 0}
        mine = sum(job.slots for job in running)
        return {"slots": most, "free": max(0, sum(room(node.resources, self._shape) for node in nodes) - mine)}

    def _teams(self, has: Mapping[str, int]) -> list[dict[str, Any]]:
        names = sorted(({team for team in self._rules.quotas if team != OTHERS} | set(has)) - {""})
        limits = {name: self._rules.quota(name) for name in names}
        return [{"name": name, "slots": has.get(name, 0), "quota": int(most) if most < math.inf else None} for name, most in limits.items()]


def _fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    from dashboards.openapi import SUBMISSION
    from dashboards.server import check_body

    check_body(asked, SUBMISSION)
    known: dict[str, Any] = {"arguments": [], "directory": os.getcwd(), "priority": 0, "team": ""} | dict(asked)
    words = [known["script"], known["directory"], *known["arguments"]]
    if any("\0" in word for word in words):
        raise ConfigError("arguments", str(words)[:200], "are not words")
    if not Path(known["directory"]).is_dir():
        raise ConfigError("directory", known["directory"][:200], "no such folder")
    return known


def _team(asked: str, identity: Identity) -> str:
    """The team in whose quota a run counts. Raises ConfigError: it is not the token's team."""
    from dashboards.identities import NAME

    if asked and not NAME.fullmatch(asked):
        raise ConfigError("team", asked[:80], "must be a name: letters, digits and . _ @ -")
    if not identity.operator and asked not in ("", identity.team):
        raise ConfigError("team", asked, f"your token is of team {identity.team}", "Leave it out.")
    return asked or identity.team


def _checked(script: str, arguments: Sequence[str], directory: str, address: str) -> tuple[RunSettings, str]:
    """(settings of the run, its name, or ""). Raises ConfigError."""
    settings, given, values = cli_run.checked(script, arguments, Path(directory))
    if values["plain"]:
        reason = "such a job runs beside the command that has started it, and the queue has none"
        raise ConfigError("--plain", "given", reason, "Use fleet run --plain.")
    for name in RESERVED:
        if name in given and not (name == "storage" and address):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, " ".join(arguments)[:200], "is the queue's to choose", "Leave it out, or use fleet run.")
    if address:
        _check_for_cluster(settings, given, values, address)
    return settings, values["name"]


def _check_for_cluster(settings: RunSettings, given: set[str], values: Mapping[str, Any], address: str) -> None:
    from fleet.app import plans

    if "storage" in given and "://" not in settings.storage and not Path(settings.storage).is_absolute():
        way_out = "Give a URL, or a folder of the head from its root on."
        raise ConfigError("--storage", settings.storage, "runs go to a cluster, and this is a folder of where you type", way_out)
    cli_run.check_address(address, False, values["nodes"], values["twin"])
    chaos = values["chaos"] not in (None, "off")
    plans.check_chaos_allowed(address, values["allow_chaos"], chaos)


def _unnamed(arguments: Sequence[str]) -> list[str]:
    """Without ``--name``, which the queue gives, and leaves out when the run goes on. Behind ``--`` all is the script's."""
    found, skips = list[str](), False
    for number, word in enumerate(arguments):
        if word == "--":
            return [*found, *arguments[number:]]
        if not skips and word != "--name" and not word.startswith("--name="):
            found.append(word)
        skips = word == "--name" and not skips
    return found


def note_path(root: Path) -> Path:
    """Where the service of this folder writes about itself."""
    return root / PRIVATE / "up.json"


def running(root: Path) -> dict[str, Any] | None:
    """The note that the service of this folder wrote about itself; None: no service runs."""
    try:
        note: dict[str, Any] = json.loads(note_path(root).read_text())
        command = Path(f"/proc/{note['pid']}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return note if b"fleet.app.cli.up" in command else None


# ---- the commands ------------------------------------------------------------------------------------------------------------------------


def submit(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file with train(run); behind --: options of fleet run, -- and its own.")],
    priority: Annotated[int, typer.Option(help="From -100 to 100; the greatest starts first.")] = 0,
    team: Annotated[str, typer.Option(help="Team in whose quota it counts; empty: that of your token.")] = "",
    storage: Storage = RUNS,
) -> None:
    """Hand SCRIPT in to the service of `fleet cluster up`: it starts when there is room for all of its ranks at once.

    Users other than the service's own have a token in the variable FLEET_TOKEN.
    """
    body = {"script": script, "arguments": context.args, "directory": os.getcwd(), "priority": priority, "team": team}
    job = _ask(Path(storage), "POST", "/api/queue", body)
    console.print(f"[bold]{job['name']}[/] waits for {job['slots']} slots")


def queue(storage: Storage = RUNS) -> None:
    """List waiting and going runs, and the slots that each team has and may have."""
    answer = _ask(Path(storage), "GET", "/api/queue")
    rows = [_row(job) for job in answer["jobs"] if job["phase"] in (WAITING, RUNNING)]
    lines = cli_print.table(("run", "phase", "slots", "priority", "waited", "owner", "team", "starts"), rows) if rows else []
    teams = [(each["name"], str(each["slots"]), "no limit" if each["quota"] is None else str(each["quota"])) for each in answer["teams"]]
    quotas = cli_print.table(("team", "slots", "quota"), teams) if teams else []
    trouble = [f"nothing can be started: {answer['trouble']}"] if answer["trouble"] else []
    cli_print.write(f"{answer['free']} of {answer['slots']} slots are free", *trouble, *lines, *quotas)


def _row(job: Mapping[str, Any]) -> tuple[str, ...]:
    since_s = job["waits_since_unix_s"] or job["submitted_unix_s"]
    waited_s = job["waited_s"] + (unix_time_s() - since_s if job["phase"] == WAITING else 0.0)
    phase = f"gives way to {job['gives_way_to']}" if job["gives_way_to"] else job["phase"]
    return job["name"], phase, str(job["slots"]), str(job["priority"]), f"{waited_s:.0f} s", job["owner"], job["team"], str(job["starts"])


def cancel(name: Annotated[str, typer.Argument(metavar="RUN", help="Its name.")], storage: Storage = RUNS) -> None:
    """Take RUN out of the queue, or end it in order if it runs."""
    job = _ask(Path(storage), "DELETE", f"/api/queue/{name}")
    console.print(f"{name} is {'asked to stop' if job['phase'] == RUNNING else job['phase']}")


def _ask(folder: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    import requests

    root = folder.absolute()
    note = running(root)
    if note is None:
        raise ConfigError("--storage", str(root), "nothing is up for this folder", "Start it with fleet cluster up.")
    token = _token(root / PRIVATE / "token")
    try:
        answer = requests.request(method, note["url"] + path, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=ANSWER_S)
        facts: dict[str, Any] = answer.json()
    except requests.RequestException as error:
        raise RunFailed(f"the service at {note['url']} does not answer", str(error)) from error
    if not answer.ok:
        reason = facts.get("reason", facts["detail"])
        raise ConfigError(facts.get("field", path), facts.get("value", ""), reason, facts.get("way_out", ""))
    return facts


def _token(path: Path) -> str:
    """The token of this user: their own, or the service's. Raises ConfigError."""
    if TOKEN in os.environ:
        return os.environ[TOKEN].strip()
    try:
        return path.read_text().strip()
    except OSError as error:
        way_out = f"Set {TOKEN} to the token that you were given."
        raise ConfigError(TOKEN, "not set", f"the service's own token cannot be read: {error.strerror}", way_out) from error
