"""A run's time as compute, communication and coordination, and its steps by the Fleet Law, with overlap as a term. Pure.

T_step = T_compute / N + T_comm + T_sync - T_overlap. All terms but T_overlap are the ledger's: means over the ranks and the kept steps. So
the law adds up to the time of a rank's step. The exchange behind compute has no category, as the rank computed meanwhile. Ranks measure it
(``actors.rank.telemetry.exchanged``). T_comm includes it, and T_overlap takes it away again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.protocol.records import CATEGORIES, STEP_CODES

STEP_NAMES = tuple(name for code, name in CATEGORIES.items() if code in STEP_CODES)
"""The parts of a step."""
COMPUTE, COMMUNICATION, COORDINATION, OVERLAP = "compute", "communication", "coordination", "overlap"
OF_CATEGORY: Mapping[str, str] = dict.fromkeys(CATEGORIES.values(), COORDINATION) | {
    "compute": COMPUTE,
    "verify": COMPUTE,
    "exposed_comm": COMMUNICATION,
}
"""Category of the ledger -> one of the three. In coordination a rank neither computes nor exchanges gradients: it waits for other ranks, or
for work that keeps many ranks together."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Means over ranks and kept steps, in seconds, but for ``ranks``.

    Attributes:
        ranks: N, the mean world of the steps, each with the weight of its time.
        compute_s: of one rank, T_compute / N.
        exposed_s: exchange that no compute hid: the ledger's ``exposed_comm``.
        straggler_s, data_s, garbage_s: waits for slower ranks and for samples, and collections of garbage: together T_sync.
        overlap_s: exchange that went on while a rank computed; None where no rank has measured it.
        ahead: share of the exchanged bytes that had arrived when a rank was done computing.
    """

    ranks: float
    compute_s: float
    exposed_s: float
    straggler_s: float
    data_s: float
    garbage_s: float
    overlap_s: float | None
    ahead: float | None

    @property
    def parts_s(self) -> tuple[float, ...]:
        """The ledger's parts of a step: computing, exchange that no compute hid, waits for slower ranks and for samples, and collecting
        garbage."""
        return self.compute_s, self.exposed_s, self.straggler_s, self.data_s, self.garbage_s

    @property
    def hidden_s(self) -> float:
        """T_overlap; 0 where no rank has measured it: no overlap is known then."""
        return self.overlap_s or 0.0

    @property
    def comm_s(self) -> float:
        """T_comm: all of the exchange, hidden or not."""
        return self.exposed_s + self.hidden_s

    @property
    def sync_s(self) -> float:
        """T_sync."""
        return self.straggler_s + self.data_s + self.garbage_s

    @property
    def step_s(self) -> float:
        """T_step of the law: the ledger's time of a rank's step. It has no time between two steps."""
        return self.compute_s + self.comm_s + self.sync_s - self.hidden_s

    @property
    def shares(self) -> dict[str, float]:
        """Shares of T_step, by the three and overlap: the three less overlap are 1. No overlap where no rank has measured it."""
        parts = {COMPUTE: self.compute_s, COMMUNICATION: self.comm_s, COORDINATION: self.sync_s}
        return _over(parts if self.overlap_s is None else parts | {OVERLAP: self.overlap_s})

    @property
    def hidden(self) -> float | None:
        """Share of the exchange's time that was hidden; None where that was not measured, or there was no exchange."""
        return None if self.overlap_s is None or self.comm_s <= 0 else self.overlap_s / self.comm_s

    def plain(self) -> dict[str, Any]:
        """For the report's JSON."""
        waits = ("sync_s", "straggler_s", "data_s", "garbage_s")
        own = ("ranks", "compute_s", "comm_s", "exposed_s", *waits, "overlap_s", "step_s", "hidden", "ahead")
        work_s = self.compute_s * self.ranks
        return {"work_s": work_s} | {name: getattr(self, name) for name in own} | {"shares": plain_shares(self.shares)}


def step_law(s: Any) -> StepLaw:
    """The law of a ``LedgerSummary``."""
    compute_s, exposed_s, straggler_s, data_s, garbage_s = (s.categories[name] / max(1, s.rank_steps) for name in STEP_NAMES)
    used = s.tallies.usage.values()
    timed, received = sum(each.exchanges for each in used), sum(each.received_bytes for each in used)
    ahead = sum(each.ahead_bytes for each in used) / received if received else None
    # The hidden exchange is at most the compute. A peer's lead may be longer: this rank may have stood still for a checkpoint.
    overlap_s = min(compute_s, sum(each.hidden_s for each in used) / timed) if timed else None
    return StepLaw(s.ranks, compute_s, exposed_s, straggler_s, data_s, garbage_s, overlap_s, ahead if timed else None)


def run_shares(s: Any) -> dict[str, float]:
    """Shares of all rank-seconds that have a category, as ``StepLaw.shares`` are of a step. Empty before there are any."""
    found, sums = s.step_law, dict.fromkeys((COMPUTE, COMMUNICATION, COORDINATION), 0.0)
    for name, rank_s in s.categories.items():
        sums[OF_CATEGORY[name]] += rank_s
    if found is not None and found.overlap_s is not None:
        sums[OVERLAP] = found.overlap_s * s.kept_s / found.step_s
        sums[COMMUNICATION] += sums[OVERLAP]
    return _over(sums)


def _over(parts: Mapping[str, float]) -> dict[str, float]:
    """Each part over their sum without the overlap; empty where that sum is 0."""
    whole = sum(-value if name == OVERLAP else value for name, value in parts.items())
    return {name: value / whole for name, value in parts.items()} if whole > 0 else {}


def plain_shares(shares: Mapping[str, float]) -> dict[str, float | None]:
    """For JSON: overlap is None where no rank has measured it."""
    return {**shares, OVERLAP: shares.get(OVERLAP)}


def in_shares(shares: Mapping[str, float]) -> str:
    """``compute 60.0% + communication 30.0% + coordination 12.0% - overlap 2.0%``."""
    three = " + ".join(f"{name} {shares[name]:.1%}" for name in (COMPUTE, COMMUNICATION, COORDINATION))
    return f"{three} - overlap {shares[OVERLAP]:.1%}" if OVERLAP in shares else three


def hidden_words(law: StepLaw) -> str:
    """Words on the part of the gradients' exchange that went on while ranks computed."""
    if law.overlap_s is None:
        return f"exchange: {_ms(law.exposed_s)} a step that nothing hid; the part hidden behind computing is not measured"
    share = f", {law.hidden:.1%} of it" if law.hidden is not None else ""
    ahead = f"; {law.ahead:.1%} of its bytes came ahead" if law.ahead is not None else ""
    return f"exchange: {_ms(law.exposed_s)} a step that nothing hid, {_ms(law.overlap_s)} behind computing{share}{ahead}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
