"""Faults inside a rank's own process, which no signal brings about: flipped bits, a value that is no number, a loop or a lock that hangs.

The node's agent tells the process, by its pid and start time, and the process does it to itself (``actors.rank.saboteur``).
"""

from __future__ import annotations

from fleet.types import Fault

FLIPS = ("flip_weight", "flip_optimizer", "flip_gradient", "flip_activation")
HELD = ("flip_weight", "flip_optimizer")
"""What the rank holds is wrong from then on, until its process is replaced."""
HANGS = ("hang_loop", "hold_gil")
"""The training loop hangs while the process beats; or the whole interpreter does, with all of its threads."""
INSIDE = (*FLIPS, "nan", *HANGS, "silent_corruption")

WITNESSES = 3
"""Replicas that it takes to say which one is wrong."""
KNOWN_S = 5.0
"""By then a wrong replica is found out, and its process is gone."""


def operation_of(fault: Fault) -> str:
    """What the process is told. Where silent corruption strikes is not published: its fault's name draws what the rank holds.

    A flipped bit of a gradient or an activation has to be asked for by its kind: without ``--verify`` nobody sees it.
    """
    return HELD[sum(fault.id.encode()) % len(HELD)] if fault.kind == "silent_corruption" else fault.kind


def holds_wrong(fault: Fault) -> bool:
    """Whether the rank will be outvoted, and so is as good as lost."""
    return operation_of(fault) in HELD


def lasts_s(fault: Fault) -> float:
    """After that long it is healed: a hang ends, and what was wrong is no longer there, or is reported to be."""
    return fault.duration_s if fault.kind in HANGS else max(fault.duration_s, KNOWN_S)
