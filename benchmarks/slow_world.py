"""A simulated world of ranks whose work takes a known time, with recorded noise (``benchmarks.noise``) and faults of known truth.

A rank's step is some shards of compute, an exchange and some batches of data. Each part takes its typical time, times recorded noise, times
its fault. The noise is the mean of successive recorded repetitions, from a place of its own: work of 100 ms gets 20 repetitions of 5 ms.
Longer work gets as many as the stretch has without using one twice. In ``brief`` worlds a shard is one repetition, and steps take 5 to 30
ms: no mean evens the noise out.

The worlds also have effects that a detector must not accuse. Ranks differ by a few percent, and hold unequal numbers of shards. There are
warm-ups, view changes with a newcomer, and stretches in which all ranks are slow. A wait for a slow rank counts as exchange, and each peer
of a slow link feels it in one of its transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import noise
from fleet.protocol.types import Member
from fleet.simulation.rng import derive_seed
from policies.placement import ranges
from policies.straggler.detectors import COMPUTE, DATA, NETWORK, StepTimes

STEPS, BEGIN, END, PORTION = 130, 60, 110, 5
REGIMES = (("compute_quiet", "network_quiet"), ("compute_gc", "network_quiet"), ("compute_shared", "network_shared"))
SEVERITIES = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
FAULTS = (COMPUTE, NETWORK, DATA, "intermittent")
WORLDS = (
    (2, 8),  # not for slow links: of two ranks both ends of the link are equally slow
    (3, 16),
    (4, 16),
    (8, 32),
    (16, 16),
    (32, 64),
)
STEP_S = (0.1, 2.0)
RANK_SPREAD, WAIT_LEAK, MESSAGES = 0.02, 0.02, 4


@dataclass(frozen=True)
class Series:
    """Times of equal work, again and again: ``factors`` [processes, repetitions] of ``seconds``, the typical time of one."""

    factors: np.ndarray
    seconds: float


Noise = dict[str, Series]


@dataclass(frozen=True)
class SlowRank:
    """``kind`` takes ``severity`` times as long on ``member`` in steps ``begin..end``; ``fault`` is one of ``FAULTS``."""

    member: Member
    kind: str
    fault: str
    severity: float
    begin: int = BEGIN
    end: int = END


@dataclass(frozen=True)
class Stretch:
    """Steps of one world, in portions, with its slow ranks. ``fault`` and ``severity`` are of the injected fault; empty when clean."""

    portions: tuple[StepTimes, ...]
    truth: tuple[SlowRank, ...]
    regime: str
    fault: str = ""
    severity: float = 1.0


def recorded(part: int, parts: int = 2) -> Noise:
    """Regime -> the ``part``-th stretch out of ``parts``, each process by its own median."""
    found = {}
    for name, rows in noise.load().items():
        rows = np.array_split(rows, parts, axis=1)[part]
        typical_us = np.median(rows, axis=1, keepdims=True)
        found[name] = Series(rows / typical_us, float(typical_us.mean()) / 1e6)
    return found


def stretches(seed: int, faults: int, clean: int, series: Noise, brief: bool = False) -> Iterator[Stretch]:
    """``faults`` stretches with one slow rank (sometimes two), by turns of all kinds and severities, then ``clean`` ones without."""
    for number in range(faults):
        fault = FAULTS[number % len(FAULTS)]
        severity = SEVERITIES[number // len(FAULTS) % len(SEVERITIES)]
        yield _World(derive_seed(seed, "fault", number), series, fault, brief).stretch(fault, severity)
    for number in range(clean):
        yield _World(derive_seed(seed, "clean", number), series, "", brief).stretch("", 1.0)


class _World:
    def __init__(self, seed: int, series: Noise, fault: str, brief: bool) -> None:
        self.rng, self.series, self.brief = np.random.default_rng(seed), series, brief
        self.ranks, shards = WORLDS[self.rng.integers(fault == NETWORK, len(WORLDS))]
        self.shards = np.array([end - begin for begin, end in ranges(shards, self.ranks)], dtype=float)
        self.regime = REGIMES[self.rng.integers(len(REGIMES))]
        self.step_s = self.shards.max() * series[self.regime[0]].seconds if brief else self.rng.uniform(*STEP_S)
        self.shares = {COMPUTE: 1.0, NETWORK: self.rng.uniform(0.15, 0.4), DATA: self.rng.uniform(0.1, 0.25)}

    def stretch(self, fault: str, severity: float) -> Stretch:
        factors = {kind: self._base(kind, name) for kind, name in zip((COMPUTE, NETWORK, DATA), (*self.regime, "data_cache"), strict=True)}
        self._everybody(factors[COMPUTE])
        members = [Member(slot, 0) for slot in range(self.ranks)]
        two = self.ranks >= 8 and self.rng.random() < 0.15
        guilty = self.rng.permutation(self.ranks)[: 1 + two].tolist() if fault else []
        truth = tuple(self._slow(factors, members[row], fault, severity) for row in guilty)
        return Stretch(tuple(self._portions(self._seconds(factors), members, guilty)), truth, "+".join(self.regime), fault, severity)

    def _base(self, kind: str, name: str) -> np.ndarray:
        """[ranks, steps]: the mean of the recorded repetitions that fill the work of a step, times the rank's own speed."""
        rows = [self._piece(self.series[name].factors, int(count)) for count in self._repetitions(kind, self.series[name])]
        speed = np.exp(self.rng.normal(0.0, RANK_SPREAD, (self.ranks, 1)))
        warm_up = 1 + 3 * np.exp(-np.arange(STEPS))
        return np.array(rows) * speed * warm_up

    def _repetitions(self, kind: str, series: Series) -> np.ndarray:
        """Number of repetitions in a step, [ranks]."""
        if self.brief:
            counts = np.full(self.ranks, MESSAGES) if kind == NETWORK else self.shards
        else:
            parts = np.ones(self.ranks) if kind == NETWORK else self.shards / self.shards.max()
            counts = np.rint(parts * self.step_s * self.shares[kind] / series.seconds)
        return np.clip(counts, 1, series.factors.shape[1] // STEPS)

    def _piece(self, factors: np.ndarray, count: int) -> np.ndarray:
        """A piece from a random place of the series, which begins again after its end."""
        row = factors[self.rng.integers(len(factors))]
        begin = int(self.rng.integers(len(row)))
        return np.roll(row, -begin)[: count * STEPS].reshape(STEPS, count).mean(axis=1)

    def _everybody(self, compute: np.ndarray) -> None:
        if self.rng.random() < 0.3:
            begin = int(self.rng.integers(20, STEPS - 30))
            compute[:, begin : begin + 30] *= self.rng.uniform(1.3, 2.0)

    def _slow(self, factors: dict[str, np.ndarray], member: Member, fault: str, severity: float) -> SlowRank:
        kind = COMPUTE if fault == "intermittent" else fault
        slow = np.ones(END - BEGIN, bool)
        if fault == "intermittent":
            on, off = int(self.rng.integers(3, 9)), int(self.rng.integers(2, 5))
            slow = np.arange(END - BEGIN) % (on + off) < on
        excess = factors[kind][member.slot, BEGIN:END] * slow * (severity - 1)
        if kind == NETWORK:  # each peer meets the slow link in one of its transfers
            factors[kind][:, BEGIN:END] += excess / (self.ranks - 1) * (np.arange(self.ranks) != member.slot)[:, None]
        factors[kind][member.slot, BEGIN:END] += excess
        return SlowRank(member, kind, fault, severity)

    def _seconds(self, factors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shard_s = self.step_s / self.shards.max()
        work = factors[COMPUTE] * self.shards[:, None] * shard_s
        waiting = work.max(axis=0) - work
        return {
            COMPUTE: factors[COMPUTE] * shard_s,
            NETWORK: factors[NETWORK] * self.step_s * self.shares[NETWORK] + WAIT_LEAK * waiting,
            DATA: factors[DATA] * shard_s * self.shares[DATA],
        }

    def _portions(self, seconds: dict[str, np.ndarray], members: list[Member], guilty: Sequence[int]) -> Iterator[StepTimes]:
        """The portions of a stretch. Sometimes the view changes before the fault: an innocent rank is new in it, with its own warm-up."""
        innocent = [row for row in range(self.ranks) if row not in guilty]
        change = int(self.rng.integers(4, 8)) * PORTION if self.rng.random() < 0.3 else STEPS
        newcomer = int(self.rng.choice(innocent))
        for begin in range(0, STEPS, PORTION):
            if begin == change:
                members = [Member(m.slot, 1) if m.slot == newcomer else m for m in members]
                for values in seconds.values():
                    values[newcomer, begin : begin + PORTION] *= 1 + 3 * np.exp(-np.arange(PORTION))
            columns = {kind: values[:, begin : begin + PORTION] for kind, values in seconds.items()}
            yield StepTimes(
                generation=1 + (begin >= change), first_step=begin, members=tuple(members), shards=self.shards,
                compute_s=columns[COMPUTE], network_s=columns[NETWORK], data_s=columns[DATA],
            )  # fmt: skip
