"""Fleet's alerts as Grafana's own alerting has them: one group of rules, made of the table of alerts, and stamped as the dashboards are.

Grafana asks Prometheus for what each rule needs, so a Prometheus without Fleet's rules will do.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dashboards.grafana.boards import FOLDER_UID, STAMP_DIGITS
from dashboards.metrics.rules import ALERTS, RUNBOOK, Alert, recordings

GROUP, EVERY_S = "fleet-alerts", 60
STAMP = "fleet_content"
"""Annotation of each rule: the digest of the group that was pushed."""
LOOKS_BACK_S = 600
ASKED, FIRES = "A", "B"
EXPRESSIONS = "__expr__"
"""Grafana's name for what it computes itself."""


def in_full(expr: str) -> str:
    """Without recorded series: each is written out."""
    for name, recorded in reversed(recordings().items()):  # those of losses are made of those of goodput
        expr = expr.replace(name, f"({recorded})")
    return expr


def _query(alert: Alert, source: str) -> dict[str, Any]:
    """1 for each series for which the alert holds, whatever its value is."""
    model = {"refId": ASKED, "expr": f"({in_full(alert.expr)}) >= bool -Inf", "instant": True, "range": False}
    return {"refId": ASKED, "datasourceUid": source, "relativeTimeRange": {"from": LOOKS_BACK_S, "to": 0}, "model": model}


def _threshold() -> dict[str, Any]:
    conditions = [{"evaluator": {"type": "gt", "params": [0]}}]
    model = {"refId": FIRES, "type": "threshold", "expression": ASKED, "conditions": conditions}
    return {"refId": FIRES, "datasourceUid": EXPRESSIONS, "relativeTimeRange": {"from": 0, "to": 0}, "model": model}


def _rule(alert: Alert, source: str, runbook: str) -> dict[str, Any]:
    return {
        "uid": alert.anchor, "title": alert.name, "orgID": 1, "folderUID": FOLDER_UID, "ruleGroup": GROUP, "condition": FIRES,
        "data": [_query(alert, source), _threshold()], "for": f"{alert.for_s:g}s", "noDataState": "OK", "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.meaning, "runbook_url": f"{runbook}#{alert.anchor}"},
    }  # fmt: skip


def rule_group(source: str, runbook: str = RUNBOOK) -> dict[str, Any]:
    """All alerts, as the body of a request that puts a group in place. ``source``: uid of the Prometheus data source."""
    made = [_rule(alert, source, runbook) for alert in ALERTS]
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:STAMP_DIGITS]
    for rule in made:
        rule["annotations"][STAMP] = digest
    return {"title": GROUP, "folderUid": FOLDER_UID, "interval": EVERY_S, "rules": made}


def stamps_of(group: dict[str, Any]) -> set[str]:
    """The stamp of each rule of a group; empty text for a rule that Fleet did not push."""
    return {(rule.get("annotations") or {}).get(STAMP, "") for rule in group.get("rules") or ()}
