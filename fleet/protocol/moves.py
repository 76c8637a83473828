"""What a rank is to do between messages, as data: what :mod:`fleet.protocol.rank_machine` asks of whoever drives it.

*Moves* take time. A driver carries one out and gives back what came of it; where the group of the view is lost meanwhile, it gives back a
:class:`GroupLost <fleet.errors.GroupLost>`. *Orders* are carried out at once, under the lock, and wait for nothing.
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
    """A view that this rank is joining. ``beside``: it is joined by :class:`Settle`, while the loop computes.

    ``stands_by``: it is a proposal, whose other members come when they are ready.
    ``promised``: the others know what this rank brings. ``done``: the settling has ended, with ``error`` where it did not end well.
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
    """What a reduction told every rank alike.

    ``offers`` are all members' (see ``MemberProtocol.offer``). ``disputed``: two have computed different things, which is looked into
    before the sum is used. ``doubt``: why the step is not to be taken, whatever the sum is. ``norm_limit``: nor is one with a larger norm.
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
    """What a rank can tell of itself at any time, without waiting.

    ``held``: shards of the step at hand that it has computed. ``steady``: what is tracked stays as it is while shards are computed.
    ``spares_newcomers``: a rank may take a step of which it has computed nothing. ``checks``: there are shards of others to compute again.
    ``testimony``: its end of a comparison that did not come to a good end.
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

    def formed(self, generation: int) -> bool:
        """Whether the forming of a group has ended, well or not."""


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
    """How a group comes to be dropped: it was the rank's; it was, and all go on in another one; it was of a proposal."""

    LEFT = "left"
    AGREED = "agreed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Drop:
    """The group of ``generation`` is used no more, formed or not: whoever waits in it is woken."""

    generation: int
    parting: Parting


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the loop, if it waits in the group of ``generation``: it is told to leave."""

    generation: int


@dataclass(frozen=True, slots=True)
class KeepBeside:
    """Write what ``order`` asks for in a thread of its own, while the loop goes on."""

    order: Keep


Order = Form | Settle | Drop | Wake | KeepBeside


# ---- moves -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Run the loop body once on the initial state, and forget what came of it."""


class Awaited(StrEnum):
    """What a rank waits for: a view, that it is joined beside the loop, the end of the run's last step, word on a lease, the run's end."""

    CALL = "call"
    SETTLED = "settled"
    BARRIER = "barrier"
    ANSWER = "answer"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Wait:
    """For ``what``, until ``until()`` holds, which changes with messages alone; at most ``again_s`` seconds where that is given."""

    what: Awaited
    until: Callable[[], object] = field(compare=False)
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """The view was left, and the coordinator knows: end what is under way in it, free its memory. ``within_step``: in the sum of a step."""

    within_step: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """The loop waits to be called: what it has computed of the step stays."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Nothing of the present attempt remains."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait until the group of ``view`` has formed. ``stands_by``: see :class:`Joining`."""

    view: View
    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch the checkpoint that ``view`` begins from. Gives what is loaded; the state of this rank is as it was."""

    view: View


@dataclass(frozen=True, slots=True)
class Begin:
    """A history begins here: with ``loaded``, or with the state that was built when it is None."""

    view: View
    loaded: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resettle:
    """State that is spread over the ranks moves to its places in ``view``. Gives the ``StateId`` that all hold then."""

    view: View


@dataclass(frozen=True, slots=True)
class Receive:
    """Learn from the donor which state it gives, and begin to take it in beside. Gives :class:`Arriving`."""

    view: View


@dataclass(frozen=True, slots=True)
class Give:
    """Begin to give ``state`` to the receivers of ``view``."""

    view: View
    state: StateId


@dataclass(frozen=True, slots=True)
class HoldStill:
    """Wait until no state is on its way from or to this rank."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Tell all of ``view`` that this rank will bring ``shards`` into the step at hand."""

    view: View
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AssignShards:
    """Deal the shards of the step at hand. ``begun``: the view may come within a step, so what its members hold of it counts."""

    view: View
    begun: bool


@dataclass(frozen=True, slots=True)
class ViewJoined:
    """The rank has joined ``view`` and is detached."""

    view: View


@dataclass(frozen=True, slots=True)
class Compute:
    """The loop body, up to its commit: compute what is due of ``step``. It ends early where the rank is ``wanted``."""

    step: int


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt at a step is over, well or not: the loop body comes to its end."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the step over all members. Gives :class:`Reduced`. ``early``: with nothing, as the state is on its way to this rank."""

    offer: Offer
    early: bool = False


@dataclass(frozen=True, slots=True)
class CastVote:
    """Say of the sums, which are here, what this rank finds. Gives :class:`Words <fleet.protocol.vote.Words>`, of all who are asked."""

    reduced: Reduced


@dataclass(frozen=True, slots=True)
class Repeat:
    """The step is computed anew, by all."""

    doubt: Doubt


@dataclass(frozen=True, slots=True)
class Apply:
    """Change the state by the step, which is dirty meanwhile. ``enter`` and ``save`` are what all have agreed on for after it."""

    reduced: Reduced
    enter: View | None = None
    save: int | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """Change the state by a step that others have taken, from the sums that are here. The vote has the factor by which they clipped."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The state is a step further: bring it to all who need parts of it."""

    reduced: Reduced


@dataclass(frozen=True, slots=True)
class Expect:
    """The next step is computed in this view, if nothing comes between."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's part of a checkpoint. ``still``: nobody moves until it is copied."""

    request: int
    still: bool = False


@dataclass(frozen=True, slots=True)
class Digest:
    """Of all of the state after the last step, as text."""


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Do what is done once in a run. ``before``: what came of it the last time before. Gives what came of it, as JSON text."""

    key: str
    before: str


Move = (
    Rehearse | Wait | Clear | Hold | Reset | Meet | Load | Begin | Resettle | Receive | Give | HoldStill | Promise | AssignShards
    | ViewJoined | Compute | Attempted | Reduce | CastVote | Repeat | Apply | Advance | StepCommitted | Expect | Save | Digest | CarryOut
)  # fmt: skip
