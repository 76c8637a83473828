"""Interfaces of the core to the world. Real adapters are in ``actors``, ``storage`` and ``fleet.app``; the simulator has its own."""

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
    """The journal: it keeps the order of appended records."""

    @property
    def trouble(self) -> str:
        """A clause on trouble by which records could not be written or read; empty while all is well."""

    def append(self, record: Record) -> None: ...

    def flush(self) -> None:
        """Hand all appended records to the operating system: they survive the death of this process. Raises OSError."""


class MembersPort(Protocol):
    """Carries instructions to ranks, by way of their nodes' agents. Delivery may fail silently: the machine repeats such messages."""

    def send(self, instruction: Instruction) -> None: ...


class CheckpointPort(Protocol):
    """The coordinator's access to durable checkpoints."""

    def commit(self, order: CommitCheckpoint) -> int:
        """Put the manifest in place atomically; returns total bytes. Raises OSError when the store fails."""


class ProcessPort(Protocol):
    """Faults on one node's processes, from outside. A process whose start time differs from the named one is refused."""

    def operate(self, order: Operation) -> str | None:
        """Carry ``order`` out. Returns the reason of a refusal, or None when it was done."""


class DaemonPort(Protocol):
    """Faults by an actor of the run on itself, and on its host. Refusals as of ``ProcessPort``."""

    def operate(self, order: Operation) -> str | None: ...

    def close(self) -> None:
        """End all faults."""


class LinkPort(Protocol):
    """Faults on the links between this host and others of the run. Refusals as of ``ProcessPort``."""

    def operate(self, order: Operation) -> str | None: ...

    def applied(self, fault: str) -> str:
        """The measured effect of a fault that is healed, in words; empty where there is none."""

    def close(self) -> None:
        """End all faults."""


class MemoryPort(Protocol):
    """One node's memory for other nodes' copies, served by its agent's process. ``address`` is ``host:port``."""

    address: str

    def held(self) -> tuple[Copy, ...]:
        """The checkpoints that have parts here."""

    def close(self) -> None: ...


class NodePort(Protocol):
    """Whole nodes. The launcher alone can end and replace them."""

    def lose(self, index: int) -> str | None: ...

    def add(self) -> int: ...

    def alive(self) -> Sequence[int]: ...


class RecoveryPolicy(Protocol):
    """Chooses the members of the next view, and ends a run that keeps failing. Pure; see ``policies.recovery``."""

    def form(self, situation: Situation, now_s: float) -> Formation:
        """The members that train on, after a loss or at the start. Action ``form``, ``wait``, or ``restart``: end the members."""

    def grow(self, situation: Situation, now_s: float) -> Formation:
        """The members of a larger view, to enter at a step boundary, while the run is healthy. Action ``grow`` or ``wait``."""

    def judge(self, losses: Sequence[Loss], now_s: float) -> Decision:
        """Whether the run's losses are bad luck (``go_on``) or a crash loop (``give_up``)."""


class PlacementPolicy(Protocol):
    """Assigns shards to view ranks, and nodes to their copies. Pure; see ``policies.placement``."""

    def weighted_ranges(self, shards: int, weights: Sequence[float]) -> Ranges:
        """The shards of each rank. ``weights`` are the ranks' speeds, 1 for a rank at full speed."""

    def copies(self, homes: Sequence[str], domains: Mapping[str, str], copies: int) -> tuple[tuple[str, ...], ...]:
        """By view rank, the nodes that keep its copies, out of ``domains`` (node -> failure domain). ``homes`` are the ranks' own nodes."""


class StragglerPolicy(Protocol):
    """Finds slow ranks, and the cheapest action against them. It keeps all times that it gets; see ``policies.straggler.mitigation``."""

    def configure(self, settings: StragglerSettings) -> None:
        """Use new settings from now on."""

    def look(self, timings: Timings | None, circumstances: Circumstances, now_s: float) -> Remedy:
        """Judge the new steps, if there are any, and give a remedy. It must not raise: in doubt it accuses no rank."""


class ProgressPolicy(Protocol):
    """Sets the time without a step after which a rank counts as hung. Pure; see ``policies.timeouts``."""

    def decide(self, steps_s: Sequence[float], present_s: float) -> Decision:
        """Action ``keep`` or ``set``; ``payload.progress_s`` is the time that holds from now on."""


class IntervalPolicy(Protocol):
    """Says when the next checkpoint of a level is due. Pure; see ``policies.interval``."""

    def configured(self, settings: CheckpointSettings) -> IntervalPolicy:
        """The policy under new settings."""

    def due(
        self, now_s: float, last_s: float, blocked_s: float, latency_s: float, rate_per_s: float, *,
        events: int = 0, exposure_s: float = 0.0,
    ) -> Decision: ...  # fmt: skip


class CorruptionPolicy(Protocol):
    """Finds the wrong ranks when ranks differ bit for bit, and the newest good state. Pure; see ``policies.corruption``."""

    def judge(self, votes: Mapping[Member, str], others: Mapping[Member, str], again: bool = False) -> Verdict:
        """Judge digests: ``votes`` of members that may vote, and ``others`` without a vote. ``again``: ranks differed right before, too.

        Action ``carry_on``; ``evict`` the guilty members; ``retry``: no member is guilty, and all go back; ``stop``: the loop is wrong.
        """

    def go_back(self, found: StateId, cleared: StateId, kept: Sequence[StateId]) -> tuple[Decision, StateId | None]:
        """The state to go on from: action ``carry_on`` at ``found``, ``go_back`` to one of the ``kept`` states, or ``begin_anew``."""
