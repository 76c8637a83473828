"""One run, one record, on a real store: carries out what :mod:`fleet.protocol.holding` asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from fleet.protocol import holding
from fleet.protocol.holding import FOLDER, Ask, Holder, SeenClaim, Stamp, Tenure
from storage.backends.files import Files, creates_once, open_files
from storage.backends.trial import IMPATIENT
from storage.checkpoint.manifest import MANIFEST, safe_name

CHECKPOINTS = "checkpoints"
T = TypeVar("T")


class RunLock:
    """The lock of the run whose checkpoints lie under ``url``. All methods raise OSError when the store fails.

    Args:
        lives: whether the process of a holder lives; None where it cannot be seen from this machine.
        wait: waits so many seconds because of a holder.
    """

    def __init__(
        self,
        url: str,
        lives: Callable[[Holder], bool | None] = lambda holder: None,
        wait: Callable[[Holder, float], object] = lambda holder, wait_s: time.sleep(wait_s),
    ) -> None:
        self._files: Files = open_files(url, **(IMPATIENT if url.startswith("s3://") else {}))
        self._lives, self._wait = lives, wait

    def creates_once(self) -> bool:
        """Whether this store refuses to create a name twice: without that, two processes could both take the run."""
        try:
            return creates_once(self._files, f"{FOLDER}-trial")
        finally:
            self._files.remove(f"{FOLDER}-trial")

    def watch(self, take: bool = False) -> SeenClaim:
        """See :func:`fleet.protocol.holding.watching`. Raises RunHeld."""
        return self.ask(holding.watching(take))

    def claim(self, holder: Holder, seen: SeenClaim | None = None) -> Tenure:
        """See :func:`fleet.protocol.holding.claiming`. The first stamp is there when this returns. Raises RunHeld."""
        tenure = self.ask(holding.claiming(holder, seen))
        self.renew(tenure, Stamp(0))
        return tenure

    def renew(self, tenure: Tenure, stamp: Stamp) -> None:
        """Leave a sign of life. Raises TakenOver."""
        self.ask(holding.renewing(tenure, stamp))

    def check(self, tenure: Tenure) -> None:
        """Raises TakenOver where another process has taken the run."""
        self.ask(holding.checking(tenure))

    def forget(self) -> None:
        """Of a run that has not begun nothing is left."""
        self._files.remove(FOLDER)

    def ask(self, steps: Generator[Ask, Any, T], put: Callable[[], bool] | None = None) -> T:
        """Carry out ``steps``; ``put`` puts the manifest that they ask for."""
        answer: Any = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                done: T = end.value
                return done
            answer = put() if isinstance(asked, holding.Put) and put is not None else self._answer(asked)

    def _answer(self, asked: Ask) -> Any:
        match asked:
            case holding.Names():
                return self._files.sizes(FOLDER)
            case holding.Read(name=name):
                return self._read(f"{FOLDER}/{name}")
            case holding.Create(name=name, data=data):
                return self._files.create(f"{FOLDER}/{name}", data)
            case holding.Note(name=name, data=data):
                self._files.note(f"{FOLDER}/{name}", data)
            case holding.Remove(name=name):
                self._files.remove(f"{FOLDER}/{name}")
            case holding.Empty(checkpoint=checkpoint):
                self._files.create(f"{CHECKPOINTS}/{safe_name(checkpoint)}/{MANIFEST}", b"")
            case holding.AskLives(holder=holder):
                return self._lives(holder)
            case holding.Pause(holder=holder):
                self._wait(holder, holding.LOOK_S)
                return time.monotonic()
            case holding.Put():
                raise TypeError("a manifest is put by its store")
        return None

    def _read(self, name: str) -> bytes | None:
        try:
            return self._files.read(name)
        except FileNotFoundError:
            return None


class SavesOf:
    """The saves of a holder, in the one process that puts manifests. ``tenure``: None for a run without a lock."""

    def __init__(self, url: str, tenure: Tenure | None) -> None:
        self._lock = RunLock(url) if tenure is not None else None
        self._saves = holding.Saves(tenure) if tenure is not None else None
        self._one_at_a_time = threading.Lock()

    def save(self, checkpoint: str, put: Callable[[], bool]) -> bool:
        """``put()`` a manifest after it was announced. Returns what it does. Raises TakenOver: then nothing was put."""
        if self._lock is None or self._saves is None:
            return put()
        with self._one_at_a_time:
            self._lock.ask(self._saves.saving(checkpoint), put)
        return True
