"""`encrypted`: what `--tls` costs the exchange of two ranks of two hosts: plainly and encrypted, in turn, in the same processes.

The hosts are two addresses of this machine: both ends, and the threads that encrypt and hand on bytes, share its cores. A sample of the
mean is as in `reduction`. A sample of the forming is the time until a group is there.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actors.rank.membership.process_group import Forming, Group
from actors.rank.step.reduction import SideChannel
from benchmarks import harness
from benchmarks.harness import Form, on_the_way
from benchmarks.reduction import BOUND_S, exchange, fleets_mean, in_ranks
from fleet.host import tls

HOSTS = ("127.0.0.11", "127.0.0.12")
"""A connection to one of them has another address at its other end, as between hosts."""
SIZES_MB, SMOKE_SIZES_MB = (1, 4, 16, 64), (1,)
REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS = 60, 20, 2
FORMINGS, QUICK_FORMINGS, SMOKE_FORMINGS = 30, 10, 1
WARM_UPS = 3
SIDES = ("plain", "tls")
CURVE = ("-pkeyopt", "ec_paramgen_curve:P-256")


@contextmanager
def certificates() -> Iterator[str]:
    """A folder for `--tls` of an authority that ends with the context. Needs the program openssl."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-benchmark-"))
    try:
        for words in (
            ("req", "-x509", "-newkey", "ec", *CURVE, "-nodes", "-days", "1", "-subj", "/CN=runs", "-keyout", "ca.key", "-out", "ca.pem"),
            ("req", "-newkey", "ec", *CURVE, "-nodes", "-subj", "/CN=host", "-keyout", "key.pem", "-out", "host.csr"),
            ("x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-out", "cert.pem"),
        ):
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=BOUND_S)
        (folder / tls.KEY).chmod(0o600)
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def _formed(store: str, rank: int, generation: int) -> Group:
    return Forming(
        store=store, generation=generation, rank=rank, size=len(HOSTS), device=torch.device("cpu"), timeout_s=BOUND_S, host=HOSTS[rank]
    ).wait()


def _rank(store: str, rank: int, folder: str, repetitions: int, formings: int, sizes_mb: tuple[int, ...], parent: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    folders, generations = dict(zip(SIDES, ("", folder), strict=True)), itertools.count(1)
    groups = dict[str, Group]()
    for side, at in folders.items():
        tls.hold(at)
        groups[side] = _formed(store, rank, next(generations))
    meeting = SideChannel(groups["plain"])
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Any, keep: bool) -> Any:
        exchange(meeting, [0.0])
        begin_s = time.perf_counter()
        result = work()
        slowest_s = float(exchange(meeting, [time.perf_counter() - begin_s]).max())
        if keep:
            times.setdefault(name, []).append(slowest_s * 1e3)
        return result

    for repetition in range(WARM_UPS + formings):
        for side, at in folders.items():
            tls.hold(at)
            timed(f"{side}_forming_ms", functools.partial(_formed, store, rank, next(generations)), repetition >= WARM_UPS).close()
    for size_mb in sizes_mb:
        means = {side: fleets_mean(group, size_mb * (1 << 18)) for side, group in groups.items()}
        for repetition in range(WARM_UPS + repetitions):
            for side, (mean, inputs) in means.items():
                for each in inputs:
                    each.normal_()
                timed(f"{side}_{size_mb}_mb_ms", mean, repetition >= WARM_UPS)
    if rank == 0:
        parent.send(times)
    exchange(meeting, [0.0])
    for group in groups.values():
        group.close()


def measure(form: Form) -> dict[str, Any]:
    """The mean of 1 to 64 MB of float32 of two ranks, and the forming of their group, plainly and encrypted."""
    sizes, repetitions = form.of(SIZES_MB, SIZES_MB, SMOKE_SIZES_MB), form.of(REPETITIONS, QUICK_REPETITIONS, SMOKE_REPETITIONS)
    formings = form.of(FORMINGS, QUICK_FORMINGS, SMOKE_FORMINGS)
    samples: dict[str, list[float]] = {}
    for _ in on_the_way("encrypted", ("two ranks, plainly and encrypted in turn",)):
        with certificates() as folder:
            samples = in_ranks(len(HOSTS), _rank, folder, repetitions, formings, sizes)
    figures = {f"{name}_median": statistics.median(values) for name, values in samples.items()}
    for what in ("forming", *(f"{size_mb}_mb" for size_mb in sizes)):
        figures[f"tls_over_plain_ratio_{what}"] = figures[f"tls_{what}_ms_median"] / figures[f"plain_{what}_ms_median"]
    notes = ["both hosts are this machine: its cores compute, encrypt and decrypt for both", "one thread a rank, and one for each tunnel"]
    return {"settings": {"repetitions": repetitions, "formings": formings}, "figures": figures, "samples": samples, "notes": notes}


if __name__ == "__main__":
    harness.run("encrypted", measure)
