"""`mesh`: how much does it cost to keep parameters and optimizer state in chunks by rank (``optimizer_sharding = "fsdp"``), with copies?

- A step without faults, beside the plain loop of PyTorch's FSDP2. Both have the same model, the same samples a rank, one thread a rank, and
  gloo on the loopback interface. Both are started once, and take blocks of steps in turn, each first in every other pair. The ratio is the
  median of the pairs' ratios; its interval is that of 10,000 bootstrap samples of the pairs.
  The processor time of all ranks is a figure, too: it hardly depends on the machine's other load.
- Ranks that train are killed (SIGKILL, from outside), with a spare. The figures are stalls as in `recovery`, samples lost by the ledger,
  and the final bits beside those of an undisturbed run. Ranks compute the step anew, so a stall has a step in it. The change of the view is
  measured by itself.
- The same with two groups of two ranks, each a replica (HSDP): one member is killed after the other. Beside it,
  :mod:`benchmarks.peers.torchft_hsdp` trains the same model in the same groups with torchft.
- A rank's bytes of parameters and optimizer state, and its resident memory beside that of a rank of FSDP2.

Coordinator, agents and ranks are real; Ray is not there (:mod:`benchmarks.device_ranks` has its replacement). The ranks' train functions
are in :mod:`benchmarks.mesh_ranks`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, mesh_ranks, turns
from benchmarks.device_ranks import Ran, Transformer, changes_s, recoveries, through
from benchmarks.harness import Form, Part, in_parts, left_out, together
from benchmarks.mesh_ranks import Shape
from benchmarks.peers import torchft_hsdp
from benchmarks.peers.common import median_step_s
from benchmarks.peers.fleet_run import generous
from benchmarks.turns import SEED, Side, ratio_of, steps_of
from fleet.ledger.goodput import Ledger
from fleet.settings.run import CheckpointSettings, RunSettings, StragglerSettings
from tests.support.plain import FORKED, PRELOADED, PlainFleet

FAR_S = 3600.0
SIDES = ("fleet", "native")
STEPPED = Shape(192, 4, 8)
"""The model of examples/gpt.py, but for its context."""
KILLED = {"1m": Shape(128, 5, 1), "10m": Shape(320, 8, 1), "50m": Shape(720, 8, 1)}
SMALLEST = Shape(64, 2, 1)
WORLD, SPARES = 3, 1
"""Ranks and spares of the runs with kills."""
NO_SPARE, SEVERAL = "no_spare", "several"
"""Two runs with kills of ten million parameters: without a spare, and with :data:`EACH` shards a rank, where kills come within steps."""
EACH = 4
GROUPED, GROUP = 4, 2
"""Ranks in all, and in each group, of the runs with groups and kills."""


def parameters_of(shape: Shape) -> tuple[int, int]:
    """(bytes of all parameters, of a block's)."""
    model = Transformer(shape.width, shape.layers)
    bytes_of = [sum(one.nbytes for one in part.parameters()) for part in (model, model.blocks[0])]
    return bytes_of[0], bytes_of[1]


def settings_of(
    shape: Shape, world: int, folder: Path, spares: int = 0, replica_size: int = 1, each: int = 1, **given: object
) -> RunSettings:  # fmt: skip
    """Settings of a run without checkpoints, without copies to peers, and without the straggler policy: this machine may be slow.
    A rank, or a group, is on a node of its own. ``each``: shards of a rank.
    """
    options = {**shape.options(), "folder": str(folder), **{name: str(value) for name, value in given.items()}}
    return RunSettings(
        world=world, spares=spares, nodes=world // replica_size if replica_size > 1 else world + spares, shards=each * world, seed=SEED,
        replica_size=replica_size, optimizer_sharding="fsdp", options=options, budgets=generous(),
        checkpoint=CheckpointSettings(policy="fixed", interval_s=FAR_S, peer_interval_s=FAR_S), straggler=StragglerSettings(enabled=False),
    )  # fmt: skip


# ---- without faults ----------------------------------------------------------------------------------------------------------------------


def in_turns(shape: Shape, world: int, pairs: int, block: int, folder: Path) -> dict[str, Side]:
    """Run Fleet's ranks beside FSDP2's, in turns."""
    folder.mkdir()
    settings = settings_of(shape, world, folder, block=block, steps=steps_of(pairs, block))
    FORKED.set_forkserver_preload([*PRELOADED, mesh_ranks.__name__])
    peers = [FORKED.Process(target=mesh_ranks.native, args=(settings.options, rank, world), daemon=True) for rank in range(world)]
    fleet = PlainFleet(mesh_ranks.paired, settings, folder, respawn=False)
    return turns.in_turns(turns.both(fleet, peers, SIDES, settings, folder), SIDES, pairs, block, folder)


def steps(form: Form, folder: Path) -> Part:
    """The step of both, at 2 and 4 ranks."""
    pairs, block, shape = form.of((16, 12, STEPPED), (6, 3, STEPPED), (1, 1, SMALLEST))
    worlds = {f"steps of {world} ranks": world for world in (2, 4)}
    work = {what: partial(in_turns, shape, world, pairs, block, folder / f"steps-{world}") for what, world in worlds.items()}

    def reported(found: dict[str, dict[str, Side]]) -> dict[str, Any]:
        figures, samples, notes = dict[str, float](), dict[str, list[float]](), list[str]()
        for what, world in worlds.items():
            fleet, native, named = found[what]["fleet"], found[what]["native"], f"{world}_ranks"
            figures |= ratio_of(f"fleet_fsdp_step_over_native_ratio_{named}", fleet.step_ms, native.step_ms)
            figures |= ratio_of(f"fleet_fsdp_cpu_over_native_ratio_{named}", fleet.cpu_ms, native.cpu_ms)
            for system, one in (("fleet_fsdp", fleet), ("native_fsdp2", native)):
                samples |= {f"{system}_step_{named}_ms": one.step_ms, f"{system}_cpu_{named}_ms": one.cpu_ms}
            notes += [left_out(f"_ratio_{named}_{end}", "one pair") for end in ("low", "high") if pairs == 1]
        figures |= {f"{name}_median": statistics.median(values) for name, values in samples.items()}
        size = f"steps are of {parameters_of(shape)[0]:,} bytes of parameters, {shape.samples} samples a rank, {block} steps a block"
        return {"settings": {"pairs": pairs}, "figures": figures, "samples": samples, "notes": [size, *notes]}

    return Part(work, reported)


def memory(form: Form, folder: Path) -> Part:
    """Held and resident memory of a rank of four, at the second size."""
    shape, world = form.of(KILLED["10m"], KILLED["10m"], SMALLEST), 4
    what = f"memory of {world} ranks"

    def reported(found: dict[str, dict[str, Side]]) -> dict[str, Any]:
        return _held(shape, world, found[what])

    return Part({what: partial(in_turns, shape, world, 1, 2, folder / "memory")}, reported)


def _held(shape: Shape, world: int, sides: Mapping[str, Side]) -> dict[str, Any]:
    whole, block = parameters_of(shape)
    fleet, native = sides["fleet"].memory, sides["native"].memory
    samples = {
        "fleet_fsdp_held_bytes": [one["weights"] + one["state"] for one in fleet],
        "fleet_fsdp_peak_beyond_start_bytes": [one["peak"] - one["before"] for one in fleet],
        "native_fsdp2_peak_beyond_start_bytes": [one["peak"] - one["before"] for one in native],
        "fleet_fsdp_resident_beyond_start_bytes": [one["resident"] - one["before"] for one in fleet],
        "native_fsdp2_resident_beyond_start_bytes": [one["resident"] - one["before"] for one in native],
    }
    figures = {
        "fleet_fsdp_peak_resident_bytes": max(one["peak"] for one in fleet),
        "native_fsdp2_peak_resident_bytes": max(one["peak"] for one in native),
    }
    peaks = [statistics.median(samples[f"{name}_peak_beyond_start_bytes"]) for name in ("fleet_fsdp", "native_fsdp2")]
    copies = 3 * whole / world  # of one other rank's parameters and AdamW's two numbers beside each
    figures["fleet_fsdp_peak_less_copies_over_native_ratio"] = (peaks[0] - copies) / peaks[1]
    bound = (whole + 2 * whole) * 2 / world + block  # AdamW has two numbers beside each parameter; there is one copy
    figures |= {f"{name}_max": max(values) for name, values in samples.items()}
    figures["fleet_fsdp_held_over_bound_ratio"] = max(samples["fleet_fsdp_held_bytes"]) / bound
    note = f"memory is of {world} ranks with {whole:,} bytes of parameters, of which {block:,} are a block's; (1 + 1) / {world} is held"
    return {"settings": {}, "figures": figures, "samples": samples, "notes": [note]}


# ---- through kills -----------------------------------------------------------------------------------------------------------------------


def trained(
    shape: Shape,
    total: int,
    kills: int,
    pause_s: float,
    folder: Path,
    world: int = WORLD,
    replica_size: int = 1,
    spares: int = SPARES,
    each: int = 1,
    until_s: float = 0.0,
) -> Ran:
    """Kills come up to ``until_s`` after a commit; 0: within the pause."""
    settings = settings_of(shape, world, folder, spares, replica_size, each, steps=total, pause_s=pause_s if kills else 0.0)
    return through(settings, folder, mesh_ranks.with_faults, kills, until_s or pause_s)


def lost(run: Ran) -> int:
    """Samples, as the ledger counts them."""
    counted = Ledger().apply_all(run.records).summary().samples
    if counted is None:
        raise ValueError("the journal has no record of the run's data")
    return counted.skipped + counted.repeated + counted.taken_back


def kills(form: Form, folder: Path) -> Part:
    """Kills at ten million parameters with a twin, without a spare, and with several shards a rank; and at one and fifty million."""
    sizes = form.of(KILLED, {"10m": KILLED["10m"]}, {"10m": SMALLEST})
    shapes = sizes | dict.fromkeys((NO_SPARE, SEVERAL), sizes["10m"])
    many = {"1m": 6, "10m": 20, "50m": 10, NO_SPARE: 10, SEVERAL: 6}
    count = form.of(many, {"10m": 4, NO_SPARE: 2, SEVERAL: 1}, {"10m": 1, NO_SPARE: 1, SEVERAL: 1})
    pause_s, each = form.of(0.25, 0.25, 0.1), form.of(10, 10, 60)
    total = {name: each * (count[name] + 1) for name in shapes}
    pieces = {f"{count[name]} kills at {name} parameters": name for name in sizes}
    pieces[f"{count[NO_SPARE]} kills at 10m parameters without a spare"] = NO_SPARE
    pieces[f"{count[SEVERAL]} kills at 10m parameters with {EACH} shards a rank"] = SEVERAL
    more: dict[str, dict[str, Any]] = {NO_SPARE: {"spares": 0}, SEVERAL: {"each": EACH, "until_s": form.of(2.0, 2.0, 0.1)}}
    work = {
        what: partial(trained, shapes[name], total[name], count[name], pause_s, folder / name, **more.get(name, {}))
        for what, name in pieces.items()
    }
    work["their twin at 10m parameters"] = partial(trained, shapes["10m"], total["10m"], 0, pause_s, folder / "twin")

    def reported(found: dict[str, Ran]) -> dict[str, Any]:
        runs, twin = {name: found[what] for what, name in pieces.items()}, found["their twin at 10m parameters"]
        samples: dict[str, list[float]] = {}
        for name, run in runs.items():
            times = recoveries(run.timeline.commits(), run.kills, WORLD)
            samples |= {key.replace("fleet", f"fleet_fsdp_kill_{name}"): values for key, values in times.items()}
            samples[f"fleet_fsdp_kill_{name}_change_s"] = changes_s(run.records, run.timeline.commits(), run.kills)
        stalls = {name: statistics.median(samples[f"fleet_fsdp_kill_{name}_stall_s"]) for name in shapes}
        figures = {
            "fleet_fsdp_kills": len(runs["10m"].kills),
            "fleet_fsdp_kill_stall_s_median": stalls["10m"],
            **{f"fleet_fsdp_kill_{name}_stall_s_median": stall for name, stall in stalls.items() if name != "10m"},
            **{
                f"fleet_fsdp_kill_{name}_change_s_median": statistics.median(samples[f"fleet_fsdp_kill_{name}_change_s"]) for name in shapes
            },
            "fleet_fsdp_kill_full_again_s_median": statistics.median(samples["fleet_fsdp_kill_10m_full_again_s"]),
            "fleet_fsdp_kill_no_spare_full_again_s_median": statistics.median(samples["fleet_fsdp_kill_no_spare_full_again_s"]),
            "fleet_fsdp_kill_several_stall_over_step_ratio": stalls[SEVERAL] / median_step_s(runs[SEVERAL].timeline.commits()),
            "fleet_fsdp_samples_lost_total": sum(map(lost, runs.values())),
            "fleet_fsdp_bit_identical_ratio": float(runs["10m"].status == "completed" and runs["10m"].digest == twin.digest != ""),
        }
        ends = [f"{name}: {parameters_of(shape)[0] // 4:,} parameters, {len(runs[name].kills)} kills" for name, shape in shapes.items()]
        size = f"{WORLD} ranks and a spare, a pause of {pause_s} s behind each step: {'; '.join(ends)}; of 10m {ended(runs['10m'], twin)}"
        missing = [left_out(f"_{name}_", f"not a size of the {form} form") for name in KILLED if name not in shapes]
        return {"settings": {"kills": count}, "figures": figures, "samples": samples, "notes": [size, *missing]}

    return Part(work, reported)


def groups(form: Form, folder: Path) -> Part:
    """Kills of members of two groups that are replicas of each other, Fleet's and torchft's; the twin has no groups."""
    shape, count, theirs = form.of(KILLED["10m"], KILLED["10m"], SMALLEST), form.of(20, 3, 1), form.of(8, 2, 1)
    pause_s, each = form.of(0.25, 0.25, 0.1), form.of(10, 10, 60)
    total = each * (count + 1)

    def reported(found: dict[str, Any]) -> dict[str, Any]:
        run, twin, torchft = found.values()
        commits = run.timeline.commits()
        times = recoveries(commits, run.kills, GROUPED)
        samples = {key.replace("fleet", "fleet_group_kill"): values for key, values in times.items()}
        samples["fleet_group_kill_change_s"] = changes_s(run.records, commits, run.kills)
        figures = {
            "fleet_group_kills": len(run.kills),
            **{
                f"fleet_group_kill_{name}_median": statistics.median(samples[f"fleet_group_kill_{name}"])
                for name in ("stall_s", "change_s", "full_again_s")
            },
            "fleet_group_samples_lost_total": lost(run),
            "fleet_group_bit_identical_ratio": float(run.status == "completed" and run.digest == twin.digest != ""),
        }
        size = f"{parameters_of(shape)[0] // 4:,} parameters, median step {median_step_s(commits):.3f} s"
        note = f"groups: {GROUPED} ranks in groups of {GROUP} and a spare, {size}; {ended(run, twin)}"
        return together([{"settings": {"group_kills": count}, "figures": figures, "samples": samples, "notes": [note]}, torchft])

    work: dict[str, Callable[[], Any]] = {
        f"{count} kills in groups": partial(trained, shape, total, count, pause_s, folder / "groups", GROUPED, GROUP),
        "their twin": partial(trained, shape, total, 0, pause_s, folder / "groups-twin", GROUPED),
        f"{theirs} kills of torchft": partial(torchft_hsdp.measure, shape.options(), theirs, pause_s, folder / torchft_hsdp.NAME),
    }
    return Part(work, reported)


def ended(run: Ran, twin: Ran) -> str:
    return ", ".join(f"{name} {one.status} with {one.digest[:16]}" for name, one in (("the run", run), ("its twin", twin)))


def measure(form: Form, parts: Sequence[Callable[[Form, Path], Part]] = (steps, memory, kills, groups)) -> dict[str, Any]:
    """Measure Fleet's fsdp beside FSDP2: steps without faults, memory, and kills."""
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        return in_parts("mesh", [part(form, Path(folder)) for part in parts])


if __name__ == "__main__":
    harness.as_rank("benchmarks.mesh")
    harness.run("mesh", measure)
