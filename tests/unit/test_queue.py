"""Runs that wait for room: whose turn it is, real processes in the place of runs, and bad input that never waits for anything."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from fleet.app.cli import queue as cli_queue
from fleet.app.cli.queue import ByRules, Submissions, queue_of
from fleet.app.cli.watch import PRIVATE
from fleet.app.cluster import queue as queue_module
from fleet.app.cluster.queue import CANCELLED, ENDED, RUNNING, SUBMITTED, WAITING, Job, OneMachine, RunQueue
from fleet.app.configuration import configured
from fleet.app.plans import Executed, RunPlan, describe
from fleet.app.report import build_report, render_table
from fleet.errors import ConfigError
from fleet.ledger.report import duration
from fleet.protocol.queueing import Rules
from fleet.protocol.records import RunStarted
from tests.golden.journals import one_loss
from tests.support.waiting import until
from tests.support.watching import WRITE_TOKEN, Watched, watched

LIMIT_S = 20.0
UNTIL_REPORTED = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit(int(sys.argv[2]))"
"""A process that ends when a file is there, with the exit code that it was given."""


# ---- real processes ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Waits:
    """Processes in the place of runs: each ends when its file is there, or when it is told to."""

    folder: Path
    tries: int = 1

    def command(self, job: Job) -> list[str]:
        return [sys.executable, "-c", UNTIL_REPORTED, str(self.folder / f"end-{job.name}"), *job.arguments]

    def listens(self, job: Job) -> bool:
        return not (self.folder / f"deaf-{job.name}").exists()

    def hurry(self, job: Job) -> None:
        os.kill(job.pid, signal.SIGKILL)


Make = Callable[..., RunQueue]
Noted = list[tuple[str, str, str]]


@pytest.fixture
def noted() -> Noted:
    """(action, run, why) of all that the queue did."""
    return []


@pytest.fixture
def make(tmp_path: Path, noted: Noted) -> Make:
    def queue(slots: int = 4, rules: Rules = Rules(), tries: int = 1) -> RunQueue:  # noqa: B008
        def note(action: str, job: Job, why: str) -> None:
            noted.append((action, job.name, why))

        return RunQueue(tmp_path / "queue", OneMachine(slots), ByRules(rules), Waits(tmp_path, tries), note)

    return queue


def job(folder: Path, name: str, slots: int, at_s: float = 0.0, code: int = 0, **more: Any) -> Job:
    return Job(
        name=name, script="s.py", arguments=(str(code),), directory=str(folder), slots=slots, submitted_unix_s=at_s,
        **{"priority": 0, **more},
    )  # fmt: skip


def phases(queue: RunQueue) -> dict[str, str]:
    queue.step()
    return {one.name: one.phase for one in queue.jobs()}


def test_a_run_starts_with_all_its_ranks_when_there_is_room(make: Make, tmp_path: Path) -> None:
    queue = make()
    for number, name in enumerate("abc"):
        queue.submit(job(tmp_path, name, slots=3 - number, at_s=number, code=number))
    assert phases(queue) == {"a": RUNNING, "b": WAITING, "c": WAITING}, "c would fit beside a, and keep b waiting"
    (tmp_path / "end-a").touch()
    until(lambda: phases(queue) == {"a": ENDED, "b": RUNNING, "c": RUNNING}, "a has ended", LIMIT_S)
    (tmp_path / "end-b").touch()
    (tmp_path / "end-c").touch()
    until(lambda: set(phases(queue).values()) == {ENDED}, "all have ended", LIMIT_S)
    assert [one.exit_code for one in queue.jobs()] == [0, 1, 2]


def test_runs_and_those_that_wait_outlive_the_service(make: Make, tmp_path: Path) -> None:
    first = make()
    first.submit(job(tmp_path, "goes-on", 4))
    first.submit(job(tmp_path, "waits", 4, at_s=1.0))
    assert phases(first) == {"goes-on": RUNNING, "waits": WAITING}
    second = make()
    assert phases(second) == {"goes-on": RUNNING, "waits": WAITING}
    (tmp_path / "end-goes-on").touch()
    until(lambda: phases(second)["waits"] == RUNNING, "the one that waited has its turn", LIMIT_S)
    assert second.jobs()[0].exit_code is None, "nobody who could know it has looked"
    second.cancel("waits")
    until(lambda: phases(second)["waits"] == ENDED, "it was ended", LIMIT_S)
    assert second.jobs()[1].exit_code == -15
    first._children["goes-on"].wait(LIMIT_S)


def test_cancelling(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.submit(job(tmp_path, "a", 4))
    assert queue.cancel("a").phase == CANCELLED
    assert phases(queue) == {"a": CANCELLED}
    with pytest.raises(ConfigError, match="cancelled already"):
        queue.cancel("a")
    with pytest.raises(KeyError):
        queue.cancel("nobody")


def test_what_cannot_be_is_refused(make: Make, tmp_path: Path) -> None:
    queue = make()
    with pytest.raises(ConfigError, match="more than the 4"):
        queue.submit(job(tmp_path, "large", 5))
    queue.submit(job(tmp_path, "a", 1))
    with pytest.raises(ConfigError, match="of that name"):
        queue.submit(job(tmp_path, "a", 1))
    with pytest.raises(ConfigError, match="at least one"):
        make(slots=0)


def test_a_run_whose_folder_is_gone_holds_up_nobody(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.submit(job(tmp_path / "gone", "a", 4))
    queue.submit(job(tmp_path, "b", 4, at_s=1.0))
    until(lambda: phases(queue) == {"a": ENDED, "b": RUNNING}, "b has its turn", LIMIT_S)
    assert "could not be started" in (tmp_path / "queue" / "a.log").read_text()
    (tmp_path / "end-b").touch()
    until(lambda: phases(queue)["b"] == ENDED, "b has ended", LIMIT_S)


def test_a_run_gives_way_to_one_of_greater_priority_and_goes_on_after_it(make: Make, tmp_path: Path, noted: Noted) -> None:
    queue = make(rules=Rules(preempts=True))
    queue.submit(job(tmp_path, "low", 3, at_s=1.0))
    queue.submit(job(tmp_path, "later", 3, at_s=2.0))
    assert phases(queue) == {"low": RUNNING, "later": WAITING}
    (tmp_path / "deaf-low").touch()
    queue.submit(job(tmp_path, "high", 2, at_s=3.0, priority=1))
    assert phases(queue) == {"low": RUNNING, "later": WAITING, "high": WAITING}
    low = queue.get("low")
    assert (low.gives_way_to, low.stop_sent_unix_s) == ("high", 0.0), "it does not hear signals yet"
    (tmp_path / "deaf-low").unlink()
    until(lambda: phases(queue) == {"low": WAITING, "later": WAITING, "high": RUNNING}, "low has given way", LIMIT_S)
    low = queue.get("low")
    assert (low.submitted_unix_s, low.gives_way_to, low.placed, low.starts) == (1.0, "", {}, 1)
    (tmp_path / "end-high").touch()
    until(lambda: phases(queue) == {"low": RUNNING, "later": WAITING, "high": ENDED}, "low goes on, before what came later", LIMIT_S)
    for name in ("low", "later"):
        (tmp_path / f"end-{name}").touch()
    until(lambda: set(phases(queue).values()) == {ENDED}, "all have ended", LIMIT_S)
    assert [(action, name) for action, name, _ in noted] == [
        ("start", "low"), ("preempt", "low"), ("released", "low"), ("start", "high"), ("end", "high"), ("resume", "low"), ("end", "low"),
        ("start", "later"), ("end", "later"),
    ]  # fmt: skip


def test_a_run_that_does_not_end_when_told_to_is_ended_at_once(make: Make, tmp_path: Path, noted: Noted, monkeypatch: Any) -> None:
    queue = make(rules=Rules(preempts=True))
    monkeypatch.setattr(
        sys.modules[__name__], "UNTIL_REPORTED", "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\n" + UNTIL_REPORTED
    )
    queue.submit(job(tmp_path, "low", 4, at_s=1.0))
    assert phases(queue) == {"low": RUNNING}
    until(lambda: (tmp_path / "queue" / "low.log").read_text() == "\n", "it hears no signal any more", LIMIT_S)
    queue.submit(job(tmp_path, "high", 4, at_s=2.0, priority=1))
    assert phases(queue) == {"low": RUNNING, "high": WAITING}
    monkeypatch.setattr(queue_module, "NOTICE_S", 0.0)
    until(lambda: phases(queue) == {"low": WAITING, "high": RUNNING}, "it was killed, and waits again", LIMIT_S)
    assert ("hurry", "low") in [(action, name) for action, name, _ in noted]
    for name in ("high", "low"):
        (tmp_path / f"end-{name}").touch()
    until(lambda: set(phases(queue).values()) == {ENDED}, "both have ended", LIMIT_S)


def test_a_run_that_is_refused_as_it_starts_is_tried_again_for_some_times(make: Make, tmp_path: Path, noted: Noted) -> None:
    queue = make(tries=3)
    queue.submit(job(tmp_path, "a", 4, code=2))
    (tmp_path / "end-a").touch()
    until(lambda: phases(queue)["a"] == ENDED, "it is over", LIMIT_S)
    assert [action for action, _, _ in noted] == ["start", "released", "resume", "released", "resume", "end"]
    assert queue.get("a").exit_code == 2


def test_what_is_cancelled_while_it_gives_way_does_not_come_back(make: Make, tmp_path: Path) -> None:
    queue = make(rules=Rules(preempts=True))
    queue.submit(job(tmp_path, "low", 4, at_s=1.0))
    phases(queue)
    (tmp_path / "deaf-low").touch()
    queue.submit(job(tmp_path, "high", 4, at_s=2.0, priority=1))
    phases(queue)
    queue.cancel("low")
    (tmp_path / "deaf-low").unlink()
    until(lambda: phases(queue) == {"low": ENDED, "high": RUNNING}, "it ended, and the other one has the room", LIMIT_S)
    (tmp_path / "end-high").touch()
    until(lambda: phases(queue)["high"] == ENDED, "high has ended", LIMIT_S)


def test_a_run_that_ends_by_itself_while_it_is_told_to_is_over(make: Make, tmp_path: Path) -> None:
    queue = make(rules=Rules(preempts=True))
    (tmp_path / "deaf-low").touch()
    queue.submit(job(tmp_path, "low", 4, at_s=1.0, code=0))
    phases(queue)
    queue.submit(job(tmp_path, "high", 4, at_s=2.0, priority=1))
    phases(queue)
    (tmp_path / "end-low").touch()
    until(lambda: phases(queue)["low"] == ENDED, "it completed", LIMIT_S)
    assert queue.get("low").exit_code == 0
    (tmp_path / "end-high").touch()
    until(lambda: phases(queue)["high"] == ENDED, "high has ended", LIMIT_S)


def test_a_run_that_gives_way_while_the_service_is_away_goes_on_later(make: Make, tmp_path: Path) -> None:
    first = make(rules=Rules(preempts=True))
    first.submit(job(tmp_path, "low", 4, at_s=1.0))
    phases(first)
    first.submit(job(tmp_path, "high", 4, at_s=2.0, priority=1))
    phases(first)
    first._children["low"].wait(LIMIT_S)
    second = make(rules=Rules(preempts=True))
    assert phases(second) == {"low": WAITING, "high": RUNNING}
    (tmp_path / "end-high").touch()
    (tmp_path / "end-low").touch()
    until(lambda: set(phases(second).values()) == {ENDED}, "both have ended", LIMIT_S)


def test_quotas_of_teams_are_kept_and_one_that_cannot_be_met_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    queue = make(slots=8, rules=Rules(quotas={"a": 2}))
    with pytest.raises(ConfigError, match="team a may have 2 slots at once, and this run needs 3"):
        queue.submit(job(tmp_path, "large", 3, team="a"))
    assert queue.jobs() == [] and not list(queue.folder.glob("*.json")), "nothing is half done"
    for number, team in enumerate("aab"):
        queue.submit(job(tmp_path, f"{team}{number}", 2, at_s=number, team=team))
    assert phases(queue) == {"a0": RUNNING, "a1": WAITING, "b2": RUNNING}
    for name in ("a0", "a1", "b2"):
        (tmp_path / f"end-{name}").touch()
    until(lambda: set(phases(queue).values()) == {ENDED}, "all have ended", LIMIT_S)


def test_waiting_counts_and_running_does_not() -> None:
    waits = job(Path(), "a", 1, at_s=100.0)
    assert waits.asked(130.0).waited_s == 30.0
    runs = dataclasses.replace(waits, phase=RUNNING, waited_s=30.0)
    assert runs.asked(500.0).waited_s == 30.0
    again = dataclasses.replace(runs, phase=WAITING, waits_since_unix_s=500.0)
    assert (again.asked(510.0).waited_s, again.asked(510.0).since_s) == (40.0, 100.0)


def test_a_job_that_an_earlier_version_wrote_is_read(make: Make, tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    old = {"name": "old", "script": "s.py", "arguments": ["0"], "directory": str(tmp_path), "slots": 1, "priority": 0}
    old |= {"submitted_unix_s": 1.0, "phase": "waiting", "pid": 0, "ticks": 0, "exit_code": None, "ended_unix_s": None}
    (tmp_path / "queue" / "old.json").write_text(json.dumps(old))
    queue = make()
    assert phases(queue) == {"old": RUNNING}
    queue.cancel("old")
    until(lambda: phases(queue) == {"old": ENDED}, "it was ended", LIMIT_S)


# ---- over HTTP ---------------------------------------------------------------------------------------------------------------------------

SCRIPT = "def train(run): pass\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Watched]:
    (tmp_path / "script.py").write_text(SCRIPT)
    with watched(tmp_path / "runs") as server:
        server.server.queue = Submissions(queue_of(server.root, 4), server.root)  # nobody looks after it: what is handed in waits
        yield server


def ask(served: Watched, method: str, path: str, body: Any = None, token: str = WRITE_TOKEN) -> requests.Response:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return requests.request(method, served.url + path, data=None if body is None else json.dumps(body), headers=headers, timeout=LIMIT_S)


def test_a_run_is_handed_in_and_taken_back(served: Watched, tmp_path: Path) -> None:
    body = {"script": "script.py", "directory": str(tmp_path), "arguments": ["--world", "2", "--spares", "1"], "priority": 3}
    taken = ask(served, "POST", "/api/queue", body)
    assert taken.status_code == 202, taken.text
    name = taken.json()["name"]
    assert (taken.json()["slots"], taken.json()["phase"]) == (3, WAITING)
    assert [one["name"] for one in ask(served, "GET", "/api/queue").json()["jobs"]] == [name]
    [row] = ask(served, "GET", "/api/runs").json()["runs"]
    assert (row["name"], row["status"], row["reason"]) == (name, "queued", "waits for 3 slots")
    assert ask(served, "DELETE", f"/api/queue/{name}").json()["phase"] == CANCELLED
    assert ask(served, "DELETE", f"/api/queue/{name}").status_code == 400
    assert ask(served, "DELETE", "/api/queue/nobody").status_code == 404
    noted = [json.loads(line) for line in (served.root / "audit.jsonl").read_text().splitlines()]
    assert [line["action"] for line in noted] == ["submit", "cancel", "cancel", "/api/queue/nobody"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"script": "nothing.py"}, "script"),
        ({"directory": "/nowhere"}, "directory"),
        ({"arguments": ["--world", "0"]}, "world"),
        ({"arguments": ["--wrld", "2"]}, "arguments"),
        ({"arguments": ["--help"]}, "arguments"),
        ({"arguments": ["--expect", "bliss>1"]}, "--expect"),
        ({"arguments": ["--world", "9", "--shards", "16"]}, "slots"),
        ({"arguments": ["--storage", "/elsewhere"]}, "--storage"),
        ({"arguments": ["--chaos", "mtbf=0s"]}, None),
        ({"arguments": [3]}, "arguments"),
        ({"arguments": "--world 2"}, "arguments"),
        ({"priority": 1000}, "priority"),
        ({"priority": True}, "priority"),
        ({"color": "red"}, "color"),
    ],
)
def test_bad_input_never_waits(served: Watched, tmp_path: Path, change: dict[str, Any], field: str | None) -> None:
    answer = ask(served, "POST", "/api/queue", {"script": "script.py", "directory": str(tmp_path), **change})
    assert answer.status_code == 400, answer.text
    assert field is None or answer.json()["field"] == field
    assert ask(served, "GET", "/api/queue").json()["jobs"] == []


def test_a_refusal_of_the_service_reads_as_one_of_the_command(served: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (served.root / PRIVATE).mkdir(exist_ok=True)
    (served.root / PRIVATE / "token").write_text(WRITE_TOKEN)
    monkeypatch.setattr(cli_queue, "running", lambda root: {"url": served.url})
    body = {"script": "script.py", "directory": str(tmp_path), "arguments": ["--world", "8"]}
    with pytest.raises(ConfigError) as refused:
        cli_queue._ask(served.root, "POST", "/api/queue", body)
    assert str(refused.value) == "slots = '8': more than the 4 that this service has for all runs. See fleet cluster up --slots."


def test_a_queued_run_may_have_a_name(served: Watched, tmp_path: Path) -> None:
    body = {"script": "script.py", "directory": str(tmp_path), "arguments": ["--name", "first"]}
    assert ask(served, "POST", "/api/queue", body).json()["name"] == "first"
    assert ask(served, "POST", "/api/queue", body).json()["field"] == "--name"
    (served.root / "second").mkdir()
    taken = ask(served, "POST", "/api/queue", {**body, "arguments": ["--name", "second"]})
    assert (taken.status_code, taken.json()["field"]) == (400, "--name")


def test_only_who_may_and_only_where_there_is_a_queue(served: Watched, tmp_path: Path) -> None:
    assert ask(served, "POST", "/api/queue", {"script": "script.py", "directory": str(tmp_path)}, token="x" * 32).status_code == 401
    served.server.queue = None
    for method, path in (("GET", "/api/queue"), ("POST", "/api/queue"), ("DELETE", "/api/queue/a")):
        assert ask(served, method, path, {} if method == "POST" else None).status_code == 409


def test_a_run_that_gave_way_is_shown_once_and_as_waiting(served: Watched, tmp_path: Path) -> None:
    served.write("gave-way", list(one_loss().records))
    queue = queue_of(served.root, 4)
    queue.submit(job(tmp_path, "gave-way", 2, starts=1))
    served.server.queue = Submissions(queue, served.root)
    [row] = ask(served, "GET", "/api/runs").json()["runs"]
    assert (row["name"], row["status"]) == ("gave-way", "queued") and "it gave way" in row["reason"]


# ---- the ledger --------------------------------------------------------------------------------------------------------------------------


def test_the_wait_is_in_the_journal_and_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.app.cli import run as cli_run

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv(SUBMITTED, repr(cli_run.unix_time_s() - 90.0))
    found = configured("world=2")
    made: RunPlan = cli_run._plan(Executed(str(script)), found, "named", "", tmp_path, 0)
    assert made.name == "named" and made.queued_s >= 90
    first, *rest = one_loss().records
    assert isinstance(first, RunStarted)
    report = build_report([dataclasses.replace(first, config=describe(made)), *rest])
    assert report.to_dict()["queued_s"] == pytest.approx(made.queued_s)
    assert f"after {duration(report.summary.queued_s)} in the queue" in render_table(report)


def test_a_name_must_be_a_name_and_free(tmp_path: Path) -> None:
    from fleet.app.plans import checked_name

    (tmp_path / "taken").mkdir()
    for name in ("../up", "", "a/b", "taken"):
        with pytest.raises(ConfigError, match="--name"):
            checked_name(name, tmp_path)
    assert checked_name("free", tmp_path) == "free"
