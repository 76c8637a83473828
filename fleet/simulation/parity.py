"""A simulated rank with parity in the place of copies, driven as the live one is in :mod:`actors.rank.fsdp.parity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet.protocol import moves
from fleet.protocol.chunks import KIN_MOST, Chunk, Claim, Kin
from fleet.protocol.domains import Place
from fleet.protocol.parity import Revival, families, family_of, revivals
from fleet.protocol.types import Member, StateId, View
from fleet.simulation.clockwork import Steps
from fleet.simulation.gathering import GatheringRank
from fleet.simulation.groups import Broken, Group
from fleet.simulation.model import POISON, updated
from fleet.simulation.sharded import LENGTH
from fleet.simulation.steps import Sum

PARTS = 2
"""In so many parts a step is taken."""


@dataclass
class SimKept:
    """The parity that one rank keeps. ``value`` stands for the bits in it, at ``kin.step``, and ``noted`` for the means before a step.

    ``before`` is what the rank held itself before a step of which not all of its family have taken in all; None when they have.
    """

    kin: Kin
    family: tuple[Member, ...]
    value: int
    noted: dict[int, int] | None = None
    before: int | None = None
    after: int = POISON
    freed: int = 0
    behind: bool = False


class ParityRank(GatheringRank):
    """``kept`` is the parity of its view, ``beside_kept`` that of views that did not come about."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: SimKept | None = None
        self.beside_kept: list[SimKept] = []
        self._next: SimKept | None = None

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        found = super().claim()
        if found.state is None:
            return found
        held = [*([self.kept] if self.kept is not None else []), *([] if self.log is not None else self.beside_kept)]
        return replace(found, kin=tuple(one.kin for one in held))

    def _begin(self, move: moves.Begin) -> Steps:
        yield from super()._begin(move)
        self.kept, self.beside_kept = None, []

    def _drop(self) -> None:
        super()._drop()
        self.kept, self.beside_kept = None, []

    def _revivals(self, claims: Sequence[Claim], target: StateId) -> Sequence[Revival]:
        return revivals(claims, target, [LENGTH])

    def _revive(self, group: Group, made: Sequence[Revival]) -> Steps:
        """Each family among itself; whoever has nothing to do with it goes on."""
        members = group.view.members
        for one in made:
            among = tuple(members[rank] for rank in (one.keeper, *(rank for rank, _ in one.givers)))
            if self.member not in among:
                continue
            if self.at("reviving"):
                yield self._pause()
            told: dict[Member, int] = yield group.exchange(self.member, ("stripe", one), self._given(one), among)
            if self.member == among[0]:
                self._make(one, {value for member, value in told.items() if member != self.member})

    def _kept_in(self, generation: int) -> SimKept:
        return next(one for one in (self.kept, *self.beside_kept) if one is not None and one.kin.generation == generation)

    def _given(self, one: Revival) -> int:
        """The value as the keeper's parity has it. Of the parts that it has not got this rank still has what was before."""
        kept = self._kept_in(one.generation)
        if one.taken is None or one.taken >= PARTS:
            return self.value
        return kept.before if kept.before is not None and kept.freed <= one.taken else POISON

    def _make(self, one: Revival, given: set[int]) -> None:
        """Poison, for all that this rank holds, where what is made is not what it should be."""
        kept = self._kept_in(one.generation)
        fits = not given or given == {kept.value if one.taken is None or one.taken < PARTS else kept.after}
        made = kept.value if one.taken is None else kept.after if one.taken >= PARTS else self._stepped(kept)
        self.value = self.value if fits and made == self.value else POISON
        self.beside_chunks = tuple(dict.fromkeys((*self.beside_chunks, one.stripe)))

    def _stepped(self, kept: SimKept) -> int:
        return POISON if kept.noted is None else updated(kept.value, kept.noted, self.world.settings.shards)

    def _prepare(self, group: Group, places: Sequence[Place], value: int, target: StateId) -> Steps:
        view = group.view
        rank = view.rank_of(self.member)
        mine = family_of(families(places, self.world.settings.parity), rank)
        family = tuple(view.members[each] for each in mine)
        told: dict[Member, int] = yield group.exchange(self.member, ("parity", family), value, family)
        values = set(told.values())
        kin = Kin(view.generation, len(view.members), mine, mine.index(rank), target.step)
        self._next = SimKept(kin, family, values.pop() if len(values) == 1 else POISON)

    def _keep_beside(self, wanted: tuple[Chunk, ...]) -> None:
        super()._keep_beside(wanted)
        if self._next is not None:
            self.beside_kept = [self._next, *self.beside_kept][: KIN_MOST - 1]

    def _adopt(self, view: View, guarded: Sequence[Sequence[int]], value: int, target: StateId) -> None:
        self.kept, self.beside_kept = self._next, []
        super()._adopt(view, guarded, value, target)

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _reduce(self, move: moves.Reduce) -> Steps:
        if self.kept is not None and self.kept.behind:
            raise Broken("of the last step not all was taken in")
        reduced: Sum = yield from super()._reduce(move)
        return reduced

    def _before_ready(self, reduced: Sum) -> Steps:
        kept = self.kept
        assert kept is not None
        yield self.group.exchange(self.member, ("means", reduced.number, kept.family), None, kept.family)
        kept.noted = reduced.merged
        if self.at("noted"):
            yield self._pause()

    def _advance(self, move: moves.Apply | moves.Advance) -> Steps:
        kept = self.kept
        assert kept is not None and self.log is not None
        kept.before, kept.after, kept.freed, self.beside_kept = self.value, updated(self.value, self.log, self.world.settings.shards), 0, []
        kept.behind = isinstance(move, moves.Advance)
        self._still = False
        yield from self._tell(kept)
        yield from super()._advance(move)
        if not kept.behind:
            kept.kin = kept.kin._replace(step=kept.kin.step + 1, taken=0)
            kept.value, kept.before, kept.noted = kept.after, None, None

    def _tell(self, kept: SimKept) -> Steps:
        """Part by part: what has changed goes to the family, who say that they have it."""
        for part in range(PARTS):
            if kept.behind:
                return
            if self.at("telling"):
                yield self._pause()
            try:
                yield self.group.exchange(self.member, ("changed", kept.kin.step, kept.kin.members, part), None, kept.family)
                kept.kin = kept.kin._replace(taken=part + 1)
                yield self.group.exchange(self.member, ("taken", kept.kin.step, kept.kin.members, part), None, kept.family)
                kept.freed = part + 1
            except Broken:
                kept.behind = True
