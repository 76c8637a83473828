"""The state of a node's health: what a check measured, and what that means."""

from __future__ import annotations

from dataclasses import dataclass

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of a pre-flight check. ``where``: host, or a device; ``unit`` of ``value``, empty for a count."""

    name: str
    where: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and what it means: ``verdict`` is pass, warn or fail; ``reason`` is empty when it passes."""

    measured: Measured
    verdict: str
    reason: str = ""
