"""The meaning of a pre-flight check's figures: whether a node may join a run with them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from fleet.ledger.health import FAIL, PASS, WARN, HealthCheck, MeasuredFigure
from fleet.protocol.decisions import Decision, Figures

MUST_BE_ZERO = {
    "matmul_wrong": "the same product gave different results: the device computes wrongly",
    "memory_wrong": "memory did not hold the bytes that were written to it",
    "gather_wrong": "the bytes of a peer did not arrive as they were sent",
    "ecc_uncorrected": "uncorrected memory errors since the driver was loaded",
    "remapped_failed": "a row of memory could not be remapped: the device is to be replaced",
    "xid_fatal": "the driver has reported errors that end processes (XID)",
}
SHOULD_BE_ZERO = {
    "remapped_pending": "rows of memory wait for a reset of the device to be remapped",
    "throttled": "the device's clock is held down by heat or power",
    "xid": "the driver has reported errors (XID)",
}
AT_LEAST = {"matmul": 0.7, "memory": 0.7, "gather": 0.5}
"""Least share of the median of all devices of one kind."""
HOT_C = 90.0

FATAL_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Double-bit ECC, row remapping, NVLink, fallen off the bus, GSP and uncontained errors (NVIDIA, XID Errors)."""


def judge(figures: Sequence[MeasuredFigure]) -> list[HealthCheck]:
    """One check for each figure, in order. Speeds are compared with the median of the same figure elsewhere, where there are three."""
    speeds: dict[str, list[float]] = {}
    for one in figures:
        speeds.setdefault(one.name, []).append(one.value)
    return [_judged(one, speeds[one.name]) for one in figures]


def _judged(one: MeasuredFigure, alike: Sequence[float]) -> HealthCheck:
    if one.name in MUST_BE_ZERO and one.value:
        return HealthCheck(one, FAIL, MUST_BE_ZERO[one.name])
    if one.name in SHOULD_BE_ZERO and one.value:
        return HealthCheck(one, WARN, SHOULD_BE_ZERO[one.name])
    if one.name == "temperature" and one.value >= HOT_C:
        return HealthCheck(one, WARN, f"{HOT_C:g} C or more: the device will slow down")
    if one.name in AT_LEAST and len(alike) >= 3:
        typical = statistics.median(alike)
        if one.value < AT_LEAST[one.name] * typical:
            return HealthCheck(one, FAIL, f"{one.value / typical:.0%} of the {typical:.3g} {one.unit} that is the median of such devices")
    return HealthCheck(one, PASS)


def admit(checks: Iterable[HealthCheck]) -> Decision:
    """Action ``admit`` or ``keep_out``: a node with a failed check joins no view; a warning has no effect but a message."""
    checks = list(checks)
    failed = [check for check in checks if check.verdict == FAIL]
    checked = Figures({"checks": float(len(checks)), "failed": float(len(failed))})
    if not failed:
        return Decision("admit", "no check failed", checked)
    what = "; ".join(f"{check.measured.name} on {check.measured.where}: {check.reason}" for check in failed)
    return Decision("keep_out", what, checked)
