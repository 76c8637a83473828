"""TensorBoard: a file of events, as ``tensorboard --logdir`` reads it. It is on this machine, or wherever the folder is mounted from.

Of what an interrupted process wrote nobody knows which event was the last that is whole. So one that goes on removes those files, and
writes all anew from the journal; the first event tells a TensorBoard that has read them to forget them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboards.trackers.port import Begun, Ended, Span, TrackedMark, TrackerAway, TrackerPlace

SUFFIX = ".fleet"
"""Of our files' names: others in the folder are left alone."""


class TensorBoardEvents:
    """One run in ``place.folder``."""

    anew = True

    def __init__(self, place: TrackerPlace) -> None:
        self.refused, self.why, self.where = 0, "", str(place.folder)
        self._folder = place.folder
        self._writer: Any = None

    def begin(self, run: Begun) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        with _kept_at(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            before = [path for path in self._folder.glob(f"*.tfevents.*{SUFFIX}") if path.is_file()]
            for path in before:
                path.unlink()
            self._writer = EventsWriter(str(self._folder / "events"), SUFFIX)
            if before:
                self._write(Event(session_log=SessionLog(status=SessionLog.START)), 0, run.started_s)
            self._table("configuration", run.facts, run.started_s)

    def figures(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        each = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._summary(Summary(value=each), step, at_s)

    def facts(self, facts: Mapping[str, str]) -> None:
        for name, value in facts.items():
            self._text(name, value, 0, 0.0)

    def mark(self, mark: TrackedMark) -> None:
        self._text(f"marks/{mark.kind}", mark.text, mark.step, mark.at_s)
        self.figures(mark.step, {f"marks/{mark.kind}": float(mark.number)}, mark.at_s)

    def span(self, span: Span) -> None:
        """TensorBoard has no place for stretches of time."""

    def artefact(self, path: Path) -> None:
        indented = "\n".join(f"    {line}" for line in path.read_text(errors="replace").splitlines())
        self._text(f"artefacts/{path.name}", indented, 0, path.stat().st_mtime)

    def end(self, ended: Ended) -> None:
        self._text("ended", f"{ended.status}: {ended.reason}", 0, ended.at_s)

    def flush(self) -> None:
        with _kept_at(self._folder):
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _table(self, tag: str, facts: Mapping[str, str], at_s: float) -> None:
        rows = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
        self._text(tag, "\n".join(["| | |", "|---|---|", *rows]), 0, at_s)

    def _text(self, tag: str, text: str, step: int, at_s: float) -> None:
        from tensorboardX.summary import text as text_of

        self._summary(text_of(tag, text), step, at_s)

    def _summary(self, summary: Any, step: int, at_s: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._write(Event(summary=summary), step, at_s)

    def _write(self, event: Any, step: int, at_s: float) -> None:
        event.step, event.wall_time = step, at_s
        with _kept_at(self._folder):
            self._writer.write_event(event)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextmanager
def _kept_at(folder: Path) -> Iterator[None]:
    """A folder that takes nothing, such as one on a full disk, may take it later."""
    try:
        yield
    except OSError as error:
        raise TrackerAway(f"{folder}: {error.strerror or error}") from error
