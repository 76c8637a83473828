"""Train functions for tests: examples/nano.py in a folder of its own, and what kills it where it hurts."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.trains import die, once

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _example(run: Any) -> Any:
    """The script as a module, as `fleet run` imports it; what it saves under a relative path goes where the test looks."""
    os.chdir(run.options["flags"])
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("nano")


def plain(run: Any) -> None:
    """No misfortune."""
    _example(run).train(run)


def injected(run: Any) -> None:
    """Once each: a rank is killed in the middle of a step, of an evaluation, and of writing the best model."""
    import storage.checkpoint.export

    nano = _example(run)
    original, write, backward = nano.mean_losses, storage.checkpoint.export._write_model, nano.fleet.Step.backward

    def dies_halfway(model: Any, splits: dict[str, Any]) -> dict[str, float]:
        if once(run, "evaluation"):
            original(model, {"val_loss": splits["val_loss"]})  # it has drawn random numbers, and has no result
            die()
        return dict(original(model, splits))

    def dies_with_half_a_file(path: Path, suffix: str, model: Any) -> None:
        if once(run, "save"):
            path.write_bytes(b"half a file")
            die()
        write(path, suffix, model)

    def dies_in_a_step(step: Any, loss: Any) -> None:
        if step.number == 5 and run.slot == 1 and once(run, "step"):
            die()
        backward(step, loss)

    nano.mean_losses, storage.checkpoint.export._write_model, nano.fleet.Step.backward = dies_halfway, dies_with_half_a_file, dies_in_a_step
    nano.train(run)
