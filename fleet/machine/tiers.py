"""The levels of checkpoints of ``FleetMachine``: when each is due, and the checkpoint from which a new history can begin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fleet.machine.checkpoints import Checkpoints
from fleet.machine.outage import Outage
from fleet.machine.roster import Roster
from fleet.machine.sessions import Sessions, in_words
from fleet.protocol.events import CopiesHeld
from fleet.protocol.instructions import Instruction
from fleet.protocol.levels import LEVELS, PEERS, STORE, level_at, peers_url, places
from fleet.protocol.ports import IntervalPolicy, PlacementPolicy
from fleet.protocol.probes import probe
from fleet.protocol.records import Record, RunStarted, ViewPublished
from fleet.protocol.types import StateId, View
from fleet.settings.run import CheckpointSettings, RunSettings

FaultRates = Callable[[int, float], tuple[float, float]]
"""(ranks lost to faults, seconds) -> rates a second of faults that need a durable checkpoint, and of faults that need copies in memory. See
``policies.interval.LevelRates``."""
FORETELL_S = 30.0
"""Seconds after which the rates are computed again. They are computed with every loss, too."""
TRIES = 3
"""Number of views that may begin from one copy in memory. If all of them fail, the copy cannot be read, in spite of the agents' reports."""


class Tiers:
    """The durable store, the memory of the nodes, and the run's other levels. ``peers`` is None when no copies are wanted."""

    def __init__(
        self, settings: RunSettings, roster: Roster, store: IntervalPolicy, peers: IntervalPolicy | None,
        newest: tuple[str, StateId] | None, rates: FaultRates, now_s: float,
    ) -> None:  # fmt: skip
        self.settings, self._roster = settings, roster
        self._rates, self._since_s, self._foretold_s, self._losses = rates, now_s, now_s, 0
        rates_per_s = rates(0, 0.0)
        self.sessions = Sessions()
        self.store = Checkpoints(STORE, settings, store, newest, rates_per_s[0], now_s, self.sessions)
        wanted = peers if settings.peer_copies > 0 else None
        self.peers = Checkpoints(PEERS, settings, wanted, None, rates_per_s[1], now_s) if wanted is not None else None
        self.others = _others(settings, store, now_s)
        self.outage = Outage()
        self.memories: dict[str, CopiesHeld] = {}
        self._tries: Counter[str] = Counter()
        self._suspected: list[tuple[StateId, StateId]] = []

    @property
    def levels(self) -> list[Checkpoints]:
        return [self.store, *([self.peers] if self.peers is not None else []), *self.others]

    # ---- where a new history begins ------------------------------------------------------------------------------------------------------

    @property
    def newest_id(self) -> str | None:
        return self._newest()[0]

    @property
    def newest_state(self) -> StateId:
        return self._newest()[1]

    def _newest(self) -> tuple[str | None, StateId]:
        """The newest complete checkpoint of all levels. Of two of one state, that of the nearer level, which loads faster."""
        tired = {checkpoint for checkpoint, tries in self._tries.items() if tries >= TRIES}
        near = [level for level in reversed(self.others) if level.newest_id is not None and _id(level.newest_id) not in tired]
        best = max(near, key=lambda level: level.newest_state, default=self.store)
        found = best if self.store.newest_id is None or best.newest_state >= self.store.newest_state else self.store
        held = [copy for memory in self._within_reach.values() for copy in memory.copies]
        copy = newest_copy(self._within_reach.values(), tired | {copy.checkpoint for copy in held if self._is_suspect(copy.state)})
        if copy is not None and (found.newest_id is None or copy[1] >= found.newest_state):
            return copy
        return found.newest_id, found.newest_state

    def _is_suspect(self, state: StateId) -> bool:
        return any(first <= state <= last for first, last in self._suspected)

    @property
    def kept(self) -> list[StateId]:
        """The states from which a history may begin, in order. Copies in memory may lack parts."""
        copies = {copy.state for memory in self._within_reach.values() for copy in memory.copies if not self._is_suspect(copy.state)}
        return sorted(copies.union(self.store.kept, *(level.kept for level in self.others)))

    def withdraw(self, first: StateId, last: StateId, now_s: float, reason: str) -> list[Instruction]:
        """Do not use checkpoints of the states ``first`` to ``last`` any more: a wrong rank wrote a part of them."""
        self._suspected.append((first, last))
        return [instruction for level in self.levels for instruction in level.withdraw(first, last, now_s, reason)]

    def step_back(self, now_s: float) -> list[Instruction]:
        """The run is resumed. If its last session failed again where the run had failed before, it begins from an older checkpoint."""
        older = self.sessions.older(self.store.kept)
        if older is None:
            return []
        probe("a run that came back begins from an older checkpoint")
        first, last = StateId(older.history, older.step + 1), max(self.store.kept)
        return self.withdraw(first, last, now_s, in_words(self.sessions.returns))

    def begin(self, rolled_back: bool) -> StateId:
        """A view begins from the newest checkpoint. Returns its state. ``rolled_back``: because of a fault."""
        checkpoint, state = self._newest()
        if checkpoint is not None and level_at(checkpoint) != STORE:
            self._tries[_id(checkpoint)] += 1
            if self._tries[_id(checkpoint)] > 1:
                probe("a history begins from the same copies in memory again")
        if rolled_back:
            self._needed(checkpoint)
        return state

    def _needed(self, checkpoint: str | None) -> None:
        """Count a fault that needed this level: its rate is learned from these."""
        self.of(level_at(checkpoint)).events += 1

    def unsure(self, silent: Collection[str]) -> bool:
        """Whether a silent node may hold the newest copy. It answers soon, or is lost for good."""
        return any(node in self._within_reach for node in silent)

    # ---- copies in memory ----------------------------------------------------------------------------------------------------------------

    def hold(self, event: CopiesHeld, view: View | None) -> bool:
        """Note the copies in a node's memory. True when the memory began anew, and members of ``view`` send copies to its old address."""
        before = self.memories.get(event.node)
        self.memories[event.node] = event
        moved = before is not None and before.address != event.address
        return moved and view is not None and any(before.address in targets for targets in view.copies if before)

    @property
    def _within_reach(self) -> dict[str, CopiesHeld]:
        """The memories of nodes that are not given up. A node that is heard again still has its copies."""
        return {node: memory for node, memory in self.memories.items() if node in self._roster.nodes}

    @property
    def domains(self) -> dict[str, str]:
        """The domain path of each node that offers memory."""
        return {node: memory.domain for node, memory in self._within_reach.items()}

    def targets(self, placement: PlacementPolicy, homes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """By view rank, the addresses for its copies; () when there are none. ``homes`` are the ranks' own nodes."""
        if self.peers is None:
            return ()
        chosen = placement.copies(homes, self.domains, self.settings.peer_copies)
        return tuple(tuple(self.memories[node].address for node in nodes) for nodes in chosen) if all(chosen) else ()

    # ---- requests ------------------------------------------------------------------------------------------------------------------------

    def of(self, level: str) -> Checkpoints:
        """The level of this name; the store where there is none."""
        return next((each for each in self.levels if each.level == level), self.store)

    def configure(self, settings: RunSettings) -> None:
        """Use new settings from now on. Of the levels, the store alone gets a new interval."""
        self.settings = settings
        self.store.configure(settings)
        for level in self.levels[1:]:
            level.settings = settings

    @property
    def pending(self) -> bool:
        return any(level.pending for level in self.levels)

    def lost(self, now_s: float) -> None:
        """Count a rank that was lost to a fault, injected or not, with or without a need for a checkpoint."""
        self._losses += 1
        self._foretell(now_s)

    def _foretell(self, now_s: float) -> None:
        """Compute the rates of faults again: more losses mean higher rates, and more time without a loss means lower rates."""
        self._foretold_s = now_s
        rates_per_s = self._rates(self._losses, now_s - self._since_s)
        for level, rate_per_s in zip([self.store, *([self.peers] if self.peers is not None else [])], rates_per_s, strict=False):
            level.foretell(rate_per_s, now_s)

    def tick(self, view: View, now_s: float) -> list[Instruction]:
        if now_s - self._foretold_s >= FORETELL_S:
            self._foretell(now_s)
        wanted = [level for level in self.levels if level is not self.peers or view.copies]
        return [instruction for level in wanted for instruction in level.tick(view, now_s)]

    def abandoned(self, now_s: float) -> list[Instruction]:
        return [instruction for level in self.levels for instruction in level.abandoned(now_s)]

    def restarted(self, now_s: float) -> None:
        for level in self.levels:
            level.restarted(now_s)

    def moved(self, now_s: float) -> None:
        """The run has moved to another cluster."""
        self.outage.forget(self.store, now_s)

    def replay(self, record: Record) -> None:
        match record:
            case RunStarted(at_s=at_s):
                for level in self.levels:
                    level.since_s = at_s
            case ViewPublished(view=view) if view.checkpoint is not None:
                self._needed(view.checkpoint)
        self.outage.replay(record, self.store)
        for level in self.levels:
            level.replay(record)


def _others(settings: RunSettings, store: IntervalPolicy, now_s: float) -> list[Checkpoints]:
    """The levels with a place of their own, each with its fixed interval from the settings."""
    found = []
    for level in LEVELS:
        if level.name in places(settings):
            interval = store.configured(CheckpointSettings(policy="fixed", interval_s=level.every_s(settings)))
            found.append(Checkpoints(level.name, settings, interval, None, 0.0, now_s))
    return found


def _id(checkpoint: str) -> str:
    return checkpoint.rpartition("/")[2]


def newest_copy(memories: Iterable[CopiesHeld], excluded: Collection[str]) -> tuple[str, StateId] | None:
    """(URL with id, state) of the newest checkpoint whose parts are all in some memory, or None."""
    found: dict[str, dict[str, set[int]]] = defaultdict(dict)
    counts: Counter[str] = Counter()
    states: dict[str, StateId] = {}
    for memory in memories:
        for copy in memory.copies:
            found[copy.checkpoint][memory.address] = set(copy.parts)
            counts[copy.checkpoint] = max(counts[copy.checkpoint], copy.count)
            states[copy.checkpoint] = copy.state
    complete = [name for name, holders in found.items() if name not in excluded and _is_complete(holders, counts[name])]
    if not complete:
        return None
    newest = max(complete, key=lambda name: (states[name], name))
    return f"{peers_url(sorted(found[newest]))}/{newest}", states[newest]


def _is_complete(holders: Mapping[str, Collection[int]], count: int) -> bool:
    return count > 0 and set(range(count)) <= {part for parts in holders.values() for part in parts}
