"""What Fleet's ranks give each other in a step, by how they keep their state, and what of it nothing hides.

N ranks; c copies of each chunk beside its owner's, in groups at least as many as there are other groups; P bytes of parameters, S those of
gradients. Bytes are those that one rank receives, and as many it sends.
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
        gathers_s: units that are waited for.
        sums_s: of gradients, what is left when the backward is over; ``hidden_s`` is what travels while it computes.
    """

    gathers_s: float
    sums_s: float
    hidden_s: float

    @property
    def total_s(self) -> float:
        """What a step is longer by."""
        return self.gathers_s + self.sums_s


@law(COUNTED, parameter_bytes=28e9, ranks=8, copies=1, gathers=2)
def gathered_bytes(parameter_bytes: NonNegative, ranks: AtLeastOne, copies: CountOrZero = 1, gathers: CountOrZero = 2) -> float:
    """Of parameters that are kept in chunks, all that a rank does not keep, each time it gathers them: gathers x (N - 1 - c)/N P.

    A unit is gathered for each forward and for each backward, so twice a shard; once a shard, if it is kept from one to the other.
    """
    return gathers * (ranks - 1.0 - minimum(copies, ranks - 1.0)) / ranks * parameter_bytes


@law(COUNTED, gradient_bytes=28e9, ranks=8, copies=1, partials=1)
def summed_bytes(gradient_bytes: NonNegative, ranks: AtLeastOne, copies: CountOrZero = 1, partials: Count = 1) -> float:
    """Of gradients whose sums stay with the owners of their chunks and with c guards: (partials (N - 1) + c)/N S.

    A rank brings as many partial sums as there are blocks of the tree that its shards make up; if gradients leave in the backward, one for
    each of its shards. Where all ranks have the whole sum, c is N - 1.
    """
    return (partials * (ranks - 1.0) + minimum(copies, ranks - 1.0)) / ranks * gradient_bytes


@law(MEASURED, forward_bytes=20e6, backward_bytes=18e6, sum_bytes=40e6, last_bytes=2e6, bytes_per_s=48e6, latency_s=1e-4, backward_s=0.3,
     units=9, leave=True)  # fmt: skip
def exposed_exchange(
    forward_bytes: NonNegative,
    backward_bytes: NonNegative,
    sum_bytes: NonNegative,
    bytes_per_s: Positive,
    latency_s: NonNegative = 0.0,
    backward_s: NonNegative = 0.0,
    units: Count = 1,
    last_bytes: NonNegative = 0.0,
    leave: bool = False,
) -> Exposed:
    """(F + B + S)/beta + 2 alpha a gather; if gradients leave in the backward, less min((u - 1)/u x backward, (S - last)/beta).

    Nothing hides a gather: a module waits for its unit, F in the forwards of u units and B in their backwards, and each is a question and
    an answer. Where gradients are summed behind the step, nothing hides S. A gradient that leaves travels while the backward computes, from
    the end of the first unit on; of the last one, what is around the others, nothing is hidden. A rank brings one after the other, and
    waits for the answer to each, alpha: u gradients and u means. ``latency_s`` is that of a link that is busy.
    """
    asked = where(forward_bytes > 0.0, units, 0.0) + where(backward_bytes > 0.0, units, 0.0)
    gathers_s = (forward_bytes + backward_bytes) / bytes_per_s + 2.0 * asked * latency_s
    rest = where(sum_bytes > last_bytes, sum_bytes - last_bytes, 0.0)
    hidden_s = minimum((units - 1.0) / units * backward_s, rest / bytes_per_s) * float(leave)
    answers_s = latency_s * where(sum_bytes > 0.0, 2.0 * units if leave else 2.0, 0.0)
    sums_s = sum_bytes / bytes_per_s + answers_s - hidden_s
    return Exposed(gathers_s, sums_s, hidden_s)
