"""Questions to a node before a run starts anything there. They are sent as code, so that they run where Fleet cannot be imported."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError

MODULES = ("torch", "numpy", "fsspec", "fleet.errors", "actors.node", "storage.checkpoint.parts")
MEMORY = "/dev/shm"
LEAST_MEMORY_BYTES = 64 << 20
"""For the rings of a node's ranks, and for their messages to each other."""
MOST_SKEW_S = 60.0
"""Object stores refuse a request that was signed by a clock some minutes off."""
LIMIT_S = 120.0
"""A node fetches the code that travels, and starts a process, before it can answer."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node's answers. ``clock_s`` is the node's calendar time; ``asked_s`` and ``answered_s`` are this process's, before and after.

    ``tls``: the fault of its folder for TLS, as a ConfigError has it. ``authority``: a digest of the certificates that it trusts for TLS.
    """

    where: str
    python: str
    missing: str
    memory_bytes: int
    clock_s: float
    asked_s: float
    answered_s: float
    tls: tuple[str, str, str, str] | None = None
    authority: str = ""

    @property
    def skew_s(self) -> float:
        """Least seconds between the node's calendar and this process's, for any time that question and answer took to travel."""
        return max(self.asked_s - self.clock_s, self.clock_s - self.answered_s, 0.0)


def facts(modules: Sequence[str], memory: str, tls_folder: str = "") -> dict[str, Any]:
    """Runs on the node. Standard library only, as it is sent there by value."""
    clock_s, missing = time.time(), ""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any error of an import would meet ranks, too
            missing = f"{name}: {type(error).__name__}: {error}"
            break
    free = shutil.disk_usage(memory).free if os.path.isdir(memory) else 0
    return {
        "where": socket.gethostname(), "python": platform.python_version(), "missing": missing, "memory_bytes": free, "clock_s": clock_s,
        **(_encrypts(tls_folder) if tls_folder and not missing else {}),
    }  # fmt: skip


def _encrypts(folder: str) -> dict[str, Any]:
    """Whether the node can encrypt by the folder. Fleet is there."""
    tls = importlib.import_module("fleet.host.tls")
    try:
        return {"authority": tls.identity(folder).authority}
    except importlib.import_module("fleet.errors").ConfigError as error:
        return {"tls": (error.field, str(error.value), error.reason, error.way_out)}


def judge(found: Mapping[str, NodeFacts], python: str) -> None:
    """Raises ConfigError with the first node that cannot train, and the number of the others. Keys are addresses."""
    complaints = [(address, *complaint) for address, each in found.items() if (complaint := _complaint(each, python)) is not None]
    if not complaints:
        return
    address, setting, value, reason, way_out = complaints[0]
    others = f" (and {len(complaints) - 1} more of {len(found)} nodes)" if len(complaints) > 1 else ""
    raise ConfigError(setting, value, f"node {address}{others}: {reason}", way_out)


def _complaint(each: NodeFacts, python: str) -> tuple[str, object, str, str] | None:
    """(setting, value, reason, way out) of the first fault, or None."""
    if each.python.rpartition(".")[0] != python.rpartition(".")[0]:
        return "Python", each.python, f"ranks are sent code of Python {python}", "Use one version of Python on all nodes."
    if each.missing:
        name = each.missing.partition(":")[0]
        return (
            "package",
            name,
            f"cannot be imported there: {each.missing[:300]}",
            "Install it on that node, in the environment that Ray uses.",
        )
    if each.memory_bytes < LEAST_MEMORY_BYTES:
        reason = f"{MEMORY} has {each.memory_bytes >> 20} MiB free, and ranks need {LEAST_MEMORY_BYTES >> 20}"
        return MEMORY, f"{each.memory_bytes >> 20} MiB", reason, "Make it larger (docker run --shm-size, an emptyDir of medium Memory)."
    if each.tls is not None:
        return each.tls
    if each.skew_s > MOST_SKEW_S:
        reason = f"its clock is {each.skew_s:,.0f} s off that of the head, and at most {MOST_SKEW_S:g} s will do: object stores refuse it"
        return "clock", f"{each.skew_s:,.0f} s", reason, "Let it be set from the network (NTP, chrony)."
    return None
