"""Early stopping: a figure no longer improves. The run's journal keeps the values, as a rank may be lost."""

from __future__ import annotations

import math
from typing import Any, Literal

from actors.rank.current import current_run
from fleet.errors import ConfigError

MODES = ("min", "max")


class EarlyStopping:
    """Detects that a figure no longer improves: ``if figures and patience.update(figures["val_loss"]): run.stop("...")``.

    Make it in the train function, and call ``update`` where ``run.evaluate`` gives its figures. All ranks get the same answer, also a rank
    that has just joined. A resume continues with the values at the checkpoint. A run that continues a completed run starts without values.

    Args:
        patience: after so many values in a row that are not better, ``update`` is True.
        min_delta: a value is better if it is so by more than this.
        mode: ``min`` for a loss, ``max`` for an accuracy.

    Attributes:
        best: the best value so far; None before there was one.
        waited: how many values have come since then.

    Raises:
        ConfigError: an argument is impossible.
    """

    def __init__(self, patience: int, *, min_delta: float = 0.0, mode: Literal["min", "max"] = "min") -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ConfigError("patience", patience, "it is how many values in a row may be no better", "Give 1 or more.")
        if not 0 <= min_delta < math.inf:
            raise ConfigError("min_delta", min_delta, "it is by how much a value has to be better", "Give 0 or more.")
        if mode not in MODES:
            raise ConfigError("mode", mode, f"it is one of {', '.join(MODES)}", "Use min for a loss, max for an accuracy.")
        self._patience, self._min_delta, self._sign = patience, min_delta, 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.waited = 0

    def update(self, value: float) -> bool:
        """Whether ``patience`` values in a row were no better. A value that is not finite is not better.

        Call it on all ranks, after ``commit`` or before ``step.batches``. In an attempt that will be repeated it is False.

        Args:
            value: the same on all ranks, as a figure of ``run.evaluate`` is.

        Raises:
            LoopError: it is called outside of a train function, or within a step.
        """
        found = current_run().recalled(lambda before, step: self._after(before, step, float(value)), name="EarlyStopping.update()")
        if found is None:
            return False
        self.best, self.waited = found["best"], found["waited"]
        return self.waited >= self._patience

    def _after(self, before: Any, step: int, value: float) -> dict[str, Any]:
        """The figures after ``value``. A second value of the same step changes nothing: the run has begun again from there."""
        if before is not None and before["step"] == step:
            return dict(before)
        best, waited = (None, 0) if before is None else (before["best"], before["waited"])
        if math.isfinite(value) and (best is None or self._sign * (best - value) > self._min_delta):
            return {"step": step, "best": value, "waited": 0}
        return {"step": step, "best": best, "waited": waited + 1}
