"""Tables for the docs: metrics, alerts, exit codes, checks, published values beside those of the laws."""

from __future__ import annotations

from typing import get_type_hints

from dashboards.metrics.rules import ALERTS
from dashboards.metrics.spec import MetricSpec
from dashboards.metrics.table import METRICS
from fleet.app.exit_codes import Exit
from fleet.laws.published import HEADS, cells, tables
from fleet.ledger.checkers import CHECKERS
from fleet.planning.inputs import PlanInput

MEANINGS = {
    Exit.DONE: "The run is completed, and all that was asked of it holds.",
    Exit.FAILED: "The run failed, or its twin failed or ended with other bits; a check of `fleet doctor` failed.",
    Exit.REFUSED: "Bad input, named with field, value, reason and way out, before any process starts; or what is resumed is not what ran.",
    Exit.NOT_SAVED: "All steps are committed, but the final checkpoint could not be kept.",
    Exit.UNMET: "What `--expect` says is not so.",
    Exit.VIOLATED: "A [check of what should hold after chaos](chaos.md#checks) says that it does not.",
    Exit.STOPPED: "The run was stopped in order.",
}


def alerts_table() -> str:
    rows = [f"| [`{a.name}`](runbook.md#{a.anchor}) | {a.severity} | {a.meaning} |" for a in ALERTS]
    return "\n".join(["| alert | severity | fires when |", "|---|---|---|", *rows]) + "\n"


def metrics_table() -> str:
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(('run', *m.labels))} | {unit(m)} | {m.help} | {m.question} |" for m in METRICS]
    return "\n".join(["| metric | kind | labels | unit | meaning | question |", "|---|---|---|---|---|---|", *rows]) + "\n"


def unit(spec: MetricSpec) -> str:
    """The unit, from the name's last word: base units, ``ratio`` between 0 and 1, ``-`` for plain numbers."""
    last = spec.name.removesuffix("_total").rpartition("_")[2]
    return {"seconds": "rank-seconds" if "rank_seconds" in spec.name else "seconds", "bytes": "bytes", "ratio": "ratio"}.get(last, "-")


def exit_codes_table() -> str:
    return "\n".join(["| code | when |", "|---|---|", *(f"| {code.value} | {MEANINGS[code]} |" for code in Exit)]) + "\n"


def checks_table() -> str:
    rows = [(f"`{kind.name}`", " ".join((kind.__doc__ or "").partition("\n\n")[0].replace("``", "`").split())) for kind in CHECKERS]
    return "\n".join("| " + " | ".join(row) + " |" for row in (("check", "holds when"), ("---", "---"), *rows)) + "\n"


def published_tables() -> str:
    lines: list[str] = []
    for name, rows in tables().items():
        lines += [f"#### {name[0].upper()}{name[1:]}", "", f"| {' | '.join(HEADS)} |", "|---|---|---:|---:|---|---|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows] + [""]
    return "\n".join(lines)


def meanings() -> dict[str, str]:
    """Field of a plan -> what it means."""
    hints = get_type_hints(PlanInput, include_extras=True)
    return {name: next(meta for meta in hint.__metadata__ if isinstance(meta, str)) for name, hint in hints.items()}
