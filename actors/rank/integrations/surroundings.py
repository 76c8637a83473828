"""What a trainer of others finds: the versions that an adapter was tested with, and a process that is alone in its world."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping

from fleet.errors import ConfigError
from fleet.host.extras import need

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_versions(extra: str, versions: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ConfigError where a distribution that ``extra`` brings along is missing, or of another version than these (major.minor)."""
    for name, tested in versions.items():
        need(name, extra, "import", f"fleet.integrations.{extra}")
        found = importlib.metadata.version(name)
        if ".".join(found.split(".")[:2]) not in tested:
            known = ", ".join(tested)
            reason = f"the adapter stands in the place of a part of its trainer, and was tested with {known}"
            raise ConfigError(name, found, reason, f"Run pip install '{name}=={tested[-1]}.*'.")


def be_alone() -> None:
    """Libraries that would form a process group by these variables see one process. The ranks of a run are no such group."""
    os.environ.update(ALONE)
    for name in LOCAL:
        os.environ.pop(name, None)
