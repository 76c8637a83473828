"""The API's description, in OpenAPI 3.1: served at ``/openapi.json``, and what the tests throw bad input at."""

from __future__ import annotations

import functools
from typing import Any

NAME = {"name": "run", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
JSON = "application/json"


def _problem(what: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["status", "detail"],
        "properties": {"status": {"type": "integer"}, "detail": {"type": "string"}},
    }
    return {"description": what, "content": {"application/problem+json": {"schema": schema}}}


NO_TOKEN, NO_RUN = _problem("No token, or a wrong one."), _problem("There is no such run.")
COMMON = {"401": NO_TOKEN, "421": _problem("The server is called by a name that is not its own.")}


def _answers(what: str, schema: dict[str, Any], kind: str = JSON, **more: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": what, "content": {kind: {"schema": schema}}}, **COMMON, **more}


def _get(summary: str, answers: dict[str, Any], *, named: bool = True) -> dict[str, Any]:
    return {"get": {"summary": summary, "parameters": [NAME] if named else [], "responses": answers}}


CHAOS = {
    "type": "object",
    "required": ["running", "ended", "kinds", "slots", "nodes"],
    "properties": {
        "running": {"type": "boolean"},
        "ended": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"type": "string"}},
        "slots": {"type": "integer"},
        "nodes": {"type": "integer"},
        "may": {"type": "boolean"},
        "said": {"type": "string"},
    },
}
ORDER = {
    "type": "object",
    "required": ["action"],
    "additionalProperties": False,
    "properties": {
        "action": {"type": "string", "enum": ["start", "stop", "strike"]},
        "kind": {"type": "string", "enum": ["kill_rank", "lose_node", "hang", "slow"]},
        "slot": {"type": "integer", "minimum": 0},
        "node": {"type": "integer", "minimum": 0},
        "duration_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
        "severity": {"type": "number", "minimum": 1, "maximum": 100},
    },
}
RUNS = {
    "type": "object",
    "required": ["runs"],
    "properties": {"runs": {"type": "array", "items": {"type": "object", "required": ["name", "status"]}}},
}


def _order() -> dict[str, Any]:
    refusals = {
        "400": _problem("The order cannot be carried out; names the field."),
        "403": _problem("Sent by another site's page."),
        "404": NO_RUN,
        "408": _problem("The body came too slowly."),
        "409": _problem("The run takes no orders: it ended, or another process runs it."),
        "413": _problem("The body is larger than 16 KiB."),
        "415": _problem("The body is not application/json."),
    }
    taken = {"202": {"description": "The order was taken.", "content": {JSON: {"schema": CHAOS}}}}
    return {
        "summary": "Start or stop a run's chaos, or strike once. Needs the write token.",
        "parameters": [NAME],
        "security": [{"token": []}],
        "requestBody": {"required": True, "content": {JSON: {"schema": ORDER}}},
        "responses": {**taken, **COMMON, **refusals},
    }


@functools.cache
def openapi() -> dict[str, Any]:
    """The document. Do not change what it returns."""
    state, missing = {"type": ["object", "null"]}, {"404": NO_RUN}
    text = {"type": "string"}
    full = {"503": _problem("Too many pages are open.")}
    chaos = _get("Whether chaos strikes a run, and what may be ordered.", _answers("Chaos of the run.", CHAOS))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fleet", "version": "1", "description": "Runs, their ledgers, their journals, and their chaos."},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/api/runs": _get("All runs, newest first.", _answers("Runs.", RUNS), named=False),
            "/api/runs/{run}": _get(
                "All that the page of a run shows.", _answers("The state; null before it has begun.", state, **missing)
            ),
            "/api/runs/{run}/events": _get(
                "The state whenever it changed.", _answers("Server-sent events.", text, "text/event-stream", **missing, **full)
            ),
            "/api/runs/{run}/journal": _get("The journal itself.", _answers("JSON lines.", text, "application/jsonl", **missing)),
            "/api/runs/{run}/chaos": {**chaos, "post": _order()},
            "/metrics": _get("Metrics of the runs that go on, for Prometheus.", _answers("Metrics.", text, "text/plain"), named=False),
        },
    }
