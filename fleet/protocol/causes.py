"""Reasons as facts, each with its figures: why a process was lost, why a rank left its view, why a run ended.

Code reads the facts, and people read the ``sentence`` of a fact. ``incident`` says which facts are a fault of the node, and of what kind;
``fleet.ledger.health`` keeps nodes out by it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fleet.protocol.codec import Tagged

IncidentKind = Literal["", "lost", "hang", "corruption"]
"""A fault of the node, by kind. Empty: the node is not to blame."""


class Fact(Tagged):
    """``str`` gives the fact's sentence."""

    __slots__ = ()

    def __str__(self) -> str:
        return sentence(self)


# ---- the process has ended ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessEnded(Fact):
    """The agent saw the process end. ``status``: the exit status, or minus the signal's number; None: not known yet.

    ``out_of_memory``: at that moment the kernel counted a kill for lack of memory in the process's memory group.
    """

    status: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class TrainRaised(Fact):
    """The train function raised ``error``: the exception's class and message."""

    error: str


@dataclass(frozen=True, slots=True)
class ClusterEnded(Fact):
    """The run goes on in another cluster."""


@dataclass(frozen=True, slots=True)
class NotReported(Fact):
    """The process did not report to the coordinator that was started again."""


# ---- its node is gone --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentHungUp(Fact):
    """The connection of the node's agent broke, and the agent did not connect again.

    ``missed``: before that, ranks of other nodes had lost this node's ranks, too.
    """

    missed: bool = False


@dataclass(frozen=True, slots=True)
class AgentSilent(Fact):
    """The node's agent is connected, and sent nothing for ``silence_s``."""

    silence_s: float


# ---- it hangs ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoHeartbeat(Fact):
    """The process gives no sign of life."""

    silence_s: float


@dataclass(frozen=True, slots=True)
class NoProgress(Fact):
    """The process lives, and its loop does not move. ``step``: the step of its state, -1 when it holds none."""

    stuck_s: float
    step: int


@dataclass(frozen=True, slots=True)
class DidNotLeave(Fact):
    """The rank was told to leave its view, and did not answer in time."""


# ---- a policy wants it gone --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Superseded(Fact):
    """A newer process has taken its slot."""


@dataclass(frozen=True, slots=True)
class TooSlow(Fact):
    """The straggler policy's ``action``, with its reason."""

    action: Literal["replace", "evict"]
    reason: str


@dataclass(frozen=True, slots=True)
class Outvoted(Fact):
    """The corruption policy found that the rank's ``what`` differs from the majority's. ``step`` is -1 for the final state.

    ``what`` is empty where the rank itself found that its chunks of a sharded state have changed, or were wrong.
    """

    what: str
    step: int = -1


@dataclass(frozen=True, slots=True)
class StartsAgain(Fact):
    """The recovery policy starts all ranks that are left again, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class FreshWanted(Fact):
    """No state is left, so the run has to go on from the initial state of a new process."""


@dataclass(frozen=True, slots=True)
class GivenUp(Fact):
    """The process was declared lost before, and still lives."""


Rule = (
    NoHeartbeat | NoProgress | DidNotLeave | Superseded | TooSlow | Outvoted | StartsAgain | FreshWanted | GivenUp | TrainRaised
)  # fmt: skip
"""The rule by which a process is evicted."""


@dataclass(frozen=True, slots=True)
class Evicted(Fact):
    """The coordinator had the process killed, by the rule ``why``."""

    why: Rule


@dataclass(frozen=True, slots=True)
class TakenAway(Fact):
    """The process's node was taken away, as announced, after the process had left the view."""


NodeCause = AgentHungUp | AgentSilent
Cause = ProcessEnded | TrainRaised | ClusterEnded | NotReported | AgentHungUp | AgentSilent | Evicted | TakenAway
"""Why a process is lost."""

INCIDENTS: dict[type[Fact], IncidentKind] = {
    ProcessEnded: "lost", AgentHungUp: "lost", AgentSilent: "lost", NoHeartbeat: "hang", NoProgress: "hang", DidNotLeave: "hang",
    Outvoted: "corruption",
}  # fmt: skip


def incident(cause: Cause) -> IncidentKind:
    """The node's fault by which a process was lost, by kind. Empty: the node is not to blame."""
    match cause:
        case Evicted(why=why):
            return INCIDENTS.get(type(why), "")
    return INCIDENTS.get(type(cause), "")


# ---- why a rank left its view ------------------------------------------------------------------------------------------------------------


class Departure(StrEnum):
    """Why a rank is in no view any more, or in none yet."""

    IDLE = "idle"
    CALLED = "called"
    """The rank was told to leave."""
    BROKEN = "broken"
    """The rank's process group broke, most likely because a peer was lost."""
    DIFFERS = "differs"
    """Ranks hold, or have computed, different bits."""
    INCOMPLETE = "incomplete"
    """A part of a sharded state is held by no member of the view. This rank's own part is clean."""
    STANDS_BY = "stands by"
    """The others have entered a view without this rank, at a step boundary on which all had agreed."""


class Engaged(StrEnum):
    """The work of a rank's loop after the rank has left its view."""

    WAITS = "waits"
    COMPUTES = "computes"
    """The loop is in its body. The tracked state stays as committed, but for buffers that a forward changes."""
    ALONE = "alone"
    """The loop evaluates, or does a task of ``run.once``. Until that is over, other weights may be in place."""


class GatherWhy(StrEnum):
    """Why the members of a view have to leave it."""

    LOST = "lost"
    """A member was lost."""
    LEFT = "left"
    """A member has left."""
    STUCK = "stuck"
    """No member moves."""
    NOT_FORMED = "not formed"
    FORGOTTEN = "forgotten"
    """A member is in a view that was cancelled, or that the journal does not have."""
    MEMORY = "memory"
    """A node that kept copies in its memory has lost them."""
    PART_MISSING = "part missing"
    """A member did not write its part of the final checkpoint."""
    ALL_LOST = "all lost"
    """All ranks were lost in the code behind the loop."""
    MAINTENANCE = "maintenance"
    """Nodes will be taken away."""
    PARTITION = "partition"
    """A node is silent, and all members wait for it."""
    STOPS = "stops"
    """The run is to stop, and a member did not reach the end of its step in time."""
    RESTARTED = "restarted"
    """The coordinator was started again, and the view is not whole."""


# ---- why a run ended ---------------------------------------------------------------------------------------------------------------------


class EndWhy(StrEnum):
    """Why a run is over."""

    ALL_STEPS = "all steps"
    LOOP_ENDED = "ended by its loop"
    """The train function has called ``run.stop``, or left its loop by ``break``, at the same step on all ranks."""
    NOT_SAVED = "not saved"
    """The run took all steps, and its final checkpoint could not be kept."""
    STOPPED = "stopped"
    STORE_FAILED = "store failed"
    """Checkpoints failed for so long that a setting stopped the run."""
    TIME_IS_UP = "time is up"
    BUDGET_SPENT = "budget spent"
    TAKEN_OVER = "taken over"
    """Another process holds the run now: nothing was kept, as the record is the other's."""
    PAUSED = "paused"
    """The user wants the run's machines back for a while."""
    JOURNAL_FAILED = "journal failed"
    """Records cannot be written, or could not be read later: the disk is full, or the journal is gone."""
    CONTRADICTION = "contradiction"
    """The coordinator's state says two things that cannot both be true: a mistake in Fleet."""
    DRIVER_FAILED = "driver failed"
    LOOP_WRONG = "loop wrong"
    """The train function has a mistake. No node is to blame for differences between ranks."""
    TRAIN_RAISED = "raised"
    RAISED_BEHIND = "raised behind the loop"
    CRASH_LOOP = "crash loop"
    UNJUDGED = "unjudged"
    """Ranks differ, and no policy can say which one is wrong."""
    ENDS_DIFFER = "ends differ"
    """The ranks hold different states at the end."""
    LATE_BEHIND = "late behind the loop"
    REFUSED = "refused"
    """The data or the optimizer differ from those before the resume. The run took no step."""
    OTHER = "other"
    """None of these."""


# ---- words -------------------------------------------------------------------------------------------------------------------------------


_WORDS: dict[type[Fact], str] = {
    TrainRaised: "the train function raised {0.error}",
    ClusterEnded: "its cluster ended",
    NotReported: "not heard of since the coordinator restarted",
    AgentHungUp: "its agent hung up",
    AgentSilent: "its agent was silent for {0.silence_s:.1f} s",
    TakenAway: "its node was taken away, as announced",
    Evicted: "evicted: {0.why}",
    NoHeartbeat: "no heartbeat for {0.silence_s:.1f} s",
    NoProgress: "no progress for {0.stuck_s:.1f} s",
    DidNotLeave: "did not leave its process group when told to",
    Superseded: "superseded by a newer process of the same slot",
    TooSlow: "it is slow: {0.reason}",
    StartsAgain: "{0.reason}",
    FreshWanted: "a fresh process must begin: no state is left, and there is no checkpoint",
    GivenUp: "given up earlier, and another process may have its slot",
}


def sentence(fact: Fact) -> str:
    """The fact as a clause without a full stop, for people alone."""
    match fact:
        case ProcessEnded():
            return _ended(fact)
        case Outvoted(what="", step=step):
            return f"silent corruption: by digests of its own, its chunks of the state at step {step} are wrong, or were"
        case Outvoted(what=what, step=step):
            differs = f"{what} at step {step} differ" if step >= 0 else f"{what} differs"
            return f"silent corruption: {differs} from the majority's"
    if type(fact) not in _WORDS:
        raise TypeError(f"{type(fact).__name__} has no sentence")
    words = _WORDS[type(fact)].format(fact)
    match fact:
        case AgentHungUp(missed=True):
            return f"{words}, and its ranks are missed"
        case NoProgress(step=step) if step >= 0:
            return f"{words} at step {step}"
    return words


def _ended(fact: ProcessEnded) -> str:
    status = fact.status
    if status is None:
        return "its process ended"
    if status >= 0:
        return f"ended with status {status}"
    if fact.out_of_memory:
        return "killed by the kernel, as memory ran out"
    if status == -signal.SIGKILL:
        return "killed by SIGKILL"
    return f"killed by {signal.Signals(-status).name if -status in list(signal.Signals) else f'signal {-status}'}"
