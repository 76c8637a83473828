"""`price`: how much does a step without faults cost, beside PyTorch's DistributedDataParallel?

Both train the same model, of the size of examples/gpt.py's, with the same samples a rank, one thread a rank, and gloo. Both clip the
gradient. Both are started once, and take blocks of steps in turn, each first in every other pair. A ratio is the median of the pairs'
ratios; its interval is that of 10,000 bootstrap samples of the pairs.

- One shard a rank, which is how DDP splits a batch; and 16 shards in all, which Fleet adds up one by one.
- One shard a rank on two hosts with a link of 1 Gbit/s between them: network namespaces, so root is needed.
- Two ranks on each of two such hosts: Fleet's sums in two levels beside those in one, and the bytes that cross the link.
- A rank's peak of resident memory, beyond its memory when it began to train.

Coordinator, agents and ranks are real; Ray is not there (:mod:`benchmarks.device_ranks` has its replacement). The ranks' train functions
are in :mod:`benchmarks.price_ranks`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, price_levels, price_ranks, turns
from benchmarks.harness import Form, Part, in_parts, left_out, one_piece, together
from benchmarks.mesh import parameters_of
from benchmarks.mesh_ranks import Shape
from benchmarks.peers.fleet_run import generous
from benchmarks.placed import Fleet, Places
from benchmarks.price_ranks import HERE
from benchmarks.turns import SEED, Side, ratio_of, steps_of
from fleet.settings.run import CheckpointSettings, RunSettings, StragglerSettings
from tests.support.plain import FORKED, PRELOADED

WORLD, FAR_S = 2, 3600.0
SIDES = ("fleet", "ddp")
STEPPED = Shape(192, 4, 32)
"""The model of examples/gpt.py and its samples, but for its context."""
LARGER = Shape(320, 8, 8)
SMALLEST = Shape(64, 2, 1)
SHARDS, RATE = 16, "1gbit"


def settings_of(shape: Shape, shards: int, folder: Path, **given: object) -> RunSettings:
    """Settings of a run without checkpoints, without copies to peers, and without the straggler policy: this machine may be slow."""
    options = {**shape.options(), "folder": str(folder), **{name: str(value) for name, value in given.items()}}
    return RunSettings(
        world=WORLD, nodes=WORLD, shards=shards, seed=SEED, options=options, budgets=generous(),
        checkpoint=CheckpointSettings(policy="fixed", interval_s=FAR_S, peer_interval_s=FAR_S), straggler=StragglerSettings(enabled=False),
    )  # fmt: skip


def in_turns(shape: Shape, shards: int, pairs: int, block: int, folder: Path, places: Places = HERE) -> dict[str, Side]:
    """Run Fleet's ranks beside DDP's, in turns."""
    folder.mkdir()
    settings = settings_of(shape, shards, folder, block=block, steps=steps_of(pairs, block))
    FORKED.set_forkserver_preload([*PRELOADED, price_ranks.__name__])
    peers = [
        FORKED.Process(target=price_ranks.ddp, args=(settings.options, rank, WORLD, at), daemon=True) for rank, at in enumerate(places)
    ]
    fleet = Fleet(settings, folder, places)
    return turns.in_turns(turns.both(fleet, peers, SIDES, settings, folder), SIDES, pairs, block, folder)


def compared(name: str, sides: dict[str, Side]) -> dict[str, Any]:
    """Figures and samples of one way to split, or of one link; ``name`` ends their names."""
    fleet, peer = sides["fleet"], sides["ddp"]
    figures = ratio_of(f"fleet_step_over_ddp_ratio{name}", fleet.step_ms, peer.step_ms)
    figures |= {f"fleet_cpu_over_ddp_ratio{name}": ratio_of("ratio", fleet.cpu_ms, peer.cpu_ms)["ratio"]}
    samples = {f"{side}_step{name}_ms": one.step_ms for side, one in sides.items()}
    figures |= {f"{each}_median": statistics.median(values) for each, values in samples.items()}
    alone = [left_out(f"_ratio{name}_{end}", "one pair") for end in ("low", "high")] if len(fleet.step_ms) == 1 else []
    return {"settings": {}, "figures": figures, "samples": samples, "notes": alone}


def sizes(form: Form) -> tuple[Shape, int, int]:
    """The model, the number of pairs, and the steps of a block."""
    return form.of((STEPPED, 24, 12), (STEPPED, 12, 4), (SMALLEST, 1, 1))


def steps(form: Form, folder: Path) -> Part:
    """One shard a rank, and 16 in all, on the loopback interface."""
    shape, pairs, block = sizes(form)
    fewer, fine = form.of(pairs, 6, pairs), shape if shape is STEPPED else Shape(64, 2, 8)
    work = {
        "one shard a rank": partial(in_turns, shape, WORLD, pairs, block, folder / "own"),
        f"{SHARDS} shards": partial(in_turns, fine, SHARDS, fewer, block, folder / "fine"),
    }

    def reported(found: dict[str, dict[str, Side]]) -> dict[str, Any]:
        own, by_many = found.values()
        size = f"steps are of {parameters_of(shape)[0]:,} bytes of parameters, {shape.samples} samples a rank, {block} steps a block"
        alike = {"settings": {"pairs": pairs}, "figures": {}, "samples": {}, "notes": [size]}
        return together([alike, compared("", own), compared(f"_{SHARDS}_shards", by_many)])

    return Part(work, reported)


def link(form: Form, folder: Path) -> Part:
    """One shard a rank, on two hosts."""
    name = f"_{RATE}"
    if missing := price_levels.can(name):
        return nothing(missing)
    shape, pairs, block = sizes(form)

    def measured() -> dict[str, Any]:
        with price_ranks.slow_link(RATE) as places:
            return compared(name, in_turns(shape, WORLD, pairs, block, folder / "link", places))

    return one_piece(f"two hosts, {RATE} between them", measured)


def levels(form: Form, folder: Path) -> Part:
    """One shard a rank, two ranks on each of two hosts: sums in two levels beside those in one."""
    if missing := price_levels.can("_level_"):
        return nothing(missing)
    pairs, block = form.of((24, 12), (8, 4), (1, 1))
    (folder / "levels").mkdir()
    given = settings_of(price_levels.SHAPES[form], WORLD, folder / "levels", block=block, steps=steps_of(pairs, block))
    return one_piece("sums in two levels", partial(price_levels.levels, form, folder / "levels", given, pairs, block))


def memory(form: Form, folder: Path) -> Part:
    """Peak of a rank's resident memory beyond that when it began to train, at two sizes."""
    shapes = form.of({"": STEPPED, "_10m": LARGER}, {"": STEPPED, "_10m": LARGER}, {"": SMALLEST, "_10m": SMALLEST})
    work = {f"memory{name}": partial(in_turns, shape, WORLD, 2, 4, folder / f"memory{name}") for name, shape in shapes.items()}
    return Part(work, lambda found: _resident({name: (shape, found[f"memory{name}"]) for name, shape in shapes.items()}))


def _resident(found: Mapping[str, tuple[Shape, dict[str, Side]]]) -> dict[str, Any]:
    figures, samples, notes = dict[str, float](), dict[str, list[float]](), list[str]()
    for name, (shape, sides) in found.items():
        beyond = {side: [float(one["peak"] - one["before"]) for one in seen.memory] for side, seen in sides.items()}
        samples |= {f"{side}_peak_beyond_start{name}_bytes": values for side, values in beyond.items()}
        figures[f"fleet_peak_memory_over_ddp_ratio{name}"] = max(beyond["fleet"]) / max(beyond["ddp"])
        figures |= {f"{side}_peak_beyond_start{name}_bytes_max": max(values) for side, values in beyond.items()}
        notes.append(f"memory{name} is of {parameters_of(shape)[0]:,} bytes of parameters, {shape.samples} samples a rank")
    return {"settings": {}, "figures": figures, "samples": samples, "notes": notes}


def nothing(notes: list[str]) -> Part:
    """A part that cannot run here."""
    return Part({}, lambda _: {"settings": {}, "figures": {}, "samples": {}, "notes": notes})


def measure(form: Form, parts: Sequence[Callable[[Form, Path], Part]] = (steps, link, levels, memory)) -> dict[str, Any]:
    """Measure a step without faults beside DDP: time, processors, a slow link, memory. And sums in two levels beside those in one."""
    with tempfile.TemporaryDirectory(prefix="price-") as folder:
        return in_parts("price", [part(form, Path(folder)) for part in parts])


if __name__ == "__main__":
    harness.as_rank("benchmarks.price")
    harness.run("price", measure)
