"""What the live page shows of a run, as plain data of bounded size: made from a report, sent as JSON, drawn by ``static/run.js``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.pages.curves import curves, fault_marks
from dashboards.pages.run import COLOURS, interval_decisions
from dashboards.pages.wrong import wrong
from fleet.ledger.bill import UNITS, for_faults, rests_on, stored_words
from fleet.ledger.categories import MEANINGS, PENDING
from fleet.ledger.forecast import FaultCost, forecast, predict
from fleet.ledger.report import Report, forecast_words, losses_by_size, worth_words
from fleet.ledger.step_law import plain_shares
from fleet.ledger.summary import STEP_NAMES, Incident, LedgerSummary
from fleet.ledger.tallies import LOST, SlotStatus
from fleet.ledger.timeline import STEP, Timeline
from fleet.protocol.records import PROGRAM, STEADY, configuration, section

MAX_SLOTS = 48
MAX_SEGMENTS = 2_400
MAX_MARKS = 200
MAX_FAULTS = 200
MAX_LISTED = 256


def run_state(
    report: Report, slots: Sequence[SlotStatus], config: str, *, silent: bool = False, damage: str = "", injected: Sequence[str] = ()
) -> dict[str, Any]:  # fmt: skip
    """Everything on the page. Times are seconds since the run started; shares are of 1; what is not a number is None."""
    s = report.summary
    said = configuration(config)
    settings = section(said, "settings")
    prediction, ahead = predict(s), forecast(s, report.left_s)
    state = {
        "run": s.run,
        "status": "silent" if silent and s.status == "running" else s.status,
        "reason": s.reason,
        "damage": damage,
        "started_unix_s": s.started_unix_s,
        "wall_s": s.wall_s,
        "down_s": s.down_s,
        "queued_s": s.queued_s,
        "now": _now(s, settings) | _time_left(report),
        "waterfall": _waterfall(s),
        "pending": {"rank_s": s.pending_s, "share": s.pending_s / s.rank_s if s.rank_s else 0.0, "colour": COLOURS["pending"]},
        "training": _training(s),
        "bill": _bill(s),
        "fleet_law": s.step_law.plain() if s.step_law is not None else None,
        "shares": plain_shares(s.run_shares),
        "wrong": wrong(s, slots, silent=silent, injected=injected),
        "law": [{"name": name, "seconds": value, "category": of} for (name, value), of in zip(_law(s), STEP_NAMES, strict=True)],
        "prediction": prediction.plain(),
        "forecast": ahead.plain() if ahead is not None else None,
        "forecast_words": [*forecast_words(report), *worth_words(s)],
        "timeline": _timeline(s, report.timeline),
        "faults": _faults(s, prediction.costs, report.history),
        "fault_counts": [{"kind": kind, "phase": phase, "count": n} for (kind, phase), n in sorted(s.faults_by_kind_phase.items())],
        "interval": [_decision(s, decision) for decision in interval_decisions(report.history["decisions"])],
        "checkpoints": _checkpoints(s),
        "curves": curves(report, section(said, "chaos").get("floor")),
        "curve_marks": fault_marks(report),
        "slots": [_member(member) for member in slots[:MAX_LISTED]],
        "slots_left_out": max(0, len(slots) - MAX_LISTED),
        "hosts": _hosts(slots),
        "injected": list(injected),
        "colours": COLOURS,
        "meanings": MEANINGS,
        "ledger": {"closes": s.closes, "other": s.other_ratio, "digest": s.digest},
    }
    plain = _finite(state)
    assert isinstance(plain, dict)
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _now(s: LedgerSummary, settings: Mapping[str, Any]) -> dict[str, Any]:
    own_first = sorted(s.measurements.items(), key=lambda item: item[0] in PROGRAM)
    losses = {name: value for name, (_, value) in own_first if name not in STEADY}
    return {
        "goodput": s.goodput,
        "scheduling_goodput": s.scheduling_goodput,
        "ettr": s.ettr,
        "steps": s.steps,
        "rolled_back": s.rolled_back_total,
        "step_s": s.median_step_s,
        "world": s.world,
        "spares": s.spares,
        "shards": s.shards,
        "view_size": s.view_size,
        "generation": s.generation,
        "views": s.views_total,
        "losses": s.losses_total,
        "measurements": losses,
        "tokens_per_s": s.tokens_per_s,
        "factors": s.factors.plain() if s.factors is not None else None,
        "peak_bytes": max((used.peak_bytes for used in s.tallies.usage.values()), default=None),
        "device_peak_bytes": max((used.device_peak_bytes for used in s.tallies.usage.values()), default=0) or None,
        "seed": settings.get("seed"),
    }


def _bill(s: LedgerSummary) -> dict[str, Any] | None:
    """Amounts by unit, in all and for faults, and on what they rest; None where nobody has said what a slot costs."""
    found = s.bill
    if found is None:
        return None
    newest = dict(list(found["faults"].items())[-MAX_FAULTS:])
    return {
        "total": found["total"],
        "faults": for_faults(found),
        "lost": {name: sum(found["categories"][of][name] for of in s.categories if of not in STEP_NAMES) for name in found["total"]},
        "by_fault": newest,
        "per_step": found["per_step"],
        "per_million_tokens": found["per_million_tokens"],
        "budget": _budget(s, found["total"].get("usd")),
        "units": UNITS,
        "basis": rests_on(found["basis"]) + stored_words(found["store"]),
    }


def _budget(s: LedgerSummary, spent_usd: float | None) -> dict[str, Any] | None:
    """What is left of it, and for how long, at what the run costs on average."""
    if s.budget_usd is None or not spent_usd:
        return None
    left_usd = s.budget_usd - spent_usd
    return {"usd": s.budget_usd, "left_usd": left_usd, "lasts_s": left_usd / (spent_usd / s.held_s)}


def _time_left(report: Report) -> dict[str, Any]:
    """How many steps the run has in all, and when it will have them: None while that is not known."""
    return {
        "total_steps": report.total_steps,
        "recent_step_s": report.step_s,
        "eta_s": report.left_s,
    }


def _waterfall(s: LedgerSummary) -> list[dict[str, Any]]:
    """From what was allocated down to goodput; ``left`` is where a bar starts, in shares of what was allocated. Pending time is in none."""
    allocated, left = s.decided_s or 1.0, 1.0
    rows = [{"name": "allocated", "rank_s": allocated, "share": 1.0, "left": 0.0, "colour": COLOURS["provision"]}]
    for name, value in losses_by_size(s):
        left -= value / allocated
        rows.append({"name": name, "rank_s": value, "share": value / allocated, "left": max(0.0, left), "colour": COLOURS[name]})
    good = sum(s.categories[name] for name in STEP_NAMES)
    return [*rows, {"name": "goodput", "rank_s": good, "share": good / allocated, "left": 0.0, "colour": COLOURS[STEP]}]


def _training(s: LedgerSummary) -> dict[str, Any]:
    """Goodput between start-up and end."""
    return {"seconds": s.training_s, "goodput": s.training_goodput}


def _law(s: LedgerSummary) -> list[tuple[str, float]]:
    return list(zip(("compute", "exposed communication", "straggler wait", "data wait"), s.law.parts_s, strict=True))


# ---- the timeline ------------------------------------------------------------------------------------------------------------------------


def _timeline(s: LedgerSummary, timeline: Timeline) -> dict[str, Any]:
    """Slots in order; of too many, those that lost the most time."""
    lost = [sum(value for name, value in slot.items() if name not in STEP_NAMES) for slot in s.slots]
    chosen = sorted(sorted(range(len(lost)), key=lambda slot: (-lost[slot], slot))[:MAX_SLOTS])
    together = 1
    while sum(len(timeline.segments(slot, together)) for slot in chosen) > MAX_SEGMENTS:
        together *= 2
    rows = [{"slot": slot, "bars": _until_now(s, _bars(s, timeline, slot, together))} for slot in chosen]
    shown = [{"at_s": m.at_s - s.started_s, "kind": m.kind, "text": m.text, "slot": m.slot} for m in timeline.marks[-MAX_MARKS:]]
    left_out = timeline.marks_left_out + max(0, len(timeline.marks) - MAX_MARKS)
    return {"rows": rows, "slots_left_out": len(lost) - len(chosen), "marks": shown, "marks_left_out": left_out}


def _bars(s: LedgerSummary, timeline: Timeline, slot: int, together: int) -> list[list[Any]]:
    """[start, end, name]; neighbours that show the same are one."""
    return [[round(b.start_s - s.started_s, 4), round(b.end_s - s.started_s, 4), b.name] for b in timeline.segments(slot, together)]


def _until_now(s: LedgerSummary, bars: list[list[Any]]) -> list[list[Any]]:
    """While the run goes on, what nobody has reported yet is pending."""
    end_s = bars[-1][1] if bars else 0.0
    return [*bars, [end_s, round(s.wall_s, 4), PENDING]] if s.status == "running" and s.wall_s - end_s > 1e-3 else bars


# ---- what happened -----------------------------------------------------------------------------------------------------------------------


def _faults(s: LedgerSummary, costs: Mapping[str, FaultCost], history: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Newest first: what struck, or was kept from it; what is only planned is a secret of the page's owner."""
    incidents = [item for item in s.incidents if not item.phases or item.phases[-1][0] not in ("planned", "aimed")]
    return [_fault(s, item, costs[item.id].charged_s, history) for item in sorted(incidents, key=_when_s, reverse=True)[:MAX_FAULTS]]


def _when_s(item: Incident) -> float:
    """When it struck or was kept from it: until then a fault's own time is one of the plan, which counts from another start."""
    done = [at_s for phase, at_s, _ in item.phases if phase not in ("planned", "aimed")]
    return min(done, default=item.at_s)


def _fault(s: LedgerSummary, item: Incident, predicted_s: float, history: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": item.id,
        "at_s": _when_s(item) - s.started_s,
        "kind": item.kind,
        "component": item.component,
        "slot": item.slot,
        "members": list(item.members[:8]),
        "members_left_out": max(0, len(item.members) - 8),
        "phase": item.phases[-1][0] if item.phases else "lost",
        "cost": {name: value for name, value in item.cost.items() if value},
        "cost_s": item.cost_s,
        "init_s": item.init_s,
        "predicted_s": predicted_s,
        "stall_s": item.stall_s,
        "excess_s": item.excess_s,
        "story": _story(s, item, history),
    }


def _story(s: LedgerSummary, item: Incident, history: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What happened to whom and what was done about it, in order."""
    lines = [(at_s, f"{item.kind} {phase}{': ' + detail if detail else ''}") for phase, at_s, detail in item.phases if phase != "planned"]
    lost = set(item.members)
    lines += [(loss["at_s"], f"rank {loss['member']} is lost: {loss['cause']}") for loss in history["losses"] if loss["member"] in lost]
    for view in history["views"]:
        if lost & set(view["causes"]):
            how = "grows beside the running steps" if view["graceful"] else "is formed"
            lines.append((view["at_s"], f"view {view['generation']} {how}: {view['size']} ranks, {view['reason']}"))
    return [{"at_s": at_s - s.started_s, "text": text} for at_s, text in sorted(lines)[:24]]


def _decision(s: LedgerSummary, decision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at_s": decision["at_s"] - s.started_s,
        "action": decision["action"],
        "reason": decision["reason"],
        "fields": decision["fields"],
    }


def _checkpoints(s: LedgerSummary) -> dict[str, Any]:
    return {
        "counts": dict(s.checkpoints_by_phase),
        "step": s.checkpoint_step,
        "interval_s": s.checkpoint_interval_s,
        "blocked_s": s.checkpoint_blocked_s,
        "latency_s": s.checkpoint_latency_s,
    }


def _hosts(members: Sequence[SlotStatus]) -> list[dict[str, Any]]:
    """Nodes by name, their slots, and what chaos does to them now: what strikes all of their ranks is the node's."""
    by_node: dict[str, list[SlotStatus]] = {}
    for member in members:
        if member.node and member.state != LOST:
            by_node.setdefault(member.node, []).append(member)
    return [_host(node, there) for node, there in sorted(by_node.items())[:MAX_LISTED]]


def _host(node: str, members: Sequence[SlotStatus]) -> dict[str, Any]:
    common = set[str].intersection(*(set(member.injected) for member in members))
    ranks = [
        {"slot": member.slot, "state": member.state, "injected": [kind for kind in member.injected if kind not in common]}
        for member in members
    ]
    return {"node": node[:12], "injected": sorted(common), "ranks": ranks}


def _member(member: SlotStatus) -> dict[str, Any]:
    shards = f"{member.shards[0]}-{member.shards[1] - 1}" if member.shards and member.shards[1] > member.shards[0] else ""
    return {
        "slot": member.slot, "incarnation": member.incarnation, "state": member.state, "node": member.node[:12], "pid": member.pid,
        "shards": shards, "cause": member.cause,
    }  # fmt: skip
