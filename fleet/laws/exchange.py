"""Bytes that Fleet's ranks exchange in a step, by the way they keep their state, and the time of it that no compute hides.

N ranks; c copies of each chunk beside its owner's, in groups at least as many as there are other groups. P: bytes of parameters, S: bytes
of gradients. All bytes are those that one rank receives; it sends as many.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.laws.law import AtLeastOne, Count, CountOrZero, NonNegative, Positive, law, minimum, where

COUNTED = "counted on the wire of real ranks: tests/fault/test_fsdp_exchange.py; docs/decisions/0018"
MEASURED = "docs/decisions/0018; measured by benchmarks/exposed.py on a link of a set rate"


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds of one rank in a step.

    Attributes:
        gathers_s: the wait for units.
        sums_s: time of the gradients' sums after the backward's end.
        hidden_s: time of gathers and sums while the rank computes.
    """

    gathers_s: float
    sums_s: float
    hidden_s: float

    @property
    def total_s(self) -> float:
        """Seconds by which the exchange makes a step longer."""
        return self.gathers_s + self.sums_s


@law(COUNTED, parameter_bytes=28e9, ranks=8, copies=1, gathers=2)
def gathered_bytes(parameter_bytes: NonNegative, ranks: AtLeastOne, copies: CountOrZero = 1, gathers: CountOrZero = 2) -> float:
    """Bytes of parameters in chunks that a rank gathers: all that it does not keep, each time. gathers x (N - 1 - c)/N P.

    A rank gathers a unit for each forward and for each backward, so twice a shard. It gathers it once a shard if it keeps it in between.
    """
    return gathers * (ranks - 1.0 - minimum(copies, ranks - 1.0)) / ranks * parameter_bytes


@law(COUNTED, gradient_bytes=28e9, ranks=8, copies=1, partials=1, adders=1)
def summed_bytes(
    gradient_bytes: NonNegative, ranks: AtLeastOne, copies: CountOrZero = 1, partials: Count = 1, adders: Count = 1
) -> float:  # fmt: skip
    """Bytes of gradients whose sums stay with the owners of their chunks and with c guards: (partials a (N - 1) + c + 1 - a)/N S.

    A rank brings one partial sum for each block of the tree that its shards make up. If gradients leave in the backward, it brings one for
    each of its shards. Where all ranks have the whole sum, c is N - 1. The owner of a chunk and its guards add it up, a ranks in all. The
    owner sends the mean to the other guards.
    """
    guards = minimum(copies, ranks - 1.0)
    adding = minimum(adders, 1.0 + guards)
    return (partials * adding * (ranks - 1.0) + guards + 1.0 - adding) / ranks * gradient_bytes


@law(MEASURED, forward_bytes=20e6, backward_bytes=18e6, sum_bytes=40e6, last_bytes=2e6, bytes_per_s=48e6, latency_s=1e-4, forward_s=0.15,
     backward_s=0.3, units=9, leave=True)  # fmt: skip
def exposed_exchange(
    forward_bytes: NonNegative,
    backward_bytes: NonNegative,
    sum_bytes: NonNegative,
    bytes_per_s: Positive,
    latency_s: NonNegative = 0.0,
    forward_s: NonNegative = 0.0,
    backward_s: NonNegative = 0.0,
    units: Count = 1,
    shards: Count = 1,
    last_bytes: NonNegative = 0.0,
    leave: bool = False,
) -> Exposed:
    """(F + B + S)/beta + 2 alpha a gather, less the part of each that travels while the rank computes.

    A module waits for its unit: F in the forwards of u units, B in their backwards. Each gather is a request and an answer. While a unit
    computes, the next one is gathered. In each of n shards the first unit of a forward and of a backward is not hidden. The others are, as
    long as that computes: min((u - n)/u F/beta, (u - n)/u forward), and likewise B.

    Where ranks sum gradients after the backward, no compute hides S. A gradient that leaves in the backward travels while it computes,
    from the end of the first unit on. Gathers take a part of that time: min((u - 1)/u backward - hidden gathers, (S - last)/beta). The
    last unit, which has the parameters around the others, is not hidden at all. A rank brings one gradient after the other, and waits for
    the answer to each, alpha: u gradients and u means. ``latency_s`` is that of a busy link. ``forward_s`` and ``backward_s`` are those
    of all shards.
    """
    later = (units - minimum(shards, units)) / units

    def gathered(gathered_bytes: float, computes_s: float) -> tuple[float, float]:
        """(all, the hidden part)."""
        whole_s = gathered_bytes / bytes_per_s + where(gathered_bytes > 0.0, 2.0 * units * latency_s, 0.0)
        return whole_s, minimum(later * whole_s, later * computes_s)

    (ahead_s, ahead_hidden_s), (back_s, back_hidden_s) = gathered(forward_bytes, forward_s), gathered(backward_bytes, backward_s)
    rest = where(sum_bytes > last_bytes, sum_bytes - last_bytes, 0.0)
    free_s = (units - 1.0) / units * backward_s - back_hidden_s
    hidden_s = minimum(where(free_s > 0.0, free_s, 0.0), rest / bytes_per_s) * float(leave)
    answers_s = latency_s * where(sum_bytes > 0.0, 2.0 * units if leave else 2.0, 0.0)
    sums_s = sum_bytes / bytes_per_s + answers_s - hidden_s
    return Exposed(ahead_s + back_s - ahead_hidden_s - back_hidden_s, sums_s, hidden_s + ahead_hidden_s + back_hidden_s)
