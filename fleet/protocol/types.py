"""The nouns of the protocol. Frozen, standard library only; every other module speaks in these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fleet.protocol.codec import LEFT_OUT
from fleet.protocol.decisions import Decision

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of batch shards, by view rank."""
Coordinate = tuple[tuple[str, int], ...]
"""Where a rank is among those that compute a shard together: names and numbers, ``(("tensor", 1),)``. Empty: each computes it alone."""


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One process that fills a slot: ``(slot, incarnation)``. A replacement has the next incarnation.

    ``coordinate`` is known of the members of a view. It is the same process with or without: members are compared by the other two.
    """

    slot: int
    incarnation: int
    coordinate: Coordinate = field(default=(), compare=False, metadata=LEFT_OUT)

    def __str__(self) -> str:
        return f"{self.slot}.{self.incarnation}"

    @property
    def name(self) -> str:
        """As people read it: ``2``, and ``2.1`` for the second process of slot 2."""
        return str(self) if self.incarnation else str(self.slot)


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """Which training state a rank holds: ``step`` committed steps of history ``history``. Ordered by (history, step)."""

    history: int
    step: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be signalled safely: pids are reused, the pair (pid, start time) is not.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    """

    node: str
    pid: int
    start_ticks: int


def outnumbered(newcomers: int, members: int) -> bool:
    """Whether newcomers are more than half: the others would take longer for a step alone than to wait for them."""
    return 2 * newcomers > members


def columns(members: Sequence[Member]) -> dict[Coordinate, tuple[int, ...]]:
    """By coordinate, the places of the members that have it, in order."""
    found: dict[Coordinate, list[int]] = {}
    for place, member in enumerate(members):
        found.setdefault(member.coordinate, []).append(place)
    return {coordinate: tuple(places) for coordinate, places in found.items()}


def assigned_by_column(members: Sequence[Member], assign: Callable[[Sequence[int]], Ranges]) -> Ranges:
    """By view rank, the shards of each: all of them are assigned within each column, by ``assign``, to the members at these places."""
    found = {place: span for places in columns(members).values() for place, span in zip(places, assign(places), strict=True)}
    return tuple(found[place] for place in range(len(members)))


@dataclass(frozen=True, slots=True)
class Column:
    """The members of a view that have one coordinate: what "the ranks" are to all that assigns shards, sums, owners and guards.

    What it has is that of the view for these members alone, in the view's order: a rank here is a place among them. ``donor`` is the view's
    where that is one of them, else the first that receives nothing.
    """

    generation: int
    members: tuple[Member, ...]
    ranges: Ranges
    donor: int
    receivers: tuple[int, ...]

    def rank_of(self, member: Member) -> int:
        """Place of ``member``, or -1."""
        return self.members.index(member) if member in self.members else -1

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks that compute nothing in the view's first step, as the state is on its way to them; none if they are more than half."""
        return () if outnumbered(len(self.receivers), len(self.members)) else self.receivers

    @property
    def giver(self) -> int:
        """The donor where it gives its state to somebody, beside the view's first step; else -1."""
        return self.donor if self.receivers else -1


@dataclass(frozen=True, slots=True)
class View:
    """The ranks that train together, and the state that they train.

    ``members`` are in order of view rank. ``ranges[r]`` is the half-open range of batch shards that view rank ``r`` computes; those of a
    column tile ``0..shards``. ``donor`` is the view rank that gives its state to the view ranks in ``receivers``. With ``checkpoint`` set
    the donor first loads that durable checkpoint; ``state`` is what every member holds once formed.
    ``store`` is the ``host:port`` of the key-value store on which the process group meets. ``copies`` says where each view rank sends
    redundant copies of its part: addresses of memories on other nodes; () when there is nowhere to send them.
    """

    generation: int
    members: tuple[Member, ...]
    ranges: Ranges
    donor: int
    receivers: tuple[int, ...]
    state: StateId
    store: str
    checkpoint: str | None = None
    copies: tuple[tuple[str, ...], ...] = ()

    def rank_of(self, member: Member) -> int:
        """View rank of ``member``, or -1."""
        return self.members.index(member) if member in self.members else -1

    def column_of(self, member: Member) -> Column:
        """That of one of the members."""
        ranks = columns(self.members)[self.members[self.members.index(member)].coordinate]
        members, ranges = tuple(self.members[rank] for rank in ranks), tuple(self.ranges[rank] for rank in ranks)
        receivers = tuple(place for place, rank in enumerate(ranks) if rank in self.receivers)
        donor = min(range(len(ranks)), key=lambda place: (ranks[place] != self.donor, place in receivers))
        return Column(self.generation, members, ranges, donor, receivers)


@dataclass(frozen=True, slots=True)
class ViewDelta:
    """A view relative to the view of generation ``base``: what travels to nodes that have seen ``base``. ``view`` has no members."""

    base: int
    removed: tuple[int, ...]
    added: tuple[tuple[int, Member], ...]
    view: View


def _in_order(before: tuple[Member, ...], after: tuple[Member, ...]) -> bool:
    """Whether those that are in both come in the same order in both."""
    both = set(before) & set(after)
    return [member for member in before if member in both] == [member for member in after if member in both]


def view_delta(base: View, view: View) -> ViewDelta:
    """The delta that turns ``base`` into ``view``; size is O(members changed + ranks' shard ranges), of all where they change places."""
    keep = set(view.members)
    known = set(base.members) if _in_order(base.members, view.members) else set[Member]()
    removed = tuple(i for i, member in enumerate(base.members) if member not in keep or not known)
    added = tuple((i, member) for i, member in enumerate(view.members) if member not in known)
    return ViewDelta(base.generation, removed, added, replace(view, members=()))


def apply_delta(base: View, delta: ViewDelta) -> View:
    """Inverse of :func:`view_delta`. Members that stay keep their relative order."""
    if base.generation != delta.base:
        raise ValueError(f"delta is relative to generation {delta.base}, this is generation {base.generation}")
    gone = set(delta.removed)
    members = [member for i, member in enumerate(base.members) if i not in gone]
    for index, member in delta.added:
        members.insert(index, member)
    return replace(delta.view, members=tuple(members))


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's file of a durable checkpoint. ``tensors`` are the indices of the state's tensors that it holds.

    ``sha256`` is the store's digest of the file, ``layout`` where in it each tensor lies; both mean something to the store alone.
    """

    name: str
    bytes: int
    sha256: str
    tensors: tuple[int, ...]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """What one node's memory holds of a checkpoint: the numbers of its parts. ``count`` of them make it up; 0 while it is not committed."""

    checkpoint: str
    state: StateId
    parts: tuple[int, ...]
    count: int


FaultPhase = Literal["planned", "announced", "aimed", "executed", "suppressed", "healed"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned misfortune.

    ``at_s`` counts from the run's start. ``component`` is a row of the fault catalogue, ``kind`` one of ``fleet.protocol.fault_kinds``.
    ``slot`` or ``node`` names the target (node as an index among the cluster's worker nodes); what follows belongs to kinds that have it
    as a parameter: ``severity`` (2.0 = half speed), ``loss`` (share of packets), ``delay_s`` (each way), ``bytes_per_s`` (0: no limit),
    ``jitter_s`` (by which packets differ).
    """

    id: str
    at_s: float
    component: str
    kind: str
    slot: int | None = None
    node: int | None = None
    duration_s: float = 0.0
    severity: float = 1.0
    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    jitter_s: float = 0.0


ENDS = ("T_max", "total_steps")
"""What a scheduler calls the step behind which its rate is not what anybody means."""


@dataclass(frozen=True, slots=True)
class Build:
    """How a rank has built what it trains, as its first step, which is not committed, shows it: what a resume must find again.

    Attributes:
        optimizers: their classes, by the names that they are tracked by.
        data: class of the data set that the step was read from; empty where it was read from none.
        samples, batch_size, data_sha256: see ``DataRead``; of the digest the class is no part.
        schedules: where a scheduler says when it ends: what says so (``CosineAnnealingLR.T_max``), and the step.
        total_steps: of the loop.
    """

    optimizers: tuple[str, ...] = ()
    data: str = ""
    samples: int = 0
    batch_size: int = 0
    data_sha256: str = ""
    schedules: tuple[tuple[str, int], ...] = ()
    total_steps: int = 0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a node agent sees of one rank: where it is, and how long ago it last moved or beat, in seconds.

    ``stepping`` is False in a call of Fleet's that may take long; ``between``: it is behind a commit, in what the loop body does there.
    """

    member: Member
    generation: int
    state: StateId
    beat_age_s: float
    progress_age_s: float
    stepping: bool = True
    between: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live rank that could be in the next view. ``state`` is None when it holds none; ``in_view``: it is in the present view.

    ``domain``: the domain path of its node, see :mod:`fleet.protocol.domains`; "" when it is not known. ``view_rank``: its rank in the
    present view, or -1.
    """

    member: Member
    node: str
    state: StateId | None
    dirty: bool
    in_view: bool
    domain: str = ""
    view_rank: int = -1


@dataclass(frozen=True, slots=True)
class Situation:
    """What a recovery policy looks at. ``since_s``: when the run last had a working view, or when it started.

    ``replicated``: each rank holds all of the state. ``replica_size``: so many view ranks, one after the other, are a group.
    """

    candidates: tuple[Candidate, ...]
    world: int
    min_ranks: int
    since_s: float
    starting: int
    checkpoint: str | None
    replicated: bool = True
    replica_size: int = 1


@dataclass(frozen=True, slots=True)
class Loss:
    """A process that ended. ``injected`` ones were put in by chaos and count towards no budget. ``step`` is where it was, -1 before
    training; ``committed`` is the run's last committed step at the time. ``domain``: the path of its node, where it was lost with that and
    the run says what fails together."""

    slot: int
    node: str
    at_s: float
    step: int
    shard: int
    injected: bool
    detail: str
    committed: int = 0
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank holds or has computed, when ranks differ in what should be the same bits on all of them.

    Attributes:
        what: names it: ``weights``, or ``shard 5``.
        generation, state: where the difference was found; the step that belongs to it is not committed.
        digest: a hash of it, in hex.
        cleared: the newest state of which all that it depends on was compared, and was alike.
        witness: it may vote. A rank that was given its state in this view has nothing to add to its donor's word, until all were found
            alike there once.
    """

    what: str
    generation: int
    state: StateId
    digest: str
    cleared: StateId
    witness: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """A corruption policy's answer: the decision, and the members that are wrong. Action ``carry_on``, ``evict``, ``retry`` or ``stop``."""

    decision: Decision
    guilty: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Formation:
    """A recovery policy's answer: the decision, and the members it means, in the order of view ranks."""

    decision: Decision
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set. ``modified_s``: when it was changed last, by the calendar; 0 where its store does not say.

    ``digest`` is ``sha256:`` and the digest of its bytes, or ``etag:`` and what its store says of them; empty: nobody knows yet.
    ``layout``: of ``strided`` where the first sample begins, bytes from one to the next, and bytes of each; of ``groups`` for each of them
    its number of samples, their weight in bytes, and where it begins and ends; else empty.
    """

    path: str
    size_bytes: int
    samples: int
    modified_s: float = 0.0
    digest: str = ""
    layout: tuple[int, ...] = ()
