"""`floor`: when chaos has cost too much, how long until all faults are healed, and until the run goes on?

Runs of two ranks, each slowed down to a sixth of its speed, with a floor of six tenths of the pace. All times are those of the journal.

- heal: from the decision that the floor is reached to the record that the last of the faults is healed.
- step: from the decision to the next committed step but one: the first may have been computed slowly.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import fleet
from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from benchmarks.peers.common import Settings
from benchmarks.peers.workload import build, shard_loss
from chaos.arrivals import as_trace
from fleet.host.journal import read_journal
from fleet.protocol.records import Committed, DecisionMade, FaultRecord, Record
from fleet.protocol.types import Fault

WORLD, SHARDS, FLOOR, INJECT_S, SEVERITY = 2, 4, 0.6, 8.0, 6.0
STEPS, WAIT_S = 240, 0.1
HEAL, STEP = "fleet_floor_heal_s", "fleet_floor_step_s"


def measure(form: Form) -> dict[str, Any]:
    """Measure how soon a run is rid of chaos that costs too much."""
    runs = form.of(7, 3, 1)
    samples: dict[str, list[float]] = {HEAL: [], STEP: []}
    for number in on_the_way("floor", range(runs), lambda number: f"run with seed {number}"):
        heal_s, step_s = times_s(journal_of(number))
        samples[HEAL].append(heal_s)
        samples[STEP].append(step_s)
    figures = {f"{name}_median": statistics.median(values) for name, values in samples.items()}
    used = {"runs": runs, "world": WORLD, "floor": FLOOR, "severity": SEVERITY, "steps": STEPS, "wait_s": WAIT_S}
    return {"settings": used, "figures": figures, "samples": samples, "notes": []}


def journal_of(number: int) -> list[Record]:
    """The journal of a run that meets its floor."""
    settings = Settings(world=WORLD, spares=0, nodes=1, shards=SHARDS, seed=number)
    faults = [Fault(f"s{slot}", INJECT_S, "slow_compute", "slow", slot=slot, duration_s=600.0, severity=SEVERITY) for slot in range(WORLD)]
    with tempfile.TemporaryDirectory(prefix="bench-floor-", ignore_cleanup_errors=True) as folder:
        result = fleet.launch(
            train, world=WORLD, spares=0, nodes=1, storage=folder, name="floor", seed=number, shards=SHARDS,
            chaos={"trace": as_trace(faults), "floor": FLOOR}, options={"settings": settings.to_json(), "steps": STEPS},
        )  # fmt: skip
        return list(read_journal(Path(result.folder) / "journal.jsonl"))


def times_s(journal: list[Record]) -> tuple[float, float]:
    """(heal, step), in seconds."""
    [reached_s] = [record.at_s for record in journal if isinstance(record, DecisionMade) and record.policy == "floor"]
    healed_s = [record.at_s for record in journal if isinstance(record, FaultRecord) and record.phase == "healed"]
    steps_s = [record.at_s for record in journal if isinstance(record, Committed) and record.at_s > reached_s]
    return max(healed_s) - reached_s, steps_s[1] - reached_s


def train(run: fleet.Run) -> None:
    """The common step of benchmarks, with a wait in each."""
    settings = Settings.from_json(run.options["settings"])
    model, optimizer = build(settings)
    state = run.track(model=model, optimizer=optimizer)
    numbers = list(range(settings.shards))
    for step in run.steps(state, total=int(run.options["steps"])):
        for _ in step.batches(numbers, batch_size=settings.shards):
            loss = shard_loss(model, settings, step.number, step.shard)
            if step.shard == step.shards[-1]:
                time.sleep(WAIT_S)
            step.backward(loss)
        step.commit()


if __name__ == "__main__":
    harness.run("floor", measure)
