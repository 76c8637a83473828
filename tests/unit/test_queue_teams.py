"""Who may hand in what: tokens with names, quotas of teams, the audit log; and the queue of a cluster that was there before."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboards.access import BY_ITSELF, LOOPBACK, Access, Audit
from dashboards.feeds import RunFeeds
from dashboards.identities import Identity, hashed, named_tokens
from dashboards.server import WatchServer
from fleet.app.cli import main as cli
from fleet.app.cli import queue as cli_queue
from fleet.app.cli.queue import ByRules, ClusterRuns, LocalRuns, Submissions, queue_of
from fleet.app.cli.watch import PRIVATE
from fleet.app.cluster import cluster_room
from fleet.app.cluster.cluster_room import shares
from fleet.app.cluster.queue import CANCELLED, RUNNING, WAITING, Job
from fleet.errors import ConfigError, RunFailed
from fleet.protocol.queueing import Node, Rules
from tests.support.watching import WRITE_TOKEN, Watched
from tests.unit.test_queue import SCRIPT, ask, job

# ---- who is who ------------------------------------------------------------------------------------------------------------------------

ADA, BOB = "a" * 32, "b" * 32


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


TOKENS = f"""
[[token]]
name = "ada"
team = "vision"
token = "{ADA}"

[[token]]
name = "bob"
team = "speech"
sha256 = "{hashed(BOB)}"
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Watched]:
    """A service that knows two people, and gives each team a quota; nobody looks after its queue."""
    (tmp_path / "script.py").write_text(SCRIPT)
    rules = Rules(quotas={"vision": 2, "speech": 4}, preempts=True)
    root, audit = tmp_path / "runs", Audit(tmp_path / "runs" / PRIVATE / "audit.jsonl")
    access = Access(WRITE_TOKEN, None, LOOPBACK, named_tokens(token_file(tmp_path, TOKENS)), "operator")
    with RunFeeds(root) as feeds, WatchServer(feeds, access, audit) as server:
        server.queue = Submissions(queue_of(root, 4, rules, audit=audit), root, rules)
        yield Watched(root, server)


def submission(folder: Path, world: int = 2, **more: Any) -> dict[str, Any]:
    return {"script": "script.py", "directory": str(folder), "arguments": ["--world", str(world)], **more}


def audit_of(served: Watched) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (served.root / PRIVATE / "audit.jsonl").read_text().splitlines()]


def test_names_and_teams_come_from_the_token_that_is_shown(shared: Watched, tmp_path: Path) -> None:
    ada = ask(shared, "POST", "/api/queue", submission(tmp_path), ADA).json()
    assert (ada["owner"], ada["team"]) == ("ada", "vision")
    assert ask(shared, "POST", "/api/queue", submission(tmp_path, team="vision"), ADA).status_code == 202
    stolen = ask(shared, "POST", "/api/queue", submission(tmp_path, team="speech"), ADA)
    assert (stolen.status_code, stolen.json()["field"]) == (400, "team")
    operated = ask(shared, "POST", "/api/queue", submission(tmp_path, team="speech")).json()
    assert (operated["owner"], operated["team"]) == ("operator", "speech")
    assert ask(shared, "POST", "/api/queue", submission(tmp_path), "c" * 32).status_code == 401
    lines = [(line["who"], line["team"], line["action"], line["run"], line["outcome"][:7]) for line in audit_of(shared)]
    assert lines[0] == ("ada", "vision", "submit", ada["name"], "waiting")
    assert lines[2] == ("ada", "vision", "submit", "", "refused")
    assert lines[3][:3] == ("operator", "", "submit")
    assert lines[4][:3] == ("", "", "/api/queue")


def test_a_quota_that_can_never_be_met_is_refused_by_name(shared: Watched, tmp_path: Path) -> None:
    refused = ask(shared, "POST", "/api/queue", submission(tmp_path, world=3), ADA)
    assert (refused.status_code, refused.json()["field"]) == (400, "slots")
    assert "team vision may have 2 slots at once, and this run needs 3" in refused.json()["detail"]
    reported = ask(shared, "GET", "/api/queue").json()
    assert reported["jobs"] == []
    assert reported["teams"] == [{"name": "speech", "slots": 0, "quota": 4}, {"name": "vision", "slots": 0, "quota": 2}]


def test_a_token_takes_back_runs_of_its_own_team_alone_and_orders_no_chaos(shared: Watched, tmp_path: Path) -> None:
    name = ask(shared, "POST", "/api/queue", submission(tmp_path), ADA).json()["name"]
    foreign = ask(shared, "DELETE", f"/api/queue/{name}", token=BOB)
    assert (foreign.status_code, foreign.json()["field"]) == (400, "name") and "of team vision" in foreign.json()["detail"]
    assert ask(shared, "DELETE", f"/api/queue/{name}", token=ADA).json()["phase"] == CANCELLED
    assert ask(shared, "POST", f"/api/runs/{name}/chaos", {"action": "start"}, ADA).status_code == 403
    assert ask(shared, "GET", f"/api/runs/{name}/chaos", token=ADA).json()["may"] is False


def test_every_action_of_the_queue_is_in_the_audit_log(shared: Watched, tmp_path: Path) -> None:
    root, audit = shared.root, Audit(shared.root / PRIVATE / "audit.jsonl")
    queue = queue_of(root, 4, Rules(), audit=audit)
    queue.submit(job(tmp_path / "gone", "a", 2, owner="ada", team="vision"))
    queue.step()
    assert [(line["who"], line["action"], line["run"], line["owner"]) for line in audit_of(shared)] == [
        (BY_ITSELF, "start", "a", "ada"), (BY_ITSELF, "end", "a", "ada"),
    ]  # fmt: skip
    outcomes = " ".join(str(line["outcome"]) for line in audit_of(shared))
    assert "there is room for all of its 2 slots" in outcomes and "could not be started" in outcomes


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (TOKENS, 0o640, "others may know or change it"),
        ("", 0o600, "tables"),
        ("[[token]", 0o600, "no TOML"),
        ('[[token]]\nname="a"\nteam="t"', 0o600, "token, or sha256"),
        ('[[token]]\nname="a"\nteam="t"\ntoken="short"', 0o600, "guessed"),
        ('[[token]]\nname="a"\nteam="t"\nsha256="12"', 0o600, "SHA-256"),
        ('[[token]]\nname="the queue"\nteam="t"\ntoken="0123456789abcdef"', 0o600, "must be a name"),
        ('[[token]]\nname="a"\nteam="t"\ntoken="0123456789abcdef"\ncolor="red"', 0o600, "no text field"),
        (TOKENS.replace("bob", "ada"), 0o600, "same name"),
        (TOKENS.replace(hashed(BOB), hashed(ADA)), 0o600, "same token"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_is_refused(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        named_tokens(token_file(tmp_path, text, mode))
    assert ADA not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--quota", "vision"], "TEAM=SLOTS"),
        (["--quota", "vision=0"], "no run could ever start"),
        (["--quota", "a=1", "--quota", "a=2"], "already"),
        (["--quota", "vision=9"], "can never be met"),
        (["--ageing", "soon"], "not a time"),
        (["--ageing", "-1s"], "from 0 s on"),
        (["--tokens", "/nowhere/tokens.toml"], "cannot be read"),
        (["--address", "nowhere"], "no address of a cluster"),
    ],
)
def test_a_service_that_cannot_be_is_refused_before_it_starts(tmp_path: Path, options: list[str], reason: str) -> None:
    slots = [] if "--address" in options else ["--slots", "8"]
    done = CliRunner().invoke(cli.app, ["cluster", "up", "--storage", str(tmp_path / "runs"), *slots, *options])
    assert isinstance(done.exception, ConfigError) and reason in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_who_has_a_token_of_their_own_shows_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli_queue.TOKEN, f" {ADA}\n")
    assert cli_queue._token(tmp_path / "token") == ADA
    monkeypatch.delenv(cli_queue.TOKEN)
    with pytest.raises(ConfigError, match="cannot be read"):
        cli_queue._token(tmp_path / "token")


# ---- how runs are started ----------------------------------------------------------------------------------------------------------------


def test_a_run_is_begun_by_its_name_and_goes_on_by_it(tmp_path: Path) -> None:
    first = dataclasses.replace(job(tmp_path, "a", 2), arguments=("--world", "2", "--", "--name", "b"))
    again, given = dataclasses.replace(first, starts=1), [first.script, *first.arguments]
    places, joins = ["--storage", str(tmp_path)], ["--address", "auto", "--copy-to", str(tmp_path)]
    assert LocalRuns(tmp_path).command(first)[-11:] == ["run", *places, "--name", "a", *given], "the queue's own come before --"
    assert LocalRuns(tmp_path).command(again)[-11:] == ["run", *places, "--resume-or-start", "a", *given]
    assert ClusterRuns(tmp_path, "auto").command(again)[-13:] == ["run", *joins, "--resume-or-start", "a", *given]
    assert cli_queue._unnamed(list(first.arguments)) == list(first.arguments)
    assert cli_queue._unnamed(["--world", "2", "--name", "a", "--name=b", "--seed", "3"]) == ["--world", "2", "--seed", "3"]


def test_a_run_listens_once_its_journal_was_written_by_this_process(tmp_path: Path) -> None:
    runs, started = LocalRuns(tmp_path), dataclasses.replace(job(tmp_path, "a", 2), started_unix_s=1_000.0)
    assert not runs.listens(started)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "journal.jsonl").touch()
    os.utime(tmp_path / "a" / "journal.jsonl", (999.0, 999.0))
    assert not runs.listens(started), "it is of the time before"
    os.utime(tmp_path / "a" / "journal.jsonl", (1_001.0, 1_001.0))
    assert runs.listens(started)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--address", "auto"], "--address"),
        (["--copy-to", "x"], "--copy-to"),
        (["--nodes", "1"], "--nodes"),
        (["--chaos", "storm"], "--chaos"),
        (["--storage", "here"], "--storage"),
    ],
)
def test_what_a_cluster_cannot_have_never_waits(tmp_path: Path, arguments: list[str], field: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    queue = queue_of(tmp_path / "runs", 4, address="auto")
    with pytest.raises(ConfigError) as refused:
        Submissions(queue, tmp_path / "runs", address="auto").submit(
            {**submission(tmp_path), "arguments": arguments}, Identity("me", "", True)
        )
    assert refused.value.field == field and queue.jobs() == []


# ---- the room of a cluster ---------------------------------------------------------------------------------------------------------------

SEEN: dict[str, Any] = {
    "total": {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}},
    "free": {"a": {"CPU": 1.0}, "b": {"CPU": 3.0}},
    "labels": {"a": {}, "b": {"rack": "7"}},
    "held": {"up": {"a": {"CPU": 2.0}}, "somebody": {"a": {"CPU": 1.0}}},
}


def on_cluster(name: str, slots: int, **more: Any) -> Job:
    return job(Path(), name, slots, shape={"CPU": 1.0}, phase=RUNNING, **more)


def test_what_others_hold_is_not_the_queues_to_give() -> None:
    nodes, [up] = shares(SEEN, [on_cluster("up", 2, placed={"b": 2})])
    assert {node.name: node.resources for node in nodes} == {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}
    assert up.placed == {"a": 2}, "where it is, not where it was counted on"


def test_a_node_never_has_more_than_it_has() -> None:
    """Who holds what is told a moment earlier than what is free."""
    seen = {"total": {"a": {"CPU": 4.0}}, "free": {"a": {"CPU": 4.0}}, "labels": {"a": {}}, "held": {"up": {"a": {"CPU": 2.0}}}}
    nodes, _ = shares(seen, [on_cluster("up", 2)])
    assert nodes[0].resources == {"CPU": 4.0}


def test_room_is_put_aside_for_a_run_that_is_about_to_have_it() -> None:
    nodes, placed = shares(SEEN, [on_cluster("up", 3), on_cluster("starts", 2, placed={"b": 2})])
    assert [each.placed for each in placed] == [{"a": 3}, {"b": 2}]
    rules = ByRules(Rules())
    running = [each.running(0.0) for each in placed]
    waits = dataclasses.replace(on_cluster("waits", 2), phase=WAITING)
    assert rules.decide([waits.asked(0.0)], running, nodes) == [], "one slot is left"


def test_a_node_that_is_gone_takes_its_room_along() -> None:
    gone = {"total": {"b": {"CPU": 4.0}}, "free": {"b": {"CPU": 1.0}}, "labels": {"b": {}}, "held": {"up": {}}}
    nodes, [up] = shares(gone, [on_cluster("up", 2, placed={"a": 2})])
    assert [(node.name, node.resources) for node in nodes] == [("b", {"CPU": 1.0})]
    assert up.placed == {"b": 1}, "what it lost it is to have again"


LOOKS = """
import json, os, sys
print(json.dumps({"joined": True}), flush=True)
for _ in sys.stdin:
    if os.path.exists(sys.argv[1]):
        sys.exit(1)
    print(json.dumps({"total": {"a": {"CPU": 4.0}}, "free": {"a": {"CPU": 4.0}}, "labels": {"a": {}}, "held": {}}), flush=True)
"""
REFUSES = 'import json; print(json.dumps({"refused": ["--address", "auto", "no cluster is there", "Start one"]}), flush=True)'


def test_a_cluster_that_goes_away_is_said_and_seen_again_when_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(cluster_room, "calling", lambda *words: [sys.executable, "-c", LOOKS, str(gone)])
    monkeypatch.setattr(cluster_room, "FRESH_S", 0.0)
    with cluster_room.ClusterRoom("auto") as room:
        assert room.most()[0].resources == {"CPU": 4.0}
        gone.touch()
        for _ in range(2):  # the second time it is not tried again yet
            with pytest.raises(RunFailed, match="does not answer any more"):
                room.nodes([])
        gone.unlink()
        monkeypatch.setattr(room, "_retry_s", 0.0)
        assert room.nodes([])[0][0].name == "a"


def test_a_cluster_that_refuses_is_refused_as_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_room, "calling", lambda *words: [sys.executable, "-c", REFUSES])
    with pytest.raises(ConfigError, match="--address = 'auto': no cluster is there. Start one"), cluster_room.ClusterRoom("auto"):
        pass
    monkeypatch.setattr(cluster_room, "calling", lambda *words: [sys.executable, "-c", "pass"])
    with pytest.raises(ConfigError, match="could not be joined"), cluster_room.ClusterRoom("auto"):
        pass


class Seen:
    """A cluster that always looks the same."""

    def nodes(self, jobs: Any) -> Any:
        return shares(SEEN, jobs)

    def most(self) -> Any:
        return [Node(name, resources, SEEN["labels"][name]) for name, resources in SEEN["total"].items()]


def test_a_rank_has_room_where_it_finds_what_it_takes_and_the_labels_that_it_wants(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    queue = queue_of(tmp_path / "runs", 0, room=Seen(), address="auto")
    submissions = Submissions(queue, tmp_path / "runs", address="auto")

    def submit(world: int, *settings: str) -> dict[str, Any]:
        words = ["--world", str(world), *(word for each in settings for word in ("--config", each))]
        return submissions.submit({**submission(tmp_path), "arguments": words}, Identity("me", operator=True))

    assert submit(4, "per_rank.labels=rack=7")["selector"] == {"rack": "7"}
    with pytest.raises(ConfigError, match="more than the 4 .* each with 1 CPU, on nodes with rack = 7"):
        submit(5, "per_rank.labels=rack=7")
    assert submit(4, "per_rank.cpus=2")["shape"] == {"CPU": 2.0}
    with pytest.raises(ConfigError, match="more than the 4 .* each with 2 CPU"):
        submit(5, "per_rank.cpus=2")
    with pytest.raises(ConfigError, match="more than the 0 .* each with 1 CPU and 1 GPU"):
        submit(1, "per_rank.gpus=1")


class Away:
    """A cluster that does not answer."""

    def nodes(self, jobs: Any) -> Any:
        raise RunFailed("it is away")

    def most(self) -> Any:
        raise RunFailed("it is away")


def test_a_cluster_that_is_away_is_said_and_ends_nobody(shared: Watched, tmp_path: Path) -> None:
    queue = queue_of(shared.root, 0, room=Away())
    queue._put(job(tmp_path, "a", 2))
    queue.step()
    assert queue.trouble == "it is away" and queue.get("a").phase == WAITING
    shared.server.queue = Submissions(queue, shared.root)
    reported = ask(shared, "GET", "/api/queue").json()
    assert (reported["trouble"], reported["slots"], reported["free"]) == ("it is away", 0, 0)
    assert ask(shared, "POST", "/api/queue", submission(tmp_path), ADA).status_code == 503
