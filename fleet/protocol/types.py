"""The nouns of the protocol, for every other module. Frozen, standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fleet.protocol.codec import LEFT_OUT
from fleet.protocol.decisions import Decision

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of batch shards, by view rank."""
Coordinate = tuple[tuple[str, int], ...]
"""A rank's place among ranks that compute a shard together: names and numbers, ``(("tensor", 1),)``. Empty: each rank computes alone."""


STAGE = "stage"
"""The axis whose ranks have layers one after the other."""


def stage_of(coordinate: Coordinate) -> int:
    """The stage of the model; 0 where it is not cut."""
    return dict(coordinate).get(STAGE, 0)


def in_words(coordinate: Coordinate) -> str:
    """A coordinate for people: ``tensor=1``."""
    return ", ".join(f"{axis}={place}" for axis, place in coordinate)


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One process that fills a slot: ``(slot, incarnation)``. A replacement has the next incarnation.

    ``coordinate`` is known of the members of a view. Members are compared without it, by slot and incarnation.
    """

    slot: int
    incarnation: int
    coordinate: Coordinate = field(default=(), compare=False, metadata=LEFT_OUT)

    def __str__(self) -> str:
        return f"{self.slot}.{self.incarnation}"

    @property
    def name(self) -> str:
        """The name for people: ``2``, and ``2.1`` for the second process of slot 2."""
        return str(self) if self.incarnation else str(self.slot)


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """A training state: ``step`` committed steps of history ``history``. Ordered by (history, step)."""

    history: int
    step: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be signalled safely: a pid is used again, the pair (pid, start time) is not.

    ``start_ticks`` is field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    """

    node: str
    pid: int
    start_ticks: int


def outnumbered(newcomers: int, members: int) -> bool:
    """Whether newcomers are more than half. Then a step by the other ranks alone would take longer than the wait for the newcomers."""
    return 2 * newcomers > members


def columns(members: Sequence[Member]) -> dict[Coordinate, tuple[int, ...]]:
    """By coordinate, the places of its members, in order."""
    found: dict[Coordinate, list[int]] = {}
    for place, member in enumerate(members):
        found.setdefault(member.coordinate, []).append(place)
    return {coordinate: tuple(places) for coordinate, places in found.items()}


def by_stage(members: Sequence[Member]) -> list[dict[Coordinate, tuple[int, ...]]]:
    """The :func:`columns` of each stage, in the order of stages. One for all where the model is not cut into stages."""
    found: dict[int, dict[Coordinate, tuple[int, ...]]] = {}
    for coordinate, places in columns(members).items():
        found.setdefault(stage_of(coordinate), {})[coordinate] = places
    return [found[stage] for stage in sorted(found)]


def groups(members: Sequence[Member]) -> list[tuple[int, ...]]:
    """The places of the members that compute a unit together: of each stage the first member of each column, then the second, and so on.

    A stage may have more groups than another. Raises ValueError: its own columns differ in length, so that some group lacks a member.
    """
    return [group for stage in by_stage(members) for group in zip(*stage.values(), strict=True)]


def assigned_by_group(members: Sequence[Member], assign: Callable[[Sequence[tuple[int, ...]]], Ranges]) -> Ranges:
    """By view rank, its shards: those of its group. ``assign`` assigns all shards to the groups of a stage: the places of their members."""
    found: dict[int, tuple[int, int]] = {}
    for stage in by_stage(members):
        together = list(zip(*stage.values(), strict=True))
        found |= {place: span for group, span in zip(together, assign(together), strict=True) for place in group}
    return tuple(found[place] for place in range(len(members)))


def shards_of(members: Sequence[Member], computing: int, shards: int, assign: Callable[[Sequence[tuple[int, ...]]], Ranges]) -> Ranges:
    """By view rank, its shards: the first ``computing`` members have all, by :func:`assigned_by_group`, and spares behind them none."""
    spares = len(members) - len(members[:computing])
    return assigned_by_group(members[:computing], assign) + ((shards, shards),) * spares


@dataclass(frozen=True, slots=True)
class Column:
    """The members of a view with one coordinate. Shards, sums, owners and guards are assigned among these ranks alone.

    The fields are the view's, for these members alone and in the view's order. A rank here is a place among them. ``donor`` is the view's
    donor if that is one of them, else the first member that receives no state. ``waiting``: ranks whose group has a receiver, of any
    column of the stage.
    """

    generation: int
    members: tuple[Member, ...]
    ranges: Ranges
    donor: int
    receivers: tuple[int, ...]
    waiting: tuple[int, ...]

    def rank_of(self, member: Member) -> int:
        """Place of ``member``, or -1."""
        return self.members.index(member) if member in self.members else -1

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks that compute no shard of the view's first step, as their group's state is on its way. Empty if they are more than half."""
        return () if outnumbered(len(self.waiting), len(self.members)) else self.waiting

    @property
    def giver(self) -> int:
        """The donor, if it gives its state to receivers beside the view's first step; else -1.

        Ranks that compute together need the same shards, and each column has other receivers: there it is -1, too.
        """
        return self.donor if self.receivers and not self.members[self.donor].coordinate else -1


@dataclass(frozen=True, slots=True)
class View:
    """The ranks that train together, and the state that they train.

    ``members`` are in order of view rank. ``ranges[r]`` is the half-open range of batch shards that view rank ``r`` computes; those of a
    column tile ``0..shards``. ``donor`` is the view rank that gives its state to the view ranks in ``receivers``. With ``checkpoint`` set
    the donor first loads that durable checkpoint. ``state`` is the state of every member once the view has formed.
    ``store`` is the ``host:port`` of the key-value store on which the process group meets. ``copies``: by view rank, the addresses of
    memories on other nodes for redundant copies of its part; () when there are none.
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

    @property
    def computing(self) -> tuple[int, ...]:
        """The view ranks that compute shards."""
        return tuple(rank for rank, (first, end) in enumerate(self.ranges) if first < end)

    @property
    def spares(self) -> tuple[Member, ...]:
        """The members that compute no shard: spares that keep a part of a sharded state."""
        return tuple(member for member, (first, end) in zip(self.members, self.ranges, strict=True) if first == end)

    def group_of(self, member: Member) -> tuple[int, ...]:
        """The view ranks that compute shards together with ``member``, which is in the view, in the order of their coordinates."""
        rank = self.members.index(member)
        return next(group for group in groups(self.members) if rank in group)

    def column_of(self, member: Member) -> Column:
        """The column of ``member``, which is in the view."""
        ranks = columns(self.members)[self.members[self.members.index(member)].coordinate]
        members, ranges = tuple(self.members[rank] for rank in ranks), tuple(self.ranges[rank] for rank in ranks)
        receiving = frozenset(self.receivers)
        receivers = tuple(place for place, rank in enumerate(ranks) if rank in receiving)
        mine = frozenset(ranks)
        together = [group for group in groups(self.members) if not mine.isdisjoint(group)]
        waiting = tuple(place for place, group in enumerate(together) if not receiving.isdisjoint(group))
        donor = min(range(len(ranks)), key=lambda place: (ranks[place] != self.donor, ranks[place] in receiving))
        return Column(self.generation, members, ranges, donor, receivers, waiting)


def rank_of_those_behind(view: View, began: int, step: int, rank: int) -> int:
    """The number of view rank ``rank`` among the ranks that have taken ``step``.

    The ranks entered the view at step ``began``, which its newcomers have not taken. ``view.state`` may be older, as the view was published
    before.
    """
    return rank - sum(each < rank for each in view.receivers) if began == step else rank


@dataclass(frozen=True, slots=True)
class ViewDelta:
    """A view relative to the view of generation ``base``, for nodes that have seen ``base``. ``view`` has no members."""

    base: int
    removed: tuple[int, ...]
    added: tuple[tuple[int, Member], ...]
    view: View


def _in_order(before: tuple[Member, ...], after: tuple[Member, ...]) -> bool:
    """Whether the members that are in both have the same order in both."""
    both = set(before) & set(after)
    return [member for member in before if member in both] == [member for member in after if member in both]


def view_delta(base: View, view: View) -> ViewDelta:
    """The delta from ``base`` to ``view``. Its size is O(changed members + shard ranges), or O(all members) where members change places."""
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
    """One rank's file of a durable checkpoint. ``tensors`` are the indices of the state's tensors in it.

    ``sha256`` is the store's digest of the file, ``layout`` the place of each tensor in it. The store alone reads both.
    """

    name: str
    bytes: int
    sha256: str
    tensors: tuple[int, ...]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """The parts of a checkpoint in one node's memory, by number. The checkpoint has ``count`` parts; 0: it is not committed yet."""

    checkpoint: str
    state: StateId
    parts: tuple[int, ...]
    count: int


FaultPhase = Literal["planned", "announced", "aimed", "executed", "suppressed", "healed"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    ``at_s`` counts from the run's start. ``component`` is a row of the fault catalogue, ``kind`` one of ``fleet.protocol.fault_kinds``.
    ``slot`` or ``node`` names the target (node as an index among the cluster's worker nodes). The other fields are parameters of some
    kinds: ``severity`` (2.0 = half speed), ``loss`` (share of packets), ``delay_s`` (each way), ``bytes_per_s`` (0: no limit), ``jitter_s``
    (by which delays vary).
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
"""Names of a scheduler's argument for its last step. Behind that step the learning rate is not the intended one."""


@dataclass(frozen=True, slots=True)
class Build:
    """A rank's model, optimizers and data, as its rehearsed step shows them. A resume must find the same.

    Attributes:
        optimizers: names under which they are tracked, with their classes.
        data: class of the data set that the step read; empty where it read none.
        samples, batch_size, data_sha256: see ``DataRead``. This digest does not cover the class.
        schedules: by scheduler with a last step, the argument that names it (``CosineAnnealingLR.T_max``), and the step.
        total_steps: steps of the loop.
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
    """An agent's view of one rank: its generation and state, and the seconds since it last moved and beat.

    ``stepping`` is False in a call of Fleet's that may take long. ``between``: the loop body runs its own code behind a commit. ``moving``:
    chunks of a sharded state are still on their way to their ranks.
    """

    member: Member
    generation: int
    state: StateId
    beat_age_s: float
    progress_age_s: float
    stepping: bool = True
    between: bool = False
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live rank that could be in the next view. ``state`` is None when it holds none; ``in_view``: it is in the present view.

    ``domain``: the domain path of its node, see :mod:`fleet.protocol.domains`; "" when it is not known. ``view_rank``: its rank in the
    present view, or -1. ``goes_in_s``: seconds until its node is taken away; infinite without a notice. ``keeps``: it can keep a part
    of a sharded state while it stands by.
    """

    member: Member
    node: str
    state: StateId | None
    dirty: bool
    in_view: bool
    domain: str = ""
    view_rank: int = -1
    goes_in_s: float = math.inf
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class Situation:
    """A recovery policy's input. ``since_s``: when the run last had a working view, or when it started.

    ``replicated``: each rank, or each group of ``coordinates``, holds the whole state. ``replica_size``: number of view ranks in a row that
    form a group. ``may_leave``: so many members can leave a running view at one time without a part of the state. ``most``: the largest
    view. ``margin_s``: a rank whose node goes within so long leaves, also where no other rank takes its place. ``coordinates``: one rank of
    each of them computes shards together; a candidate without a coordinate is in no view. ``spares``: so many members beyond ``world`` keep
    a part of a sharded state, and compute no shard. ``computing``: so many members of the present view compute shards,
    and ``compute`` would by the world's present size.
    """

    candidates: tuple[Candidate, ...]
    world: int
    min_ranks: int
    since_s: float
    starting: int
    checkpoint: str | None
    replicated: bool = True
    replica_size: int = 1
    may_leave: float = math.inf
    most: float = math.inf
    margin_s: float = 0.0
    coordinates: tuple[Coordinate, ...] = ((),)
    spares: int = 0
    computing: int = 0
    compute: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """A process that ended. ``injected``: chaos ended it, and it counts towards no budget. ``step`` is its step, -1 before training;
    ``committed`` is the run's last committed step at the time. ``domain``: the domain path of its node, if the node was lost and the run
    has set domains."""

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
    """One rank's value, when ranks differ in a value that should have the same bits on all of them.

    Attributes:
        what: ``weights``, or ``shard 5``: the name of the value.
        generation, state: where ranks found the difference. The step from this state is not committed.
        digest: a hash of the value, in hex.
        cleared: the newest state whose inputs were all compared and found alike.
        witness: the rank may vote. A rank that received its state in this view would only repeat its donor. It may vote once all ranks
            were found alike in the view.
        seen: the digests that this rank has seen, its own among them: (rank in its column, digest). Empty: it knows its own alone.
    """

    what: str
    generation: int
    state: StateId
    digest: str
    cleared: StateId
    witness: bool = True
    seen: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A corruption policy's answer: the decision, and the wrong members. Action ``carry_on``, ``evict``, ``retry`` or ``stop``."""

    decision: Decision
    guilty: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Formation:
    """A recovery policy's answer: the decision, and its members in the order of view ranks."""

    decision: Decision
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set. ``modified_s``: Unix time of its last change; 0 where its store does not give it.

    ``digest`` is ``sha256:`` and the digest of its bytes, or ``etag:`` and its store's tag for them; empty: not known yet. ``layout``
    depends on the layout's name. ``strided``: the offset of the first sample, the bytes from one sample to the next, and the bytes of a
    sample. ``groups``: by group, its number of samples, their weight in bytes, its beginning and its end. Else empty.
    """

    path: str
    size_bytes: int
    samples: int
    modified_s: float = 0.0
    digest: str = ""
    layout: tuple[int, ...] = ()
