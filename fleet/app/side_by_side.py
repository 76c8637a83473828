"""Recorded runs beside each other: their rank-seconds by category, the cost of their faults, and whether these were the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.ledger.report import duration
from fleet.ledger.step_law import STEP_NAMES
from fleet.protocol.records import PLAIN

LEAST = 0.0005
"""Categories in which every run lost less than this share have no line."""


def kind_of_run(config: Mapping[str, Any]) -> str:
    """The kind of a run, in words, from the record of its start."""
    return "as it is (torchrun)" if PLAIN in config else f"with Fleet ({config.get('settings', {}).get('recovery', {}).get('policy', '?')})"


def table(runs: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of text, the first with the runs' names. ``runs`` are reports as in JSON, ``kinds`` the answers of :func:`kind_of_run`."""
    lines: list[tuple[str, list[str]]] = [
        ("", [str(run["run"]) for run in runs]),
        ("script", list(kinds)),
        ("status", [str(run["status"]) for run in runs]),
        ("ranks", [str(run["world"]) + (f" + {run['spares']}" if run["spares"] else "") for run in runs]),
        ("steps", [f"{run['steps']:,}" for run in runs]),
        ("wall time", [duration(run["wall_s"]) for run in runs]),
        ("goodput", [f"{run['goodput']:.1%}" for run in runs]),
        *_losses(runs),
        ("faults that struck", [str(run["counts"]["executed"]) for run in runs]),
        ("ranks lost in training", [str(run["counts"]["in_view_losses"]) for run in runs]),
        ("steps computed twice", [f"{run['rolled_back_steps']:,}" for run in runs]),
        ("a fault cost", [_cost(run) for run in runs]),
    ]
    return [(head, *cells) for head, cells in lines]


def _losses(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """A line for each category with losses: its share of all rank-seconds."""
    shares = [_shares(run) for run in runs]
    names = sorted({name for each in shares for name in each}, key=lambda name: -max(each.get(name, 0.0) for each in shares))
    shown = [name for name in names if max(each.get(name, 0.0) for each in shares) >= LEAST]
    return [(f"- {name.replace('_', ' ')}", [f"{each.get(name, 0.0):.1%}" for each in shares]) for name in shown]


def _shares(run: Mapping[str, Any]) -> dict[str, float]:
    allocated = sum(run["categories"].values()) + run["pending_s"]
    return {name: value / allocated for name, value in run["categories"].items() if name not in STEP_NAMES and allocated}


def _cost(run: Mapping[str, Any]) -> str:
    """The mean cost of faults and other losses, with the start-up of the new processes, in rank-seconds."""
    costs = [each["cost_s"] + each["init_s"] for each in run["faults"] if each["members"]]
    return f"{sum(costs) / len(costs):.1f} rank-s" if costs else "-"


def same_faults(runs: Sequence[Mapping[str, Any]]) -> str:
    """Whether the same faults were planned for all runs, in a sentence."""
    planned = [sorted((each["id"], each["kind"]) for each in run["faults"] if _planned(each)) for run in runs]
    if not any(planned):
        return "No faults were planned for them."
    if all(each == planned[0] for each in planned):
        return f"The same {len(planned[0])} faults were planned for each; the runs differ in how they met them."
    counts = " and ".join(str(len(each)) for each in planned)
    return f"They were not to meet the same faults ({counts} were planned): make them with the same --chaos, --seed, --world and --nodes."


def _planned(incident: Mapping[str, Any]) -> bool:
    return any(phase["phase"] == "planned" for phase in incident["phases"])
