"""An HTTP server that answers as Grafana's documented API does, as far as ``dashboards.grafana.push`` asks: in memory, with faults."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "glsa_test"
Answer = tuple[int, Any]


class FakeGrafana:
    """What it holds. ``login``: ``page`` answers all with a page to log in, ``redirect`` sends all to it. ``fail`` maps the start of
    "METHOD /path" to a status that is answered instead; ``meddle`` is called before a save.

    ``versions`` are newest first, as Grafana lists them; ``lists_versions`` answers with the bare list, as older Grafanas do.
    """

    def __init__(self) -> None:
        self.sources: dict[str, dict[str, Any]] = {}
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, list[dict[str, Any]]] = {}
        self.rules: dict[str, dict[str, Any]] = {}
        self.lists_versions = False
        self.fail: dict[str, int] = {}
        self.writes = 0
        self.meddle: Any = None
        self.login = ""
        self.url = ""

    def answer(self, method: str, path: str, body: Any, token: str) -> Answer:
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        failing = next((status for start, status in self.fail.items() if f"{method} {path}".startswith(start)), None)
        if failing is not None:
            return failing, {"message": "on request"}
        parts = urlsplit(path)
        kind, _, rest = parts.path.removeprefix("/api/").partition("/")
        self.writes += method in ("POST", "PUT")
        return getattr(self, f"_{kind}")(method, unquote(rest), body, parse_qs(parts.query))  # type: ignore[no-any-return]

    def _datasources(self, method: str, rest: str, body: Any, query: Any) -> Answer:
        if method == "POST":
            if body["name"] in self.sources:
                return 409, {"message": "data source with the same name already exists"}
            self.sources[body["name"]] = {"id": len(self.sources) + 1, **body}
            return 200, {"message": "Datasource added", "datasource": body}
        found = self.sources.get(rest.removeprefix("name/"))
        return (200, found) if found else (404, {"message": "Data source not found"})

    def _folders(self, method: str, rest: str, body: Any, query: Any) -> Answer:
        if method == "POST":
            if body["uid"] in self.folders:
                return 412, {"message": "a folder with the same uid already exists"}
            self.folders[body["uid"]] = body
            return 200, {"id": 1, "version": 1, **body}
        return (200, self.folders[rest]) if rest in self.folders else (404, {"message": "folder not found"})

    def _dashboards(self, method: str, rest: str, body: Any, query: Any) -> Answer:
        if rest.endswith("/versions"):
            return self._versions(rest.removeprefix("uid/").removesuffix("/versions"), int(query["limit"][0]))
        if method == "GET":
            found = self.dashboards.get(rest.removeprefix("uid/"))
            return (200, {"dashboard": found, "meta": {"slug": "x"}}) if found else (404, {"message": "Dashboard not found"})
        if body.get("folderUid") not in self.folders:
            return 400, {"message": "folder not found"}
        return self._save(body)

    def _v1(self, method: str, rest: str, body: Any, query: Any) -> Answer:
        """Groups of alert rules, as its provisioning has them."""
        _, _, folder, _, group = rest.split("/")
        if folder not in self.folders:
            return 404, {"message": "folder not found"}
        if method == "GET":
            return (200, self.rules[group]) if group in self.rules else (404, {"message": "rule group not found"})
        if wrong := [problem for rule in body["rules"] for problem in self._wrong_in(rule)]:
            return 400, {"message": "; ".join(wrong)}
        self.rules[group] = body | {"rules": [{**rule, "id": 1, "updated": "now", "provenance": "api"} for rule in body["rules"]]}
        return 200, self.rules[group]

    def _wrong_in(self, rule: dict[str, Any]) -> list[str]:
        """What Grafana refuses of a rule."""
        known = {source["uid"] for source in self.sources.values()} | {"__expr__"}
        asked = {each["refId"]: each for each in rule["data"]}
        unknown = [each["datasourceUid"] for each in rule["data"] if each["datasourceUid"] not in known]
        wrong = [f"no data source {uid}" for uid in unknown] + [] if rule["condition"] in asked else ["the condition is no query"]
        wrong += [] if len(rule["uid"]) <= 40 and re.fullmatch(r"[A-Za-z0-9_-]+", rule["uid"]) else ["uid"]
        wrong += [] if rule["noDataState"] in ("OK", "NoData", "Alerting", "KeepLast") else ["noDataState"]
        wrong += [] if rule["execErrState"] in ("OK", "Error", "Alerting", "KeepLast") else ["execErrState"]
        return wrong + ([] if re.fullmatch(r"\d+[smh]", rule["for"]) else ["for"])

    def _save(self, body: Any) -> Answer:
        if self.meddle is not None:
            self.meddle()
        new = body["dashboard"]
        old = self.dashboards.get(new["uid"])
        if old is not None and not body["overwrite"] and old["version"] != new["version"]:
            return 412, {"status": "version-mismatch", "message": "The dashboard has been changed by someone else"}
        version = old["version"] + 1 if old is not None else 1
        stored = {**json.loads(json.dumps(new)), "id": 7, "version": version, "gnetId": None}  # what Grafana adds by itself
        self._store(stored, body.get("message", ""))
        return 200, {"id": 7, "uid": new["uid"], "status": "success", "version": version}

    def _store(self, stored: dict[str, Any], message: str) -> None:
        uid, version = stored["uid"], stored["version"]
        self.dashboards[uid] = stored
        kept = {"id": 7, "dashboardId": 7, "uid": uid, "parentVersion": version - 1, "restoredFrom": 0, "version": version}
        self.versions.setdefault(uid, []).insert(0, kept | {"createdBy": "admin", "message": message})

    def edited(self, uid: str, change: Callable[[dict[str, Any]], None], message: str = "") -> None:
        """Somebody opens a dashboard, changes it and saves it; few people write a message."""
        mine = json.loads(json.dumps(self.dashboards.get(uid, {"uid": uid, "version": 0})))
        change(mine)
        self._store({**mine, "version": mine["version"] + 1}, message)

    def _versions(self, uid: str, limit: int) -> Answer:
        if uid not in self.versions:
            return 404, {"message": "Dashboard not found"}
        newest = self.versions[uid][:limit]
        return 200, newest if self.lists_versions else {"continueToken": "", "versions": newest}


@contextmanager
def grafana() -> Iterator[FakeGrafana]:
    """One on a free port of loopback, under the path ``/grafana``."""
    fake = FakeGrafana()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            path = self.path.removeprefix("/grafana")
            if fake.login:
                self._ask_to_log_in(redirect=fake.login == "redirect" and path != "/login")
                return
            status, content = fake.answer(self.command, path, body, self.headers.get("Authorization", ""))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _ask_to_log_in(self, redirect: bool) -> None:
            page = b"" if redirect else b"<!doctype html><title>Log in</title>"
            self.send_response(302 if redirect else 200)
            self.send_header("Location", "/grafana/login")
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815 - the names that http.server asks for

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the signature of http.server
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}/grafana"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
