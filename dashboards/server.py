"""The live page and its API, over HTTP. ``dashboards/openapi.py`` describes the API; ``docs/dashboards.md`` says who may do what.

Reads go to feeds that follow journals, never to a coordinator: a thousand open pages cost a run nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dashboards.access import NOBODY, QUEUE, WRITE, Access, Audit
from dashboards.control_registry import ControlRegistry, RunGone
from dashboards.feeds import RunFeed, RunFeeds
from dashboards.identities import Identity
from dashboards.openapi import ORDER, Schema, openapi
from dashboards.pages.logs import log_files, log_piece
from fleet.errors import ConfigError, RunFailed
from fleet.host.scheduling import give_way

log = logging.getLogger("fleet.dashboards")
T = TypeVar("T")

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 16_384
BODY_S = 5.0
"""A request's body must be there within so long."""
WRITE_S = 10.0
"""A reader that takes nothing for so long is let go."""
HEARTBEAT_S = 10.0
UPDATE_S = 0.5
MAX_STREAMS = 512
MALFORMED = "malformed request"
OFFSET = re.compile(r"[0-9]{1,18}")
SCRAPE_AGE_S = 1.0
"""Metrics are computed so often at most, however many scrape."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ChaosPort(Protocol):
    """What the page may order of a run's chaos; ``chaos.controls.ChaosControls`` is one. Each raises ConfigError when it cannot be."""

    def order(self, asked: Mapping[str, Any]) -> str: ...
    def status(self) -> dict[str, Any]: ...


class QueuePort(Protocol):
    """Runs that wait for room; ``fleet.app.cli.queue.Submissions`` is one. Each raises ConfigError when it cannot be."""

    def submit(self, asked: Mapping[str, Any], who: Identity) -> dict[str, Any]: ...
    def cancel(self, name: str, who: Identity) -> dict[str, Any]: ...
    def listing(self) -> dict[str, Any]: ...


class Exposition:
    """All metrics as text, computed when somebody scrapes, and at most once in ``SCRAPE_AGE_S``. Safe from any thread."""

    def __init__(self, feeds: RunFeeds) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(feeds.collector())
        self._made: dict[str, tuple[float, bytes]] = {}
        self._lock = threading.Lock()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Body and content type for a scraper that sent ``accept``."""
        encode, kind = choose_encoder(accept)
        with self._lock:
            self._made = {each: made for each, made in self._made.items() if time.monotonic() - made[0] < SCRAPE_AGE_S}
            if kind not in self._made:
                self._made[kind] = time.monotonic(), encode(self._registry)
            return self._made[kind][1], kind


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp logs. A request that is no HTTP is a line of the audit log: its sender's mistake needs no traceback of ours."""

    def __init__(self, audit: Audit) -> None:
        super().__init__(log)
        self._audit = audit

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            self._audit.write(str(args[0]) if args else "", NOBODY, MALFORMED, "", {}, f"refused: {brief(error)}")
        else:
            super().log(level, msg, *args, **kwargs)


def brief(error: Exception) -> str:
    """Its words on one line, without what was sent behind them."""
    return " ".join(str(error).split())[:200]


class WatchServer:
    """Serves the runs of ``feeds`` from an event loop in a thread of its own. Use as a context manager.

    Args:
        feeds: the runs.
        access: who may do what.
        host, port: where to listen; port 0 takes a free one, see ``url``.
        audit: where what was changed is written down.

    Attributes:
        queue: what starts runs, where this server does.
        control_registry: who takes the orders for runs that other processes of this machine run; None: they take none here.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, feeds: RunFeeds, access: Access, audit: Audit, host: str = "127.0.0.1", port: int = 0) -> None:
        self._feeds, self._access, self._audit, self._exposition = feeds, access, audit, Exposition(feeds)
        self._host, self._port = host, port
        self._chaos: dict[str, ChaosPort] = {}
        self.queue: QueuePort | None = None
        self.control_registry: ControlRegistry | None = None
        self._streams = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._closing: asyncio.Event | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._serve, name="fleet-watch-server", daemon=True)

    def __enter__(self) -> WatchServer:
        self._thread.start()
        self._ready.wait(30.0)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._closing is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(10.0)

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def control(self, name: str, chaos: ChaosPort) -> None:
        """Let whoever has the write token order ``chaos`` of run ``name``, here, and through the other servers of this machine."""
        self._chaos[name] = chaos
        if self.control_registry is not None:
            self.control_registry.add(name, self.url)

    def release(self, name: str) -> None:
        """Run ``name`` takes no orders any more."""
        self._chaos.pop(name, None)
        if self.control_registry is not None:
            self.control_registry.remove(name)

    # ---- the loop ----------------------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        give_way()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()

    async def _run(self) -> None:
        self._closing = asyncio.Event()
        limits: dict[str, Any] = {"keepalive_timeout": 15.0, "handler_cancellation": True, "shutdown_timeout": 1.0}
        runner = web.AppRunner(self.app(), access_log=None, logger=ServerLog(self._audit), **limits)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self._port = runner.addresses[0][1]
        except OSError as error:
            self._error = error
        self._ready.set()
        if self._error is None:
            await self._closing.wait()
        await runner.cleanup()

    def app(self) -> web.Application:
        """The application, for a server or for tests."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/", self._shell("runs.html"))
        app.router.add_get("/runs/{run}", self._shell("run.html"))
        app.router.add_static("/static", STATIC)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/runs/{run}", self._state)
        app.router.add_get("/api/runs/{run}/events", self._events)
        app.router.add_get("/api/runs/{run}/ledger", self._ledger)
        app.router.add_get("/api/runs/{run}/journal", self._journal)
        app.router.add_get("/api/runs/{run}/logs", self._logs)
        app.router.add_get("/api/runs/{run}/logs/{slot:[0-9]{1,7}}/{incarnation:[0-9]{1,7}}", self._log)
        app.router.add_get("/api/runs/{run}/chaos", self._chaos_status)
        app.router.add_post("/api/runs/{run}/chaos", self._chaos_order)
        app.router.add_get("/api/queue", self._queue_listing)
        app.router.add_post("/api/queue", self._queue_submit)
        app.router.add_delete("/api/queue/{run}", self._queue_cancel)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks that come before all others; whatever is refused or goes wrong is answered as JSON, without a traceback."""
        try:
            self._check(request)
            answer = await handler(request)
        except web.HTTPException as refusal:
            self._note_refusal(request, refusal)
            answer = problem(refusal.status, refusal.text or refusal.reason)
            answer.headers.update({name: value for name, value in refusal.headers.items() if name in ("Allow", "WWW-Authenticate")})
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            answer = problem(500, "something went wrong; the log of the server says what")
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _check(self, request: web.Request) -> None:
        if not self._access.knows_host(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(text="this server is not called that")
        right = self._right(request)
        changes = request.method not in ("GET", "HEAD")
        if changes and not self._access.same_origin(request.headers):
            raise web.HTTPForbidden(text="the request comes from another site's page")
        public = request.path == "/" or request.path.startswith(("/static/", "/runs/")) or request.path == "/openapi.json"
        if right == NOBODY and not public:
            raise web.HTTPUnauthorized(text="a token is needed: Authorization: Bearer TOKEN", headers={"WWW-Authenticate": "Bearer"})
        queues = request.path == "/api/queue" or request.path.startswith("/api/queue/")
        if changes and right == QUEUE and not queues:
            raise web.HTTPForbidden(text="your token is for handing in runs; this needs the write token of the service")
        if changes and right not in (WRITE, QUEUE):
            text = "the write token is needed: Authorization: Bearer TOKEN"
            raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})

    # ---- pages -------------------------------------------------------------------------------------------------------------------------

    def _shell(self, name: str) -> Handler:
        text = (STATIC / name).read_text(encoding="utf-8")

        async def page(request: web.Request) -> web.StreamResponse:
            return web.Response(text=text, content_type="text/html")

        return page

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openapi())

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, kind = await asyncio.to_thread(self._exposition.text, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": kind})

    # ---- runs --------------------------------------------------------------------------------------------------------------------------

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"runs": await asyncio.to_thread(self._all_runs)})

    def _all_runs(self) -> list[dict[str, Any]]:
        waiting = [job for job in self.queue.listing()["jobs"] if job["phase"] == "waiting"] if self.queue is not None else []
        rows = [{"name": job["name"], "status": "queued", "reason": _waits_for(job)} for job in waiting]
        names = {job["name"] for job in waiting}  # one that gave way has a journal, too
        return rows + [row for row in self._feeds.runs() if row["name"] not in names]

    async def _found(self, find: Callable[[str], T | None], request: web.Request) -> T:
        """What ``find`` gives for the run that is asked for."""
        found = await asyncio.to_thread(find, request.match_info["run"])
        if found is None:
            raise web.HTTPNotFound(text="there is no such run")
        return found

    async def _state(self, request: web.Request) -> web.StreamResponse:
        feed = await self._found(self._feeds.get, request)
        return web.Response(body=await asyncio.to_thread(feed.body), content_type="application/json")

    async def _ledger(self, request: web.Request) -> web.StreamResponse:
        feed = await self._found(self._feeds.get, request)
        report = await asyncio.to_thread(feed.follower.look, lambda report: report.to_dict())
        return web.json_response(report, dumps=functools.partial(json.dumps, allow_nan=False))

    async def _journal(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(await self._found(self._feeds.journal, request), headers={**HEADERS, "Content-Type": "application/jsonl"})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        path = await self._found(self._feeds.journal, request)
        return web.json_response({"logs": await asyncio.to_thread(log_files, path.parent)})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        path, offset = await self._found(self._feeds.journal, request), request.query.get("offset", "")
        if offset and not OFFSET.fullmatch(offset):
            return problem(400, "offset is a number of bytes", field="offset")
        slot, incarnation = (int(request.match_info[name]) for name in ("slot", "incarnation"))
        piece = await asyncio.to_thread(log_piece, path.parent, slot, incarnation, int(offset) if offset else None)
        if piece is None:
            raise web.HTTPNotFound(text="this process has no log")
        return web.json_response(piece)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: ``state`` whenever it changed, a comment when it has not for a while."""
        feed = await self._found(self._feeds.get, request)
        if self._streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_STREAMS} pages are open; close one")
        self._streams += 1
        try:
            answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
            await answer.prepare(request)
            await self._stream(feed, answer)
            return answer
        except TimeoutError:
            assert request.transport is not None
            request.transport.abort()  # nothing more can be said to who does not listen
            return answer
        finally:
            self._streams -= 1

    async def _stream(self, feed: RunFeed, answer: web.StreamResponse) -> None:
        assert self._closing is not None
        last, idle_s = b"", 0.0
        while not self._closing.is_set():
            body = await asyncio.to_thread(feed.body)
            if body is not last:
                await asyncio.wait_for(answer.write(b"retry: 1000\nevent: state\ndata: " + body + b"\n\n"), WRITE_S)
                last, idle_s = body, 0.0
            elif idle_s >= HEARTBEAT_S:
                await asyncio.wait_for(answer.write(b": nothing new\n\n"), WRITE_S)
                idle_s = 0.0
            await asyncio.sleep(UPDATE_S)
            idle_s += UPDATE_S

    # ---- chaos -------------------------------------------------------------------------------------------------------------------------

    async def _port_of(self, request: web.Request) -> ChaosPort | None:
        """Who takes orders for the run: this process, or another one of this machine; None when nobody does."""
        name = request.match_info["run"]
        if name in self._chaos or self.control_registry is None:
            return self._chaos.get(name)
        there = await asyncio.to_thread(self._feeds.journal, name) is not None
        return await asyncio.to_thread(self.control_registry.port, name) if there else None

    async def _chaos_status(self, request: web.Request) -> web.StreamResponse:
        port = await self._port_of(request)
        status = {"running": False, "ended": True, "kinds": [], "places": {}, "slots": 0, "nodes": 0}
        if port is not None:
            with contextlib.suppress(RunGone):  # then it takes no orders, as is said
                status = await asyncio.to_thread(port.status)
        return web.json_response(status | {"may": self._right(request) == WRITE})

    async def _chaos_order(self, request: web.Request) -> web.StreamResponse:
        asked, port = await _json_body(request), await self._port_of(request)
        if port is None:
            raise self._deaf(request)
        try:
            check_body(asked, ORDER)
            said, status = await asyncio.to_thread(lambda: (port.order(asked), port.status()))
        except ConfigError as error:
            return self._refused(request, "chaos", asked, error)
        except RunGone:
            raise self._deaf(request) from None
        self._noted(request, "chaos", asked, said)
        return web.json_response({**status, "said": said}, status=202)

    def _deaf(self, request: web.Request) -> web.HTTPException:
        if self._feeds.journal(request.match_info["run"]) is None:
            return web.HTTPNotFound(text="there is no such run")
        return web.HTTPConflict(text="this run takes no orders: it ended, or nobody on this machine runs it")

    # ---- who did what ------------------------------------------------------------------------------------------------------------------

    def _right(self, request: web.Request) -> str:
        return self._access.right(request.headers.get("Authorization", ""))

    def _identity(self, request: web.Request) -> Identity | None:
        return self._access.identity(request.headers.get("Authorization", ""))

    def _noted(self, request: web.Request, action: str, asked: Mapping[str, Any], outcome: str, name: str = "") -> None:
        identity, run = self._identity(request), name or request.match_info.get("run", "")
        mine = (identity.name, identity.team) if identity is not None else ("", "")
        self._audit.write(request.remote or "", self._right(request), action, run, asked, outcome, *mine)

    def _note_refusal(self, request: web.Request, refusal: web.HTTPException) -> None:
        """Who tried to change something and may not, or could not."""
        if request.method not in ("GET", "HEAD") and refusal.status >= 400:
            self._noted(request, request.path[:200], {}, f"refused: {refusal.status} {refusal.text or refusal.reason}")

    def _refused(self, request: web.Request, action: str, asked: Mapping[str, Any], error: ConfigError) -> web.Response:
        self._noted(request, action, asked, f"refused: {error}")
        facts = {name: str(getattr(error, name)) for name in ("value", "reason", "way_out")}
        return problem(400, str(error), field=error.field, **facts)

    # ---- the queue ---------------------------------------------------------------------------------------------------------------------

    def _queue(self) -> QueuePort:
        if self.queue is None:
            raise web.HTTPConflict(text="this server starts no runs; that of fleet cluster up does")
        return self.queue

    def _known(self, request: web.Request) -> Identity:
        identity = self._identity(request)
        assert identity is not None, "who may change something has a name"
        return identity

    async def _queue_listing(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await asyncio.to_thread(self._queue().listing))  # it waits while runs are being started

    async def _queue_submit(self, request: web.Request) -> web.StreamResponse:
        queue, asked, identity = self._queue(), await _json_body(request), self._known(request)
        try:
            job = await asyncio.to_thread(queue.submit, asked, identity)
        except ConfigError as error:
            return self._refused(request, "submit", asked, error)
        except RunFailed as error:
            raise web.HTTPServiceUnavailable(text=error.reason) from None
        self._noted(request, "submit", asked, job["phase"], job["name"])
        return web.json_response(job, status=202)

    async def _queue_cancel(self, request: web.Request) -> web.StreamResponse:
        try:
            job = await asyncio.to_thread(self._queue().cancel, request.match_info["run"], self._known(request))
        except KeyError:
            raise web.HTTPNotFound(text="there is no such run in the queue") from None
        except ConfigError as error:
            return self._refused(request, "cancel", {}, error)
        self._noted(request, "cancel", {}, job["phase"])
        return web.json_response(job, status=202)


def _waits_for(job: Mapping[str, Any]) -> str:
    again = "it gave way, and goes on when there is room: it " if job.get("starts") else ""
    return f"{again}waits for {job['slots']} slots"


def problem(status: int, detail: str, **more: Any) -> web.Response:
    """An error as RFC 9457 has it."""
    return web.json_response({"status": status, "detail": detail, **more}, status=status, content_type="application/problem+json")


async def _json_body(request: web.Request) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send application/json")
    try:
        async with asyncio.timeout(BODY_S):
            body = json.loads(await request.read())
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body was not there within {BODY_S:g} s") from None
    except RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {brief(error)}") from None
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text="the body is not JSON") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    return body


def check_body(asked: Mapping[str, Any], schema: Schema) -> None:
    """Refuse a body that is not as the API's description has it. Raises ConfigError."""
    error = best_match(Draft202012Validator(schema).iter_errors(asked))
    if error is not None:
        unknown, missing = asked.keys() - schema["properties"].keys(), set(schema["required"]) - asked.keys()
        field = str([*error.absolute_path, *sorted(unknown), *sorted(missing)][0])
        raise ConfigError(field[:80], str(error.instance)[:80], error.message[:200], "See /openapi.json.")
