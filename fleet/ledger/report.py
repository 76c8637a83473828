"""The report of a run from its journal, as plain data, and its words and units."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.ledger.checkers import Judge
from fleet.ledger.forecast import forecast, predict, worths
from fleet.ledger.goodput import Ledger
from fleet.ledger.pace import Pace, remaining_s
from fleet.ledger.step_law import STEP_NAMES, plain_shares
from fleet.ledger.summary import COST_NAMES, Incident, LedgerSummary
from fleet.ledger.timeline import Timeline
from fleet.ledger.utc import iso, with_utc
from fleet.ledger.verdicts import Verdicts
from fleet.ledger.verification import verification
from fleet.protocol.causes import Evicted
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    DataRead,
    DecisionMade,
    EvidenceKept,
    HistoryBegun,
    LossExplained,
    Measurement,
    ProcessLost,
    Record,
    ViewPublished,
)
from fleet.protocol.types import Member

HAPPENINGS = ("losses", "views", "checkpoints", "decisions", "evidence")
MAX_CURVES = 64
LAST_DECISIONS = 5
HEAD = (
    "run", "status", "reason", "digest", "started_unix_s", "queued_s", "wall_s", "down_s", "training_s", "world", "spares", "shards",
    "steps",
)  # fmt: skip
PACE = ("median_step_s", "tokens_per_s", "goodput", "scheduling_goodput", "ettr", "training_goodput")
TIME = ("other_ratio", "closes", "pending_s", "holes", "hole_s", "stale_s", "categories", "cold_provision_s")
"""Fields of a summary that a report has under the same names, in three places."""


@dataclass(frozen=True, slots=True)
class Report:
    """``summary`` and ``timeline`` are the ledger's own; ``history`` holds the happenings, as plain data.

    ``commits`` are (at_s, step) of the history at its end, ``step_s`` is the median of the newest ones. ``total_steps`` is None for a loop
    with an unknown number of steps.
    """

    summary: LedgerSummary
    timeline: Timeline
    history: Mapping[str, Any]
    commits: Sequence[tuple[float, int]] = ()
    step_s: float | None = None
    total_steps: int | None = None

    @property
    def left_s(self) -> float | None:
        """The training time left; None where the run has ended, or the time is unknown."""
        s = self.summary
        return remaining_s(s.steps, self.total_steps, self.step_s, s.training_goodput) if s.status == "running" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, keys in a fixed order, seconds rounded to the nanosecond, moments in UTC too. NaN and infinity are None."""
        s = self.summary
        head = {
            **_named(s, *HEAD),
            "rolled_back_steps": s.rolled_back_total,
            "samples": dataclasses.asdict(s.samples) if s.samples is not None else None,
            **_named(s, *PACE),
            "prediction": predict(s).plain(),
            "forecast": found.plain() if (found := forecast(s, self.left_s)) is not None else None,
            "worth": [dataclasses.asdict(each) for each in worths(s)],
            **_named(s, *TIME),
            "law_per_step": dict(zip(("compute_s", "comm_s", "sync_s", "data_s", "garbage_s"), s.law.parts_s, strict=True)),
            "fleet_law": s.step_law.plain() if s.step_law is not None else None,
            "shares": plain_shares(s.run_shares),
            "faults": [_incident(item) for item in s.incidents],
            "factors": s.factors.plain() if s.factors is not None else None,
            "bill": s.bill,
            "usage": {str(slot): dataclasses.asdict(used) for slot, used in sorted(s.tallies.usage.items())},
            "uncharged": {name: s.uncharged[name] for name in (*COST_NAMES, "init")},
        }
        stragglers = self.history["stragglers"] | {"scorecard": s.tallies.score.plain()}
        plain = finite({**head, **self.history, "stragglers": stragglers, "counts": _counts(s)}, 9)
        dated: dict[str, Any] = with_utc(plain, s.unix_s(0.0))
        return {**dated, "started_utc": iso(s.started_unix_s), "until_utc": iso(s.unix_s(s.now_s))}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


class History:
    """The happenings of a run, as plain data, gathered record by record.

    Args:
        most: keep so many of each kind, the newest; with more points of a measurement, every second one goes. None: keep all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._kinds: dict[str, deque[dict[str, Any]]] = {name: deque(maxlen=most) for name in HAPPENINGS}
        self.data: DataRead | None = None
        self._decided: dict[str, dict[str, int]] = {}
        self._points: dict[str, list[list[float]]] = {}
        self._verdicts = Verdicts(most)
        self._rollbacks: deque[dict[str, Any]] = deque(maxlen=most)
        self._newest = 0
        self._evicted: set[Member] = set()
        self.judge = Judge()
        self.pace = Pace()

    def add(self, record: Record) -> None:
        self._verdicts.apply(record)
        self.judge.take(record)
        self.pace.add(record)
        match record:
            case ProcessLost():
                self._kinds["losses"].append(_loss(record))
                self._evicted |= {record.member} if isinstance(record.cause, Evicted) else set()
            case LossExplained(member=member, cause=cause):
                for loss in self._kinds["losses"] if member not in self._evicted else ():
                    loss["cause"] = str(cause) if loss["member"] == str(member) else loss["cause"]
            case ViewPublished():
                self._kinds["views"].append(_view(record))
            case Committed(state=state_id):
                self._newest = max(self._newest, state_id.step)
            case HistoryBegun(from_state=start, at_s=at_s):
                if self._newest > start.step:
                    self._rollbacks.append({"at_s": at_s, "first_step": start.step + 1, "last_step": self._newest})
                self._newest = min(self._newest, start.step)
            case CheckpointRecord():
                state = [record.state.history, record.state.step]
                self._kinds["checkpoints"].append({**_facts(record), "state": state})
            case EvidenceKept():
                self._kinds["evidence"].append({**_facts(record), "members": [str(member) for member in record.members]})
            case DecisionMade(policy=policy, action=action):
                counts = self._decided.setdefault(policy, {})
                counts[action] = counts.get(action, 0) + 1
                self._kinds["decisions"].append(_decision(record))
            case DataRead():
                self.data = record
            case Measurement():
                self._measured(record)

    def _measured(self, record: Measurement) -> None:
        if self._most is not None and record.name not in self._points and len(self._points) >= MAX_CURVES:
            return
        points = self._points.setdefault(record.name, [])
        points.append([record.state.step, record.value])
        if self._most is not None and len(points) > self._most:
            del points[1:-1:2]

    def decided(self) -> dict[str, Any]:
        """How often each policy took each action in the whole run, and the last few decisions with their reasons."""
        last = [{name: item[name] for name in ("at_s", "policy", "action", "reason")} for item in self._kinds["decisions"]]
        counts = {policy: dict(sorted(actions.items())) for policy, actions in sorted(self._decided.items())}
        return {"counts": counts, "last": last[-LAST_DECISIONS:]}

    def as_dict(self) -> dict[str, Any]:
        """A copy, for a :class:`Report`."""
        points = {name: list(points) for name, points in self._points.items()}
        happened = {name: list(items) for name, items in self._kinds.items()}
        return {**happened, "rollbacks": list(self._rollbacks), "measurements": points, "stragglers": self._verdicts.plain()}


def build_report(records: Iterable[Record]) -> Report:
    """Fold a run's journal. Raises LedgerError when its rank-seconds overlap or leave a gap."""
    ledger, history = Ledger(Timeline()), History()
    for record in records:
        ledger.apply(record)
        history.add(record)
    return report_of(ledger, history, ledger.summary())


def report_of(ledger: Ledger, history: History, summary: LedgerSummary) -> Report:
    """The report of a ledger with a timeline, with ``summary``'s figures."""
    verified = verification(ledger.started, summary.view_size, summary.median_step_s) if ledger.started else {}
    timeline, pace = ledger.closed_timeline() or Timeline(), history.pace
    total = getattr(history.data, "total_steps", 0) or None
    more = {"verification": verified, "checks": [dataclasses.asdict(one) for one in history.judge.judgements(summary)]}
    return Report(summary, timeline, history.as_dict() | more, list(pace.points), pace.step_s, total)


OURS = ("event", "view_changed")
"""Fields of a record that only the code needs."""


def _facts(record: CheckpointRecord | EvidenceKept) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(record).items() if name not in OURS}


def _named(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _loss(record: ProcessLost) -> dict[str, Any]:
    own = _named(record, "at_s", "fault", "generation", "step", "shard", "detail")
    return {"member": str(record.member), "cause": str(record.cause), **own}


def _decision(record: DecisionMade) -> dict[str, Any]:
    return _named(record, "policy", "action", "reason", "fields", "at_s")


def _view(record: ViewPublished) -> dict[str, Any]:
    return {
        "generation": record.view.generation,
        "at_s": record.at_s,
        "size": len(record.view.computing),
        "members": [str(member) for member in record.view.members],
        "state": [record.view.state.history, record.view.state.step],
        "checkpoint": record.view.checkpoint,
        "graceful": record.graceful,
        "causes": list(record.causes),
        "reason": record.reason,
    }


def _incident(item: Incident) -> dict[str, Any]:
    phases = [{"phase": phase, "at_s": at_s, "detail": detail} for phase, at_s, detail in item.phases]
    return {**dataclasses.asdict(item), "phases": phases, "cost_s": item.cost_s}


def _counts(summary: LedgerSummary) -> dict[str, Any]:
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, phase), count in sorted(summary.faults_by_kind_phase.items()):
        by_kind.setdefault(kind, {})[phase] = count
    total = {phase: sum(phases.get(phase, 0) for phases in by_kind.values()) for phase in ("planned", "executed", "suppressed", "healed")}
    return {
        "faults_by_kind": by_kind,
        **total,
        "losses": summary.losses_total,
        "in_view_losses": summary.in_view_losses,
        "views": summary.views_total,
        "checkpoints": dict(summary.checkpoints_by_phase),
        "copies": dict(summary.copies_by_phase),
    }


def finite(value: Any, digits: int | None = None) -> Any:
    """``value`` for JSON, rounded to so many digits after the point. A number that is not finite becomes None."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else value if digits is None else round(value, digits)
    if isinstance(value, Mapping):
        return {str(key): finite(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, digits) for item in value]
    return value


def duration(seconds: float | None) -> str:
    """Three figures and a unit that fits, ``-`` for None: ``85 ms``, ``12.3 s``, ``4 m 05 s``, ``7 h 20 m``, ``3.2 d``."""
    if seconds is None:
        return "-"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 3_600:
        return f"{int(seconds // 60)} m {int(seconds % 60):02d} s"
    if seconds < 172_800:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} m"
    return f"{seconds / 86_400:.1f} d"


def rank_time(rank_s: float) -> str:
    """Rank-seconds, or rank-hours from 10,000 on."""
    return f"{rank_s:,.2f} s" if rank_s < 10_000 else f"{rank_s / 3600:,.1f} h"


def prediction_words(summary: LedgerSummary) -> str:
    """The predicted goodput of the run, given the faults that came."""
    found = predict(summary)
    return f"{found.goodput:.2%} predicted for the faults that came, error {100 * found.error:+.1f} points"


def forecast_words(report: Report) -> list[str]:
    """The forecast, a line each: faults and goodput of the time ahead, and how often forecasts were right. Empty before training."""
    found = forecast(report.summary, report.left_s)
    if found is None:
        return []
    score = f"; {found.inside} of {found.scored} such intervals held the truth" if found.scored else ""
    goodput = f"goodput {found.goodput.mean:.1%} ({found.goodput.low:.1%} to {found.goodput.high:.1%})"
    often = f"a fault every {_every(found.all.mean)} ({_every(found.all.high)} to {_every(found.all.low)})"
    return [
        f"next {duration(found.ahead_s)} of training: {often}, {goodput}",
        f"in brackets: the bounds of 90% certainty{score}",
        f"the world is whole for 95% of that time with {found.spares} spare{'' if found.spares == 1 else 's'}",
    ]


def _every(rate_per_s: float) -> str:
    return duration(1.0 / rate_per_s) if rate_per_s > 0 else "never"


def worth_words(summary: LedgerSummary) -> list[str]:
    """The savings and the cost of spares and checkpoints, a line each."""
    return [
        f"{each.name} saved {rank_time(each.saved_s)} of ranks in {each.uses} {'use' if each.uses == 1 else 'uses'}, "
        f"and cost {rank_time(each.cost_s)}"
        for each in worths(summary)
    ]


def losses_by_size(summary: LedgerSummary) -> list[tuple[str, float]]:
    """Rank-seconds outside goodput by category, largest first. It leaves out empty categories, and pending time."""
    named = [(name, value) for name, value in summary.categories.items() if name not in STEP_NAMES and value > 0]
    return sorted(named, key=lambda item: -item[1])
