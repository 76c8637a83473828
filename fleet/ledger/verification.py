"""The reach of a run's verification: errors that it finds, how soon, and errors that it does not find. From its own settings and steps."""

from __future__ import annotations

from typing import Any

from fleet.protocol.records import PLAIN, RunStarted, configuration
from fleet.protocol.verification import Sampling, expected_steps_to_detection

PARTLY = 0.1
"""Share of its shards that a rank computes wrongly, for the second figure: most faulty cores are wrong now and then."""

SLICED = "sums that a rank added up wrongly, outside the slice of each rank that a verification adds up again"
SUMS = "a sum that is added up wrongly: the rank that owns a chunk of it gives the same to all"
STATES = "weights and optimizer state that differ between ranks, until the end of the run"
GRADIENTS = "gradients that a rank computes wrongly: once they are summed they are the same for all"
SAMPLED = "gradients that a rank computed wrongly between two verifications: sampling bounds the risk, and does not remove it"
SPREAD = "optimizer state that is spread over the ranks, until weights differ for it; a run in which they do is ended"
ALIKE = "errors that are the same on all ranks"


def verification(started: RunStarted, ranks: int, median_step_s: float) -> dict[str, Any]:
    """Plain data; empty when the journal's first record has no settings of verification, or the script was not Fleet's.

    ``expected_steps`` are means for a rank that computes each of its shards wrongly, or a tenth of them; None: never.
    """
    config = configuration(started.config)
    run = config.get("settings", {})
    settings = run.get("verify")
    if not settings or PLAIN in config:
        return {}
    spread = run.get("optimizer_sharding", "none") != "none"
    ordered = run.get("reduction") == "tree"
    replicas, compute = float(settings["replicas"]), float(settings["compute"])
    states = [SPREAD] * spread if replicas else [STATES]
    every = Sampling(budget=compute).every(started.shards, ranks) if compute and 1 < ranks <= started.shards else 0
    steps = {"each_shard": expected_steps_to_detection(every, 1.0), "a_tenth": expected_steps_to_detection(every, PARTLY)} if every else {}
    return {
        "replicas": replicas,
        "compute": compute,
        "every_steps": every,
        "expected_steps": steps,
        "expected_s": {name: value * median_step_s for name, value in steps.items()},
        "not_covered": [*states, SAMPLED if every else GRADIENTS, SLICED if every and ordered else SUMS, ALIKE],
    }


def in_words(found: dict[str, Any]) -> list[str]:
    """Lines for the terminal."""
    if not found:
        return []
    states = "replicas are compared in each step" if found["replicas"] else "replicas are not compared"
    words = f"verified: {states}"
    if found["every_steps"]:
        words += f"; a shard of each rank is computed again every {found['every_steps']} steps, so that a rank with wrong results is found"
        words += f" after {found['expected_steps']['each_shard']:.0f} steps on average, {found['expected_steps']['a_tenth']:.0f}"
        words += " if a tenth of its shards are wrong"
    return [words, "not covered: " + "; ".join(found["not_covered"])]
