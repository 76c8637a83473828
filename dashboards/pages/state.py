"""What the live page shows of a run, as plain data of bounded size: made from a report, sent as JSON, drawn by ``static/run.js``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.pages.curves import curves, fault_marks
from dashboards.pages.run import COLOURS, drawn_slots, happened, interval_decisions, law_terms, waterfall
from dashboards.pages.wrong import verdict, wrong
from fleet.ledger.bill import UNITS, for_faults, rests_on, stored_words
from fleet.ledger.categories import MEANINGS, PENDING
from fleet.ledger.forecast import FaultCost, forecast, predict
from fleet.ledger.report import Report, finite, forecast_words, worth_words
from fleet.ledger.step_law import STEP_NAMES, plain_shares
from fleet.ledger.summary import Incident, LedgerSummary
from fleet.ledger.tallies import LOST, SlotStatus
from fleet.ledger.timeline import Timeline
from fleet.protocol.records import PROGRAM, STEADY, configuration, section

MAX_SLOTS = 48
MAX_SEGMENTS = 2_400
MAX_MARKS = 200
MAX_FAULTS = 200
MAX_LISTED = 256

OF_RUN = ("run", "reason", "started_unix_s", "wall_s", "down_s", "queued_s")
OF_NOW = ("goodput", "scheduling_goodput", "ettr", "steps", "world", "spares", "shards", "view_size", "generation", "tokens_per_s")
OF_FAULT = ("id", "kind", "component", "slot", "cost_s", "init_s", "stall_s", "excess_s")
OF_SLOT = ("slot", "coordinate", "incarnation", "state", "pid", "cause")
"""Fields that the page has as they are."""


def run_state(
    report: Report, slots: Sequence[SlotStatus], config: str, *, silent: bool = False, damage: str = "", injected: Sequence[str] = ()
) -> dict[str, Any]:  # fmt: skip
    """Everything on the page. Times are seconds since the run started; shares are of 1; what is not a number is None."""
    s = report.summary
    said = configuration(config)
    settings = section(said, "settings")
    prediction, ahead = predict(s), forecast(s, report.left_s)
    lines = wrong(s, slots, silent=silent, injected=injected)
    state = {
        **_fields(s, OF_RUN),
        "status": "silent" if silent and s.status == "running" else s.status,
        "damage": damage,
        "now": _now(report, settings),
        "waterfall": waterfall(s),
        "pending": {"rank_s": s.pending_s, "share": s.pending_s / s.rank_s if s.rank_s else 0.0, "colour": COLOURS["pending"]},
        "training": {"seconds": s.training_s, "goodput": s.training_goodput},
        "bill": _bill(s),
        "fleet_law": s.step_law.plain() if s.step_law is not None else None,
        "shares": plain_shares(s.run_shares),
        "verdict": verdict(s, lines, silent=silent)._asdict(),
        "wrong": lines,
        "law": [{"name": name, "seconds": value, "category": of} for (name, value), of in zip(law_terms(s), STEP_NAMES, strict=True)],
        "prediction": prediction.plain(),
        "forecast": ahead.plain() if ahead is not None else None,
        "forecast_words": [*forecast_words(report), *worth_words(s)],
        "timeline": _timeline(s, report.timeline),
        "faults": _faults(s, prediction.costs, report.history),
        "fault_counts": [{"kind": kind, "phase": phase, "count": n} for (kind, phase), n in sorted(s.faults_by_kind_phase.items())],
        "interval": [{**each, "at_s": each["at_s"] - s.started_s} for each in interval_decisions(report.history["decisions"])],
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
    plain = finite(state, 6)
    assert isinstance(plain, dict)
    return plain


def _fields(of: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _now(report: Report, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``total_steps`` and ``eta_s``, how many steps the run has in all and when it will have them, are None while that is not known."""
    s = report.summary
    own_first = sorted(s.measurements.items(), key=lambda item: item[0] in PROGRAM)
    usage = s.tallies.usage.values()
    return _fields(s, OF_NOW) | {
        "rolled_back": s.rolled_back_total,
        "step_s": s.median_step_s,
        "views": s.views_total,
        "losses": s.losses_total,
        "measurements": {name: value for name, (_, value) in own_first if name not in STEADY},
        "factors": s.factors.plain() if s.factors is not None else None,
        "peak_bytes": max((used.peak_bytes for used in usage), default=None),
        "device_peak_bytes": max((used.device_peak_bytes for used in usage), default=0) or None,
        "seed": settings.get("seed"),
        "total_steps": report.total_steps,
        "recent_step_s": report.step_s,
        "eta_s": report.left_s,
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


# ---- the timeline ------------------------------------------------------------------------------------------------------------------------


def _timeline(s: LedgerSummary, timeline: Timeline) -> dict[str, Any]:
    """Slots in order; of too many, those that lost the most time."""
    chosen, together = drawn_slots(s, timeline, MAX_SLOTS, MAX_SEGMENTS)
    rows = [{"slot": slot, "bars": _until_now(s, _bars(s, timeline, slot, together))} for slot in chosen]
    shown = [{"at_s": m.at_s - s.started_s, "kind": m.kind, "text": m.text, "slot": m.slot} for m in timeline.marks[-MAX_MARKS:]]
    left_out = timeline.marks_left_out + max(0, len(timeline.marks) - MAX_MARKS)
    return {"rows": rows, "slots_left_out": len(s.slots) - len(chosen), "marks": shown, "marks_left_out": left_out}


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
    newest = sorted(happened(s), key=lambda item: item.at_s, reverse=True)[:MAX_FAULTS]
    return [_fault(s, item, costs[item.id].charged_s, history) for item in newest]


def _fault(s: LedgerSummary, item: Incident, predicted_s: float, history: Mapping[str, Any]) -> dict[str, Any]:
    return _fields(item, OF_FAULT) | {
        "at_s": item.at_s - s.started_s,
        "members": list(item.members[:8]),
        "members_left_out": max(0, len(item.members) - 8),
        "phase": item.phases[-1][0] if item.phases else "lost",
        "cost": {name: value for name, value in item.cost.items() if value},
        "predicted_s": predicted_s,
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


def _checkpoints(s: LedgerSummary) -> dict[str, Any]:
    newest = {name: getattr(s, f"checkpoint_{name}") for name in ("step", "interval_s", "blocked_s", "latency_s")}
    return {"counts": dict(s.checkpoints_by_phase), **newest}


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
    return _fields(member, OF_SLOT) | {"node": member.node[:12], "shards": shards}
