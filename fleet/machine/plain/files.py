"""The step in each checkpoint file of a plain job, after its ranks have saved, renamed and copied files. Pure."""

from __future__ import annotations


class SavedFiles:
    """Path -> step, for files that ``torch.save`` has saved during this run."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self.newest = ""
        """The present path of the file that was saved last."""

    def saved(self, path: str, step: int) -> None:
        self._steps[path], self.newest = step, path

    def moved(self, path: str, to: str) -> None:
        """The file at ``path`` is renamed to ``to``, in the place of an older file there."""
        step = self._steps.pop(path, None)
        self._become(path, to, step)

    def copied(self, path: str, to: str) -> None:
        self._become(path, to, self._steps.get(path))

    def _become(self, path: str, to: str, step: int | None) -> None:
        if step is None:
            self._steps.pop(to, None)
            return
        self._steps[to] = step
        self.newest = to if self.newest == path else self.newest

    def step_of(self, path: str) -> int | None:
        """The step in the file at ``path``; None where it is not known."""
        return self._steps.get(path)
