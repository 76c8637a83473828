"""The terminal while a run goes on: its events, the ranks' output, and a status line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fleet.app.beginning import Beginning
from fleet.app.live_line import Status, forewarning, hung, in_columns, parts
from fleet.app.progress_calls import Watching
from fleet.host.follow import Follower
from fleet.host.rank_logs import RunLogs
from fleet.host.snapshots import EVERY_BYTES
from fleet.ledger.happenings import Line, Narrator
from fleet.ledger.report import duration
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import Record, ViewPublished

POLL_S = 0.25
PLAIN_S = 10.0
"""Seconds between status lines where the terminal cannot redraw one."""
BAR, BAR_FROM = 16, 76
"""Columns of the bar, and the least columns of a terminal that shows it."""


INDENT = 13
"""Columns before the second line of an event, below the first line's text."""


class LiveView(Watching):
    """Shows a run on the terminal.

    Args:
        console: prints whole lines, see ``fleet.app.cli.prints``. On a terminal, the status line is redrawn.
        clock: seconds that do not go back.
        logs: the ranks' output, which is shown, too.
        first_fault_s: when chaos strikes first, in seconds of training; None: never.
        beginning: takes the records up to the first step.
    """

    def __init__(
        self, follower: Follower, console: Console, clock: Callable[[], float], logs: RunLogs | None = None,
        first_fault_s: float | None = None, beginning: Beginning | None = None,
    ) -> None:  # fmt: skip
        super().__init__(follower, POLL_S, clock, Narrator())
        self._console, self._logs, self._first_fault_s = console, logs, first_fault_s
        self._beginning = beginning
        self._trains_since_s: float | None = None
        self._printed_s = clock()
        self._lives = console.is_terminal and not console.is_dumb_terminal
        columns = [*([BarColumn(bar_width=BAR)] if console.width >= BAR_FROM else []), TextColumn("{task.fields[line]}", markup=False)]
        self._progress = Progress(*columns, console=console, refresh_per_second=4, transient=True, disable=not self._lives)
        self._task = self._progress.add_task("", total=None, line="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._follower.read()
        self._progress.stop()

    def _take(self, record: Record) -> None:
        super()._take(record)
        if self._beginning is not None:
            self._beginning.take(record)
        if isinstance(record, ViewPublished) and self._trains_since_s is None:
            self._trains_since_s = record.at_s

    def _say(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._print(str(line), line.colour)

    def _print(self, text: str, colour: str) -> None:
        self._console.print(Text(hung(text, self._console.width if self._lives else None, INDENT), colour))

    def _pass_on(self, *, last: bool) -> None:
        """Print the ranks' new output, all at once: line by line, it costs a rank's time."""
        lines = list(self._logs.poll(last=last)) if self._logs is not None else []
        if lines:
            self._console.print(Text("\n".join(lines)))
        if last and self._logs is not None:
            self._logs.close()

    def _show(self, *, ended: bool) -> None:
        self._follower.keep(EVERY_BYTES)
        self._pass_on(last=ended)
        summary = self._follower.summary() if not ended else None
        if summary is None or summary.view_size == 0:
            return
        status = self._status(summary)
        self._forewarn(status, summary.now_s)
        if self._lives:
            room = self._console.width - (BAR + 1 if self._console.width >= BAR_FROM else 0)
            line = in_columns(parts(status), room)
            self._progress.update(self._task, total=status.total or None, completed=status.step, line=line)
        elif self._clock() - self._printed_s >= PLAIN_S:
            self._printed_s = self._clock()
            self._console.print(Text(f"{duration(summary.wall_s):>9}    {in_columns(parts(status))}"))

    def _status(self, s: LedgerSummary) -> Status:
        batch_size = data.batch_size if (data := self._follower.data) is not None else 0
        survived = sum(count for (_, phase), count in s.faults_by_kind_phase.items() if phase == "executed")
        step_s = self._follower.step_s
        pace = s.training_goodput / step_s if step_s and s.training_goodput else None
        return Status(s.steps, self._total(), pace, batch_size, s.goodput, s.view_size, s.world, survived, dict(self._figures))

    def _forewarn(self, status: Status, now_s: float) -> None:
        """Warn once, as soon as it is known, that chaos will not strike: such a run tests nothing."""
        if self._first_fault_s is None or self._trains_since_s is None:
            return
        words = forewarning(status, now_s - self._trains_since_s, self._first_fault_s)
        if words:
            self._first_fault_s = None
            self._print(words, "yellow")
