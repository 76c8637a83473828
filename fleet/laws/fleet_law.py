"""The Fleet Law: T_step(N) = T_compute/N + T_comm(N) + T_sync(N) - T_overlap, and its forms solved for other terms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleet.errors import ConfigError
from fleet.laws.law import AtLeastOne, NonNegative, Positive, Share, law

SOURCE = "Fleet Law, Machine Learning Systems (textbook), vol. 2"


@dataclass(frozen=True, slots=True)
class TermChange:
    """The gain from a change of one term.

    Attributes:
        name: the term, by its printed name.
        step_s: the step with the term changed.
        speedup: step before / step after.
    """

    name: str
    step_s: float
    speedup: float


@law(SOURCE, compute_s=1000.0, ranks=1000, comm_s=0.5, sync_s=0.0, overlap_s=0.2)
def fleet_step_s(
    compute_s: NonNegative, ranks: AtLeastOne, comm_s: NonNegative, sync_s: NonNegative = 0.0, overlap_s: NonNegative = 0.0
) -> float:
    """T_compute/N + T_comm + T_sync - T_overlap. The overlap is at most the communication, and at most the computation."""
    _check_overlap(compute_s / ranks, comm_s, overlap_s)
    return compute_s / ranks + comm_s + sync_s - overlap_s


def _check_overlap(compute_s: float, comm_s: float, overlap_s: float) -> None:
    """Check the overlap of one rank's times. Raises ConfigError."""
    most = np.minimum(compute_s, comm_s)
    if np.any(overlap_s > most * (1.0 + 1e-12)):
        reason = f"no more than {np.min(most):g} s of computation and communication can run at the same time"
        raise ConfigError("overlap_s", overlap_s, reason, f"The nearest valid value is {np.min(most):g}.")


@law(f"{SOURCE}, solved for T_overlap", step_s=1.3, compute_s=1000.0, ranks=1000, comm_s=0.5, sync_s=0.0)
def overlap_s(step_s: Positive, compute_s: NonNegative, ranks: AtLeastOne, comm_s: NonNegative, sync_s: NonNegative = 0.0) -> float:
    """T_overlap = T_compute/N + T_comm + T_sync - T_step of a measured step; below 0 when the step has time that no term names."""
    return compute_s / ranks + comm_s + sync_s - step_s


@law(SOURCE, compute_s=0.9, comm_s=0.8, sync_s=0.4, overlap_s=0.0)
def compute_share(compute_s: NonNegative, comm_s: NonNegative, sync_s: NonNegative, overlap_s: NonNegative = 0.0) -> float:
    """f_compute: share of a rank's step that computes, T_compute / (T_compute + T_comm + T_sync - T_overlap). One rank's times."""
    _check_overlap(compute_s, comm_s, overlap_s)
    return compute_s / (compute_s + comm_s + sync_s - overlap_s)


@law(SOURCE, alone=True, compute_s=0.9, comm_s=0.8, sync_s=0.4)
def term_to_attack(compute_s: NonNegative, comm_s: NonNegative, sync_s: NonNegative, overlap_s: NonNegative = 0.0) -> str:
    """The largest term that does not compute: T_comm (its part without overlap) or T_sync; T_compute when both are 0.

    A shorter T_compute alone lowers the share that computes; the other terms stay.
    """
    _check_overlap(compute_s, comm_s, overlap_s)
    terms = {"T_comm": comm_s - overlap_s, "T_sync": sync_s}
    name = max(terms, key=terms.__getitem__)
    return name if terms[name] > 0.0 else "T_compute"


@law(SOURCE, alone=True, compute_s=0.9, comm_s=0.8, sync_s=0.4, overlap_s=0.2, factor=0.5)
def levers(
    compute_s: NonNegative, comm_s: NonNegative, sync_s: NonNegative, overlap_s: NonNegative = 0.0, factor: Share = 0.5
) -> list[TermChange]:
    """T_step before / after each term is multiplied by `factor`, best first. For T_overlap, all that can overlap does.

    The overlap stays the same, as far as the changed terms still allow it.
    """
    _check_overlap(compute_s, comm_s, overlap_s)
    before = compute_s + comm_s + sync_s - overlap_s
    if before <= 0:
        raise ConfigError("compute_s", compute_s, "no term costs anything, so no step is left", "Give at least one time above 0 s.")
    changed = {
        "T_compute": (compute_s * factor, comm_s, sync_s),
        "T_comm": (compute_s, comm_s * factor, sync_s),
        "T_sync": (compute_s, comm_s, sync_s * factor),
    }
    steps = {name: sum(terms) - min(overlap_s, *terms[:2]) for name, terms in changed.items()}
    steps["T_overlap"] = compute_s + comm_s + sync_s - min(compute_s, comm_s)
    found = [TermChange(name, step, before / step) for name, step in steps.items()]
    return sorted(found, key=lambda lever: -lever.speedup)
