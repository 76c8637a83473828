"""Which step each file of a job holds that is not Fleet's, as its ranks have saved, renamed and copied them. Pure."""

from __future__ import annotations


class SavedFiles:
    """Path -> step. What was not saved by ``torch.save`` during this run is not in it."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self.newest = ""
        """The path under which the last file was saved, or to which it was renamed."""

    def saved(self, path: str, step: int) -> None:
        self._steps[path], self.newest = step, path

    def moved(self, path: str, to: str) -> None:
        """Whatever ``to`` was before is no more."""
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
        """The step that it holds; None where that is not known."""
        return self._steps.get(path)
