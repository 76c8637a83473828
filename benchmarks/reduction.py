"""`reduction`: the fixed-order mean against gloo's all-reduce, on the same ranks, in turn, on buffers made beforehand.

Accounting: both sides start with the sum of the gradients of each rank's own shards, and end with the result on every rank, in place. A
sample is the time from a barrier until the slowest rank is done. With 16 shards, 2 and 4 ranks hold one partial sum each. Of 3 ranks, two
hold two and one holds one (``policies.placement``), so five partial sums travel instead of three. Fleet's side also divides by the number
of shards. It leaves its inputs as they were, so that the loss of a peer costs no computed gradient. Before each sample the inputs are
written anew, as in a step; that is not timed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from actors.rank.membership.process_group import Forming, Group, StoreServer
from actors.rank.step.reduction import BUCKET_BYTES, BUCKETS_IN_FLIGHT, Reducer, SideChannel
from actors.rank.step.sums import ShardSums
from benchmarks import harness
from benchmarks.harness import Form, left_out, on_the_way
from fleet.host import secret
from fleet.protocol.shards import blocks
from policies.placement import ranges

HOST = "127.0.0.1"
SHARDS = 16
WORLDS = (2, 3, 4)
SIZES_MB, SMOKE_SIZES_MB = {1: 8, 4: 4, 16: 2, 64: 1}, {1: 1}
"""Size -> factor of the repetitions: small messages wait for the scheduler as often as large ones, and vary more."""

REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS = 60, 20, 1
WARM_UPS = 3
BOUND_S = 60.0


class Buffers:
    def __init__(self, length: int) -> None:
        self.flats = [torch.zeros(length)]


def fleets_mean(group: Group, length: int) -> tuple[Callable[[], object], list[torch.Tensor]]:
    """(the operation, its inputs)."""
    split = ranges(SHARDS, group.size)
    reducer = Reducer(SHARDS)
    reducer.bind(group, [blocks(*bounds, SHARDS) for bounds in split])
    sums, mean = ShardSums(SHARDS, lambda: Buffers(length)), Buffers(length)
    for shard in range(*split[group.rank]):
        buffers = sums.take()
        buffers.flats[0].normal_()
        sums.add(shard, buffers)
    return lambda: reducer.reduce(sums, mean), [partial.flats[0] for partial in sums.partials(reducer.blocks)]


def _all_reduce(group: Group, length: int) -> tuple[Callable[[], object], list[torch.Tensor]]:
    buffer = torch.randn(length)
    return lambda: group.all_reduce(buffer), [buffer]


def exchange(side: SideChannel, numbers: list[float]) -> torch.Tensor:
    """The numbers of all ranks. No rank has them before all are here."""
    side.start(numbers).arrived()
    return side.take()


def _rank(store: str, rank: int, world: int, repetitions: dict[int, int], parent: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    cpu = torch.device("cpu")
    group = Forming(store=store, generation=world, rank=rank, size=world, device=cpu, timeout_s=BOUND_S, host=HOST).wait()
    side = SideChannel(group)
    times: dict[tuple[int, str], list[float]] = {}
    for size_mb, count in repetitions.items():
        length = size_mb * (1 << 18)
        systems = {"fleet": fleets_mean(group, length), "allreduce": _all_reduce(group, length)}
        kept = {name: [buffer.clone() for buffer in buffers] for name, (_, buffers) in systems.items()}
        for repetition in range(WARM_UPS + count):
            for name, (operation, buffers) in systems.items():
                for buffer, value in zip(buffers, kept[name], strict=True):
                    buffer.copy_(value)
                exchange(side, [0.0])
                begin_s = time.perf_counter()
                operation()
                slowest_s = float(exchange(side, [time.perf_counter() - begin_s]).max())
                if repetition >= WARM_UPS:
                    times.setdefault((size_mb, name), []).append(slowest_s * 1e3)
    if rank == 0:
        parent.send(times)
    exchange(side, [0.0])
    group.close()


def in_ranks(world: int, rank: Callable[..., None], *arguments: Any) -> dict[Any, list[float]]:
    """The samples that rank 0 sends. Each of ``world`` processes runs ``rank(address of the store, its number, *arguments, pipe)``."""
    store, context = StoreServer(HOST), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "actors.rank.step.reduction"])  # imported once
    mine, theirs = context.Pipe()
    given = [(store.address, number, *arguments, theirs) for number in range(world)]
    ranks = [context.Process(target=secret.holding, args=(secret.held(), rank, *each)) for each in given]
    for process in ranks:
        process.start()
    try:
        theirs.close()
        return dict(mine.recv())
    finally:
        for process in ranks:
            process.join(BOUND_S)
        store.close()


def measure(form: Form) -> dict[str, Any]:
    """Fleet's fixed-order mean against gloo's all-reduce, at 2, 3 and 4 ranks, 1 to 64 MB of float32."""
    times_more = form.of(SIZES_MB, SIZES_MB, SMOKE_SIZES_MB)
    repetitions = {size: form.of(REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS) * more for size, more in times_more.items()}
    samples: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    ratios: dict[int, list[float]] = {}
    for world in on_the_way("reduction", WORLDS, lambda world: f"{world} ranks"):
        for (size_mb, name), values in in_ranks(world, _rank, world, repetitions).items():
            samples[f"{name}_{world}_ranks_{size_mb}_mb_ms"] = values
    for world in WORLDS:
        for size_mb in repetitions:
            medians = [statistics.median(samples[f"{name}_{world}_ranks_{size_mb}_mb_ms"]) for name in ("fleet", "allreduce")]
            ratio = medians[0] / medians[1]
            figures[f"fleet_{world}_ranks_{size_mb}_mb_ms_median"], figures[f"allreduce_{world}_ranks_{size_mb}_mb_ms_median"] = medians
            figures[f"fleet_over_allreduce_ratio_{world}_ranks_{size_mb}_mb"] = ratio
            ratios.setdefault(world, []).append(ratio)
    figures["fleet_over_allreduce_ratio_aligned_max"] = max(ratios[2] + ratios[4])
    figures["fleet_over_allreduce_ratio_3_ranks"] = max(ratios[3])
    settings = {
        "shards": SHARDS,
        "repetitions_by_mb": repetitions,
        "bucket_bytes": BUCKET_BYTES,
        "buckets_in_flight": BUCKETS_IN_FLIGHT,
    }
    notes = [
        "one thread a rank; both systems over the same gloo group on the loopback interface",
        "the 3-rank figure is the largest of all sizes",
        *(left_out(f"_{size}_mb", f"not a size of the {form} form") for size in SIZES_MB if size not in repetitions),
    ]
    return {"settings": settings, "figures": figures, "samples": samples, "notes": notes}


if __name__ == "__main__":
    harness.run("reduction", measure)
