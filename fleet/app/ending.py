"""The last lines of a run: its course, its cost, its checkpoints, and the next command. Pure: the report's data go in."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.app import twins
from fleet.ledger.bill import for_faults, in_units, rests_on, stored_words
from fleet.ledger.checkers import UNKNOWN, violated
from fleet.ledger.factors import Factors
from fleet.ledger.figures import figure
from fleet.ledger.report import duration
from fleet.ledger.step_law import STEP_NAMES
from fleet.machine.sessions import MOST
from fleet.protocol.records import COMPLETED, PROGRAM, UNSAVED

MOST_LOSSES = 3
"""Number of the largest losses of time that are named."""
WORTH_A_WORD = 0.001
"""Least share of a run's money from which on the store's cost is named here. The report always has it."""
MOST_REASONS = 2
"""Number of reasons that are named for which faults were suppressed."""
MOST_RANGES = 4
"""Number of stretches of steps computed twice that are named."""


@dataclass(frozen=True, slots=True)
class JoinedPlace:
    """The cluster of a run that has joined one: its address, the run's storage, and the place of its checkpoints; empty: the head's."""

    address: str
    storage: str
    place: str


@dataclass(frozen=True, slots=True)
class EndContext:
    """Facts that the report does not have.

    Args:
        run: the run's name, as commands take it.
        saved_at: where checkpoints lie.
        first_fault_s: when chaos was to strike first, in seconds of training; None where no fault was planned.
        storage: of the command line, where it is not the default.
        again: the command that runs a script again that is not Fleet's; its checkpoints are its own.
        returns: how often in a row the run has come back to the same step, from a checkpoint.
        joined: the cluster that the run has joined; None: it had one of its own.
        taken_over: another process has taken the run, and goes on with it.
    """

    run: str
    saved_at: str
    first_fault_s: float | None = None
    storage: str = ""
    again: str = ""
    returns: int = 0
    joined: JoinedPlace | None = None
    taken_over: bool = False


def ending(data: Mapping[str, Any], context: EndContext) -> list[tuple[str, str]]:
    """(head, words) of each line. ``data`` is the report's JSON, with ``twin`` where one has run, and ``total_steps`` of its loop."""
    lines = [
        ("run", _happened(data)),
        ("goodput", _goodput(data)),
        ("lost", _lost(data)),
        ("faults", _faults(data, context) + _checks(data)),
    ]
    if data.get("factors") is not None:
        found = data["factors"]
        lines.append(("factors", str(Factors(found["scheduling"], found["runtime"], found["program"], found["rests_on"]))))
    if data.get("bill") is not None:
        lines.append(("cost", _cost(data)))
    lines.append(("saved", _saved(data, context)))
    if (twin := data.get("twin")) is not None:
        lines.append(("twin", twins.in_words(twin)))
    return [*lines, *_next(data, context)]


def _happened(data: Mapping[str, Any]) -> str:
    before_its_last_step = data["steps"] < (data.get("total_steps") or 0)
    why = f": {data['reason']}" if data["reason"] and (data["status"] != COMPLETED or before_its_last_step) else ""
    figures = [
        f"{name} {figure(points[0][1])} -> {figure(points[-1][1])}"
        for name, points in data["measurements"].items()
        if name not in PROGRAM and points and None not in (points[0][1], points[-1][1])
    ]
    pace = f", {data['tokens_per_s']:,.0f} tokens/s" if data.get("tokens_per_s") else ""
    words = f"{data['status']}{why}; {data['steps']:,} steps in {duration(data['wall_s'])}{pace}"
    return " ".join("; ".join([words, *figures]).split())


def _goodput(data: Mapping[str, Any]) -> str:
    """With spares, also the share of all slots: the losses of the next line are shares of all slots, too."""
    slots = data["world"] + data["spares"]
    all_slots = f", {data['scheduling_goodput']:.1%} of that of all {slots} slots" if data["spares"] else ""
    return f"{data['goodput']:.1%} of {data['world']} ranks' time{all_slots}"


def _lost(data: Mapping[str, Any]) -> str:
    allocated = sum(data["categories"].values()) + data["pending_s"]
    named = {name: value for name, value in data["categories"].items() if name not in STEP_NAMES and value > 0}
    largest = sorted(named, key=lambda name: -named[name])
    words = [f"{name.replace('_', ' ')} {named[name] / allocated:.1%}" for name in largest[:MOST_LOSSES]]
    rest = sum(named[name] for name in largest[MOST_LOSSES:])
    return ", ".join(words + ([f"the rest {rest / allocated:.1%}"] if rest else [])) or "nothing"


def _faults(data: Mapping[str, Any], context: EndContext) -> str:
    counts = data["counts"]
    kinds = [f"{phases['executed']} {kind}" for kind, phases in counts["faults_by_kind"].items() if phases.get("executed")]
    lost = f"{counts['in_view_losses']} rank{'' if counts['in_view_losses'] == 1 else 's'} lost while training"
    back, suppressed = _back(data), _suppressed(data)
    if kinds or suppressed:
        injected = f"{counts['executed']} struck ({', '.join(kinds)})" if kinds else "no fault struck"
        return f"{injected}{suppressed}; {lost}{back}"
    if context.first_fault_s is None:
        return f"none were planned; {lost}{back}"
    trained = f", and the run was over after {duration(data['trained_s'])}" if data.get("trained_s") is not None else ""
    return f"no fault struck: the first was due after {duration(context.first_fault_s)} of training{trained}; {lost}{back}"


def _suppressed(data: Mapping[str, Any]) -> str:
    """The number of faults that were due and not carried out, and the most frequent reasons."""
    phases = (phase for each in data["faults"] for phase in each["phases"])
    reasons = Counter(phase["detail"] for phase in phases if phase["phase"] == "suppressed")
    return f", {reasons.total()} suppressed ({'; '.join(reason for reason, _ in reasons.most_common(MOST_REASONS))})" if reasons else ""


def _back(data: Mapping[str, Any]) -> str:
    """The number of steps that were rolled back, and their ranges."""
    if not data["rolled_back_steps"]:
        return ""
    ranges = [f"{each['first_step']} to {each['last_step']}" for each in data["rollbacks"]]
    more = f", and {len(ranges) - MOST_RANGES} times more" if len(ranges) > MOST_RANGES else ""
    which = f" (computed twice: {', '.join(ranges[:MOST_RANGES])}{more})" if ranges else ""
    return f", {data['rolled_back_steps']} steps rolled back{which}"


def _checks(data: Mapping[str, Any]) -> str:
    """The violated checks, with their reasons; else, where a fault struck, the number of checks that hold."""
    checks = data["checks"]
    wrong = [f"; VIOLATED {one['check']}: {one['reason']}" for one in violated(checks)]
    unknown = [f"{one['check']} ({one['reason']})" for one in checks if one["verdict"] == UNKNOWN]
    count = f"; {len(checks) - len(unknown)} checks ok" + (f"; not known: {', '.join(unknown)}" if unknown else "")
    return "".join(wrong) or (count if data["counts"]["executed"] else "")


def _cost(data: Mapping[str, Any]) -> str:
    """The whole cost, and the part of it that faults caused."""
    found = data["bill"]
    fault_cost = for_faults(found)
    faults = f"; of it for faults {in_units(fault_cost)}" if any(fault_cost.values()) else ""
    store = found["store"]
    stored = stored_words(store) if store and store["usd"] >= WORTH_A_WORD * found["total"]["usd"] else ""
    return f"{in_units(found['total'])} ({rests_on(found['basis'])}){stored}{faults}"


def _saved(data: Mapping[str, Any], context: EndContext) -> str:
    step = saved_step(data["checkpoints"])
    if step is None and context.again:
        return "nothing that Fleet saw: torch.save has written no file while it trained"
    if step is None:
        return "nothing: no checkpoint became durable"
    behind = f", {data['steps'] - step:,} before the last" if step < data["steps"] else ""
    return f"step {step:,}{behind}, in {context.saved_at}"


def saved_step(checkpoints: Sequence[Mapping[str, Any]]) -> int | None:
    """Step of the newest checkpoint that is durable and was not withdrawn; None without one."""
    gone = {each["checkpoint"] for each in checkpoints if each["phase"] == "withdrawn"}
    kept = [each for each in checkpoints if each["phase"] == "durable" and each["level"] == "store" and each["checkpoint"] not in gone]
    return int(kept[-1]["state"][1]) if kept else None


def _next(data: Mapping[str, Any], context: EndContext) -> list[tuple[str, str]]:
    run = shlex.quote(context.run) + (f" --storage {shlex.quote(context.storage)}" if context.storage else "")
    saved = any(each["phase"] == "durable" and each["level"] == "store" for each in data["checkpoints"])
    more = [("more", f"fleet report {run}, fleet logs {run}")]
    if context.again:
        return [*more, ("next", _of_plain(data, run, context))]
    if context.taken_over:
        return [*more, ("next", "nothing: the run goes on there, and this record ends here")]
    if data["status"] in (COMPLETED, UNSAVED):
        load = 'torch.load("model.pt", weights_only=True)["model"], or as run.track named it'
        return more + ([("next", f"fleet checkpoint export {_exported(run, context)} --output model.pt, then {load}")] if saved else [])
    return [*more, ("next", _resume(run, context) if saved else f"fleet report {run} --diagnose")]


def _exported(run: str, context: EndContext) -> str:
    """The run, as its checkpoints are found from here."""
    place = context.joined.place.removeprefix("file://") if context.joined is not None else ""
    return shlex.quote(place) if place else run


def _resume(run: str, context: EndContext) -> str:
    """The whole command after a failure. A command that has failed twice is not advised again."""
    returns, joined = context.returns, context.joined
    if returns >= MOST:
        return f"mend the script: it came to the same step from two checkpoints, and failed; fleet report {run} --diagnose says where"
    if joined is not None:
        there = f" --storage {shlex.quote(joined.storage)}" if joined.place else ""
        run = f"{shlex.quote(context.run)}{there} --address {shlex.quote(joined.address)}"
    return f"fleet run --resume {run}" + (", which begins from an older checkpoint: it came to the same step twice" if returns else "")


def _of_plain(data: Mapping[str, Any], run: str, context: EndContext) -> str:
    if data["status"] in (COMPLETED, UNSAVED):
        return f"fleet experiment compare {run} RUN, with a run of Fleet's under the same --chaos and --seed"
    return f"{context.again}, which goes on from the checkpoint that the script finds; its output: fleet logs {run}"
