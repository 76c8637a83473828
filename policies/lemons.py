"""Nodes that are kept out of a run because of their incidents in earlier runs.

Faults of a node are a Poisson process with an unknown rate. The prior of the rate is Gamma(a, a / r), with r the fleet's rate and a = 1/4.
It has a long tail: one node in 20 fails five times as often as the mean. After ``n`` faults in ``t`` hours the rate is Gamma(a + n, a / r +
t) (conjugate prior; Gelman et al., Bayesian Data Analysis, 2.6). A node is a *lemon* when its rate is at least ``factor`` times
that of the fleet. It is kept out when that is nearly certain, and after at least ``least`` faults, since one fault can be bad luck. Old
faults, and old hours, count less and less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import gammaincc

from fleet.errors import ConfigError
from fleet.ledger.health import NodeHistory, NodeIncident
from fleet.protocol.decisions import Decision, Lemon

WEIGHTS = {"lost": 1.0, "hang": 1.0, "straggler": 0.5, "preflight": 1.0, "corruption": 3.0}
"""The number of faults that an incident counts for. A neighbour may cause a straggler; only the rank itself loses a bitwise vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemons:
    """Keeps out repeat offenders. Meta's research clusters saw about 6.5 faults a 1,000 node-days (arXiv 2410.21680).

    Attributes:
        fleet_rate_per_h: faults of an ordinary node an hour.
        factor: a lemon fails at least this many times as often.
        certainty: from this posterior probability of that on, a node is kept out.
        least: least number of weighted faults.
        half_life_h: age at which a fault, or an hour without one, counts half.
        share_max: at most this share of the nodes is kept out, the worst first: when many are bad, the cause is elsewhere.
        prior_faults: the faults that the prior is worth.
    """

    fleet_rate_per_h: float = 6.5 / 1000 / 24
    factor: float = 5.0
    certainty: float = 0.95
    least: float = 2.0
    half_life_h: float = 60 * 24.0
    share_max: float = 0.1
    prior_faults: float = 0.25

    def judge(self, history: NodeHistory, now_h: float) -> Decision:
        """Action ``admit`` or ``keep_out``. Raises ConfigError for an incident of a kind that has no weight."""
        faults = sum(self._weight(incident) * self._fade(now_h - incident.at_h) for incident in history.incidents)
        hours = sum(self._faded_hours(now_h - end, now_h - begin) for begin, end in history.stretches)
        certain = self.probability(faults, hours)
        rate = (self.prior_faults + faults) / (self.prior_faults / self.fleet_rate_per_h + hours)
        runs = float(len({incident.run for incident in history.incidents}))
        lemon = Lemon(faults, hours, certain, rate / self.fleet_rate_per_h, self.factor, self.certainty, runs)
        words = f"{faults:.2g} faults in {hours:.4g} h: a lemon with probability {certain:.3f}"
        if faults < self.least:
            return Decision("admit", f"{words}; fewer than {self.least:g} faults are bad luck", lemon)
        if certain < self.certainty:
            return Decision("admit", f"{words}, below {self.certainty:g}", lemon)
        return Decision(
            "keep_out", f"{words}, at least {self.certainty:g}: it fails {rate / self.fleet_rate_per_h:.3g} times as often", lemon
        )

    def probability(self, faults: float, hours: float) -> float:
        """Posterior probability that the node's rate is at least ``factor`` times the fleet's."""
        shape, exposure = self.prior_faults + faults, self.prior_faults / self.fleet_rate_per_h + hours
        return float(gammaincc(shape, self.factor * self.fleet_rate_per_h * exposure))

    def keep_out(self, histories: Sequence[NodeHistory], now_h: float) -> dict[str, Decision]:
        """Node -> decision for each node that stays out; the most certain first, no more than ``share_max`` of all."""
        judged = [(self.judge(history, now_h), history.node) for history in histories]
        bad = [(-_certain(decision), node, decision) for decision, node in judged if decision.action == "keep_out"]
        room = math.floor(self.share_max * len(histories))
        return {node: decision for _, node, decision in sorted(bad, key=lambda item: item[:2])[:room]}

    def _weight(self, incident: NodeIncident) -> float:
        if incident.kind not in WEIGHTS:
            raise ConfigError("lemons.kind", incident.kind, "has no weight", f"Known: {', '.join(WEIGHTS)}.")
        return WEIGHTS[incident.kind]

    def _fade(self, age_h: float) -> float:
        return math.exp2(-max(age_h, 0.0) / self.half_life_h)

    def _faded_hours(self, youngest_h: float, oldest_h: float) -> float:
        """Integral of the fading over the ages of a stretch."""
        return self.half_life_h / math.log(2) * (self._fade(youngest_h) - self._fade(oldest_h))


def _certain(decision: Decision) -> float:
    return decision.payload.lemon_probability if isinstance(decision.payload, Lemon) else 1.0
