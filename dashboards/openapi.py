"""The API's description, in OpenAPI 3.1: served at ``/openapi.json``, and what the tests throw bad input at."""

from __future__ import annotations

import functools
import operator
from typing import Any

from fleet.protocol.fault_kinds import EXECUTABLE
from fleet.protocol.fault_parameters import PARAMETERS, Parameter

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


def _answers(what: str, schema: dict[str, Any], *more: dict[str, Any], kind: str = JSON) -> dict[str, Any]:
    answers = {"200": {"description": what, "content": {kind: {"schema": schema}}}, **COMMON}
    return functools.reduce(operator.or_, more, answers)


def _get(summary: str, answers: dict[str, Any], *more: dict[str, Any], named: bool = True) -> dict[str, Any]:
    return {"get": {"summary": summary, "parameters": [NAME, *more] if named else [], "responses": answers}}


def _number(name: str, place: str, most: int) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "integer", "minimum": 0, "maximum": most}}


def _bounded(parameter: Parameter) -> dict[str, Any]:
    low = {"minimum": parameter.least} if parameter.least is not None else {"exclusiveMinimum": parameter.above}
    return {"type": "number", **low, "maximum": parameter.most, "default": parameter.default, "description": parameter.meaning}


CHAOS = {
    "type": "object",
    "required": ["running", "ended", "kinds", "places", "slots", "nodes"],
    "properties": {
        "running": {"type": "boolean"},
        "ended": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"type": "string", "enum": list(EXECUTABLE)}},
        "places": {
            "type": "object",
            "additionalProperties": {"type": "string", "enum": ["slot", "node", ""]},
            "description": "What an order of each kind has to name; empty: nothing.",
        },
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
        "action": {"type": "string", "enum": ["start", "stop", "heal", "inject"]},
        "kind": {"type": "string", "enum": list(EXECUTABLE)},
        "slot": {"type": "integer", "minimum": 0},
        "node": {"type": "integer", "minimum": 0},
        **{parameter.name: _bounded(parameter) for parameter in PARAMETERS},
    },
}
JOB = {
    "type": "object",
    "required": ["name", "script", "slots", "priority", "phase", "submitted_unix_s"],
    "properties": {
        "name": {"type": "string"},
        "slots": {"type": "integer"},
        "priority": {"type": "integer"},
        "phase": {"type": "string", "enum": ["waiting", "running", "ended", "cancelled"]},
        "owner": {"type": "string", "description": "Who handed it in."},
        "team": {"type": "string", "description": "Whose quota it counts for."},
        "starts": {"type": "integer", "description": "How often it was started: more than once when it gave way."},
        "gives_way_to": {"type": "string", "description": "The run for which it is to end; empty: none."},
        "exit_code": {"type": ["integer", "null"]},
    },
}
TEAM = {
    "type": "object",
    "required": ["name", "slots", "quota"],
    "properties": {
        "name": {"type": "string"},
        "slots": {"type": "integer", "description": "That its runs have now."},
        "quota": {"type": ["integer", "null"], "description": "That they may have at once; null: no limit."},
    },
}
QUEUE = {
    "type": "object",
    "required": ["slots", "free", "jobs"],
    "properties": {
        "slots": {"type": "integer"},
        "free": {"type": "integer"},
        "jobs": {"type": "array", "items": JOB},
        "teams": {"type": "array", "items": TEAM},
        "trouble": {"type": "string", "description": "Why nothing can be started now; empty: nothing is wrong."},
    },
}
SUBMISSION = {
    "type": "object",
    "required": ["script"],
    "additionalProperties": False,
    "properties": {
        "script": {"type": "string", "minLength": 1},
        "arguments": {"type": "array", "items": {"type": "string"}, "description": "Options of fleet run."},
        "directory": {"type": "string", "description": "Where the run starts; that of the service unless given."},
        "priority": {"type": "integer", "minimum": -100, "maximum": 100},
        "team": {"type": "string", "description": "Whose quota it counts for; that of the token unless given."},
    },
}
LOG = {
    "type": "object",
    "required": ["slot", "incarnation", "bytes"],
    "properties": {"slot": {"type": "integer"}, "incarnation": {"type": "integer"}, "bytes": {"type": "integer"}},
}
LOGS = {"type": "object", "required": ["logs"], "properties": {"logs": {"type": "array", "items": LOG}}}
PIECE = {
    "type": "object",
    "required": ["offset", "next", "bytes", "text"],
    "properties": {
        "offset": {"type": "integer", "description": "Where the text begins, in bytes."},
        "next": {"type": "integer", "description": "The offset to ask for next."},
        "bytes": {"type": "integer", "description": "Of the whole file."},
        "text": {"type": "string"},
    },
}
RUNS = {
    "type": "object",
    "required": ["runs"],
    "properties": {"runs": {"type": "array", "items": {"type": "object", "required": ["name", "status"]}}},
}


REFUSALS = {
    "400": _problem("It cannot be done; names the field."),
    "403": _problem("Sent by another site's page."),
    "408": _problem("The body came too slowly."),
    "413": _problem("The body is larger than 16 KiB."),
    "415": _problem("The body is not application/json."),
}
NO_QUEUE = {"409": _problem("This server starts no runs: that of fleet up does.")}


def _change(summary: str, answer: dict[str, Any], body: dict[str, Any] | None, *, named: bool, **more: dict[str, Any]) -> dict[str, Any]:
    taken = {"202": {"description": "It was taken.", "content": {JSON: {"schema": answer}}}}
    return {
        "summary": f"{summary} Needs the write token.",
        "parameters": [NAME] if named else [],
        "security": [{"token": []}],
        **({"requestBody": {"required": True, "content": {JSON: {"schema": body}}}} if body is not None else {}),
        "responses": {**taken, **COMMON, **REFUSALS, **more},
    }


def _order() -> dict[str, Any]:
    deaf = {"409": _problem("The run takes no orders: it ended, or another process runs it."), "404": NO_RUN}
    return _change("Start or stop a run's chaos, or strike once.", CHAOS, ORDER, named=True, **deaf)


def _queue() -> dict[str, Any]:
    listing = _get("Runs that wait for room, and those that had it.", _answers("The queue.", QUEUE, NO_QUEUE), named=False)
    unseen = {"503": _problem("The cluster that runs go to does not answer.")}
    return {**listing, "post": _change("Hand in a run.", JOB, SUBMISSION, named=False, **NO_QUEUE, **unseen)}


def _cancel() -> dict[str, Any]:
    return _change("Take a run out of the queue, or end it in order.", JOB, None, named=True, **NO_QUEUE, **{"404": NO_RUN})


def _logs() -> dict[str, Any]:
    numbers = [_number("slot", "path", 9_999_999), _number("incarnation", "path", 9_999_999), _number("offset", "query", 10**18 - 1)]
    missing, bad = {"404": _problem("There is no such run, or the process has no log.")}, {"400": _problem("The offset is no number.")}
    piece = "What a process printed: the end of it, or, from `offset` on, 64 KiB at most."
    return {
        "/api/runs/{run}/logs": _get("The logs of a run's processes.", _answers("The logs.", LOGS, missing)),
        "/api/runs/{run}/logs/{slot}/{incarnation}": _get(piece, _answers("A piece.", PIECE, missing, bad), *numbers),
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
            "/api/runs/{run}": _get("All that the page of a run shows.", _answers("The state; null before it has begun.", state, missing)),
            "/api/runs/{run}/events": _get(
                "The state whenever it changed.", _answers("Server-sent events.", text, missing, full, kind="text/event-stream")
            ),
            "/api/runs/{run}/ledger": _get(
                "Where every rank-second went, as `fleet report --json` has it.",
                _answers("The ledger; null before it has begun.", state, missing),
            ),
            "/api/runs/{run}/journal": _get("The journal itself.", _answers("JSON lines.", text, missing, kind="application/jsonl")),
            **_logs(),
            "/api/runs/{run}/chaos": {**chaos, "post": _order()},
            "/api/queue": _queue(),
            "/api/queue/{run}": {"delete": _cancel()},
            "/metrics": _get("Metrics of the runs that go on, for Prometheus.", _answers("Metrics.", text, kind="text/plain"), named=False),
        },
    }
