"""Journals of version 1: what they say in sentences and in keys becomes what version 2 says in facts.

The one place where the text of a reason is read, and it reads that of old journals alone. What a sentence means is believed where the
fact has the very same sentence; else the text is kept (:class:`fleet.protocol.causes.Told`): an old run's report stays what it was. A
line tells its version by its name and its number of fields: a run that an older Fleet began goes on in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fleet.protocol import causes, decisions
from fleet.protocol.causes import Cause, EndWhy, IncidentKind
from fleet.protocol.codec import plain
from fleet.protocol.decisions import Figures, Payload

FIELDS = {
    "ProcessUp": 4, "ProcessLost": 8, "ViewPublished": 5, "Committed": 2, "LineageBegun": 4, "FaultRecord": 5, "DecisionMade": 5,
    "CheckpointRecord": 9, "Measurement": 4, "DataRead": 5, "EvidenceKept": 6, "OnceRecord": 5, "RunEnded": 5,
}  # fmt: skip
"""How many fields a record had."""
GREW: dict[tuple[str, int], list[Any]] = {("DataRead", 3): ["", 0], ("DataRead", 4): [0], ("Resumed", 5): [""]}
"""(record, how many fields it had even before) -> what the others are."""
GREW_SINCE: dict[tuple[str, int], list[Any]] = {
    ("DataRead", 6): [-1, -1, ""],
    ("Usage", 6): [0, 0, 0, 0, 0, 0.0, 0.0],
    ("Usage", 10): [0, 0.0, 0.0],
}
"""The same of version 2, whose newer fields stand before the event."""
FAULT_GREW: dict[int, list[Any]] = {8: [0.0, 0.0, 0.0, 0.0], 11: [0.0]}
"""The same of the fault within a ``FaultRecord``."""
NO_EVENT = 0


def upgraded(value: list[Any]) -> list[Any]:
    """A record of a journal, name first, as version 2 has it. Raises ProtocolError, or what a damaged record leads to."""
    name = value[0]
    grown: list[Any] = GREW.get((name, len(value) - 1), [])
    value = [*value, *grown]
    if name == "FaultRecord":
        value = [name, [*value[1], *FAULT_GREW.get(len(value[1]), [])], *value[2:]]
    if FIELDS.get(name) == len(value) - 1:
        rewrite = REWRITTEN.get(name)
        value = [*(rewrite(value) if rewrite is not None else value), NO_EVENT]
    since: list[Any] = GREW_SINCE.get((name, len(value) - 1), [])
    return [*value[:-1], *since, value[-1]] if since else value


def _lost(value: list[Any]) -> list[Any]:
    return [*value[:2], plain(cause_of(value[2])), *value[3:]]


def _decided(value: list[Any]) -> list[Any]:
    name, policy, action, reason, fields, at_s = value
    return [name, policy, action, reason, plain(payload_of(policy, action, fields)), at_s]


def _saved(value: list[Any]) -> list[Any]:
    return [*value, value[2] == "failed" and value[8] == "the view changed"]


def _ended(value: list[Any]) -> list[Any]:
    return [*value, end_of(value[1], value[2])]


REWRITTEN: dict[str, Callable[[list[Any]], list[Any]]] = {
    "ProcessLost": _lost, "DecisionMade": _decided, "CheckpointRecord": _saved, "RunEnded": _ended,
}  # fmt: skip


# ---- losses ------------------------------------------------------------------------------------------------------------------------------

LIKE: tuple[tuple[str, Callable[..., causes.Fact]], ...] = (
    ("its process ended", causes.ProcessEnded),
    ("its cluster ended", causes.ClusterEnded),
    ("not heard of since the coordinator restarted", causes.NotHeardOf),
    ("its agent hung up", causes.AgentHungUp),
    ("its agent hung up, and its ranks are missed", lambda: causes.AgentHungUp(missed=True)),
    (r"its agent was silent for (\d+\.\d) s", lambda seconds: causes.AgentSilent(float(seconds))),
    (r"the train function raised (.*)", causes.TrainRaised),
    (r"evicted: no heartbeat for (\d+\.\d) s", lambda seconds: causes.Evicted(causes.NoHeartbeat(float(seconds)))),
    ("evicted: did not leave its process group when told to", lambda: causes.Evicted(causes.DidNotLeave())),
    ("evicted: superseded by a newer process of the same slot", lambda: causes.Evicted(causes.Superseded())),
    (r"evicted: silent corruption: (.*) at step (\d+) differ from the majority's",
     lambda what, step: causes.Evicted(causes.Outvoted(what, int(step)))),
    (r"evicted: silent corruption: (the final state) differs from the majority's", lambda what: causes.Evicted(causes.Outvoted(what))),
    ("evicted: a fresh process must begin: no state is left, and there is no checkpoint", lambda: causes.Evicted(causes.FreshWanted())),
)  # fmt: skip
"""What a cause looked like, and what it is."""

COUNTED: tuple[tuple[str, IncidentKind], ...] = (
    ("silent corruption", "corruption"), ("no heartbeat", "hang"), ("no progress", "hang"), ("did not leave", "hang"),
    ("its process ended", "lost"), ("its agent", "lost"),
)  # fmt: skip
"""What a cause began with, less ``evicted:``, and the kind of incident that it was counted as."""


def cause_of(text: str) -> Cause:
    """Of a loss, by its sentence."""
    for pattern, make in LIKE:
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found is not None and str(fact := make(*found.groups())) == text:
            return fact  # type: ignore[return-value]
    counted = text.removeprefix("evicted: ")
    return causes.Told(text, next((kind for begins, kind in COUNTED if counted.startswith(begins)), ""))


# ---- the end -----------------------------------------------------------------------------------------------------------------------------

ENDS = (
    ("a mistake of the train function, not the hardware", EndWhy.LOOP_WRONG),
    ("the train function raised behind the loop", EndWhy.RAISED_BEHIND),
    ("the train function raised", EndWhy.TRAIN_RAISED),
    ("crash loop", EndWhy.CRASH_LOOP),
    ("the code behind the loop takes longer", EndWhy.LATE_BEHIND),
    ("the ranks end with different states", EndWhy.ENDS_DIFFER),
)
"""What the reason of a run that failed began with."""


def end_of(status: str, reason: str) -> EndWhy:
    """Why a run was over."""
    others = {"completed": EndWhy.ALL_STEPS, "completed, not saved": EndWhy.NOT_SAVED, "stopped": EndWhy.STOPPED}
    return others.get(status) or next((why for begins, why in ENDS if reason.startswith(begins)), EndWhy.OTHER)


# ---- decisions ---------------------------------------------------------------------------------------------------------------------------

PLAIN: tuple[type[Payload], ...] = (
    decisions.Candidates, decisions.Survivors, decisions.Budget, decisions.OfView, decisions.StoodStill, decisions.Delay, decisions.Votes,
    decisions.Cleared, decisions.Doubtful, decisions.TimeOut, decisions.Interval, decisions.StoreOutage, decisions.Checked,
)  # fmt: skip
"""Those whose figures have the names of their fields."""
STEPS = tuple(decisions.StepFigures.__dataclass_fields__)
KNOWN = ("slowdown", "slow_ranks", "expected_left_s", "elapsed_s", "spares", "changes", "limit", "saved")
OWN = ("slot", "incarnation", "score", "confidence", "since_step", "step")
TAKEN = ("generation", "lineage", "found", "doubted_lineage", "doubted_step", "resumed")
COST, SPEED, SHUN, KIND = "cost_", "speed ", "shun ", "kind "


def payload_of(policy: str, action: str, fields: Mapping[str, float]) -> Payload | None:
    """What a decision was decided on, by the keys of its figures; :class:`Figures` where they are none that this Fleet knows."""
    if not fields:
        return None
    for make in (*_special(policy, action), *(lambda given, kind=kind: kind(**given) for kind in PLAIN)):
        try:
            made: Payload = make(fields)
        except (TypeError, KeyError, ValueError, StopIteration):
            continue  # other keys than it has
        if made.figures() == fields:
            return made
    return Figures(dict(fields))


def _special(policy: str, action: str) -> list[Callable[[Mapping[str, float]], Payload]]:
    makers: dict[str, list[Callable[[Mapping[str, float]], Payload]]] = {
        "straggler": [_suspect if action in ("accuse", "clear") else _prices],
        "corruption": [_taken_back],
        "ending": [lambda given: decisions.Concluded(given["generation"], bool(given["kept"]))],
        "settings": [lambda given: decisions.SettingTo(*next(iter(given.items())))],
        "lemons": [_kept_out],
        "preflight": [_kept_out],
    }
    return makers.get(policy, [])


def _suspect(given: Mapping[str, float]) -> Payload:
    kind = next(name for name in given if name.startswith(KIND))
    evidence = {name: value for name, value in given.items() if name not in OWN and name != kind}
    slot, incarnation, score, confidence, since_step, step = (given[name] for name in OWN)
    return decisions.Suspect(slot, incarnation, score, confidence, since_step, step, kind.removeprefix(KIND), evidence)


def _prices(given: Mapping[str, float]) -> Payload:
    speeds = [(name.removeprefix(SPEED), value) for name, value in given.items() if name.startswith(SPEED)]
    return decisions.Prices(
        {name.removeprefix(COST): value for name, value in given.items() if name.startswith(COST)},
        **{name: given[name] for name in KNOWN if name in given},
        steps=decisions.StepFigures(**{name: given[name] for name in STEPS if name in given}) if STEPS[0] in given else None,
        speeds=tuple((_member(name), value) for name, value in speeds),
        shunned=tuple((name.removeprefix(SHUN), value) for name, value in given.items() if name.startswith(SHUN)),
    )


def _member(name: str) -> tuple[int, int]:
    slot, incarnation = name.split(".")
    return int(slot), int(incarnation)


def _taken_back(given: Mapping[str, float]) -> Payload:
    generation, *states = (int(given[name]) for name in TAKEN[:5])
    resumed = int(given["resumed"]) if "resumed" in given else None
    others = {name: value for name, value in given.items() if name not in TAKEN}
    return decisions.TakenBack(generation, (states[0], states[1]), (states[2], states[3]), resumed, others)


def _kept_out(given: Mapping[str, float]) -> Payload:
    return decisions.KeptOut(given["node"], {name: value for name, value in given.items() if name != "node"})
