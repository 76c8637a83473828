"""One run, one record: which process may write a run's checkpoints, agreed by files that a store creates once. Pure: no clock, no store.

Beside a run's checkpoints lies a sequence of numbered files. Each number is created by one process, and never overwritten. It is a
:class:`RunClaim`, by which a process takes the run, or a :class:`SaveEntry`, by which the holder announces a checkpoint. A claim and the
next save of the holder before compete for the same number. So a holder that has lost the run announces nothing any more: it is fenced.

The functions are generators. They yield what is to be asked of the store (:class:`Names`, :class:`Create`), or of the machine
(:class:`AskLives`, :class:`Pause`), and are sent the answers. So tests interleave them at will.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from dataclasses import asdict, dataclass
from typing import Any

from fleet.errors import FleetError

FOLDER = "lock"
RENEW_S = 5.0
"""From one stamp of a holder to the next."""
STALE_S = 30.0
"""A stamp that has not changed for so long, by the clock that looks at it, is that of a holder that is gone."""
LOOK_S = 1.0
"""From one look at a holder's stamp to the next."""
KEPT = 4
"""So many announcements of saves that are done stay in the sequence."""
STAMP = ".stamp"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a run, or wants to. ``start_ticks``, ``boot`` and ``space`` (of pids) name it for good, where it is seen.

    ``cluster`` is the address of a cluster that was there before; empty: one of its own. ``token`` is drawn by the process.
    """

    host: str
    pid: int
    start_ticks: int
    boot: str
    space: str
    cluster: str
    since_utc: str
    token: str

    def __str__(self) -> str:
        where = f" for the cluster {self.cluster}" if self.cluster else ""
        return f"process {self.pid} of {self.host}{where}, since {self.since_utc}"


@dataclass(frozen=True, slots=True)
class RunClaim:
    """From here on ``holder`` has the run, for the ``epoch``-th time that it is taken."""

    number: int
    epoch: int
    holder: Holder


@dataclass(frozen=True, slots=True)
class SaveEntry:
    """The holder of ``epoch`` puts the manifest of ``checkpoint`` next."""

    number: int
    epoch: int
    checkpoint: str


Entry = RunClaim | SaveEntry


@dataclass(frozen=True, slots=True)
class Tenure:
    """A holder's right to save: the number and the epoch of its claim."""

    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """A holder's sign of life. It is ``over`` once the holder has ended in order."""

    count: int
    over: bool = False


@dataclass(frozen=True, slots=True)
class SeenClaim:
    """A claim that may be followed by another, as it was found. ``stamp`` is what its holder must have left it at; None: any."""

    number: int
    stamp: Stamp | None = None


class TakenOver(FleetError, OSError):
    """Another process has taken the run: this one may write nothing of it any more. ``by`` is who has it."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by

    def __str__(self) -> str:
        return f"the run was taken over by {self.by}"


class RunHeld(FleetError):
    """A run goes on elsewhere: its ``holder`` lives."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self.holder = holder

    def __str__(self) -> str:
        return f"the run is held by {self.holder}"


# ---- what is asked for -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Names:
    """The names of all files of the sequence."""


@dataclass(frozen=True, slots=True)
class Read:
    """The bytes of a file; None when it is not there."""

    name: str


@dataclass(frozen=True, slots=True)
class Create:
    """Create a file that must not be there. Whether this was done."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Empty:
    """Create an empty manifest for a checkpoint, if it has none: then no other can be put."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Put:
    """Put the manifest of a checkpoint, where there is none. Whether this was done."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Note:
    """Write a file, whatever was there. It need not survive the machine."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file."""

    name: str


@dataclass(frozen=True, slots=True)
class AskLives:
    """Whether the process of a holder lives; None: it cannot be seen from here."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait a while because of ``holder``, then say what time it is."""

    holder: Holder


Ask = Names | Read | Create | Empty | Put | Note | Remove | AskLives | Pause


# ---- files -------------------------------------------------------------------------------------------------------------------------------


def name_of(number: int) -> str:
    """The file of an entry."""
    return f"{number:08d}"


def stamp_of(number: int) -> str:
    """The file of the stamps of the claim ``number``."""
    return name_of(number) + STAMP


KINDS: dict[type, str] = {RunClaim: "claim", SaveEntry: "save", Stamp: "stamp"}
"""The word of an entry in its file."""


def encode(entry: Entry | Stamp) -> bytes:
    """As JSON."""
    kind = KINDS[type(entry)]
    return json.dumps({"kind": kind} | asdict(entry)).encode()


def decode(data: bytes) -> Entry | Stamp:
    """Inverse of :func:`encode`. Raises ValueError for what is none."""
    try:
        content = json.loads(data)
        kind = content.pop("kind")
        match kind:
            case "claim":
                return RunClaim(content["number"], content["epoch"], Holder(**content["holder"]))
            case "save":
                return SaveEntry(**content)
            case "stamp":
                return Stamp(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no entry of a run's lock: {data[:60]!r}") from error
    raise ValueError(f"no entry of a run's lock: it is a {kind!r}")


def numbers_in(names: Collection[str]) -> list[int]:
    """The numbers of the entries, newest first."""
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


# ---- to take a run -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sequence:
    """The end of a sequence: its last number (-1: none), its last claim, and saves that may not be done."""

    last: int
    claim: RunClaim | None
    saves: tuple[SaveEntry, ...]


def reading() -> Generator[Ask, Any, Sequence]:
    """The end of the sequence, down to the last claim that is older than a holder who came so far as to leave a stamp."""
    names = yield Names()
    numbers = numbers_in(names)
    claim: RunClaim | None = None
    saves: list[SaveEntry] = []
    for number in numbers:
        data = yield Read(name_of(number))
        entry = decode(data) if data is not None else None  # None: its holder has removed it meanwhile
        if isinstance(entry, SaveEntry):
            saves.append(entry)
        elif isinstance(entry, RunClaim):
            claim = claim or entry
            if stamp_of(number) in names:
                break
    return Sequence(numbers[0] if numbers else -1, claim, tuple(saves))


def watching(take: bool = False) -> Generator[Ask, Any, SeenClaim]:
    """Find out whether the run may be taken: the claim that may be followed by another.

    A holder whose process is known to have ended, or that has ended in order, is followed at once. So is any where ``take`` is true. Else
    a stamp that does not change for ``STALE_S`` is waited for. Raises RunHeld.
    """
    known: tuple[int, Stamp | None] | None = None
    since_s = 0.0
    while True:
        sequence = yield from reading()
        claim = sequence.claim
        if claim is None:
            return SeenClaim(-1)
        if known is not None and claim.number != known[0]:
            raise RunHeld(claim.holder)
        if take:
            return SeenClaim(claim.number)
        data = yield Read(stamp_of(claim.number))
        stamp = _stamp(data)
        if stamp is not None and stamp.over:
            return SeenClaim(claim.number, stamp)
        lives = yield AskLives(claim.holder)
        if lives or (known is not None and stamp != known[1]):
            raise RunHeld(claim.holder)
        if lives is False:
            return SeenClaim(claim.number, stamp)
        now_s = yield Pause(claim.holder)
        if known is None:
            known, since_s = (claim.number, stamp), now_s
        elif now_s - since_s >= STALE_S:
            return SeenClaim(claim.number, stamp)


def _stamp(data: bytes | None) -> Stamp | None:
    """None: there is none, or it is just being written."""
    try:
        found = decode(data) if data else None
    except ValueError:
        return None
    return found if isinstance(found, Stamp) else None


def claiming(holder: Holder, seen: SeenClaim | None = None) -> Generator[Ask, Any, Tenure]:
    """Take the run. ``seen`` is what may be followed, as :func:`watching` has found it elsewhere; without, or after a change, it is watched
    here. Raises RunHeld.

    When this returns, no save of an earlier holder comes about any more.
    """
    while True:
        sequence = yield from reading()
        claim = sequence.claim
        if claim is not None and not (yield from _may_follow(claim, seen)):
            seen = yield from watching()
            continue
        number, epoch = sequence.last + 1, claim.epoch + 1 if claim is not None else 0
        if not (yield Create(name_of(number), encode(RunClaim(number, epoch, holder)))):
            continue  # a save of the holder before, or another claim
        sequence = yield from reading()
        if sequence.last > number:  # the holder before has announced so much meanwhile that this number was free again
            yield Remove(name_of(number))
            continue
        for save in sequence.saves:
            yield Empty(save.checkpoint)
        return Tenure(number, epoch)


def _may_follow(claim: RunClaim, seen: SeenClaim | None) -> Generator[Ask, Any, bool]:
    if seen is None or claim.number != seen.number:
        return False
    if seen.stamp is None:
        return True
    return _stamp((yield Read(stamp_of(claim.number)))) == seen.stamp


# ---- to hold it --------------------------------------------------------------------------------------------------------------------------


def checking(tenure: Tenure) -> Generator[Ask, Any, None]:
    """Look for a holder that has followed, which may be a moment late. Raises TakenOver."""
    names = yield Names()
    later = [name for name in names if name.endswith(STAMP) and name > stamp_of(tenure.number)]
    if later:
        data = yield Read(max(later).removesuffix(STAMP))
        _refuse_other(tenure, decode(data) if data is not None else None)


def renewing(tenure: Tenure, stamp: Stamp) -> Generator[Ask, Any, None]:
    """Leave a sign of life, as long as no holder has followed. Raises TakenOver."""
    yield from checking(tenure)
    yield Note(stamp_of(tenure.number), encode(stamp))


def _refuse_other(tenure: Tenure, entry: Entry | Stamp | None) -> None:
    if isinstance(entry, RunClaim) and entry.number != tenure.number:
        raise TakenOver(str(entry.holder))
    if isinstance(entry, SaveEntry) and entry.epoch != tenure.epoch:
        raise TakenOver(f"another process, which has saved {entry.checkpoint}")


class Saves:
    """The saves of one holder, one after the other, in one process."""

    def __init__(self, tenure: Tenure) -> None:
        self.tenure = tenure
        self._last = -1
        self._done: list[int] = []

    def saving(self, checkpoint: str) -> Generator[Ask, Any, None]:
        """Announce a save, and only then put its manifest. Raises TakenOver: then nothing was put."""
        if self._last < 0:
            self._last = yield from self._known()
        number = yield from self._announced(checkpoint)
        self._last = number
        if not (yield Put(checkpoint)):
            names = yield Names()
            raise TakenOver(f"the process of entry {numbers_in(names)[0]} of its lock")
        self._done.append(number)
        while len(self._done) > KEPT:
            yield Remove(name_of(self._done.pop(0)))

    def _known(self) -> Generator[Ask, Any, int]:
        """The last number, which may be that of an earlier process of this holder."""
        names = yield Names()
        numbers = numbers_in(names)
        for number in numbers:
            if number > self.tenure.number:
                data = yield Read(name_of(number))
                _refuse_other(self.tenure, decode(data) if data is not None else None)
        return max([self.tenure.number, *numbers])

    def _announced(self, checkpoint: str) -> Generator[Ask, Any, int]:
        number = self._last + 1
        while not (yield Create(name_of(number), encode(SaveEntry(number, self.tenure.epoch, checkpoint)))):
            data = yield Read(name_of(number))
            if data is not None:  # None: a claim that was given up
                _refuse_other(self.tenure, decode(data))
                number += 1
        return number
