"""The ranks' measured step times, and the straggler policy's input and answer. Frozen, standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.decisions import Decision
from fleet.protocol.types import Member, Ranges, View

ACTIONS = ("rebalance", "replace", "evict")
"""The policy's answers that change the view."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's own time in some of its committed steps. All sequences have one entry a step.

    ``compute_us`` and ``data_us``: the time of all its ``shards``. ``network_us``: the exchange, from the moment at which the last peer was
    there. ``fixed_us``: the work of a step that does not depend on shards. None of these contains the wait for peers. ``waited_us``: the
    time in which the rank was ready to run and had no core, as a part of the times above; empty: not known.
    """

    member: Member
    steps: tuple[int, ...]
    shards: tuple[int, ...]
    compute_us: tuple[int, ...]
    data_us: tuple[int, ...]
    network_us: tuple[int, ...]
    fixed_us: tuple[int, ...]
    waited_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTime:
    """One rank in one step, in seconds; see :class:`RankTimes`."""

    shards: int
    compute_s: float
    data_s: float
    network_s: float
    fixed_s: float
    waited_s: float = 0.0

    @property
    def own_s(self) -> float:
        """The rank's time without the wait for peers."""
        return self.compute_s + self.data_s + self.network_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Timings:
    """Consecutive measured steps of one view: ``rows[r]`` is view rank ``r``, a column a step. None: not measured."""

    generation: int
    steps: tuple[int, ...]
    members: tuple[Member, ...]
    rows: tuple[tuple[StepTime | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """A straggler policy's input beside the times.

    Attributes:
        view: the view that runs; ``nodes`` are those of its members.
        shards: batch shards of a step.
        spares: (member, node) of each rank that stands by.
        steps_left: steps that the run still has, infinite when it is not known.
        changes: view changes that the policy made within its window.
        losses_per_s: rate of lost ranks so far: these faults would need a spare.
    """

    view: View
    nodes: tuple[str, ...]
    shards: int
    spares: tuple[tuple[Member, str], ...]
    steps_left: float
    changes: int
    losses_per_s: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """A straggler policy's answer.

    ``findings`` are its new findings, for the journal: ranks that are accused, cleared, or not certain. ``decision`` is ``tolerate``,
    ``rebalance`` (to ``ranges``, by ``speeds`` of the members below full speed), ``replace`` or ``evict`` (the ``members`` go); None when
    there is nothing to decide.
    """

    findings: tuple[Decision, ...] = ()
    decision: Decision | None = None
    ranges: Ranges = ()
    speeds: tuple[tuple[Member, float], ...] = ()
    members: tuple[Member, ...] = ()
