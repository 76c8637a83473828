"""A rank's work between messages, as data: :mod:`fleet.protocol.rank_machine` asks its driver for it.

*Moves* take time. A driver carries a move out and gives back its result. If the group of the view is lost meanwhile, it gives back a
:class:`GroupLost <fleet.errors.GroupLost>`. *Orders* are carried out at once, under the lock, and never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from fleet.protocol.instructions import Keep
from fleet.protocol.member import Offer
from fleet.protocol.types import Finding, StateId, View
from fleet.protocol.vote import Doubt


@dataclass(eq=False, slots=True)
class Joining:
    """A view that this rank is joining. ``beside``: by :class:`Settle`, while the loop computes.

    ``stands_by``: the view is a proposal, and its other members come when they are ready. ``promised``: the others know the shards that
    this rank brings. ``done``: the settling has ended, with ``error`` where it failed.
    """

    view: View
    beside: bool = False
    stands_by: bool = False
    promised: bool = False
    done: bool = False
    error: str = ""


class Arriving(NamedTuple):
    """The state that is on its way to this rank. ``alike``: its donor trains the same parameters."""

    state: StateId
    alike: bool


class Reduced(Protocol):
    """The result of a reduction, the same on every rank.

    ``offers``: those of all members (see ``MemberProtocol.offer``). ``disputed``: two members have computed different values, so the ranks
    compare before they use the sum. ``doubt``: a reason against the step, for any sum. ``norm_limit``: the ranks do not take a step whose
    gradient has a larger norm.
    """

    @property
    def offers(self) -> Sequence[Offer]: ...
    @property
    def disputed(self) -> bool: ...
    @property
    def doubt(self) -> Doubt | None: ...
    @property
    def norm_limit(self) -> float: ...


class Facts(Protocol):
    """Facts of a rank that are known at any time, without waiting.

    ``held``: the shards of the present step that the rank has computed. ``steady``: the tracked state does not change while shards are
    computed. ``spares_newcomers``: a rank may take a step without computing any shard of it. ``checks``: shards of other ranks to compute
    again. ``testimony``: the rank's side of a comparison that failed. ``apart``: see :class:`fleet.protocol.events.Ready`.
    """

    @property
    def held(self) -> Collection[int]: ...
    @property
    def steady(self) -> bool: ...
    @property
    def spares_newcomers(self) -> bool: ...
    @property
    def checks(self) -> Collection[int]: ...
    @property
    def testimony(self) -> Finding | None: ...
    @property
    def apart(self) -> str: ...

    def formed(self, generation: int) -> bool:
        """Whether the forming of a group has ended, with success or not."""


# ---- orders ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """Begin to build the group of ``view``; :class:`Meet` waits for it."""

    view: View


@dataclass(frozen=True, slots=True)
class Settle:
    """Carry out ``RankMachine.settle(sitting)`` beside the loop."""

    joining: Joining


class Parting(StrEnum):
    """Why a group is dropped: the rank left its view; all members entered another view; the group's proposal was withdrawn."""

    LEFT = "left"
    AGREED = "agreed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Drop:
    """The group of ``generation`` is not used any more, formed or not: wake the threads that wait in it."""

    generation: int
    parting: Parting


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the loop, if it waits in the group of ``generation``: it has to leave."""

    generation: int


@dataclass(frozen=True, slots=True)
class KeepBeside:
    """Write the state that ``order`` names, in a separate thread, while the loop goes on."""

    order: Keep


Order = Form | Settle | Drop | Wake | KeepBeside


# ---- moves -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Run the loop body once on the initial state, and drop the result."""


class Awaited(StrEnum):
    """The thing that a rank waits for.

    In order: a view, the end of a join beside the loop, the finish barrier, the answer on a task for all, the run's end.
    """

    CALL = "call"
    SETTLED = "settled"
    BARRIER = "barrier"
    ANSWER = "answer"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for ``what`` until ``until()`` holds, at most ``again_s`` seconds where given. Messages alone change ``until()``."""

    what: Awaited
    until: Callable[[], object] = field(compare=False)
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """The rank has left the view, and has reported that: end the work under way there, and free its memory.

    ``within_step``: the rank left in the sum of a step.
    """

    within_step: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """The loop waits to be called. The shards that it has computed stay."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop all of the present attempt."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait until the group of ``view`` has formed. ``stands_by``: see :class:`Joining`."""

    view: View
    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch the checkpoint from which ``view`` begins. Gives the loaded data, and does not change this rank's state."""

    view: View


@dataclass(frozen=True, slots=True)
class Begin:
    """A history begins here: with ``loaded``, or with the initial state when it is None."""

    view: View
    loaded: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resettle:
    """Come to one state with the members of ``view``, where no rank has all of it. Gives its ``ViewState``."""

    view: View


@dataclass(frozen=True, slots=True)
class Receive:
    """Learn which state rank ``giver`` of the column gives, and begin to receive it in the background. Gives :class:`Arriving`."""

    view: View
    giver: int


@dataclass(frozen=True, slots=True)
class Give:
    """Begin to give ``state`` to the ranks ``receivers`` of the column."""

    view: View
    state: StateId
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HoldStill:
    """Wait until no state is on its way from or to this rank."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Tell all members of ``view`` that this rank will bring ``shards`` into the present step."""

    view: View
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignShards:
    """Assign the shards of the present step. ``begun``: the step may have begun before the view, so shards that members hold count."""

    view: View
    begun: bool


@dataclass(frozen=True, slots=True)
class ViewJoined:
    """The rank has joined ``view`` and is detached."""

    view: View


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the loop body up to its commit: compute the assigned shards of ``step``. It ends early where the rank is ``wanted``."""

    step: int


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt at a step is over, with success or not: the loop body comes to its end."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the step's gradients over all members. Gives :class:`Reduced`. ``early``: this rank adds none, as its state is on the way."""

    offer: Offer
    early: bool = False


@dataclass(frozen=True, slots=True)
class CastVote:
    """Vote on the sums, which this rank has. Gives the :class:`Words <fleet.protocol.vote.Words>` of all ranks that are asked."""

    reduced: Reduced


@dataclass(frozen=True, slots=True)
class Repeat:
    """All ranks compute the step again."""

    doubt: Doubt


@dataclass(frozen=True, slots=True)
class Apply:
    """Change the state by the step; the state is dirty meanwhile. All agreed to ``enter`` this view and serve request ``save`` after it."""

    reduced: Reduced
    enter: View | None = None
    save: int | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """Take, from this rank's sums, a step that other ranks have taken. The vote has the factor by which they clipped."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The state is a step further: send it to all ranks that need parts of it."""

    reduced: Reduced


@dataclass(frozen=True, slots=True)
class Expect:
    """Expect the next step in this view."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's part of a checkpoint. ``still``: no rank moves until the part is copied."""

    request: int
    still: bool = False


@dataclass(frozen=True, slots=True)
class Digest:
    """Give the digest of the whole state after the last step, as text."""


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Do the task ``key`` for all ranks. ``before``: its result the last time before. Gives the result as JSON text."""

    key: str
    before: str


Move = (
    Rehearse | Wait | Clear | Hold | Reset | Meet | Load | Begin | Resettle | Receive | Give | HoldStill | Promise | AssignShards
    | ViewJoined | Compute | Attempted | Reduce | CastVote | Repeat | Apply | Advance | StepCommitted | Expect | Save | Digest | CarryOut
)  # fmt: skip
