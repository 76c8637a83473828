"""One level of checkpoints of ``FleetMachine``: when one is due, which parts are written, which one is the newest."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fleet.machine.sessions import Sessions
from fleet.protocol.decisions import Interval
from fleet.protocol.events import CheckpointDurable, PartFailed, PartWritten
from fleet.protocol.instructions import CommitCheckpoint, Instruction, Keep, SaveCheckpoint, Write
from fleet.protocol.levels import PEERS, STORE, peers_url, places, request_number
from fleet.protocol.ports import IntervalPolicy
from fleet.protocol.probes import probe
from fleet.protocol.records import CheckpointRecord, DecisionMade, Record
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings

COSTS = 8
"""Number of checkpoints over which costs are averaged."""
CHANGE = 0.05
"""An interval that differs by a smaller share from the last journalled one is not journalled."""
TRIES, FIRST_RETRY_S = 5, 2.0
"""A checkpoint that fails is tried again after 2, 4, 8 and 16 s, then skipped."""


@dataclass(slots=True)
class CheckpointRequest:
    """One requested checkpoint. ``said``: the request; ``members``: its ranks; ``parts``: the parts that are written; ``committing``: the
    manifest is being put in place."""

    number: int
    at_s: float
    sent_s: float
    members: tuple[Member, ...]
    said: Instruction
    parts: dict[Member, PartWritten] = field(default_factory=dict)
    committing: bool = False


@dataclass(slots=True)
class CheckpointFailures:
    """Checkpoints that failed after the newest durable one. ``in_a_row``: their number. ``since_s``: when the first of them was requested;
    None when there is none. ``last``: the reason of the last failure. ``by``: the member that could not write its part, if that was it."""

    in_a_row: int = 0
    since_s: float | None = None
    last: str = ""
    by: Member | None = None


@dataclass(slots=True)
class FinalCheckpoint:
    """The checkpoint of the run's last state: it is ``wanted``, was requested in ``generation``, or is ``lost``: it cannot be kept."""

    wanted: bool = False
    generation: int = -1
    lost: bool = False


class Checkpoints:
    """At most one request is pending. It ends with its view, and is made again.

    Attributes:
        durable_s: when the newest kept state was saved; when there is none, the beginning of the run or of its cluster.
    """

    def __init__(
        self,
        level: str,
        settings: RunSettings,
        interval: IntervalPolicy,
        newest: tuple[str, StateId] | None,
        rate_per_s: float,
        now_s: float,
        sessions: Sessions | None = None,
    ) -> None:
        self._sessions = sessions
        self.level = level
        self.settings, self.interval, self.rate_per_s = settings, interval, rate_per_s
        self.place = places(settings).get(level, "")
        self.kept: dict[StateId, str] = {newest[1]: newest[0]} if newest else {}
        self._suspected: tuple[StateId, StateId] | None = None
        self._said_s: float | None = None
        self._request: CheckpointRequest | None = None
        self._count = 0
        self._last_s = now_s
        self._ask_again_s = now_s
        self._costs: deque[tuple[float, float]] = deque(maxlen=COSTS)
        self.failures, self.final = CheckpointFailures(), FinalCheckpoint()
        self.durable_s = now_s
        self.events, self.since_s = 0, now_s

    @property
    def blocked_s(self) -> float:
        """C: seconds for which a checkpoint blocks the loop, the mean of the last few; 0 while not known."""
        return statistics.fmean(blocked_s for blocked_s, _ in self._costs) if self._costs else 0.0

    @property
    def latency_s(self) -> float:
        """L: seconds until a checkpoint is durable, the mean of the last few; 0 while not known."""
        return statistics.fmean(latency_s for _, latency_s in self._costs) if self._costs else 0.0

    @property
    def newest_id(self) -> str | None:
        return self.kept[max(self.kept)] if self.kept else None

    @property
    def newest_state(self) -> StateId:
        return max(self.kept, default=StateId(0, 0))

    def holds(self, state: StateId) -> bool:
        """Whether exactly this state is kept."""
        return state in self.kept

    def _keep(self, checkpoint: str, state: StateId) -> None:
        """Note a checkpoint. The store keeps a number of checkpoints and deletes older ones, but no guarded ones. Other levels keep one."""
        self.kept[state] = f"{self.place}/{checkpoint}" if self.place else checkpoint
        for old in sorted(self.kept)[: -1 if self.place else -max(1, self.settings.checkpoint.keep)]:
            if old not in self._guarded:
                del self.kept[old]

    @property
    def _guarded(self) -> Collection[StateId]:
        return self._sessions.guarded if self._sessions is not None else ()

    def withdraw(self, first: StateId, last: StateId, now_s: float, reason: str) -> list[Instruction]:
        """Do not use checkpoints of the states ``first`` to ``last`` any more: a wrong rank wrote a part of them."""
        self._suspected = (first, last)
        suspected = [(state, self.kept.pop(state)) for state in list(self.kept) if first <= state <= last]
        return [
            Write(CheckpointRecord(checkpoint, "withdrawn", state, now_s, detail=reason, level=self.level))
            for state, checkpoint in suspected
        ]

    @property
    def pending(self) -> bool:
        return self._request is not None

    def foretell(self, rate_per_s: float, now_s: float) -> None:
        """Faults that need this level are now expected at another rate: ask the policy again."""
        self.rate_per_s = rate_per_s
        if self.failures.since_s is None:
            self._ask_again_s = min(self._ask_again_s, now_s)

    def configure(self, settings: RunSettings) -> None:
        """Use new settings from now on."""
        self.settings, self.interval = settings, self.interval.configured(settings.checkpoint)
        self._ask_again_s = self._last_s

    def tick(self, view: View, now_s: float) -> list[Instruction]:
        """While a view runs: ask for a checkpoint when the policy says so, repeat the request, or give it up."""
        if self._request is None:
            return self._when_due(view, now_s) if now_s >= self._ask_again_s else []
        return self.repeat(now_s)

    def repeat(self, now_s: float) -> list[Instruction]:
        """Repeat the pending request, or give it up."""
        request = self._request
        if request is None:
            return []
        if now_s - request.at_s > self.settings.timeouts.checkpoint_s:
            return self.failed(f"not durable after {now_s - request.at_s:.1f} s", now_s)
        if not request.committing and now_s - request.sent_s >= self.settings.timeouts.resend_s:
            request.sent_s = now_s
            return [request.said]
        return []

    def keep_final(self, view: View, now_s: float) -> tuple[list[Instruction], bool]:
        """All members wait with the run's last state: request it until it is kept, or until ``final.lost``.

        Returns (instructions, whether a member did not write its part in time).
        """
        if not self.final.wanted:
            self.final.wanted, self.failures.in_a_row = True, 0
        if self.final.generation != view.generation:  # ranks of this view may write it, although those of the last view could not
            self.final.generation, self._ask_again_s = view.generation, now_s
        request = self._request
        late = request is not None and not request.committing and now_s - request.at_s > self.settings.timeouts.checkpoint_s
        if request is not None:
            return self.tick(view, now_s), late
        return (self.request(view, now_s) if now_s >= self._ask_again_s else []), False

    def _when_due(self, view: View, now_s: float) -> list[Instruction]:
        self.final = FinalCheckpoint()  # the run trains: all ranks with the last state are gone, and the next end has new tries
        exposure_s = now_s - self.since_s
        decision = self.interval.due(
            now_s, self._last_s, self.blocked_s, self.latency_s, self.rate_per_s, events=self.events, exposure_s=exposure_s
        )
        interval_s = decision.payload.interval_s if isinstance(decision.payload, Interval) else 0.0
        out: list[Instruction] = []
        if self._said_s is None or abs(interval_s - self._said_s) > CHANGE * self._said_s:
            self._said_s = interval_s
            policy = "interval" if self.level == STORE else f"interval of {self.level}"
            out.append(Write(DecisionMade(policy, decision.action, decision.reason, decision.payload, now_s)))
        if decision.action == "save":
            return out + self.request(view, now_s)
        self._ask_again_s = min(decision.valid_until_s, now_s + 60.0)
        return out

    def request(self, view: View, now_s: float) -> list[Instruction]:
        return self._ask(view.members, lambda number: SaveCheckpoint(view.members, view.generation, number), now_s)

    def keep(self, members: tuple[Member, ...], generation: int, state: StateId, now_s: float) -> list[Instruction]:
        """Have these members, which are in no view, write their ``state`` at once."""
        return self._ask(members, lambda number: Keep(members, generation, state, number), now_s)

    def _ask(self, members: tuple[Member, ...], words: Callable[[int], Instruction], now_s: float) -> list[Instruction]:
        if self._request is not None:
            return []
        self._count += 1
        number = request_number(self.level, self._count)
        self._request = CheckpointRequest(number, now_s, now_s, members, words(number))
        asked = CheckpointRecord(f"request-{number}", "requested", self.newest_state, now_s, level=self.level)
        return [Write(asked), self._request.said]

    def part(self, event: PartWritten, view: View) -> list[Instruction]:
        """A member's part is written. After the last one the manifest can be put in place."""
        request = self._request
        if request is None or event.request != request.number or request.committing or event.member not in request.members:
            return []
        request.parts[event.member] = event
        if len(request.parts) < len(request.members):
            return []
        request.committing = True
        parts = [request.parts[member] for member in request.members]
        blocked_s = max(part.blocked_s for part in parts)
        meta = next((part.meta for part in parts if part.meta), "")
        written = tuple(part.part for part in parts)
        guarded = tuple(self.kept[state] for state in sorted(self._guarded) if state in self.kept)
        return [CommitCheckpoint(event.checkpoint, event.state, written, meta, blocked_s, request.at_s, self._place(view), guarded)]

    def _place(self, view: View) -> str:
        """The URL for the manifest. All memories with a part get the manifest, so each memory that is left knows the number of parts."""
        addresses = sorted({address for targets in view.copies for address in targets})
        return peers_url(addresses) if self.level == PEERS else self.place

    def part_failed(self, event: PartFailed, now_s: float) -> list[Instruction]:
        """A member could not write its part: the request has failed, without a wait for other parts."""
        request = self._request
        if request is None or event.request != request.number or request.committing:
            return []
        out = self.failed(f"{event.member}: {event.reason}", now_s)
        self.failures.by = event.member
        return out

    def durable(self, event: CheckpointDurable, now_s: float) -> list[Instruction]:
        self._costs.append((event.blocked_s, event.latency_s))
        self.failures.in_a_row, self.failures.since_s, self.durable_s = 0, None, now_s - event.latency_s
        self._settle(now_s - event.latency_s)  # an interval is from one kept state to the next, without the time of writing
        if self._suspected is not None and self._suspected[0] <= event.state <= self._suspected[1]:
            probe("a checkpoint becomes durable when its state is in doubt")
            detail = "a rank that wrote a part of it was found to be wrong later"
            return [Write(CheckpointRecord(event.checkpoint, "withdrawn", event.state, now_s, detail=detail, level=self.level))]
        self._keep(event.checkpoint, event.state)
        cost = event.bytes, event.blocked_s, event.latency_s
        return [Write(CheckpointRecord(event.checkpoint, "durable", event.state, now_s, *cost, level=self.level))]

    def failed(self, reason: str, now_s: float) -> list[Instruction]:
        if self._request is None:
            return []
        request, self._request = self._request, None
        self.failures.last, self.failures.by = reason, None
        if self.failures.since_s is None:
            self.failures.since_s = request.at_s
        return [self._failure(request.number, now_s, reason), *self._after_failure(now_s)]

    def _after_failure(self, now_s: float) -> list[Instruction]:
        """Try again soon, then later, then not before the next one is due. So a failure of a minute does not cost an interval."""
        self.failures.in_a_row += 1
        if tried := self.failures.in_a_row % TRIES:
            self._ask_again_s = now_s + FIRST_RETRY_S * 2.0 ** (tried - 1)
            return []
        self._settle(now_s)
        self.final.lost = self.final.wanted
        if self.final.lost:
            probe("the final checkpoint cannot be kept")
        reason = f"given up after {TRIES} tries, until the next one is due"
        return [Write(CheckpointRecord("", "skipped", self.newest_state, now_s, detail=reason, level=self.level))]

    def abandoned(self, now_s: float) -> list[Instruction]:
        """The view changed before the request was done. It was due, so it is made again at once."""
        if self._request is None or self._request.committing:
            if self._request is not None:
                probe("a view changes while its checkpoint is put in place")
            return []
        number, self._request = self._request.number, None
        return [self._failure(number, now_s, "the view changed", view_changed=True)]

    def _failure(self, number: int, now_s: float, reason: str, *, view_changed: bool = False) -> Instruction:
        name, newest = f"request-{number}", self.newest_state
        return Write(CheckpointRecord(name, "failed", newest, now_s, detail=reason, level=self.level, view_changed=view_changed))

    def _settle(self, last_s: float) -> None:
        """Drop the request. The next one is due an interval after ``last_s``."""
        self._request = None
        self._last_s = self._ask_again_s = last_s

    def restarted(self, now_s: float) -> None:
        """After a replay: the next checkpoint is due an interval from now."""
        self._last_s = self._ask_again_s = now_s

    def replay(self, record: Record) -> None:
        if not isinstance(record, CheckpointRecord) or record.level != self.level:
            return
        if record.phase == "requested":  # numbers are never used twice: no rank may take a new request for an old one
            self._count += 1
        elif record.phase == "durable":
            self._keep(record.checkpoint, record.state)
            self.failures.since_s, self.durable_s = None, record.at_s - record.latency_s
            self._costs.append((record.blocked_s, record.latency_s))
        elif record.phase == "failed":
            self.failures.last = record.detail
        elif record.phase == "withdrawn":
            self.kept.pop(record.state, None)
