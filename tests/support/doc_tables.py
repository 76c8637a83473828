"""Tables for the docs: rooms, messages, metrics, alerts, exit codes, checks, published values beside those of the laws."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_type_hints

from dashboards.metrics.rules import ALERTS
from dashboards.metrics.spec import MetricSpec
from dashboards.metrics.table import METRICS
from fleet.laws.published import HEADS, cells, tables
from fleet.ledger.checkers import CHECKERS
from fleet.machine.table import LOSS, OVER, RECONCILES, STOPS, EventRow, Of
from fleet.planning.inputs import PlanInput
from fleet.protocol.exit_codes import Exit
from fleet.protocol.instructions import Instruction
from tests.tidy.rules import SHIPPED

ROOT = Path(__file__).parents[2]
KINDS = {"fleet/app": "roof", "fleet/host": "ground", "fleet/integrations": "front", "fleet": "pure", "policies": "pure"}
"""Folder -> what kind of room it and those below it are; the longest that fits."""

MEANINGS = {
    Exit.DONE: "All that was asked holds: a run is completed, what was examined is fit, each probe of an experiment was held.",
    Exit.FAILED: "The run failed, or its twin failed or ended with other bits; what was examined is not fit; not all probes were held.",
    Exit.REFUSED: "Bad input, named with field, value, reason and way out, before any process starts; or what is resumed is not what ran.",
    Exit.NOT_SAVED: "All steps are committed, but the final checkpoint could not be kept; the faults of an experiment were called off.",
    Exit.UNMET: "What `--expect` says is not so.",
    Exit.VIOLATED: "A [check of what should hold after chaos](chaos.md#checks) says that it does not.",
    Exit.UNSEEN: "How the run ends was not seen: a signal ended `fleet attach`, or the cluster does not answer. The run may go on.",
    Exit.STOPPED: "The run was stopped in order, or taken over by another process, or Ctrl-C has ended the command.",
}


def kind_of_room(folder: str) -> str:
    above = [name for name in KINDS if folder == name or folder.startswith(name + "/")]
    return KINDS[max(above, key=len)] if above else ""


def rooms_table() -> str:
    """Each package with the first paragraph of its docstring: the roof, the ground, what is pure, and then those that use it."""
    order = (*dict.fromkeys(KINDS.values()), "")
    packages = [path.parent.relative_to(ROOT).as_posix() for top in SHIPPED for path in (ROOT / top).rglob("__init__.py")]
    folders = sorted((folder for folder in packages if folder != "fleet"), key=lambda name: (order.index(kind_of_room(name)), name))
    rows = [f"| {kind_of_room(folder)} | `{folder}/` | {_said_of(folder)} |" for folder in folders]
    return "\n".join(["| kind | room | holds |", "|---|---|---|", *rows]) + "\n"


def _said_of(folder: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace(":mod:", "")


def alerts_table() -> str:
    rows = [f"| [`{a.name}`](runbook.md#{a.anchor}) | {a.severity} | {a.meaning} |" for a in ALERTS]
    return "\n".join(["| alert | severity | fires when |", "|---|---|---|", *rows]) + "\n"


def metrics_table() -> str:
    rows = [
        f"| `{m.name}` | {'counter' if m.counts else 'gauge'} | {', '.join(('run', *m.labels))} | {unit(m)} | {m.help} |" for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | unit | meaning |", "|---|---|---|---|---|", *rows]) + "\n"


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


# ---- messages of the protocol ------------------------------------------------------------------------------------------------------------

SENTENCE = re.compile(r"(.*?[.?])(\s|$)")
SETS = {"a loss": LOSS, "the end": OVER}
"""Name of what leads to many things -> these."""
WHOSE = {Of.ANYBODY: "", Of.LIVE: "of a rank that lives", Of.IN_VIEW: "of a member of the view"}


def first_sentence(kind: type) -> str:
    found = SENTENCE.match(" ".join((kind.__doc__ or "").split()))
    assert found is not None, f"{kind.__name__} has no sentence"
    return found[1].replace("``", "`").replace("|", "\\|")


def named(kinds: Iterable[type]) -> str:
    left, parts = list(dict.fromkeys(kinds)), []
    for name, whole in SETS.items():
        if set(whole) <= set(left):
            parts.append(f"*{name}*")
            left = [kind for kind in left if kind not in whole]
    return ", ".join([*(f"`{kind.__name__}`" for kind in left), *parts]) or "-"


def events_table(rows: Mapping[type, EventRow]) -> str:
    lines = ["| message | says | counts if it is | handled by | may lead to |", "|---|---|---|---|---|"]
    for kind, row in rows.items():
        handler = f"`{row.do.__module__.rpartition('.')[2]}.{row.do.__name__}`"
        leads_to = named(row.emits) + ("" if row.reconciles else "; nothing is compared")
        lines.append(f"| `{kind.__name__}` | {first_sentence(kind)} | {WHOSE[row.of]} | {handler} | {leads_to} |")
    return "\n".join(lines) + "\n"


def reconciles_table() -> str:
    rows = [f"| `{phase}` | {named(kinds)} |" for phase, kinds in RECONCILES.items()]
    sets = [f"- *{name}*: {', '.join(f'`{kind.__name__}`' for kind in kinds)}" for name, kinds in SETS.items()]
    return "\n".join(["| phase | may come of it |", "|---|---|", *rows, f"| any, in a stop | {named(STOPS)} |", "", *sets]) + "\n"


def instructions_table() -> str:
    rows = [f"| `{kind.__name__}` | {first_sentence(kind)} |" for kind in Instruction.__args__]
    return "\n".join(["| message | says |", "|---|---|", *rows]) + "\n"
