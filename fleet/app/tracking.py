"""Sends a run to trackers: from a process for each tracker beside the driver, or afterwards.

Such a process follows the run's journal. No rank waits for it, and none of its errors reaches the run. Its standard input ends
when the driver ends or is killed: from then on it has ``track.end_s`` for the rest.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dashboards.trackers import choice
from dashboards.trackers.session import FOLDER, StandingFile, TrackerSession, TrackerStanding, Wait, standing
from fleet.app import plans
from fleet.app.report import render_table
from fleet.app.result import report_data
from fleet.errors import ConfigError, FleetError
from fleet.host.clock import MonotonicClock
from fleet.host.follow import open_report
from fleet.host.linux import be_nicer
from fleet.host.processes import calling
from fleet.protocol.records import section
from fleet.settings.fields import read
from fleet.settings.track import TrackSettings

log = logging.getLogger("fleet.tracking")
GRACE_S = 5.0
"""Seconds after which a tracker's process that has not ended in its time is killed."""
NICENESS = 10
LOCK_S = 0.5


@contextmanager
def tracked(folder: Path, settings: TrackSettings) -> Iterator[None]:
    """Send the run in ``folder`` to its trackers meanwhile. The end waits for them, for ``settings.end_s`` and ``GRACE_S`` at most."""
    if settings.to:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    senders = [_start(folder, name, settings) for name in settings.to]
    try:
        yield
    finally:
        for sender in senders:
            _stdin(sender).close()
        clock = MonotonicClock()
        end_s = clock.now_s() + settings.end_s + GRACE_S
        for sender in senders:
            _end(sender, end_s - clock.now_s())


def _start(folder: Path, name: str, settings: TrackSettings) -> subprocess.Popen[bytes]:
    """Start a tracker's process in its own session: Ctrl-C is for the driver, and the process then sends the rest."""
    command = calling("fleet.app.tracking", "main", str(folder), name, json.dumps(dataclasses.asdict(settings)))
    with (folder / FOLDER / f"{name}.log").open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)


def _stdin(sender: subprocess.Popen[bytes]) -> IO[bytes]:
    assert sender.stdin is not None
    return sender.stdin


def _end(sender: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        sender.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        sender.kill()
        sender.wait()


def main() -> None:
    """The process of one tracker: ``FOLDER NAME SETTINGS``. Exit code 3 when its time was up in the middle of a call."""
    folder, name, said = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    be_nicer(NICENESS)
    settings = read(TrackSettings, json.loads(said), "track.")
    alone = _Alone(settings.end_s)
    try:
        with _kept(folder, name, alone.wait) as kept:
            send(folder, name, settings, kept, alone.over.is_set, alone.wait)
    except (FleetError, OSError):
        log.exception("%s gets nothing more of this run", name)
        sys.exit(1)


class _Alone:
    """Watches this process's driver. When the driver is gone, the time runs."""

    def __init__(self, limit_s: float) -> None:
        self.over, self._never = threading.Event(), threading.Event()
        self._limit_s, self._clock = limit_s, MonotonicClock()
        self._end_s = float("inf")
        threading.Thread(target=self._listen, name="fleet-driver", daemon=True).start()

    def _listen(self) -> None:
        while sys.stdin.buffer.read(1 << 16):
            continue
        self._end_s = self._clock.now_s() + self._limit_s
        self.over.set()
        self._never.wait(self._limit_s + GRACE_S / 2)
        os._exit(3)  # a call of a library hangs; data that has arrived is noted

    def wait(self, seconds: float) -> bool:
        """See ``Wait``. The end of the driver ends the wait."""
        if not self.over.is_set():
            self.over.wait(seconds)
            return False
        self._never.wait(max(0.0, min(seconds, self._end_s - self._clock.now_s())))
        return self._clock.now_s() >= self._end_s


@contextmanager
def _kept(folder: Path, name: str, wait: Wait) -> Iterator[StandingFile]:
    """The tracker's file, once no other process holds it. A killed driver may have left a process that sends the rest; it ends soon."""
    while True:
        try:
            kept = StandingFile(folder, name)
            break
        except ConfigError:
            if wait(LOCK_S):
                raise
    try:
        yield kept
    finally:
        kept.close()


def send(folder: Path, name: str, settings: TrackSettings, kept: StandingFile, over: Callable[[], bool], wait: Wait) -> TrackerStanding:
    """Send the run in ``folder`` to tracker ``name``; see :meth:`dashboards.trackers.session.TrackerSession.run`."""
    tracker = choice.made(name, folder, settings, os.environ)
    try:
        session = TrackerSession(folder / "journal.jsonl", tracker, kept, settings.every_s, lambda lines: artefacts(folder, lines), wait)
        return session.run(over)
    finally:
        tracker.close()


def artefacts(folder: Path, marks: Sequence[str]) -> list[Path]:
    """The report of the run in ``folder`` as JSON and as text, its marks and its settings, as files."""
    report, damage = open_report(folder / "journal.jsonl")
    texts = {
        "report.json": json.dumps(report_data(report, damage, None), indent=1) + "\n",
        "report.txt": render_table(report, colour=False),
        "marks.txt": "".join(f"{line}\n" for line in marks),
        "configuration.json": json.dumps(plans.recorded(folder)[1], indent=1) + "\n",
    }
    paths = [folder / FOLDER / name for name in texts]
    for path in paths:
        path.write_text(texts[path.name])
    return paths


def recorded(folder: Path, to: Sequence[str], environment: Mapping[str, str]) -> TrackSettings:
    """Settings of the trackers of the run in ``folder``: its journal's, or the trackers ``to``, if any, with places from
    ``environment``."""
    said = section(section(plans.recorded(folder)[1], "settings"), "track")
    settings = read(TrackSettings, said, "track.")
    return choice.located(dataclasses.replace(settings, to=tuple(to) or settings.to), environment, over=True)


def in_words(folder: Path, settings: TrackSettings) -> list[str]:
    """The state of each tracker of the run in ``folder``, a line each."""
    found = [standing(folder, name) for name in settings.to]
    return [str(each) if each.done else f"{each}; to send the rest: fleet runs track {folder} --track {each.tracker}" for each in found]
