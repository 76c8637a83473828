"""`flips`: bits flip in the chunks of a sharded state. Does the rank find it, is any other rank accused, and what does a clean run accuse?

Ranks, agents and coordinator are real. At a random moment of a step, bits of one number flip in the memory of one rank. It is a parameter,
or of its optimizer's state. A flip is found when its rank is evicted for corruption. An accusation of any other rank is
wrong, and so is one without a flip. A flip within a commit is found by the digests of two ranks. They tell that one of them is wrong, and
not which. Then the run goes back, and the step, taken again, tells which.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, mesh_ranks
from benchmarks.device_ranks import REPLACED_S, RUN_S, SETTLED_STEPS, Fleet, Text, Transformer
from benchmarks.harness import Form, Part, in_parts
from benchmarks.mesh import FAR_S, settings_of
from benchmarks.mesh_ranks import Shape
from benchmarks.turns import SEED
from fleet.machine.candidates import chunks_move
from fleet.protocol.causes import Evicted, Outvoted
from fleet.protocol.operations import START, Operation
from fleet.protocol.records import Committed, DecisionMade, HistoryBegun, ProcessLost
from fleet.protocol.types import Member
from fleet.settings.run import CheckpointSettings
from fleet.simulation.rng import stream
from tests.simulation.runs import simulate_seed
from tests.support.plain import FORKED, PRELOADED

WORLD, PAUSE_S, SAVE_S, WITHIN = 3, 0.1, 2.0, 3
"""``WITHIN``: so many commits after a flip its rank has been evicted."""
MODES, KINDS = ("zero1", "fsdp"), ("flip_weight", "flip_optimizer")
SHAPE = Shape(64, 2, 1)
"""Two digests of a rank's chunks take less than their share of such a step. Of a larger state they are taken in every second step, or
fourth; a flip in another one is found by two ranks that differ."""


def texts(run: Any) -> None:
    """Train on texts until the driver's file says that it is enough, with a wait behind each shard's backward."""
    options, enough = run.options, Path(run.options["folder"]) / "enough"
    if options["mode"] == "fsdp":
        model, optimizer = mesh_ranks.cut(options, run.mesh)
    else:
        model = Transformer(int(options["width"]), int(options["layers"]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, batch = Text(), run.shards * int(options["samples"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=int(options["steps"]), clip_norm=1.0):
        for text in step.batches(data, batch_size=batch):
            step.backward(model.train()(text))
            time.sleep(PAUSE_S if not enough.exists() else 0.0)
        step.commit()


@dataclass
class Flipped:
    """One run: the ranks whose bits flipped, those that were accused, how often the run went back, and its steps and end."""

    flipped: list[Member] = field(default_factory=list)
    accused: list[Member] = field(default_factory=list)
    back: int = 0
    steps: int = 0
    status: str = ""
    digest: str = ""


def run_of(mode: str, kind: str, flips: int, steps: int, folder: Path) -> Flipped:
    """A run of ``steps`` steps with so many flips. Raises RuntimeError when it is over before them."""
    FORKED.set_forkserver_preload([*PRELOADED, __name__])
    folder.mkdir()
    save = CheckpointSettings(policy="fixed", interval_s=SAVE_S, peer_interval_s=FAR_S)
    given = settings_of(SHAPE, WORLD, folder, 0, steps=steps, mode=mode)
    settings = dataclasses.replace(given, optimizer_sharding=mode, checkpoint=save)
    draw, found = stream(SEED, "flips", mode, kind), Flipped()
    with Fleet(settings, folder, texts) as fleet:
        state = fleet.coordinator.machine.state
        for number in range(flips):
            _calm(fleet)
            time.sleep(draw.random() * 2 * PAUSE_S)
            member, process, _ = draw.choice([one for one in fleet.census() if one[2]])
            order = Operation(f"f{number}", kind, START, process, seed=draw.randrange(1 << 30))
            if fleet.call(fleet.coordinator.operate(order)).refused:
                raise RuntimeError(f"{mode}: the flip in {member} was refused")
            found.flipped.append(member)
            since = fleet.step
            fleet.wait_for(lambda since=since: fleet.ended.done() or fleet.step >= since + WITHIN, REPLACED_S)
        (folder / "enough").touch()
        outcome = fleet.wait(RUN_S)
        found.steps = state.committed.step
        ended = state.ending.record
        records = fleet.records()
    lost = [one for one in records if isinstance(one, ProcessLost) and isinstance(one.cause, Evicted)]
    found.accused = [one.member for one in lost if isinstance(one.cause, Evicted) and isinstance(one.cause.why, Outvoted)]
    found.back = sum(isinstance(one, HistoryBegun) for one in records)
    found.status, found.digest = outcome.status, ended.digest if ended is not None else ""
    return found


def _calm(fleet: Fleet) -> None:
    """Wait until the full world has trained for a few steps, and no chunk moves. Raises RuntimeError: the run is over."""
    state = fleet.coordinator.machine.state

    def whole() -> bool:
        view = state.view
        return view is not None and len(view.members) == WORLD and state.phase == "run" and not chunks_move(state, view)

    fleet.wait_for(lambda: fleet.ended.done() or whole(), REPLACED_S)
    since = fleet.step
    fleet.wait_for(lambda: fleet.ended.done() or (whole() and fleet.step >= since + SETTLED_STEPS), REPLACED_S)
    if fleet.ended.done():
        raise RuntimeError(f"the run was over before all flips: {fleet.ended.result()}")


def runs(form: Form, folder: Path) -> Part:
    """Flips of each kind in each way to spread the state, and clean steps with their twins."""
    flips, clean = form.of((35, 1000), (3, 30), (1, 4))
    cases = [(mode, kind) for mode in MODES for kind in KINDS]
    total = max(clean, 14 * flips + 10)
    work = {
        f"{flips} times {kind} with {mode}": partial(run_of, mode, kind, flips, total, folder / f"{mode}-{kind}") for mode, kind in cases
    }
    work |= {f"{total} clean steps with {mode}": partial(run_of, mode, "", 0, total, folder / f"{mode}-clean") for mode in MODES}

    def reported(found: dict[str, Flipped]) -> dict[str, Any]:
        wrong, sound = list(found.values())[: len(cases)], list(found.values())[len(cases) :]
        injected, accused = sum(len(one.flipped) for one in wrong), sum(len(one.accused) for one in wrong)
        right = sum(len(set(one.flipped) & set(one.accused)) for one in wrong)
        twins = dict(zip(MODES, sound, strict=True))
        alike = [one.status == "completed" and one.digest == twins[mode].digest != "" for (mode, _), one in zip(cases, wrong, strict=True)]
        figures = {
            "fleet_flips": injected,
            "fleet_flips_precision": right / max(1, accused),
            "fleet_flips_recall": right / injected,
            "fleet_flips_taken_back": sum(one.back for one in wrong),
            "fleet_flips_bit_identical_ratio": sum(alike) / len(alike),
            "fleet_clean_steps": sum(one.steps for one in sound),
            "fleet_clean_accusations": sum(len(one.accused) + one.back for one in sound),
        }
        notes = [f"{what}: {len(one.accused)} accused, {one.back} times back, {one.status}" for what, one in found.items()]
        return {"settings": {"flips": injected}, "figures": figures, "samples": {}, "notes": [*notes, _size()]}

    return Part(work, reported)


def simulated(form: Form, folder: Path) -> Part:
    """Simulated runs with losses of ranks, nodes and coordinators, and without flips: the live code compares all states in them."""
    wanted = form.of(50_000, 500, 100)

    def reported(found: dict[str, dict[str, int]]) -> dict[str, Any]:
        [counted] = found.values()
        figures = {"fleet_simulated_clean_steps": counted["steps"], "fleet_simulated_clean_accusations": counted["accusations"]}
        note = f"simulated: {counted['runs']} runs, half of them sharded, with {counted['losses']} losses and {counted['backs']} times back"
        return {"settings": {"simulated_steps": wanted}, "figures": figures, "samples": {}, "notes": [note]}

    return Part({f"{wanted} simulated steps": partial(_simulated, wanted)}, reported)


def _simulated(wanted: int) -> dict[str, int]:
    """Runs of one seed after the other, until ``wanted`` steps are committed. Raises RuntimeError: an invariant does not hold."""
    counted = dict.fromkeys(("runs", "steps", "losses", "backs", "accusations"), 0)
    while counted["steps"] < wanted:
        outcome = simulate_seed(("random", "sharded")[counted["runs"] % 2], counted["runs"])
        if outcome.broken:
            raise RuntimeError(outcome.report())
        records = outcome.world.journal
        counted["runs"] += 1
        counted["steps"] += sum(isinstance(one, Committed) for one in records)
        counted["losses"] += sum(isinstance(one, ProcessLost) for one in records)
        counted["backs"] += sum(isinstance(one, HistoryBegun) for one in records)
        counted["accusations"] += sum(isinstance(one, DecisionMade) and one.policy == "corruption" for one in records)
    return counted


def _size() -> str:
    model = Transformer(SHAPE.width, SHAPE.layers)
    return f"{sum(one.numel() for one in model.parameters()):,} parameters, {WORLD} ranks, a wait of {PAUSE_S} s behind each shard"


def measure(form: Form, parts: Sequence[Any] = (runs, simulated)) -> dict[str, Any]:
    """Flip bits of sharded states, and train without flips."""
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        return in_parts("flips", [part(form, Path(folder)) for part in parts])


if __name__ == "__main__":
    harness.as_rank("benchmarks.flips")
    harness.run("flips", measure)
