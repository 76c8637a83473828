"""An HTTP server that answers as Grafana's documented API does, as far as ``dashboards.grafana.push`` asks: in memory, with faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "glsa_test"
Answer = tuple[int, Any]


class FakeGrafana:
    """What it holds. ``fail`` maps the start of "METHOD /path" to a status that is answered instead; ``meddle`` is called before a save.

    ``versions`` are newest first, as Grafana lists them; ``lists_versions`` answers with the bare list, as older Grafanas do.
    """

    def __init__(self) -> None:
        self.sources: dict[str, dict[str, Any]] = {}
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, list[dict[str, Any]]] = {}
        self.lists_versions = False
        self.fail: dict[str, int] = {}
        self.writes = 0
        self.meddle: Any = None
        self.url = ""

    def answer(self, method: str, path: str, body: Any, token: str) -> Answer:
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        failing = next((status for start, status in self.fail.items() if f"{method} {path}".startswith(start)), None)
        if failing is not None:
            return failing, {"message": "on request"}
        parts = urlsplit(path)
        kind, _, rest = parts.path.removeprefix("/api/").partition("/")
        self.writes += method == "POST"
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
            status, content = fake.answer(self.command, path, body, self.headers.get("Authorization", ""))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

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
