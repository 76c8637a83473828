"""Runs that wait for room: whose turn it is, real processes in the place of runs, and bad input that never waits for anything."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from fleet.app.configuration import configured
from fleet.app.plans import RunPlan, describe
from fleet.app.report import build_report, render_table
from fleet.cli.queue import Submissions, queue_of
from fleet.cli.watch import PRIVATE
from fleet.cluster.queue import CANCELLED, ENDED, RUNNING, SUBMITTED, WAITING, Job, RunQueue
from fleet.errors import ConfigError
from fleet.ledger.report import duration
from fleet.protocol.records import RunStarted
from policies.admission import Waiting, admit, in_turn
from tests.golden.journals import one_loss
from tests.support.waiting import until
from tests.support.watching import WRITE_TOKEN, Watched, watched

LIMIT_S = 20.0
UNTIL_TOLD = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit(int(sys.argv[2]))"
"""A process that ends when a file is there, with the exit code that it was given."""


def waiting(name: str, slots: int, priority: int = 0, since_s: float = 0.0) -> Waiting:
    return Waiting(name, slots, priority, since_s)


def test_priority_comes_before_age_and_nobody_overtakes() -> None:
    old, large, urgent = waiting("old", 1, since_s=1.0), waiting("large", 4, since_s=2.0), waiting("urgent", 2, priority=1, since_s=3.0)
    small = waiting("small", 1, since_s=4.0)
    assert [one.name for one in in_turn([small, large, old, urgent])] == ["urgent", "old", "large", "small"]
    assert admit([small, large, old, urgent], 4) == ["urgent", "old"], "small would fit, but large would wait for ever"
    assert admit([small, large, old, urgent], 8) == ["urgent", "old", "large", "small"]
    assert admit([large], 3) == [], "all ranks or none"


@given(
    st.lists(st.builds(Waiting, st.uuids().map(str), st.integers(1, 9), st.integers(-2, 2), st.floats(0, 9)), max_size=9),
    st.integers(0, 30),
)
def test_who_starts_has_room_and_is_a_beginning_of_the_line(line: list[Waiting], free: int) -> None:
    started, turn = admit(line, free), in_turn(line)
    assert started == [one.name for one in turn[: len(started)]]
    used = sum(one.slots for one in turn[: len(started)])
    assert used <= free
    assert len(started) == len(turn) or used + turn[len(started)].slots > free


# ---- real processes ----------------------------------------------------------------------------------------------------------------------


def by_age(jobs: Sequence[Job], free: int) -> list[str]:
    return admit([Waiting(job.name, job.slots, job.priority, job.submitted_unix_s) for job in jobs], free)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunQueue]:
    def command(job: Job) -> list[str]:
        return [sys.executable, "-c", UNTIL_TOLD, str(tmp_path / f"end-{job.name}"), *job.arguments]

    return lambda slots=4: RunQueue(tmp_path / "queue", slots, by_age, command)


def job(folder: Path, name: str, slots: int, at_s: float = 0.0, code: int = 0) -> Job:
    return Job(
        name=name, script="s.py", arguments=(str(code),), directory=str(folder), slots=slots, priority=0, submitted_unix_s=at_s
    )  # fmt: skip


def phases(queue: RunQueue) -> dict[str, str]:
    queue.step()
    return {one.name: one.phase for one in queue.jobs()}


def test_a_run_starts_with_all_its_ranks_when_there_is_room(make: Callable[..., RunQueue], tmp_path: Path) -> None:
    queue = make()
    for number, name in enumerate("abc"):
        queue.submit(job(tmp_path, name, slots=3 - number, at_s=number, code=number))
    assert phases(queue) == {"a": RUNNING, "b": WAITING, "c": WAITING}, "c would fit beside a, and keep b waiting"
    assert queue.free == 1
    (tmp_path / "end-a").touch()
    until(lambda: phases(queue) == {"a": ENDED, "b": RUNNING, "c": RUNNING}, "a has ended", LIMIT_S)
    (tmp_path / "end-b").touch()
    (tmp_path / "end-c").touch()
    until(lambda: set(phases(queue).values()) == {ENDED}, "all have ended", LIMIT_S)
    assert [one.exit_code for one in queue.jobs()] == [0, 1, 2]


def test_runs_and_those_that_wait_outlive_the_service(make: Callable[..., RunQueue], tmp_path: Path) -> None:
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


def test_cancelling(make: Callable[..., RunQueue], tmp_path: Path) -> None:
    queue = make()
    queue.submit(job(tmp_path, "a", 4))
    assert queue.cancel("a").phase == CANCELLED
    assert phases(queue) == {"a": CANCELLED}
    with pytest.raises(ConfigError, match="cancelled already"):
        queue.cancel("a")
    with pytest.raises(KeyError):
        queue.cancel("nobody")


def test_what_cannot_be_is_refused(make: Callable[..., RunQueue], tmp_path: Path) -> None:
    queue = make()
    with pytest.raises(ConfigError, match="more than the 4"):
        queue.submit(job(tmp_path, "large", 5))
    queue.submit(job(tmp_path, "a", 1))
    with pytest.raises(ConfigError, match="of that name"):
        queue.submit(job(tmp_path, "a", 1))
    with pytest.raises(ConfigError, match="at least one"):
        make(slots=0)


def test_a_run_whose_folder_is_gone_holds_up_nobody(make: Callable[..., RunQueue], tmp_path: Path) -> None:
    queue = make()
    queue.submit(job(tmp_path / "gone", "a", 4))
    queue.submit(job(tmp_path, "b", 4, at_s=1.0))
    until(lambda: phases(queue) == {"a": ENDED, "b": RUNNING}, "b has its turn", LIMIT_S)
    assert "could not be started" in (tmp_path / "queue" / "a.log").read_text()
    (tmp_path / "end-b").touch()
    until(lambda: phases(queue)["b"] == ENDED, "b has ended", LIMIT_S)


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
    assert (row["name"], row["status"]) == (name, "queued")
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
    from fleet.cli import queue as cli_queue

    (served.root / PRIVATE).mkdir(exist_ok=True)
    (served.root / PRIVATE / "token").write_text(WRITE_TOKEN)
    monkeypatch.setattr(cli_queue, "running", lambda root: {"url": served.url})
    body = {"script": "script.py", "directory": str(tmp_path), "arguments": ["--world", "8"]}
    with pytest.raises(ConfigError) as refused:
        cli_queue._ask(served.root, "POST", "/api/queue", body)
    assert str(refused.value) == "slots = '8': more than the 4 that this service has for all runs. See fleet up --slots."


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


# ---- the ledger --------------------------------------------------------------------------------------------------------------------------


def test_the_wait_is_in_the_journal_and_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.cli import run as cli_run

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv(SUBMITTED, repr(cli_run.unix_time_s() - 90.0))
    found = configured("world=2")
    made: RunPlan = cli_run._plan(str(script), found, "named", "", tmp_path, 0)
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
