"""Parts of all adapters of trainers: tested versions, a process that is alone in its world, and the trainer's part of the tracked state."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

from fleet.errors import ConfigError
from fleet.host.extras import need

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_versions(extra: str, versions: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ConfigError where a distribution of ``extra`` is missing, or of another version than these (major.minor)."""
    for name, tested in versions.items():
        need(name, extra, "import", f"fleet.integrations.{extra}")
        found = importlib.metadata.version(name)
        if ".".join(found.split(".")[:2]) not in tested:
            known = ", ".join(tested)
            reason = f"the adapter stands in the place of a part of its trainer, and was tested with {known}"
            raise ConfigError(name, found, reason, f"Run pip install '{name}=={tested[-1]}.*'.")


def be_alone() -> None:
    """Set these variables so that libraries see one process, and form no process group. The ranks of a run are no such group."""
    os.environ.update(ALONE)
    for name in LOCAL:
        os.environ.pop(name, None)


class HandedOn:
    """A trainer's part of the tracked state, which ranks hand on and checkpoints contain. It changes only in commits.

    Attributes:
        values: plain data and tensors.
        fresh: the values came from another rank or a checkpoint, and the trainer does not have them yet.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.fresh = False

    def state_dict(self) -> dict[str, Any]:
        """What is tracked."""
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`state_dict`."""
        self.values, self.fresh = dict(state), True
