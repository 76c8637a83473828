"""What a terminal shows while a run goes on: progress, goodput, world size, and faults as they happen."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fleet.follow import Follower
from fleet.records import FaultRecord, Measurement, ProcessLost, Record, ViewPublished
from fleet.snapshots import EVERY_BYTES

POLL_S = 0.25


class LiveView:
    """Keeps a follower up to date while its run goes on, and tells the terminal. Use as a context manager."""

    def __init__(self, follower: Follower, title: str, console: Console) -> None:
        self._follower, self._console = follower, console
        self._stop = threading.Event()
        self._losses: dict[str, float] = {}
        columns = (SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4, transient=True)
        self._task = self._progress.add_task(title, total=None, line="starting")
        self._thread = threading.Thread(target=self._follow, name="fleet-progress", daemon=True)

    def __enter__(self) -> LiveView:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._follower.read()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            for record in self._follower.poll():
                self._tell(record)
            self._follower.keep(EVERY_BYTES)
            self._show()

    def _tell(self, record: Record) -> None:
        match record:
            case ProcessLost(member=member, cause=cause, fault=fault):
                self._console.print(f"[red]- rank {member}[/] {cause}" + (f" [dim](fault {fault})[/]" if fault else ""))
            case ViewPublished(view=view, reason=reason, graceful=graceful):
                how = "grows beside the running steps" if graceful else "formed"
                self._console.print(f"[cyan]> view {view.generation}[/] {how}: {len(view.members)} ranks ({reason})")
            case FaultRecord(fault=fault, phase=phase, detail=detail) if phase in ("executed", "healed"):
                self._console.print(f"[yellow]! {fault.id}[/] {fault.kind} ({fault.component}) {phase} {detail}")
            case Measurement(name=name, value=value):
                self._losses[name] = value

    def _show(self) -> None:
        summary = self._follower.summary()
        if summary is None:
            return
        figures = "  ".join(f"{name} {value:.3f}" for name, value in self._losses.items())
        line = f"step {summary.steps}  world {summary.view_size}  goodput {summary.goodput:.1%}  {figures}"
        self._progress.update(self._task, line=line)
