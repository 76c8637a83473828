"""The server of the live page: what it shows, whom it lets do what, and that nothing that is sent to it breaks it."""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from typer.testing import CliRunner

from chaos.controls import ChaosControls
from dashboards import access, server
from dashboards.access import Access, stored_token
from dashboards.control_registry import ControlRegistry
from dashboards.feeds import RunFeed, RunFeeds
from dashboards.metrics import table as metrics
from dashboards.metrics.prometheus import Prometheus
from dashboards.openapi import openapi
from fleet.app.cli.main import app
from fleet.app.cli.queue import Submissions, queue_of, running
from fleet.app.cli.watch import PRIVATE, serving
from fleet.app.report import build_report
from fleet.errors import ConfigError
from fleet.host.follow import Follower
from fleet.host.ports import free_port
from fleet.host.scheduling import NICE
from tests.golden.journals import one_loss
from tests.support.waiting import until
from tests.support.watching import READ_TOKEN, WRITE_TOKEN, Watched, controls, watched

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("runs")) as server:
        server.write("good", list(one_loss("f1").records))
        server.server.queue = Submissions(queue_of(server.root, 4), server.root)
        yield server


@pytest.fixture(scope="module")
def chaos(served: Watched) -> ChaosControls:
    port = controls()
    served.server.control("good", port)
    return port


def get(served: Watched, path: str, **arguments: Any) -> requests.Response:
    return requests.get(served.url + path, timeout=LIMIT_S, **arguments)


def order(served: Watched, body: Any, token: str = WRITE_TOKEN, **headers: str) -> requests.Response:
    sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return requests.post(f"{served.url}/api/runs/good/chaos", data=data, headers=sent, timeout=LIMIT_S)


def state(served: Watched, name: str) -> dict[str, Any]:
    """Once the journal is read to its end, or to its damage."""
    until(lambda: (seen := get(served, f"/api/runs/{name}").json()) is not None and seen["status"] != "running", f"{name} is read")
    found: dict[str, Any] = get(served, f"/api/runs/{name}").json()
    return found


def test_the_state_is_the_ledgers(served: Watched) -> None:
    seen = state(served, "good")
    assert seen["now"]["goodput"] == pytest.approx(0.6812, abs=1e-4)
    assert sum(row["share"] for row in seen["waterfall"][1:]) == pytest.approx(1.0, abs=1e-6)
    [fault] = seen["faults"]
    assert fault["cost_s"] == pytest.approx(1.54)
    assert [line["text"] for line in fault["story"]][1:] == ["rank 1.0 is lost: killed by SIGKILL", "view 2 is formed: 1 ranks, because"]
    assert get(served, "/api/runs").json()["runs"][0]["name"] == "good"
    assert get(served, "/api/runs/good/journal").content.startswith(b'["RunStarted",')


def test_the_ledger_is_the_reports(served: Watched) -> None:
    state(served, "good")
    expected = build_report(one_loss("f1").records).to_dict()
    assert get(served, "/api/runs/good/ledger").json() == json.loads(json.dumps(expected))


def test_the_stream_sends_the_state_and_what_is_new(served: Watched) -> None:
    records = list(one_loss().records)
    served.write("grows", records[:8])
    seen = []
    with get(served, "/api/runs/grows/events", stream=True) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        lines = (line for line in answer.iter_lines() if line.startswith(b"data: "))
        seen.append(json.loads(next(lines)[6:]))
        served.write("grows", records[8:])
        for line in lines:
            seen.append(json.loads(line[6:]))
            if seen[-1] is not None and seen[-1]["status"] == "completed":
                break
    assert seen[-1]["now"]["steps"] == 60


def test_metrics_are_those_of_the_runs_that_go_on(served: Watched) -> None:
    until(lambda: 'fleet_steps_committed_total{run="story"} 60.0' in get(served, "/metrics").text, "the run is scraped", LIMIT_S)
    old = served.root / "old"
    served.write("old", list(one_loss().records))
    os.utime(old / "journal.jsonl", (1e9, 1e9))
    going_on = len({"good", "grows"} & set(os.listdir(served.root)))
    openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}  # asked for the first time: it is computed anew
    assert get(served, "/metrics", headers=openmetrics).text.count("fleet_run_info{") == going_on


def test_a_storm_of_scrapes_is_answered_from_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looks = [100.0], []
    monkeypatch.setattr(server.time, "monotonic", lambda: now_s[0])
    with RunFeeds(tmp_path) as feeds:
        monkeypatch.setattr(feeds, "fresh", lambda: looks.append(now_s[0]) or [])
        scraped = server.Exposition(feeds)
        for at_s in (100.0, 100.5, 100.9, 101.0):
            now_s[0] = at_s
            scraped.text("")
    assert looks == [100.0, 101.0]


@pytest.mark.parametrize("per_rank", [False, True])
def test_large_runs_have_series_of_each_rank_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_rank: bool) -> None:
    monkeypatch.setattr(metrics, "PER_RANK_UP_TO", 1)
    with serving(tmp_path, "127.0.0.1", 0, per_rank) as page:
        Watched(tmp_path, page.server).write("good", list(one_loss().records))
        until(lambda: "fleet_run_info{" in requests.get(f"{page.server.url}/metrics", timeout=LIMIT_S).text, "it is scraped", LIMIT_S)
        assert ("fleet_slot_seconds{" in requests.get(f"{page.server.url}/metrics", timeout=LIMIT_S).text) is per_rank


def test_who_comes_from_elsewhere_shows_a_token_and_the_one_for_reading_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "0.0.0.0", 0) as page:
        assert requests.get(f"{page.server.url}/api/runs", timeout=LIMIT_S).status_code == 401
        shown = {"Authorization": f"Bearer {page.read_link().rpartition('=')[2]}"}
        assert requests.get(f"{page.server.url}/api/runs", headers=shown, timeout=LIMIT_S).status_code == 200
        assert requests.post(f"{page.server.url}/api/queue", json={}, headers=shown, timeout=LIMIT_S).status_code == 401
        assert page.link().rpartition("=")[2] != page.read_link().rpartition("=")[2]
        assert stat.S_IMODE((tmp_path / PRIVATE / access.READ_TOKEN).stat().st_mode) == 0o600


def test_whoever_looks_gives_way_to_whoever_trains(served: Watched) -> None:
    nice = {thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threading.enumerate()}
    assert nice["fleet-watch-server"] == min(19, nice["MainThread"] + NICE)


# ---- who may do what -----------------------------------------------------------------------------------------------------------------


def test_an_order_is_taken_and_written_down(served: Watched, chaos: ChaosControls) -> None:
    answer = order(served, {"action": "inject", "kind": "hang", "slot": 2, "duration_s": 3})
    assert answer.status_code == 202
    [inject] = chaos.take()
    assert inject.kind == "hang"  # type: ignore[union-attr]
    last = json.loads((served.root / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["run"], last["asked"]["kind"], last["outcome"]) == ("good", "hang", inject.id)  # type: ignore[union-attr]
    assert (last["remote"], last["right"]) == ("127.0.0.1", "write")


def audited(served: Watched) -> dict[str, Any]:
    return json.loads((served.root / "audit.jsonl").read_text().splitlines()[-1])


def test_who_was_refused_is_written_down_too(served: Watched, chaos: ChaosControls) -> None:
    assert order(served, {"action": "stop"}, "x" * 32).status_code == 401
    assert {name: audited(served)[name] for name in ("right", "run", "action")} == {
        "right": "read", "run": "good", "action": "/api/runs/good/chaos",
    }  # fmt: skip
    assert audited(served)["outcome"].startswith("refused: 401")


def test_refusals_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_BYTES", 400)
    log = access.Audit(tmp_path / "audit.jsonl")
    for right in ("nobody", "nobody", "nobody", "nobody", "write"):
        log.write("10.0.0.1", right, "/api/queue", "", {}, "outcome")
    assert [json.loads(line)["right"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()] == [
        "nobody",
        "nobody",
        "nobody",
        "write",
    ]


# ---- a run of another process --------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(served: Watched, tmp_path: Path) -> Iterator[Watched]:
    """A second server of the same folder, which runs nothing itself."""
    with watched(served.root) as other:
        served.server.control_registry = other.server.control_registry = ControlRegistry(tmp_path / "pages", WRITE_TOKEN)
        yield other
        served.server.control_registry = None


def test_orders_reach_the_process_that_runs_the_run(served: Watched, beside: Watched) -> None:
    port = controls()
    served.server.control("good", port)
    answer = order(beside, {"action": "inject", "kind": "kill_rank", "slot": 1})
    assert answer.status_code == 202 and answer.json()["kinds"]
    [inject] = port.take()
    assert (inject.kind, inject.slot, inject.id) == ("kill_rank", 1, answer.json()["said"])  # type: ignore[union-attr]
    assert get(beside, "/api/runs/good/chaos").json() == get(served, "/api/runs/good/chaos").json()
    refused = order(beside, {"action": "inject", "kind": "meteor"})
    assert refused.status_code == 400 and refused.json()["detail"].startswith("kind = 'meteor': 'meteor' is not one of")
    assert order(beside, {"action": "stop"}, READ_TOKEN).status_code == 401 and not port.waiting


def test_a_run_whose_process_is_gone_takes_no_orders(served: Watched, beside: Watched, chaos: ChaosControls) -> None:
    assert beside.server.control_registry is not None
    for url in (f"http://127.0.0.1:{free_port()}", "http://elsewhere.example", f"{served.url}/nowhere"):
        beside.server.control_registry.add("good", url)
        assert order(beside, {"action": "stop"}).status_code == 409
        assert get(beside, "/api/runs/good/chaos").json()["ended"] is True
    beside.server.control_registry.remove("good")
    assert order(beside, {"action": "stop"}).status_code == 409 and not chaos.waiting


@pytest.mark.parametrize("token", ["", "x" * 32, READ_TOKEN, WRITE_TOKEN[:-1], "ü" * 16])
def test_without_the_write_token_nothing_is_changed(served: Watched, chaos: ChaosControls, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}".encode(), "Content-Type": "application/json"}
    answer = requests.post(f"{served.url}/api/runs/good/chaos", data=b'{"action":"stop"}', headers=headers, timeout=LIMIT_S)
    assert answer.status_code == 401
    assert not chaos.waiting


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"}, {"Origin": "null"}, {"Host": "elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"}, {"Referer": "https://elsewhere.example/page"},
    ],
)  # fmt: skip
def test_another_sites_page_changes_nothing(served: Watched, chaos: ChaosControls, headers: dict[str, str]) -> None:
    assert order(served, {"action": "stop"}, **headers).status_code in (403, 421)
    assert not chaos.waiting
    own = {"Origin": served.url, "Referer": f"{served.url}/runs/good", "Sec-Fetch-Site": "same-origin"}
    assert order(served, {"action": "stop"}, **own).status_code == 202
    chaos.take()


def test_a_server_with_a_read_token_shows_its_runs_to_nobody_else(tmp_path: Path) -> None:
    with watched(tmp_path, READ_TOKEN) as served:
        served.write("good", list(one_loss().records))
        for path in ("/api/runs", "/api/runs/good", "/api/runs/good/events", "/api/runs/good/journal", "/metrics"):
            assert get(served, path).status_code == 401
        assert get(served, "/api/runs", headers={"Authorization": f"Bearer {READ_TOKEN}"}).status_code == 200
        assert order(served, {"action": "stop"}, READ_TOKEN).status_code == 401
        assert "all steps are committed" not in get(served, "/runs/good").text


def test_the_token_is_its_owners_alone_and_stays(tmp_path: Path) -> None:
    token = stored_token(tmp_path)
    assert len(token) >= 32
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert stored_token(tmp_path) == token
    with pytest.raises(ConfigError, match="16 characters"):
        Access("short")


MALFORMED = {
    "a method": b"GARBAGE\r\n\r\n", "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a version": b"GET / HTTP/9.9\r\n\r\n",
    "a header": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nBad Header\r\n\r\n", "a path": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "a length": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    "a host": b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a chunk": b"POST /api/runs/good/chaos HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
}  # fmt: skip


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_a_line_of_the_audit_log_and_none_of_the_terminal(
    served: Watched, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    def lines() -> list[dict[str, Any]]:
        path = served.root / "audit.jsonl"
        noted = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [each for each in noted if each["action"] == server.MALFORMED]

    before = len(lines())
    with socket.create_connection(("127.0.0.1", served.server.port), LIMIT_S) as line:
        line.sendall(sent)
        assert b" 400 " in line.recv(4096)
    until(lambda: len(lines()) > before, "it is noted", LIMIT_S)
    [noted] = lines()[before:]
    assert noted["remote"] == "127.0.0.1" and noted["outcome"].startswith("refused: 400") and len(noted["outcome"]) < 250
    assert not caplog.records


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Encoding": "gzip"}, 400), ({"Authorization": b"Bearer \xff\xfe"}, 401)],
)
def test_what_cannot_be_decoded_is_refused_without_a_traceback(
    served: Watched, chaos: ChaosControls, caplog: pytest.LogCaptureFixture, headers: dict[str, Any], status: int
) -> None:
    sent = {"Authorization": f"Bearer {WRITE_TOKEN}", "Content-Type": "application/json", **headers}
    answer = requests.post(f"{served.url}/api/runs/good/chaos", data=b"abc", headers=sent, timeout=LIMIT_S)
    assert answer.status_code == status and not chaos.waiting
    assert not caplog.records


@pytest.mark.parametrize("named", ["file", "read-token"])
def test_what_listens_for_all_has_tokens_or_does_not_start(tmp_path: Path, named: str) -> None:
    if named == "file":
        (tmp_path / PRIVATE).write_text("in its place")
    else:
        (tmp_path / PRIVATE).mkdir()
        (tmp_path / PRIVATE / named).touch()
    for command in (("runs", "watch"), ("cluster", "up")):
        done = CliRunner().invoke(app, [*command, "--storage", str(tmp_path), "--host", "0.0.0.0", "--port", "0"])
        assert isinstance(done.exception, ConfigError) and "\n" not in str(done.exception), done.exception
    assert running(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [(("--host", "nowhere.invalid"), "--host = 'nowhere.invalid'"), (("--host", "203.0.113.7"), "is no address of this machine")],
)
def test_an_address_of_others_is_refused_by_name(tmp_path: Path, given: tuple[str, ...], words: str) -> None:
    for command in (("runs", "watch"), ("cluster", "up")):
        done = CliRunner().invoke(app, [*command, "--storage", str(tmp_path), "--port", "0", *given])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception), done.exception
    assert running(tmp_path) is None


def test_a_port_that_is_taken_or_none_is_refused(served: Watched, tmp_path: Path) -> None:
    for command in (("runs", "watch"), ("cluster", "up")):
        done = CliRunner().invoke(app, [*command, "--storage", str(tmp_path), "--port", str(served.server.port)])
        assert isinstance(done.exception, ConfigError) and "in use" in str(done.exception), done.exception
        assert CliRunner().invoke(app, [*command, "--storage", str(tmp_path), "--port", "99999"]).exit_code == 2
    with pytest.raises(ConfigError, match="another program listens there"):
        Prometheus(tmp_path / "prometheus", {}, "/bin/true", served.server.port).start()
    assert running(tmp_path) is None


# ---- hostility -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["..", "../secret", "%2e%2e%2fsecret", "..%2f..%2fetc%2fpasswd", "/etc", "good%00", "a%0d%0ab", "link", "x" * 5000, "%3Cimg%3E"]
)
def test_no_name_leads_out_of_the_folder(served: Watched, name: str) -> None:
    (served.root.parent / "secret").mkdir(exist_ok=True)
    (served.root.parent / "secret" / "journal.jsonl").write_text("secret")
    if not (served.root / "link").exists():
        (served.root / "link").symlink_to(served.root.parent / "secret")
    for tail in ("", "/journal", "/events"):
        request = requests.Request("GET", served.url).prepare()
        request.url = f"{served.url}/api/runs/{name}{tail}"
        answer = requests.Session().send(request, timeout=LIMIT_S)
        assert answer.status_code in (400, 404)
        assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * 20_000, 413), (b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 16_000, 400), ({"action": "explode"}, 400), ({}, 400),
        ({"action": "inject", "kind": "meteor", "slot": 0}, 400), ({"action": "inject", "kind": "kill_rank", "slot": True}, 400),
        ({"action": "inject", "kind": "kill_rank", "slot": 10**400}, 400), ({"action": "stop", "<script>": 1}, 400),
        ('{"action":"inject","kind":"slow","slot":0,"severity":NaN}', 400),
        ('{"action":"inject","kind":"hang","slot":0,"duration_s":1e999}', 400),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_with_its_reason(served: Watched, chaos: ChaosControls, body: Any, status: int) -> None:
    answer = order(served, body)
    assert answer.status_code == status
    assert answer.json()["detail"]
    assert not chaos.waiting


def test_a_slow_client_holds_up_nobody(served: Watched, chaos: ChaosControls) -> None:
    address = (served.url.removeprefix("http://").split(":")[0], served.server.port)
    head = f"POST /api/runs/good/chaos HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {WRITE_TOKEN}\r\n"
    with socket.create_connection(address, LIMIT_S) as slow, socket.create_connection(address, LIMIT_S) as slower:
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        slower.sendall(b"GET /api/ru")
        assert get(served, "/api/runs").status_code == 200
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    assert not chaos.waiting


def test_a_reader_that_takes_nothing_is_let_go(served: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.2)
    monkeypatch.setattr(server, "UPDATE_S", 0.001)
    monkeypatch.setattr(RunFeed, "body", lambda feed: b"x" * (1 << 20) + os.urandom(1))  # each time another one
    with socket.create_connection(("127.0.0.1", served.server.port), LIMIT_S) as deaf:
        deaf.sendall(b"GET /api/runs/good/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: served.server._streams == 1, "it is served", LIMIT_S)
        until(lambda: served.server._streams == 0, "it is let go", LIMIT_S)
        sum(iter(lambda: len(deaf.recv(1 << 20)), 0))  # what was under way, and then the end: the connection does not stay


def test_what_the_journal_says_stays_text(served: Watched) -> None:
    answer = get(served, "/runs/good")
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for name in ("run.js", "runs.js", "parts.js"):
        text = get(served, f"/static/{name}").text
        assert "innerHTML" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("HTTP", "")
    assert get(served, "/static/..%2faccess.py").status_code == 404


def test_a_damaged_journal_is_shown_as_far_as_it_is_good(served: Watched) -> None:
    served.write("torn", list(one_loss().records)[:-1])
    with open(served.root / "torn" / "journal.jsonl", "ab") as file:
        file.write(b"<b>not a record</b>\n")
    until(lambda: (get(served, "/api/runs/torn").json() or {}).get("damage"), "the damage is found", LIMIT_S)
    seen = get(served, "/api/runs/torn").json()
    assert seen["now"]["steps"] == 60
    assert "not a record" in seen["damage"]


def test_a_follower_is_served_as_it_is(served: Watched, tmp_path: Path) -> None:
    served.server._feeds.adopt("lent", Follower(tmp_path / "none" / "journal.jsonl"))
    assert get(served, "/api/runs/lent").json() is None


OPERATIONS = [
    (path, method) for path, operations in openapi()["paths"].items() for method in operations if not path.endswith("/events")
]  # fmt: skip


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_schemathesis_sends_is_answered_as_described(served: Watched, chaos: ChaosControls, path: str, method: str) -> None:
    schema = schemathesis.openapi.from_dict(openapi())
    operation, turns = schema[path][method.upper()], itertools.count()

    @given(case=operation.as_strategy() | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE))
    @settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    def send(case: Any) -> None:
        if case.path_parameters and next(turns) % 2:
            case.path_parameters["run"] = "good"  # a name that is made up hardly ever is that of a run
        answer = case.call(base_url=served.url, headers={"Authorization": f"Bearer {WRITE_TOKEN}"})
        assert answer.status_code < 500
        chaos.take()

    send()
