"""The API's description, in OpenAPI 3.1: served at ``/openapi.json``, and what the tests throw bad input at."""

from __future__ import annotations

import functools
import operator
from typing import Any

from fleet.protocol.fault_kinds import EXECUTABLE
from fleet.protocol.fault_parameters import PARAMETERS, Parameter

TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SOME_TEXT = {**TEXT, "minLength": 1}
KIND = {**TEXT, "enum": list(EXECUTABLE)}
NAME = {"name": "run", "in": "path", "required": True, "schema": SOME_TEXT}
JSON = "application/json"

Schema = dict[str, Any]


def _object(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _said(of: Schema, description: str) -> Schema:
    return {**of, "description": description}


def _problem(what: str) -> dict[str, Any]:
    schema = _object("status detail", status=WHOLE, detail=TEXT)
    return {"description": what, "content": {"application/problem+json": {"schema": schema}}}


NO_TOKEN, NO_RUN = _problem("No token, or a wrong one."), _problem("There is no such run.")
COMMON = {"401": NO_TOKEN, "421": _problem("The server is called by a name that is not its own.")}


def _answers(what: str, schema: Schema, *more: dict[str, Any], kind: str = JSON) -> dict[str, Any]:
    answers = {"200": {"description": what, "content": {kind: {"schema": schema}}}, **COMMON}
    return functools.reduce(operator.or_, more, answers)


def _get(summary: str, answers: dict[str, Any], *more: dict[str, Any], named: bool = True) -> dict[str, Any]:
    return {"get": {"summary": summary, "parameters": [NAME, *more] if named else [], "responses": answers}}


def _number(name: str, place: str, most: int) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {**WHOLE, "minimum": 0, "maximum": most}}


def _bounded(parameter: Parameter) -> Schema:
    low = {"minimum": parameter.least} if parameter.least is not None else {"exclusiveMinimum": parameter.above}
    return {"type": "number", **low, "maximum": parameter.most, "default": parameter.default, "description": parameter.meaning}


PLACES = {"type": "object", "additionalProperties": {**TEXT, "enum": ["slot", "node", ""]}}
CHAOS = _object(
    "running ended kinds places slots nodes",
    running=FLAG,
    ended=FLAG,
    kinds=_list(KIND),
    places=_said(PLACES, "What an order of each kind has to name; empty: nothing."),
    slots=WHOLE,
    nodes=WHOLE,
    may=FLAG,
    said=TEXT,
)
ORDER = _object(
    "action",
    action={**TEXT, "enum": ["start", "stop", "heal", "inject"]},
    kind=KIND,
    slot={**WHOLE, "minimum": 0},
    node={**WHOLE, "minimum": 0},
    **{parameter.name: _bounded(parameter) for parameter in PARAMETERS},
) | {"additionalProperties": False}
JOB = _object(
    "name script slots priority phase submitted_unix_s",
    name=TEXT,
    slots=WHOLE,
    priority=WHOLE,
    phase={**TEXT, "enum": ["waiting", "running", "ended", "cancelled"]},
    owner=_said(TEXT, "Who handed it in."),
    team=_said(TEXT, "Whose quota it counts for."),
    starts=_said(WHOLE, "How often it was started: more than once when it gave way."),
    gives_way_to=_said(TEXT, "The run for which it is to end; empty: none."),
    exit_code={"type": ["integer", "null"]},
)
TEAM = _object(
    "name slots quota",
    name=TEXT,
    slots=_said(WHOLE, "That its runs have now."),
    quota=_said({"type": ["integer", "null"]}, "That they may have at once; null: no limit."),
)
QUEUE = _object(
    "slots free jobs",
    slots=WHOLE,
    free=WHOLE,
    jobs=_list(JOB),
    teams=_list(TEAM),
    trouble=_said(TEXT, "Why nothing can be started now; empty: nothing is wrong."),
)
SUBMISSION = _object(
    "script",
    script=SOME_TEXT,
    arguments=_said(_list(TEXT), "Options of fleet run."),
    directory=_said(TEXT, "Where the run starts; that of the service unless given."),
    priority={**WHOLE, "minimum": -100, "maximum": 100},
    team=_said(TEXT, "Whose quota it counts for; that of the token unless given."),
) | {"additionalProperties": False}
LOGS = _object("logs", logs=_list(_object("slot incarnation bytes", slot=WHOLE, incarnation=WHOLE, bytes=WHOLE)))
PIECE = _object(
    "offset next bytes text",
    offset=_said(WHOLE, "Where the text begins, in bytes."),
    next=_said(WHOLE, "The offset to ask for next."),
    bytes=_said(WHOLE, "Of the whole file."),
    text=TEXT,
)
RUNS = _object("runs", runs=_list({"type": "object", "required": ["name", "status"]}))
REFUSALS = {
    "400": _problem("It cannot be done; names the field."),
    "403": _problem("Sent by another site's page."),
    "408": _problem("The body came too slowly."),
    "413": _problem("The body is larger than 16 KiB."),
    "415": _problem("The body is not application/json."),
}
NO_QUEUE = {"409": _problem("This server starts no runs: that of fleet cluster up does.")}


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
                "The state whenever it changed.", _answers("Server-sent events.", TEXT, missing, full, kind="text/event-stream")
            ),
            "/api/runs/{run}/ledger": _get(
                "Where every rank-second went, as `fleet report --json` has it.",
                _answers("The ledger; null before it has begun.", state, missing),
            ),
            "/api/runs/{run}/journal": _get("The journal itself.", _answers("JSON lines.", TEXT, missing, kind="application/jsonl")),
            **_logs(),
            "/api/runs/{run}/chaos": {**chaos, "post": _order()},
            "/api/queue": _queue(),
            "/api/queue/{run}": {"delete": _cancel()},
            "/metrics": _get("Metrics of the runs that go on, for Prometheus.", _answers("Metrics.", TEXT, kind="text/plain"), named=False),
        },
    }
