"""The time of one process of a plain job, from its messages: spans without gaps, in the journal's form. Pure."""

from __future__ import annotations

from fleet.machine.plain.words import What, Word
from fleet.protocol.records import CHECKPOINT, COMMIT, COMPUTE, FINISH, INIT, RESTORE, Spans
from fleet.protocol.types import Member, Process

NO_VIEW = -1
OFTEN_US = 500_000
"""Spans are collected for so long, and handed over together."""


class RankTime:
    """The work of one process, and its time. Times are microseconds on the run's clock.

    Attributes:
        steps: number of optimizer steps that have ended.
        trains: the model has computed for the first time.
        loaded: the greatest step in a file that the process has loaded; None when it has loaded no file of this job.
        saved_s: seconds that the last ``torch.save`` took.
        error: the error of the script, if it has raised one.
        done: the script has come to its end.
    """

    def __init__(self, member: Member, process: Process, at_us: int) -> None:
        self.member, self.process = member, process
        self.steps, self.trains, self.done, self.error = 0, False, False, ""
        self.loaded: int | None = None
        self.saved_s = 0.0
        self._save_us = at_us
        self._codes: list[str] = []
        self._durations_us: list[int] = []
        self._start_us = self._cursor_us = at_us
        self._code, self._before = INIT, INIT
        self._reported_steps = 0

    def receive(self, word: Word) -> None:
        """Take one message of the process, in order."""
        match word.what:
            case What.READY:
                self._turn(word.at_us, COMPUTE)
                self.trains = True
            case What.STEP:
                self._close(word.at_us)
                self._add(COMMIT, 0)
                self.steps = word.steps
            case What.SAVE | What.LOAD:
                self._stall(word, CHECKPOINT if word.what == What.SAVE else RESTORE)
            case What.SAVED | What.LOADED:
                self.saved_s = (word.at_us - self._save_us) / 1e6
                if word.blocking:
                    self._turn(word.at_us, self._before)
            case What.RAISED:
                self.error = word.text
            case What.DONE:
                self._finish(word.at_us)

    def _stall(self, word: Word, code: str) -> None:
        self._save_us = word.at_us
        if word.blocking:
            self._before = self._code
            self._turn(word.at_us, code)

    def loads(self, step: int | None) -> None:
        """The process has loaded a file of this step; None where the step is not known."""
        if step is not None:
            self.loaded = max(step, self.loaded or 0)

    def end(self, at_us: int) -> None:
        """The process is gone."""
        self._close(at_us)

    def due(self, at_us: int) -> bool:
        """Whether it is time to hand over spans."""
        return at_us - self._start_us >= OFTEN_US

    def begun(self, history: int) -> list[Spans]:
        """All spans before the process was in a view. Take them once, when the process is ready."""
        return self._taken(len(self._codes), NO_VIEW, history, 0)

    def take(self, generation: int, history: int, base: int, *, last: bool = False) -> list[Spans]:
        """The spans up to the last commit; with ``last``, all spans. ``base``: the first step of the view."""
        commits = [number for number, code in enumerate(self._codes) if code == COMMIT]
        upto = len(self._codes) if last else commits[-1] + 1 if commits else 0
        return self._taken(upto, generation, history, base)

    def _taken(self, upto: int, generation: int, history: int, base: int) -> list[Spans]:
        codes, durations_us = "".join(self._codes[:upto]), tuple(self._durations_us[:upto])
        codes = codes.replace(COMPUTE, INIT) if generation == NO_VIEW else codes  # this rank was ready, and others never were
        if not codes:
            return []
        del self._codes[:upto], self._durations_us[:upto]
        spans = Spans(self.member, generation, history, base + self._reported_steps, self._start_us, durations_us, codes)
        self._start_us += sum(durations_us)
        self._reported_steps += codes.count(COMMIT)
        return [spans]

    def _close(self, at_us: int) -> None:
        at_us = max(at_us, self._cursor_us)  # a message may come late
        self._add(self._code, at_us - self._cursor_us)
        self._cursor_us = at_us

    def _turn(self, at_us: int, code: str) -> None:
        self._close(at_us)
        self._code = code

    def _finish(self, at_us: int) -> None:
        """The script has no more steps: its time since the last step is finishing, and not an abandoned step."""
        self._turn(at_us, FINISH)
        self.done = True
        since = max((number + 1 for number, code in enumerate(self._codes) if code == COMMIT), default=0)
        self._codes[since:] = [FINISH if code == COMPUTE else code for code in self._codes[since:]]

    def _add(self, code: str, duration_us: int) -> None:
        if duration_us or code == COMMIT:
            self._codes.append(code)
            self._durations_us.append(duration_us)
