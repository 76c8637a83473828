"""What the core asks of the world. Real adapters live in ``actors``, ``storage`` and ``fleet.app``; the simulator has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fleet.protocol.decisions import Decision
from fleet.protocol.instructions import CommitCheckpoint, Instruction
from fleet.protocol.operations import Operation
from fleet.protocol.records import Record
from fleet.protocol.slowness import Circumstances, Remedy, Timings
from fleet.protocol.types import Copy, Formation, Loss, Member, Ranges, Situation, StateId, Verdict
from fleet.settings.run import CheckpointSettings, StragglerSettings


class JournalPort(Protocol):
    """Where records go. Appending keeps their order."""

    @property
    def trouble(self) -> str:
        """What will keep records from being written, or read, in a clause; empty while all is well."""

    def append(self, record: Record) -> None: ...

    def flush(self) -> None:
        """Hand everything appended so far to the operating system: it survives the death of this process. Raises OSError."""


class MembersPort(Protocol):
    """Carries instructions to ranks, by way of their nodes' agents. Delivery may fail silently; the machine repeats what matters."""

    def send(self, instruction: Instruction) -> None: ...


class CheckpointPort(Protocol):
    """Durable checkpoints as the coordinator sees them."""

    def commit(self, order: CommitCheckpoint) -> int:
        """Put the manifest in place atomically; returns total bytes. Raises OSError when the store fails."""


class ProcessPort(Protocol):
    """What can be done to one node's processes from outside. A process whose start time differs from the one named is refused."""

    def operate(self, order: Operation) -> str | None:
        """Carry it out. Returns why it was refused, or None when it was done."""


class DaemonPort(Protocol):
    """What an actor of the run can do to itself, and to what is beside it on its host. Refusals as of ``ProcessPort``."""

    def operate(self, order: Operation) -> str | None: ...

    def close(self) -> None:
        """End whatever was done."""


class LinkPort(Protocol):
    """What can be done to the links between this host and others of the run. Refusals as of ``ProcessPort``."""

    def operate(self, order: Operation) -> str | None: ...

    def applied(self, fault: str) -> str:
        """What was done for a fault that is healed, as it was measured; empty where that says nothing."""

    def close(self) -> None:
        """End whatever was done."""


class MemoryPort(Protocol):
    """One node's memory for other nodes' copies, served by its agent's process. ``address`` is ``host:port``."""

    address: str

    def held(self) -> tuple[Copy, ...]:
        """The checkpoints of which parts are here."""

    def close(self) -> None: ...


class NodePort(Protocol):
    """Whole nodes, which only the launcher can lose and replace."""

    def lose(self, index: int) -> str | None: ...

    def add(self) -> int: ...

    def alive(self) -> Sequence[int]: ...


class RecoveryPolicy(Protocol):
    """Who is in the next view, and when a run that keeps failing ends. Pure; see ``policies.recovery``."""

    def form(self, situation: Situation, now_s: float) -> Formation:
        """After a loss, or at the start: who trains on. Action ``form``, ``wait``, or ``restart``: the members are to be ended."""

    def grow(self, situation: Situation, now_s: float) -> Formation:
        """While the run is healthy: who joins the view at a step boundary. Action ``grow`` or ``wait``."""

    def judge(self, losses: Sequence[Loss], now_s: float) -> Decision:
        """Whether the run's losses are bad luck (``go_on``) or a crash loop (``give_up``)."""


class PlacementPolicy(Protocol):
    """Which shards each view rank computes, and where its copies go. Pure; see ``policies.placement``."""

    def weighted_ranges(self, shards: int, weights: Sequence[float]) -> Ranges:
        """``weights`` are the ranks' speeds, 1 for each that is well."""

    def copies(self, homes: Sequence[str], domains: Mapping[str, str], copies: int) -> tuple[tuple[str, ...], ...]:
        """Nodes that keep the copies of each view rank, at home on ``homes``, out of those in ``domains`` (node -> failure domain)."""


class StragglerPolicy(Protocol):
    """Who is slow, and what is the cheapest to do about it. Remembers the times it was shown; see ``policies.straggler.mitigation``."""

    def configure(self, settings: StragglerSettings) -> None:
        """New settings hold from now on."""

    def look(self, timings: Timings | None, circumstances: Circumstances, now_s: float) -> Remedy:
        """Judge the steps that are new, if there are any, and say what to do. Must not raise: one that cannot tell accuses nobody."""


class ProgressPolicy(Protocol):
    """How long a rank may go without a step before it counts as hung. Pure; see ``policies.timeouts``."""

    def decide(self, steps_s: Sequence[float], present_s: float) -> Decision:
        """Action ``keep`` or ``set``; ``payload.progress_s`` is what holds from now on."""


class IntervalPolicy(Protocol):
    """When the next checkpoint of a level is due. Pure; see ``policies.interval``."""

    def configured(self, settings: CheckpointSettings) -> IntervalPolicy:
        """The policy under new settings."""

    def due(
        self, now_s: float, last_s: float, blocked_s: float, latency_s: float, rate_per_s: float, *,
        events: int = 0, exposure_s: float = 0.0,
    ) -> Decision: ...  # fmt: skip


class CorruptionPolicy(Protocol):
    """Who is wrong when ranks differ bit for bit, and which state is still good. Pure; see ``policies.corruption``."""

    def judge(self, votes: Mapping[Member, str], others: Mapping[Member, str], again: bool = False) -> Verdict:
        """``votes`` are the digests of those who may vote; ``others`` are judged, and have no voice. ``again``: they differed right before.

        Action ``carry_on``; ``evict`` those who are guilty; ``retry``: nobody is, and all go back; ``stop``: the loop is wrong.
        """

    def go_back(self, found: StateId, cleared: StateId, kept: Sequence[StateId]) -> tuple[Decision, StateId | None]:
        """Where to go on: action ``carry_on`` at ``found``, ``go_back`` to one of the ``kept`` states, or ``begin_anew``."""
