"""Fleet: train through failure, inject failure on purpose, account for every rank-second.

``import fleet`` is light; torch and ray are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rank.current import current_run as current_run
    from actors.rank.current import is_main as is_main
    from actors.rank.early_stopping import EarlyStopping as EarlyStopping
    from actors.rank.loop import Run as Run
    from actors.rank.step.shard_state import ShardState as ShardState
    from actors.rank.step.step import Step as Step
    from fleet import data as data
    from fleet.app.configuration import configured as configured
    from fleet.app.launching import launch as launch
    from fleet.app.progress_calls import Progress as Progress
    from fleet.app.ray_trainer import Trainer as Trainer
    from fleet.app.result import Result as Result

__version__ = "0.1.0"
__all__ = [
    "EarlyStopping",
    "Progress",
    "Result",
    "Run",
    "ShardState",
    "Step",
    "Trainer",
    "__version__",
    "configured",
    "current_run",
    "is_main",
    "launch",
]
_WHERE = {
    "EarlyStopping": "actors.rank.early_stopping",
    "Progress": "fleet.app.progress_calls",
    "Result": "fleet.app.result",
    "Run": "actors.rank.loop",
    "ShardState": "actors.rank.step.shard_state",
    "Step": "actors.rank.loop",
    "Trainer": "fleet.app.ray_trainer",
    "configured": "fleet.app.configuration",
    "current_run": "actors.rank.current",
    "is_main": "actors.rank.current",
    "launch": "fleet.app.launching",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "data"})


def __getattr__(name: str) -> Any:
    if name == "data":  # so that `import fleet` is enough for fleet.data.Tokens
        return importlib.import_module("fleet.data")
    if name not in _WHERE:
        raise AttributeError(f"module 'fleet' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
