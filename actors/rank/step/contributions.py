"""The shards of the current step that a rank brings to its view's sum, and their losses, weights and figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors.rank.membership.process_group import Group, Work
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.logged import ShardLog
from actors.rank.step.reduction import Reducer, SideChannel
from actors.rank.step.representations import Representations
from actors.rank.step.rows import Numbers, RowFormat, Rows
from actors.rank.step.shard_state import ShardStates
from actors.rank.step.weights import ShardWeights
from actors.rank.tags import Tag
from actors.rank.telemetry.recorder import Recorder
from fleet.protocol.duties import Duties
from fleet.protocol.pipelining import Ways, ways_of
from fleet.protocol.shards import Shares, cover
from fleet.protocol.types import STAGE, Column, Member, View, columns, groups
from fleet.settings.run import RunSettings


class InView(NamedTuple):
    """A view of several columns, and this rank's groups in it."""

    view: View
    groups: ViewGroups


class _Places(NamedTuple):
    """Ranks of one view, by their numbers there.

    Attributes:
        whole: all of them. ``places``: those of this rank's column. ``receivers``: newcomers.
        together: those that compute shards together, by the place of this rank's column.
        staged: the view, where the model is cut into stages.
    """

    whole: Group
    places: tuple[int, ...]
    receivers: frozenset[int]
    together: list[tuple[int, ...]]
    staged: View | None = None


class Contributions:
    """The contributions of one rank.

    Attributes:
        duties: which rank has which shards.
        losses: by shard, of the shards that this rank has computed and that count; ``weights`` are theirs. ``log`` holds the loop's
            figures.
        group, column, rank: the ranks that sum together, their column, and this rank's number there.
        side: carries a few numbers beside the gradients.
        ways: of all shards through the stages of a model; None where it has none.
        gathered: representations of shards, for a loss over the whole batch. ``carried``: the state that shards leave for the next step.
    """

    column: Column

    def __init__(
        self,
        settings: RunSettings,
        objects: Mapping[str, Any],
        duties: Duties,
        weights: ShardWeights,
        gradients: GradientBuffers,
        reducer: Reducer,
        recorder: Recorder,
    ) -> None:
        self.duties, self.weights, self.log = duties, weights, ShardLog(settings.world)
        self.gathered, self.carried = Representations(settings.shards), ShardStates(objects)
        self._shards, self._gradients, self._reducer, self._recorder = settings.shards, gradients, reducer, recorder
        self.losses: dict[int, float] = {}
        self.group, self.rank = Group(0, 0, 1, gradients.parameters[0].device), 0
        self._at = _Places(self.group, (0,), frozenset(), [(0,)])
        self.side = SideChannel(self.group)
        self._sent: list[tuple[Work, torch.Tensor]] = []  # messages on their way to the peers, whose memory must stay
        self.ways: Ways | None = None
        self._whole: tuple[View, Ways] | None = None
        self._promise: tuple[Group, Collection[int], Collection[int]] | None = None

    def rehearse(self) -> None:
        """Prepare for a rehearsal: this rank alone, one shard."""
        self.group, self.rank = Group(0, 0, 1, self.group.device), 0
        self._at = self._at._replace(whole=self.group)
        self.duties.rehearse()
        self.ways = None
        self.gathered.rehearse()

    def join(self, group: Group, column: Column, rank: int, view: InView | None = None) -> None:
        """Bring shards to ``group``, the ranks of ``column``, from now on. Then call :meth:`assign`. ``view``: see
        :meth:`TrainStep.join`."""
        self.group, self.column, self.rank = group, column, rank
        if view is None:
            everywhere = tuple(range(group.size))
            self._at = _Places(group, everywhere, frozenset(column.receivers), [(place,) for place in everywhere])
        else:
            members, whole = view.view.members, view.groups.whole
            places = columns(members)[members[whole.rank].coordinate]
            mine = frozenset(places)
            together = [group for group in groups(members) if not mine.isdisjoint(group)]
            staged = view.view if STAGE in dict(members[0].coordinate) else None
            self._at = _Places(whole, places, frozenset(view.view.receivers), together, staged)
        self.log.begin_view()

    @property
    def whole(self) -> Group:
        """All ranks of the view."""
        return self._at.whole

    def rows(self, form: RowFormat, numbers: Numbers) -> tuple[Rows, Rows]:
        """Of all ranks' numbers, the rows of this rank's column, and those that have the losses: of the last stage, or of this column."""
        own = Rows(form, [numbers[place] for place in self._at.places], self.duties.contributed)
        if self.ways is None:
            return own, own
        return own, Rows(form, [numbers[rank] for rank in self.ways.stages[-1].ranks], self.ways.of_last)

    # ---- which rank brings which shards --------------------------------------------------------------------------------------------------

    def promise(self, group: Group, shards: Collection[int]) -> None:
        """Tell all ranks of ``group`` which shards this rank will bring when it joins: those it has and those it still computes.

        Called from the thread that joins while the loop computes. So a rank that is done computes lost shards at once, without waiting.
        """
        representations = self.gathered.held
        self._promise = group, shards, representations
        self._send_held(group, group.peers, shards, representations, None)

    def _send_held(
        self, group: Group, peers: Sequence[int], shards: Collection[int], representations: Collection[int], there: Collection[int] | None
    ) -> None:  # fmt: skip
        mask = torch.zeros(4, self._shards, dtype=torch.uint8, device="cpu")
        mask[0, sorted(shards)] = mask[1, sorted(representations)] = mask[2, slice(None) if there is None else sorted(there)] = 1
        mask[3, 0] = self.gathered.used
        self._sent = [*self._sent[-1:], (group.start([(mask, peer) for peer in peers], [], Tag.HELD), mask)]

    def assign(self, there: Collection[int] | None, idle: Collection[int], *, begun: bool) -> frozenset[int]:
        """Share out the shards of the step in the view that was joined. Raises GroupBroken.

        Args:
            there: see :attr:`StateLayout.there`.
            idle: ranks that bring nothing.
            begun: the step may have begun, so shards of other ranks count, too.

        Returns:
            The shards that count, of all ranks of the column.
        """
        contributed = self._contributed_by_all(there, begun, idle)
        self._share(self.duties.join(self.column, self.rank, contributed, idle))
        return frozenset[int]().union(*contributed)

    def _contributed_by_all(self, there: Collection[int] | None, begun: bool, idle: Collection[int]) -> list[frozenset[int]]:
        """By rank, the shards of the current step that it has or has promised. Receivers of the state have none, and are not waited for.

        Where ranks compute together, those that all of them have. Where others add up, those that are there on all ranks.
        """
        group, receivers = self._at.whole, self._at.receivers
        promise, self._promise = self._promise, None
        held: Collection[int] = self._gradients.sums.held
        representations: Collection[int] = self.gathered.held
        if promise is not None and promise[0] is group:
            held, representations = promise[1:]
        else:
            asking = group.peers if begun else [peer for peer in group.peers if peer in receivers]
            self._send_held(group, [] if group.rank in receivers else asking, held, representations, there)
        masks = torch.zeros(group.size, 4, self._shards, dtype=torch.uint8, device="cpu")
        givers = [peer for peer in group.peers if peer not in receivers] if begun else []
        group.start([], [(masks[peer], peer) for peer in givers], Tag.HELD).wait()
        received = [[frozenset(row.nonzero().flatten().tolist()) for row in mask] for mask in masks]
        received[group.rank] = [frozenset(held), frozenset(representations), frozenset(range(self._shards) if there is None else there)]
        self.gathered.used = self.gathered.used or bool(masks[:, 3].any())  # so a rank that has not run the loop body yet learns it
        self.gathered.join([received[place][1] for place in self._at.places], idle)
        if self._at.staged is not None:
            held_by = [() if rank in receivers else each[0] for rank, each in enumerate(received)]
            self.ways = ways_of(self._at.staged, self._at.staged.members[group.rank], held_by, self._shards, idle=True)
        everywhere = frozenset.intersection(*(received[rank][2] for rank in (group.rank, *givers)))
        return [everywhere.intersection(*(received[place][0] for place in together)) for together in self._at.together]

    def assign_anew(self) -> None:
        """Share out all shards: the next step begins, or the same step from its beginning."""
        self.gathered.begin_step()
        self._begin_ways()
        self._share(self.duties.begin_step())

    def _begin_ways(self) -> None:
        """No unit of the step that begins is computed."""
        if (view := self._at.staged) is None:
            return
        if self._whole is None or self._whole[0] is not view:
            self._whole = view, ways_of(view, view.members[self.whole.rank], [()] * self.whole.size, self._shards, idle=False)
        self.ways = self._whole[1]

    def _share(self, shares: Shares) -> None:
        kept = {shard for lo, hi in shares.kept[self.rank] for shard in range(lo, hi)}
        held = self._gradients.sums.held
        if not held <= kept:
            self._recorder.abandon()
            self._gradients.sums.keep(cover(held & kept, self._shards))
            self.losses = {shard: loss for shard, loss in self.losses.items() if shard in kept}
            self.weights.keep(kept)
            self.log.keep(kept)
        self._reducer.bind(self.group, shares.leaves(self._shards))
        self._gradients.watch(self._reducer.beside)
        self.side = SideChannel(self.whole)

    def computed_by(self, shard: int) -> Member | None:
        """The member that brings ``shard``; None: no member does."""
        return next((member for member, shards in self.duties.had.items() if shard in shards), None)

    # ---- computed shards -----------------------------------------------------------------------------------------------------------------

    @property
    def assigned(self) -> tuple[int, ...]:
        """The shards that this rank has yet to compute for the step at hand."""
        return self.duties.assigned(self.losses)

    @property
    def contributed(self) -> list[tuple[float, float]]:
        """(loss, weight) of each shard that this rank brings."""
        shards = self.duties.contributed[self.rank]
        return list(zip([self.losses[shard] for shard in shards], self.weights.of(shards), strict=True))

    @property
    def most(self) -> int:
        """The largest number of shards that one rank brings."""
        return max(map(len, self.duties.contributed)) if self.ways is None else self.ways.most

    def forget_lost(self) -> None:
        """A shard that is no longer in the sums is due again."""
        held = self._gradients.sums.held
        self.losses = {shard: loss for shard, loss in self.losses.items() if shard in held}

    def send_carried(self) -> None:
        """Before the sum: begin to send the state that this rank's shards leave for the next step."""
        self.carried.send(self.group, self.duties.contributed)

    def receive_carried(self) -> None:
        """After the sum: receive the state that the other ranks' shards leave. Raises GroupBroken."""
        self.carried.receive(self.group, self.duties.contributed)

    def gather(self) -> None:
        """Exchange representations, so that this rank has those of all shards. Raises GroupBroken."""
        self.gathered.exchange(self.group, self.duties.contributed)

    def finish_gather(self) -> None:
        """End the exchange of representations, before the sum. Raises GroupBroken."""
        self.gathered.finish(self.group, self.duties.contributed)

    def forget(self) -> None:
        """Nothing of the present attempt remains."""
        self.losses = {}
        self.gathered.forget()
        self.carried.forget()
        self.weights.forget()
        self.log.forget()

    def take(self) -> None:
        """The step is taken."""
        self.losses = {}
        self.gathered.begin_step()
        self._begin_ways()
        self.carried.take()
        self.log.take(self.weights.taken())
