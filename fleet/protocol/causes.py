"""Why a process was lost, why a rank left its view, why a run ended: facts, each with its figures. Code reads these; people, a sentence.

``incident`` says which of them are a fault of the node, and of what kind; ``fleet.ledger.health`` keeps nodes out by it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fleet.protocol.codec import Tagged

IncidentKind = Literal["", "lost", "hang", "corruption"]
"""What a node did by itself; empty: nothing that a node is to blame for."""


class Fact(Tagged):
    """``str`` of it is its sentence."""

    __slots__ = ()

    def __str__(self) -> str:
        return sentence(self)


# ---- the process has ended ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessEnded(Fact):
    """Its node's agent saw the end. ``status``: exit status, or the signal's number as a negative one; None while nobody has said it.

    ``out_of_memory``: the kernel has counted a process of its memory group that it killed for memory, at that moment.
    """

    status: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class TrainRaised(Fact):
    """The train function raised ``error``, the exception's class and words."""

    error: str


@dataclass(frozen=True, slots=True)
class ClusterEnded(Fact):
    """The run goes on in another cluster."""


@dataclass(frozen=True, slots=True)
class NotReported(Fact):
    """It said nothing to the coordinator that was started again."""


# ---- its node is gone --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentHungUp(Fact):
    """The line to the node's agent broke, and it did not connect again. ``missed``: its ranks were missed by their peers before that."""

    missed: bool = False


@dataclass(frozen=True, slots=True)
class AgentSilent(Fact):
    """The line to the node's agent is there, and nothing came over it."""

    silence_s: float


# ---- it hangs ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoHeartbeat(Fact):
    """The process gives no sign of life."""

    silence_s: float


@dataclass(frozen=True, slots=True)
class NoProgress(Fact):
    """The process lives, and its loop does not move. ``step``: where it stands, -1 when it holds no state."""

    stuck_s: float
    step: int


@dataclass(frozen=True, slots=True)
class DidNotLeave(Fact):
    """It was told to leave its view, and did not answer in time."""


# ---- a policy wants it gone --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Superseded(Fact):
    """A newer process has taken its slot."""


@dataclass(frozen=True, slots=True)
class TooSlow(Fact):
    """The straggler policy's ``action``, and why."""

    action: Literal["replace", "evict"]
    reason: str


@dataclass(frozen=True, slots=True)
class Outvoted(Fact):
    """The corruption policy: ``what`` it holds differs from the majority's. ``step`` is -1 for the final state."""

    what: str
    step: int = -1


@dataclass(frozen=True, slots=True)
class StartsAgain(Fact):
    """The recovery policy has all that are left start again, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class FreshWanted(Fact):
    """No state is left to go on from but that of a process that was just built."""


@dataclass(frozen=True, slots=True)
class GivenUp(Fact):
    """It was declared lost before, and yet lives."""


Rule = (
    NoHeartbeat | NoProgress | DidNotLeave | Superseded | TooSlow | Outvoted | StartsAgain | FreshWanted | GivenUp | TrainRaised
)  # fmt: skip
"""By which rule a process is evicted."""


@dataclass(frozen=True, slots=True)
class Evicted(Fact):
    """The coordinator had it killed, by the rule ``why``."""

    why: Rule


@dataclass(frozen=True, slots=True)
class TakenAway(Fact):
    """Its node was taken away, as was announced, and it had left the view before."""


NodeCause = AgentHungUp | AgentSilent
Cause = ProcessEnded | TrainRaised | ClusterEnded | NotReported | AgentHungUp | AgentSilent | Evicted | TakenAway
"""Why a process is lost."""

INCIDENTS: dict[type[Fact], IncidentKind] = {
    ProcessEnded: "lost", AgentHungUp: "lost", AgentSilent: "lost", NoHeartbeat: "hang", NoProgress: "hang", DidNotLeave: "hang",
    Outvoted: "corruption",
}  # fmt: skip


def incident(cause: Cause) -> IncidentKind:
    """What kind of incident of its node a loss is."""
    match cause:
        case Evicted(why=why):
            return INCIDENTS.get(type(why), "")
    return INCIDENTS.get(type(cause), "")


# ---- why a rank left its view ------------------------------------------------------------------------------------------------------------


class Departure(StrEnum):
    """Why a rank is in no view any more, or in none yet."""

    IDLE = "idle"
    CALLED = "called"
    """It was told to leave."""
    BROKEN = "broken"
    """Its process group broke, most likely as a peer was lost."""
    DIFFERS = "differs"
    """Ranks hold, or have computed, different bits."""
    INCOMPLETE = "incomplete"
    """No member of the view holds some of a sharded state. What this rank holds is clean."""


class Engaged(StrEnum):
    """What the loop of a rank does that has left its view."""

    WAITS = "waits"
    COMPUTES = "computes"
    """It is in its loop body; what is tracked stays as it was committed, but for buffers that a forward changes."""
    ALONE = "alone"
    """It evaluates, or does what is done once: until that is over it may have put other weights in place."""


class GatherWhy(StrEnum):
    """Why the members of a view have to leave it."""

    LOST = "lost"
    """A member was lost."""
    LEFT = "left"
    """A member has left."""
    STUCK = "stuck"
    """Nobody moves."""
    NOT_FORMED = "not formed"
    FORGOTTEN = "forgotten"
    """A member is in a view that was cancelled, or that is in no journal."""
    MEMORY = "memory"
    """The memory of a node that kept copies began anew."""
    PART_MISSING = "part missing"
    """A member did not write its part of the final checkpoint."""
    ALL_LOST = "all lost"
    """Nobody is left behind the loop."""
    MAINTENANCE = "maintenance"
    """Nodes will be taken away."""
    RESIZED = "resized"
    """The world is to be smaller."""
    PARTITION = "partition"
    """A node is silent, and all wait for it."""
    STOPS = "stops"
    """The run is to end, and not all members have come to the end of their step in time."""
    RESTARTED = "restarted"
    """The coordinator was started again, and the view is not whole."""


# ---- why a run ended ---------------------------------------------------------------------------------------------------------------------


class EndWhy(StrEnum):
    """Why a run is over."""

    ALL_STEPS = "all steps"
    LOOP_ENDED = "ended by its loop"
    """The train function has called ``run.stop``, or left its loop by ``break``, at the same step on all ranks."""
    NOT_SAVED = "not saved"
    """All steps, and the final checkpoint could not be kept."""
    STOPPED = "stopped"
    STORE_FAILED = "store failed"
    """It was told to stop when checkpoints fail for long."""
    TIME_IS_UP = "time is up"
    BUDGET_SPENT = "budget spent"
    PAUSED = "paused"
    """Its user wants its machines back for a while."""
    JOURNAL_FAILED = "journal failed"
    """Records cannot be written, or will not be read: the disk is full, or the journal is gone."""
    CONTRADICTION = "contradiction"
    """The coordinator's state says two things that cannot both be true: a mistake in Fleet."""
    DRIVER_FAILED = "driver failed"
    LOOP_WRONG = "loop wrong"
    """A mistake of the train function: no node is to blame for anything that ranks differed in."""
    TRAIN_RAISED = "raised"
    RAISED_BEHIND = "raised behind the loop"
    CRASH_LOOP = "crash loop"
    UNJUDGED = "unjudged"
    """Ranks differ, and nobody can say which one is wrong."""
    ENDS_DIFFER = "ends differ"
    """The ranks hold different states at the end."""
    LATE_BEHIND = "late behind the loop"
    REFUSED = "refused"
    """The data, or the optimizer, are not those that ran before the resume: no step was taken."""
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
    GivenUp: "given up earlier, and another may have taken its slot",
}


def sentence(fact: Fact) -> str:
    """A fact in words, for people alone; a clause without a full stop."""
    match fact:
        case ProcessEnded():
            return _ended(fact)
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
