"""`garbage`: the time that Python's collector takes from a step, by Python's own rule and with collections that all ranks make together.

Runs of ranks whose loop makes objects, in turn. `own`: the script gives Python's collector its own rule back, so each rank collects when it
is due there. `together`: as Fleet has it. `none`: the script disables the collector, which shows a step without collections.

- step: the median and the mean time of a step; the mean has the collections.
- share: `garbage_collection` of the ledger as a part of all steps; wait: `straggler_wait`, most of it for ranks that collect.
"""

from __future__ import annotations

import collections
import gc
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import fleet
from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from benchmarks.peers.common import Settings
from benchmarks.peers.workload import build, shard_loss
from fleet.host.journal import read_journal
from fleet.ledger.report import build_report
from fleet.ledger.step_law import STEP_NAMES
from fleet.protocol.records import Committed

WORLD, SHARDS, STEPS = 2, 4, 150
SIDES = ("own", "together", "none")
BEFORE, A_STEP, KEPT = 200_000, 6_000, 40
"""Objects that the script holds from the beginning on, those that it makes in a step, and for how many steps it keeps them."""
WARM_UP = 20


def measure(form: Form) -> dict[str, Any]:
    """Measure steps of ranks that make garbage, collected in three ways."""
    rounds = form.of(5, 3, 1)
    samples: dict[str, list[float]] = {}
    for number, side in on_the_way("garbage", list(itertools.product(range(rounds), SIDES)), lambda each: f"round {each[0]}, {each[1]}"):
        for name, value in _figures(number, side).items():
            samples.setdefault(f"{side}_{name}", []).append(value)
    figures = {f"{name}_median": statistics.median(values) for name, values in samples.items()}
    for side in ("own", "together"):
        ratios = [one / none for one, none in zip(samples[f"{side}_step_mean_ms"], samples["none_step_mean_ms"], strict=True)]
        figures[f"{side}_over_none_step_ratio"] = statistics.median(ratios)
    used = {"rounds": rounds, "world": WORLD, "steps": STEPS, "objects": BEFORE, "objects_a_step": A_STEP, "kept_steps": KEPT}
    return {"settings": used, "figures": figures, "samples": samples, "notes": []}


def _figures(number: int, side: str) -> dict[str, float]:
    settings = Settings(world=WORLD, spares=0, nodes=1, shards=SHARDS, seed=number)
    with tempfile.TemporaryDirectory(prefix="bench-garbage-", ignore_cleanup_errors=True) as folder:
        result = fleet.launch(
            train, world=WORLD, spares=0, nodes=1, storage=folder, name="garbage", seed=number, shards=SHARDS,
            options={"settings": settings.to_json(), "side": side},
        )  # fmt: skip
        journal = list(read_journal(Path(result.folder) / "journal.jsonl"))
    first, *_, last = [record for record in journal if isinstance(record, Committed) and record.state.step >= WARM_UP]
    summary = build_report(journal).summary
    spent = summary.categories
    steps_s = sum(spent[name] for name in STEP_NAMES)
    return {
        "step_median_ms": 1e3 * summary.median_step_s,
        "step_mean_ms": 1e3 * (last.at_s - first.at_s) / (last.state.step - first.state.step),
        "share": spent["garbage_collection"] / steps_s,
        "wait_share": spent["straggler_wait"] / steps_s,
    }


class Held:
    """An object that the collector has to look through, and that only the collector can free."""

    def __init__(self) -> None:
        self.itself, self.more = self, [1]


def train(run: fleet.Run) -> None:
    """The common step of benchmarks, which makes objects."""
    settings = Settings.from_json(run.options["settings"])
    model, optimizer = build(settings)
    state = run.track(model=model, optimizer=optimizer)
    numbers, held = list(range(settings.shards)), [Held() for _ in range(BEFORE)]
    kept = collections.deque[list[Held]](maxlen=KEPT + 5 * run.slot)  # ranks are not due in the same step by chance
    for step in run.steps(state, total=STEPS):
        if step.number == 1 and run.options["side"] == "own":
            gc.unfreeze()
            gc.set_threshold(700, 10, 10)
        if step.number == 1 and run.options["side"] == "none":
            gc.disable()
        for _ in step.batches(numbers, batch_size=settings.shards):
            step.backward(shard_loss(model, settings, step.number, step.shard))
        if step.commit():
            kept.append([Held() for _ in range(A_STEP)])
    assert len(held) == BEFORE


if __name__ == "__main__":
    harness.run("garbage", measure)
