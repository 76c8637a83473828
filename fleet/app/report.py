"""The report of a run, as a table for the terminal. Its data come from ``fleet.ledger.report``."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.ledger.bill import in_units, rests_on, stored_words
from fleet.ledger.checkers import OK, VIOLATED
from fleet.ledger.report import Report, build_report, duration, forecast_words, losses_by_size, prediction_words, rank_time, worth_words
from fleet.ledger.step_law import hidden_words, in_shares
from fleet.ledger.summary import COST_NAMES, Incident, LedgerSummary
from fleet.ledger.utc import clock, stamp
from fleet.ledger.verdicts import Score
from fleet.ledger.verification import in_words

__all__ = ["Report", "build_report", "render_table"]

BAR_WIDTH = 44
MAX_ROWS = 25
"""Faults in the terminal's table; the JSON and the page have all."""
MOST_CAUSE = 24
MOST_PRICED = 5
DAY_S = 86_400.0
INDENT = " " * 24
GREEN, RED, BOLD, DIM, PLAIN = "\033[32m", "\033[31m", "\033[1m", "\033[2m", "\033[0m"
STATUS_COLOUR = {"completed": GREEN, "failed": RED}


def render_table(report: Report, *, colour: bool = False) -> str:
    """The report as text of at most 120 columns: headline, waterfall, faults with their cost. ``colour`` adds ANSI codes."""
    paint = _Paint(colour)
    summary = report.summary
    parts = [
        _headline(summary, paint),
        _waterfall(summary, paint),
        f"factors  {summary.factors}\n" if summary.factors is not None else "",
        _bill(summary),
        _ahead(report),
        _step(summary),
        _shares(summary),
        _samples(summary),
        _usage(summary),
        _faults(summary, paint),
        _verdicts(report, paint),
        _verified(report),
        _checks(report, paint),
    ]
    parts.append(_slow_ranks(report.history["stragglers"], summary, paint))
    parts.append(_levels(report))
    return "\n".join([*(part for part in parts if part), _footer(report.summary, paint)]) + "\n"


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{PLAIN}" if self._colour else text


def _headline(s: LedgerSummary, paint: _Paint) -> str:
    state = f"{s.status}: {s.reason}" if s.reason else s.status
    spares = f" + {s.spares} spare{'s' if s.spares > 1 else ''}" if s.spares else ""
    back = f", {s.rolled_back_total:,} rolled back" if s.rolled_back_total else ""
    title = f"{paint(BOLD, s.run)}  {paint(STATUS_COLOUR.get(s.status, BOLD), state)}"
    ratios = f"scheduling {s.scheduling_goodput:.2%}   ETTR {s.ettr:.2%}"
    queued = f", after {duration(s.queued_s)} in the queue" if s.queued_s else ""
    down = f", and stopped for {duration(s.down_s)}" if s.down_s else ""
    size = f"{s.steps:,} steps{back}   {s.world} ranks{spares} for {duration(s.held_s)}{queued}{down}"
    size += f"\n{stamp(s.started_unix_s)} to {stamp(s.unix_s(s.now_s))}"
    if s.training_s:
        size += f"\n{prediction_words(s)}; while training {s.training_goodput:.2%}"
    return f"{title}\n{paint(BOLD + GREEN, f'goodput {s.goodput:.2%}')}   {ratios}   {size}\n"


def _ahead(report: Report) -> str:
    """The forecast, and the lines on what was worth its price."""
    lines = [*(f"forecast  {line}" for line in forecast_words(report)), *(f"worth  {line}" for line in worth_words(report.summary))]
    return "\n".join([*lines, ""]) if lines else ""


def _bill(s: LedgerSummary) -> str:
    """The cost: of the run, of a kept step, and of the dearest faults."""
    found = s.bill
    if found is None:
        return ""
    each = f"; a kept step {in_units(found['per_step'])}" if found["per_step"] else ""
    dearest = sorted(found["faults"].items(), key=lambda item: -sum(item[1].values()))[:MOST_PRICED]
    priced = [f"  {name:<19} {in_units(amounts)}" for name, amounts in dearest if any(amounts.values())]
    return "\n".join([f"cost  {in_units(found['total'])} ({rests_on(found['basis'])}){stored_words(found['store'])}{each}", *priced, ""])


def _bar(begin: float, share: float, fill: str) -> str:
    """A bar from ``begin`` for ``share`` of the width, of at least one character."""
    start = min(round(begin * BAR_WIDTH), BAR_WIDTH - 1)
    return " " * start + fill * max(1, round((begin + share) * BAR_WIDTH) - start)


def _waterfall(s: LedgerSummary, paint: _Paint) -> str:
    """The waterfall from all allocated time down to goodput. Pending time stands below, in no share, as its category is not known yet."""
    allocated = s.decided_s or 1.0
    lines = [_line("allocated", allocated, 1.0, _bar(0.0, 1.0, "█"))]
    left = 1.0
    for name, value in losses_by_size(s):
        share = value / allocated
        left -= share
        lines.append(_line(f"- {name}", value, share, paint(RED, _bar(max(0.0, left), share, "▒"))))
    lines.append(_line("= goodput", s.kept_s, s.scheduling_goodput, paint(GREEN, _bar(0.0, left, "█"))))
    if s.pending_s > 0:
        lines.append(f"  {'pending':<19}{rank_time(s.pending_s):>14}           not decided yet, and in no share")
    return "\n".join([*lines, ""])


def _line(name: str, rank_s: float, share: float, bar: str) -> str:
    return f"  {name:<19}{rank_time(rank_s):>14} {share:>8.2%}  {bar}"


def _step(s: LedgerSummary) -> str:
    terms = zip(("compute", "comm", "straggler", "data", "garbage"), s.law.parts_s, strict=True)
    return f"  a step of {duration(s.median_step_s)}: " + "  ".join(f"{name} {duration(value)}" for name, value in terms) + "\n"


def _shares(s: LedgerSummary) -> str:
    """Shares of steps by the Fleet Law, shares of all rank-seconds, and the hidden share of the exchange."""
    law = s.step_law
    if law is None:
        return ""
    rows = [("Fleet Law", law.shares), ("all time", s.run_shares)]
    lines = [f"  {name:<10}{in_shares(shares)} = 100%" for name, shares in rows]
    return "\n".join([*lines, f"  {hidden_words(law)}", ""])


def _usage(s: LedgerSummary) -> str:
    """Memory of the rank that used most, and the bytes sent between ranks."""
    used = s.tallies.usage
    if not used:
        return ""
    slot = max(used, key=lambda each: used[each].peak_bytes)
    device = max(each.device_peak_bytes for each in used.values())
    gpu = f", and {device / 1e9:.3g} GB of a GPU" if device else ""
    sent = sum(each.sent_bytes for each in used.values())
    return f"  memory of a rank: at most {used[slot].peak_bytes / 1e9:.3g} GB (slot {slot}){gpu}; {sent / 1e9:.3g} GB sent between ranks\n"


def _samples(s: LedgerSummary) -> str:
    if s.samples is None:
        return ""
    samples = s.samples
    back = f"; {samples.taken_back:,} more in steps that were taken back" if samples.taken_back else ""
    epochs = f", {samples.epochs:.3g} epochs" if samples.epochs else ""
    return f"  {samples.seen:,} samples{epochs}: {samples.skipped:,} skipped, {samples.repeated:,} repeated{back}\n"


def _faults(s: LedgerSummary, paint: _Paint) -> str:
    """Injected faults with an effect, losses without a fault, and times in which the run was stopped; the dearest first."""
    items = sorted((item for item in s.incidents if item.cost_s > 0 or item.members or item.down_s), key=lambda item: -item.cost_s)
    if not items:
        return ""
    names = [name for name in COST_NAMES if any(item.cost[name] for item in items[:MAX_ROWS])]
    heads = ["fault", "at", "UTC", "what", "lost", *names, "cost", "stall"]
    rows = [_row(item, s, names) for item in items[:MAX_ROWS]]
    lines = _columns([heads, *rows], left=(0, 3, 4))
    lines[0] = paint(DIM, lines[0])
    if len(items) > MAX_ROWS:
        rest = items[MAX_ROWS:]
        lines.append(f"  and {len(rest)} more, {rank_time(sum(item.cost_s for item in rest))} in all")
    lines += _causes(items[:MAX_ROWS])
    return "\n".join([*lines, ""])


def _causes(items: Sequence[Incident]) -> list[str]:
    """Why ranks were lost, with a line for each cause."""
    by_cause: dict[str, list[str]] = {}
    for item in items:
        for member, cause in zip(item.members, item.causes, strict=False):
            by_cause.setdefault(cause, []).append(member)
    return [line for cause, members in by_cause.items() for line in _wrapped(f"lost {', '.join(members)}: {cause}")]


def _slow_ranks(found: Mapping[str, Any], s: LedgerSummary, paint: _Paint) -> str:
    """Ranks that were found slow, and why; each remedy with its alternatives, and its saving against no remedy."""
    lines = [paint(DIM, "  slow ranks")] if found["verdicts"] or found["actions"] else []
    for case in found["verdicts"][:MAX_ROWS]:
        sure = (
            f"; confidence {case['confidence']:.1%}, from step {case['since_step']:.0f}, seen at {case['step']:.0f}" if case["rank"] else ""
        )
        until = f"; until {_when(s, case['cleared_s'])}" if case["cleared_s"] is not None else ""
        lines += _wrapped(f"{_when(s, case['at_s'])}  {case['reason']}{sure}{until}")
    for action in found["actions"][:MAX_ROWS]:
        costs = ", ".join(f"{name} {rank_time(cost)}" for name, cost in sorted(action["costs_rank_s"].items(), key=lambda item: item[1]))
        saved = ""
        if action["saved_rank_s"] is not None:
            each = f"{action['steps']} steps that would have taken {duration(action['step_without_s'])} each"
            saved = f"; saved {rank_time(action['saved_rank_s'])} of rank time: {each}"
        lines += _wrapped(f"{_when(s, action['at_s'])}  {action['action']}; expected loss: {costs}{saved}")
    if s.tallies.score.injected:
        lines = [*(lines or [paint(DIM, "  slow ranks")]), *_wrapped(_scored(s.tallies.score))]
    return "\n".join([*lines, ""]) if lines else ""


def _scored(score: Score) -> str:
    """The detectors' recall and precision on injected slowdowns."""
    said, after = score.right + score.wrong, ""
    if score.latency_s is not None:
        after = f", {duration(score.latency_s)} after it began (median)"
    precision = f"; {score.right} of {said} accusations right (precision {score.precision:.0%})" if said else "; no rank was accused"
    return f"detectors: {score.found} of {score.injected} injected slowdowns found (recall {score.recall:.0%}){after}{precision}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=114, initial_indent="  ", subsequent_indent="      ")


def _verdicts(report: Report, paint: _Paint) -> str:
    """Ranks that were found wrong or hanging, and the place of the evidence."""
    s, lines = report.summary, list[str]()
    judged = [decision for decision in report.history["decisions"] if decision["policy"] == "corruption"]
    lines += [f"  {_when(s, one['at_s']):>20}  {one['action']}: {one['reason']}" for one in judged]
    by_incident: dict[str, list[str]] = {}
    for kept in report.history["evidence"]:  # of one incident, from the agent of each node
        head = f"  {_when(s, kept['at_s']):>20}  {kept['incident']}: {kept['reason']}; stacks in {kept['path']}"
        rows = textwrap.wrap(kept["detail"], width=114, initial_indent=INDENT, subsequent_indent=INDENT)
        by_incident.setdefault(kept["incident"], [head]).extend(rows)
    lines += itertools.chain.from_iterable(by_incident.values())
    return "\n".join([paint(DIM, "  verdicts and evidence"), *lines, ""]) if lines else ""


def _verified(report: Report) -> str:
    lines = [line for words in in_words(report.history.get("verification", {})) for line in _wrapped(words)]
    return "\n".join([*lines, ""]) if lines else ""


def _checks(report: Report, paint: _Paint) -> str:
    """The verdicts of the checks after chaos."""
    checks, colours = report.history.get("checks", []), {OK: GREEN, VIOLATED: RED}
    rows = [(paint(colours.get(one["verdict"], DIM), f"{one['verdict']:9}"), f"{one['check']:17}", one["reason"]) for one in checks]
    return "\n".join([paint(DIM, "  checks after chaos"), *(f"  {' '.join(row)}" for row in rows), ""]) if rows else ""


def _levels(report: Report) -> str:
    """The saves to memory and to the store, their intervals, and the reasons."""
    s, lines = report.summary, []
    for name, policy, counts in (("memory", "interval of peers", s.copies_by_phase), ("store", "interval", s.checkpoints_by_phase)):
        reasons = [decision["reason"] for decision in report.history["decisions"] if decision["policy"] == policy]
        saved = ", ".join(f"{counts[phase]} {phase}" for phase in ("durable", "failed", "skipped") if counts.get(phase))
        if reasons or saved:
            lines.append(f"  saved to {name:<7}{saved or 'nothing yet'}; {reasons[-1] if reasons else ''}".rstrip("; "))
    return "\n".join([*lines, ""]) if lines else ""


def _moment(s: LedgerSummary, at_s: float) -> tuple[str, str]:
    """The time since the start of the run, and in UTC."""
    return duration(at_s - s.started_s), clock(s.unix_s(at_s), day=s.wall_s > DAY_S)


def _when(s: LedgerSummary, at_s: float) -> str:
    return " ".join(_moment(s, at_s))


def _row(item: Incident, s: LedgerSummary, names: Sequence[str]) -> list[str]:
    members = ",".join(item.members[:2]) + (f",+{len(item.members) - 2}" if len(item.members) > 2 else "")
    what = item.kind if item.component == "unknown" else f"{item.kind} {item.component}"
    what = f"stopped for {duration(item.down_s)}" if item.down_s else item.domain or what
    costs = [duration(item.cost[name]) if item.cost[name] else "-" for name in names]
    shown = what if item.phases else what[:MOST_CAUSE]  # an injected fault has a short name; a cause is a sentence
    return [item.id, *_moment(s, item.at_s), shown, members or "-", *costs, duration(item.cost_s), duration(item.stall_s)]


def _columns(rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _footer(s: LedgerSummary, paint: _Paint) -> str:
    total = sum(s.categories.values()) + s.pending_s
    verdict = paint(GREEN, "closes") if s.closes else paint(RED, "does not close")
    holes = f", {s.holes} holes of {duration(s.hole_s)}" if s.holes else ""
    holes += f", {duration(s.stale_s)} told by processes that were replaced" if s.stale_s else ""
    return f"  ledger {verdict}: {total:,.6f} of {s.rank_s:,.6f} rank-seconds, other {s.other_ratio:.2%}{holes}"
