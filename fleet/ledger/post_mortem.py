"""One Markdown page about a run for readers who did not follow it: time, cost, causes, decisions by rule, and remedies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fleet.ledger.bill import in_units
from fleet.ledger.diagnosis import TimeFinding, diagnose
from fleet.ledger.happenings import Line, Narrator
from fleet.ledger.report import Report, duration, losses_by_size, rank_time
from fleet.ledger.summary import Incident, LedgerSummary
from fleet.ledger.utc import clock, stamp
from fleet.protocol.records import DecisionMade, Record, ViewPublished

MOST = 60
"""Rows of a table; a line below gives the number of the others."""
DAY_S = 86_400.0


def post_mortem(report: Report, records: Iterable[Record]) -> str:
    """The page.

    Args:
        records: of the run, in order; the page needs no ``Spans`` of its ranks.
    """
    s, records = report.summary, list(records)
    findings = diagnose(s)
    parts = [_head(s), _impact(s), _timeline(s, _lines(s, records)), _causes(s), _decided(s, records), _to_do(findings)]
    return "\n".join(parts)


def _head(s: LedgerSummary) -> str:
    lines = [
        f"# Post-mortem: {s.run}",
        "",
        f"- **Status**: {s.status}{f', {s.reason}' if s.reason else ''}",
        f"- **From**: {stamp(s.started_unix_s)}",
        f"- **To**: {stamp(s.unix_s(s.now_s))} ({duration(s.wall_s)}{f', stopped for {duration(s.down_s)} of it' if s.down_s else ''})",
        f"- **Size**: {s.world} ranks, {s.spares} spares",
        f"- **Steps**: {s.steps:,} committed, {s.rolled_back_total:,} rolled back",
        f"- **Losses**: {s.losses_total} processes, {s.in_view_losses} of them while they trained",
    ]
    return "\n".join([*lines, ""])


def _impact(s: LedgerSummary) -> str:
    allocated = s.decided_s or 1.0
    rows = [[name, rank_time(value), f"{value / allocated:.2%}"] for name, value in losses_by_size(s)]
    rows.append(["goodput", rank_time(s.kept_s), f"{s.scheduling_goodput:.2%}"])
    words = [
        "## Impact",
        "",
        f"Goodput {s.goodput:.2%} of the world, {s.scheduling_goodput:.2%} of all ranks, {s.training_goodput:.2%} while training.",
        "",
    ]
    if s.bill is not None:
        faults = {unit: sum(each.get(unit, 0.0) for each in s.bill["faults"].values()) for unit in s.bill["total"]}
        words += [f"The run cost {in_units(s.bill['total'])}; faults cost {in_units(faults)} of it.", ""]
    return "\n".join([*words, *_table(["where rank-seconds went", "rank time", "share"], rows), ""])


def _lines(s: LedgerSummary, records: Sequence[Record]) -> list[Line]:
    """The happenings, a line each, as ``fleet runs watch`` shows them, and the views that ranks trained in."""
    narrator, lines = Narrator(), list[Line]()
    for record in records:
        lines += narrator.take(record, getattr(record, "at_s", 0.0))
        if isinstance(record, ViewPublished):
            how = "is entered beside the running steps" if record.graceful else "is formed"
            text = f"view {record.view.generation} {how}, {len(record.view.computing)} ranks: {record.reason}"
            lines.append(Line(record.at_s - s.started_s, "", text, ""))
    return sorted([*lines, *narrator.rest()], key=lambda line: line.at_s)


def _timeline(s: LedgerSummary, lines: Sequence[Line]) -> str:
    day = s.wall_s > DAY_S
    rows = [[clock(s.started_unix_s + line.at_s, day=day), duration(line.at_s), line.text] for line in lines]
    return "\n".join(["## Timeline", "", *_table(["UTC", "run time", "what happened"], rows), ""])


def _causes(s: LedgerSummary) -> str:
    lost = sorted((item for item in s.incidents if item.members or item.cost_s > 0 or item.down_s), key=lambda item: -item.cost_s)
    rows = [_cause(s, item) for item in lost]
    heads = ["incident", "UTC", "kind", "ranks", "cause", "cost", "training stopped for"]
    return "\n".join(["## Causes", "", *_table(heads, rows), ""])


def _cause(s: LedgerSummary, item: Incident) -> list[str]:
    causes = "; ".join(f"{cause} ({count} ranks)" if count > 1 else cause for cause, count in Counter(item.causes).items())
    what = (
        f"stopped for {duration(item.down_s)}"
        if item.down_s
        else item.kind
        if item.component == "unknown"
        else f"{item.kind} {item.component}"
    )
    ranks = ", ".join(item.members[:8]) + (f" and {len(item.members) - 8} more" if len(item.members) > 8 else "")
    day = s.wall_s > DAY_S
    return [item.id, clock(s.unix_s(item.at_s), day=day), what, ranks, causes, rank_time(item.cost_s), duration(item.stall_s)]


def _decided(s: LedgerSummary, records: Sequence[Record]) -> str:
    """Each rule and its decisions, their number, and the newest reason."""
    found: dict[tuple[str, str], list[DecisionMade]] = {}
    for record in records:
        if isinstance(record, DecisionMade):
            found.setdefault((record.policy, record.action), []).append(record)
    day = s.wall_s > DAY_S
    rows = [
        [rule, action.replace("_", " "), str(len(made)), clock(s.unix_s(made[-1].at_s), day=day), made[-1].reason]
        for (rule, action), made in sorted(found.items())
    ]
    return "\n".join(["## Decisions, by rule", "", *_table(["rule", "decided", "times", "newest", "its reason"], rows), ""])


def _to_do(findings: Sequence[TimeFinding]) -> str:
    lines = ["## What to do", ""]
    for number, each in enumerate(findings, 1):
        lines.append(f"{number}. **{each.symptom}** ({each.share:.1%} of all rank-seconds, {each.metric}). {each.remedy}")
        lines += [f"    - {evidence}" for evidence in each.evidence]
        lines.append(f"    - The cost {'goes' if each.moves_to.startswith('nowhere') else 'moves'} {each.moves_to}")
    return "\n".join([*lines, "" if findings else "Nothing was lost."])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows[:MOST]:
        yield f"| {' | '.join(_cell(text) for text in row)} |"
    if len(rows) > MOST:
        yield f"\n{len(rows) - MOST} more rows are left out."


def _cell(text: str) -> str:
    """Text of a journal stays text: it cannot end a cell or begin markup."""
    for sign in "\\|<>`*_[":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
