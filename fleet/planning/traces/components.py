"""From the words of a log to the components of the fault catalogue. A cause without a known word counts as unknown."""

from __future__ import annotations

from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import KIND_OF_COMPONENT

IGNORE = "ignore"
"""Stands for a cause that is no fault: a job that was cancelled, or ended well."""
UNKNOWN = "host_parts"
"""A fault of an unknown cause counts as this component: its node is lost. It also counts as unknown."""

WORDS: tuple[tuple[str, str], ...] = (
    ("maintenance", "host_maintenance"), ("scheduled", "host_maintenance"), ("upgrade", "host_maintenance"),
    ("hbm", "hbm"), ("ecc", "hbm"), ("xid 48", "hbm"), ("xid 63", "hbm"), ("xid 64", "hbm"), ("xid 94", "hbm"), ("xid 95", "hbm"),
    ("sram", "gpu_sram"), ("xid 119", "gpu_system_processor"), ("gsp", "gpu_system_processor"),
    ("gpu", "gpu"), ("graphics", "gpu"), ("cuda", "gpu"), ("xid", "gpu"), ("nvlink", "gpu"), ("accelerator", "gpu"),
    ("thermal throttl", "gpu_thermal"), ("silent", "silent_corruption"), ("sdc", "silent_corruption"),
    ("nic", "nic"), ("hca", "nic"), ("network interface", "nic"),
    ("switch", "switch_or_cable"), ("cable", "switch_or_cable"), ("infiniband", "switch_or_cable"), ("interconnect", "switch_or_cable"),
    ("network", "switch_or_cable"), ("link", "switch_or_cable"), ("fabric", "switch_or_cable"),
    ("hang", "hang"), ("nccl timeout", "hang"), ("watchdog", "hang"), ("stuck", "hang"),
    ("human", "software"), ("software", "software"), ("dst", "software"), ("scheduler", "software"), ("kernel", "software"),
    ("os", "software"), ("file system", "software"), ("filesystem", "software"), ("bug", "software"), ("config", "software"),
    ("out of memory", "software"), ("oom", "software"), ("exception", "software"), ("application", "software"), ("code", "software"),
    ("facilities", "host_parts"), ("power", "host_parts"), ("environment", "host_parts"), ("hardware", "host_parts"),
    ("memory", "host_parts"), ("dimm", "host_parts"), ("cpu", "host_parts"), ("disk", "host_parts"), ("ssd", "host_parts"),
    ("node", "host_parts"), ("board", "host_parts"), ("psu", "host_parts"), ("chassis", "host_parts"), ("fan", "host_parts"),
    ("host", "host_parts"), ("bios", "host_parts"), ("scsi", "host_parts"),
)  # fmt: skip
"""(word in a cause, component). The first word found counts; a short one must be a word of its own."""
SHORT = 4


def check(name: str, where: str) -> str:
    """``name``, if it is a component of the catalogue or ``ignore``. Raises ConfigError."""
    if name != IGNORE and name not in KIND_OF_COMPONENT:
        raise ConfigError(where, name, "is no component of the fault catalogue", f"Known: {IGNORE}, {', '.join(KIND_OF_COMPONENT)}.")
    return name


def component_of(said: str) -> str:
    """The component for a cause in a log's words, or "" when the words above do not have it."""
    text = " ".join(said.lower().replace("_", " ").split())
    if said in KIND_OF_COMPONENT:
        return said
    padded = f" {text} "
    return next((name for word, name in WORDS if (f" {word} " if len(word) < SHORT else word) in padded), "")
