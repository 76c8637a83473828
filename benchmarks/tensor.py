"""`tensor`: what do groups of ranks that compute a shard together cost (``--mesh tensor=2``), and what does a lost member cost?

- A step without faults, beside PyTorch's own tensor parallelism with DDP over two replicas. Both have the same model, the same samples a
  replica, one thread a rank, and gloo on the loopback interface. They take blocks of steps in turn, as in `mesh`. Groups of Fleet sum in a
  fixed order, and its gradients travel behind the backward.
- Ranks that train are killed (SIGKILL, from outside): with a spare, and without one, where the other group computes the lost shards. The
  figures are stalls as in `recovery`, samples lost by the ledger, and the final bits beside those of an undisturbed run.
- A rank's resident memory beside that of a rank without axes, whose plain model has the same parameters as one part has. PyTorch's ranks
  are measured in both ways, too.

Coordinator, agents and ranks are real; Ray is not there. The ranks' train functions are in :mod:`benchmarks.tensor_ranks`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, tensor_ranks, turns
from benchmarks.device_ranks import Ran, changes_s, recoveries, through
from benchmarks.harness import Form, Part, in_parts, left_out
from benchmarks.mesh import FAR_S, ended, lost
from benchmarks.mesh_ranks import Shape
from benchmarks.peers.common import median_step_s
from benchmarks.peers.fleet_run import generous
from benchmarks.tensor_ranks import TENSOR, Predictor
from benchmarks.turns import SEED, Side, ratio_of, steps_of
from fleet.settings.run import CheckpointSettings, RunSettings, StragglerSettings
from tests.support.plain import FORKED, PRELOADED, PlainFleet

SIDES = ("fleet", "native")
WORLD = 2 * TENSOR
STEPPED, KILLED, SMALLEST = Shape(256, 4, 8), Shape(320, 8, 1), Shape(64, 2, 1)
"""The second one has ten million parameters."""


def settings_of(shape: Shape, folder: Path, spares: int = 0, axes: bool = True, **given: object) -> RunSettings:
    """Settings of a run without checkpoints and without the straggler policy: this machine may be slow. One shard for each replica."""
    options = {**shape.options(), "folder": str(folder), **{name: str(value) for name, value in given.items()}}
    return RunSettings(
        world=WORLD if axes else WORLD // TENSOR, mesh={"tensor": TENSOR} if axes else {}, spares=spares, nodes=1, shards=WORLD // TENSOR,
        seed=SEED, options=options, budgets=generous(), straggler=StragglerSettings(enabled=False), peer_copies=0,
        checkpoint=CheckpointSettings(policy="fixed", interval_s=FAR_S),
    )  # fmt: skip


# ---- without faults ----------------------------------------------------------------------------------------------------------------------


def in_turns(shape: Shape, pairs: int, block: int, folder: Path, axes: bool = True) -> dict[str, Side]:
    """Fleet's ranks and PyTorch's, in turns."""
    folder.mkdir()
    settings = settings_of(shape, folder, axes=axes, block=block, steps=steps_of(pairs, block))
    FORKED.set_forkserver_preload([*PRELOADED, tensor_ranks.__name__])
    target = tensor_ranks.native if axes else tensor_ranks.plain
    peers = [FORKED.Process(target=target, args=(settings.options, rank, settings.world), daemon=True) for rank in range(settings.world)]
    fleet = PlainFleet(tensor_ranks.paired, settings, folder, respawn=False)
    return turns.in_turns(turns.both(fleet, peers, SIDES, settings, folder), SIDES, pairs, block, folder)


def steps(form: Form, folder: Path) -> Part:
    """The step of both, and a rank's memory with axes and without."""
    pairs, block, shape = form.of((16, 12, STEPPED), (6, 4, STEPPED), (1, 1, SMALLEST))
    work = {
        "steps": partial(in_turns, shape, pairs, block, folder / "steps"),
        "memory with axes": partial(in_turns, shape, 1, block, folder / "axes"),
        "memory without axes": partial(in_turns, shape, 1, block, folder / "plain", False),
    }

    def reported(found: dict[str, dict[str, Side]]) -> dict[str, Any]:
        fleet, native = found["steps"]["fleet"], found["steps"]["native"]
        held = {"tensor": found["memory with axes"], "plain": found["memory without axes"]}
        samples = {
            "fleet_tensor_step_ms": fleet.step_ms, "native_tensor_step_ms": native.step_ms,
            "fleet_tensor_cpu_ms": fleet.cpu_ms, "native_tensor_cpu_ms": native.cpu_ms,
            **{
                f"{side}_{name}_peak_beyond_start_bytes": [one["peak"] - one["before"] for one in sides[side].memory]
                for side in SIDES for name, sides in held.items()
            },
        }  # fmt: skip
        figures = ratio_of("fleet_tensor_step_over_native_ratio", fleet.step_ms, native.step_ms)
        figures |= ratio_of("fleet_tensor_cpu_over_native_ratio", fleet.cpu_ms, native.cpu_ms)
        figures |= {f"{name}_median": statistics.median(values) for name, values in samples.items()}
        for side in SIDES:
            peaks = [figures[f"{side}_{name}_peak_beyond_start_bytes_median"] for name in held]
            figures[f"{side}_tensor_peak_over_plain_ratio"] = peaks[0] / peaks[1]
        notes = [left_out(f"_ratio_{end}", "one pair") for end in ("low", "high") if pairs == 1]
        own = sum(one.nbytes for one in Predictor(shape.width, shape.layers, TENSOR).parameters())
        size = f"groups of {TENSOR}; {own:,} bytes of parameters a rank, {shape.samples} samples a replica, {block} steps a block"
        return {"settings": {"pairs": pairs}, "figures": figures, "samples": samples, "notes": [size, *notes]}

    return Part(work, reported)


# ---- through kills -----------------------------------------------------------------------------------------------------------------------


def trained(shape: Shape, total: int, kills: int, pause_s: float, spares: int, folder: Path) -> Ran:
    settings = settings_of(shape, folder, spares, steps=total, pause_s=pause_s if kills else 0.0)
    return through(settings, folder, tensor_ranks.with_faults, kills, pause_s)


def kills(form: Form, folder: Path) -> Part:
    """Kills of members with a spare and without one, beside an undisturbed run."""
    shape, count = form.of(KILLED, KILLED, SMALLEST), form.of(20, 3, 1)
    pause_s, each = form.of(0.25, 0.25, 0.1), form.of(14, 12, 60)
    total = each * (count + 1)
    spares = {"spare": 1, "no_spare": 0}
    work = {f"{count} kills, {name}": partial(trained, shape, total, count, pause_s, more, folder / name) for name, more in spares.items()}
    work["their twin"] = partial(trained, shape, total, 0, pause_s, 0, folder / "twin")

    def reported(found: dict[str, Ran]) -> dict[str, Any]:
        *killed, twin = found.values()
        runs, samples, figures = dict(zip(spares, killed, strict=True)), dict[str, list[float]](), dict[str, float]()
        for name, run in runs.items():
            commits = run.timeline.commits()
            for key, values in recoveries(commits, run.kills, WORLD).items():
                samples[key.replace("fleet", f"fleet_tensor_{name}_kill")] = values
            samples[f"fleet_tensor_{name}_kill_change_s"] = changes_s(run.records, commits, run.kills)
        figures |= {f"{key}_median": statistics.median(values) for key, values in samples.items()}
        step_s = median_step_s(twin.timeline.commits())
        figures["fleet_tensor_step_of_kills_s_median"] = step_s
        figures["fleet_tensor_no_spare_kill_stall_over_step_ratio"] = figures["fleet_tensor_no_spare_kill_stall_s_median"] / step_s
        figures |= {f"fleet_tensor_{name}_kills": len(run.kills) for name, run in runs.items()}
        figures["fleet_tensor_samples_lost_total"] = sum(map(lost, killed))
        alike = [run.status == "completed" and run.digest == twin.digest != "" for run in killed]
        figures["fleet_tensor_bit_identical_ratio"] = statistics.fmean(alike)
        parameters = sum(one.numel() for one in Predictor(shape.width, shape.layers).parameters())
        notes = [f"kills: {parameters:,} parameters in all, {name}: {ended(run, twin)}" for name, run in runs.items()]
        return {"settings": {"kills": count}, "figures": figures, "samples": samples, "notes": notes}

    return Part(work, reported)


def measure(form: Form, parts: Sequence[Callable[[Form, Path], Part]] = (steps, kills)) -> dict[str, Any]:
    """Measure ranks that compute shards together beside PyTorch's tensor parallelism with DDP: steps without faults, memory, and kills."""
    with tempfile.TemporaryDirectory(prefix="tensor-") as folder:
        return in_parts("tensor", [part(form, Path(folder)) for part in parts])


if __name__ == "__main__":
    harness.as_rank("benchmarks.tensor")
    harness.run("tensor", measure)
