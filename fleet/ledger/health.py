"""A node's health: the results of checks, the measured links, and the node's earlier runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet.protocol.causes import EndWhy, incident
from fleet.protocol.records import ProcessLost, ProcessUp, Record, Resumed, RunEnded, RunStarted
from fleet.protocol.types import Member

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """One figure of a pre-flight check. ``where``: host, or a device; ``unit`` of ``value``, empty for a count."""

    name: str
    where: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A figure and its verdict: ``verdict`` is pass, warn or fail; ``reason`` is empty when it passes."""

    measured: MeasuredFigure
    verdict: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """Something that a node did in a run, by itself and not through chaos.

    ``at_h``: hours on any one clock. ``kind``: lost, hang, straggler, preflight or corruption.
    """

    at_h: float
    kind: str
    run: str


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """The past of one node: (begin_h, end_h) of each stretch in which it trained, and its incidents."""

    node: str
    stretches: tuple[tuple[float, float], ...] = ()
    incidents: tuple[NodeIncident, ...] = ()

    @property
    def hours(self) -> float:
        return sum(end - begin for begin, end in self.stretches)


HOUR_S = 3600.0


def histories(records: Iterable[Record], names: Mapping[str, str]) -> list[NodeHistory]:
    """Training time of each node in one run, and its own incidents, from the journal.

    Three losses are no incident of a node: one that chaos injected, an exception of the user's, and the end of the whole cluster.
    Corruption is none, either, when the loop turned out to be wrong. Ranks that one node loses at a moment are one incident. ``names``: a
    node's id in the journal -> its name from run to run; other nodes are left out.
    """
    run, zero_s = "", 0.0
    nodes: dict[Member, str] = {}
    seen: dict[str, tuple[float, float]] = {}
    incidents: dict[str, dict[tuple[str, int], NodeIncident]] = {}
    for record in records:
        match record:
            case RunStarted(run=run, at_s=at_s, unix_time_s=unix_s) | Resumed(cluster=run, at_s=at_s, unix_time_s=unix_s):
                zero_s = unix_s - at_s
            case ProcessUp(member=member, process=process) if process.node in names:
                name = nodes[member] = names[process.node]
                seen.setdefault(name, (record.at_s, record.at_s))
            case ProcessLost(member=member, fault=None) if member in nodes and (kind := incident(record.cause)):
                known = incidents.setdefault(nodes[member], {})
                known.setdefault((kind, round(record.at_s)), NodeIncident((zero_s + record.at_s) / HOUR_S, kind, run))
            case RunEnded(why=why):
                if why is EndWhy.LOOP_WRONG:  # then the loop is the cause of ranks that differ
                    incidents = {name: _but_corruption(found) for name, found in incidents.items()}
                seen = {name: (begin_s, record.at_s) for name, (begin_s, _) in seen.items()}
    hours = {name: ((zero_s + begin_s) / HOUR_S, (zero_s + end_s) / HOUR_S) for name, (begin_s, end_s) in seen.items()}
    return [NodeHistory(name, (stretch,), tuple(incidents.get(name, {}).values())) for name, stretch in hours.items()]


def _but_corruption(incidents: Mapping[tuple[str, int], NodeIncident]) -> dict[tuple[str, int], NodeIncident]:
    return {key: incident for key, incident in incidents.items() if incident.kind != "corruption"}


@dataclass(frozen=True, slots=True)
class Link:
    """The round trip of a small message in seconds, and the bytes per second each way. ``error``: why there is no figure, a sentence."""

    one: str
    other: str
    round_trip_s: float = math.nan
    there_bytes_per_s: float = math.nan
    back_bytes_per_s: float = math.nan
    error: str = ""

    @property
    def ends(self) -> tuple[str, str]:
        return self.one, self.other
